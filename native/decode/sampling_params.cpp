#include "decode/sampling_params.hpp"

#include <cmath>

#include "base/error.hpp"

namespace dflash {

void SamplingParams::validate(int32_t n_vocab) const {
    const auto require = [](bool ok, const char * field, double value, const char * limit) {
        check(ok, Status::invalid, "%s is %g, want %s", field, value, limit);
    };
    const auto in_unit = [](float value) { return value >= 0.0f && value <= 1.0f; };
    const auto require_id = [n_vocab](const char * field, int32_t id) {
        check(id >= 0 && id < n_vocab, Status::invalid, "%s names token %d, want 0 <= token < %d", field, id, n_vocab);
    };

    require(n_vocab >= 1, "n_vocab", n_vocab, ">= 1");
    require(std::isfinite(temperature) && temperature >= 0.0f, "temperature", temperature, "finite and >= 0");
    require(top_k >= 0, "top_k", top_k, ">= 0");
    require(in_unit(top_p), "top_p", top_p, "0 to 1");
    require(in_unit(min_p), "min_p", min_p, "0 to 1");
    require(in_unit(typical_p), "typical_p", typical_p, "0 to 1");
    require(std::isfinite(repeat_penalty) && repeat_penalty > 0.0f, "repeat_penalty", repeat_penalty, "finite and > 0");
    require(std::isfinite(presence_penalty), "presence_penalty", presence_penalty, "a finite number");
    require(std::isfinite(frequency_penalty), "frequency_penalty", frequency_penalty, "a finite number");
    require(penalty_last_n >= -1, "penalty_last_n", penalty_last_n, ">= -1");
    for (const auto & [token, bias] : logit_bias) {
        require_id("logit_bias", token);
        check(bias < INFINITY, Status::invalid, "logit_bias of token %d is %g, want finite or -infinity", token,
              static_cast<double>(bias));
    }
    for (const int32_t token : eos_ids) {
        require_id("eos_ids", token);
    }
    require(n_logprobs >= 0 && n_logprobs <= max_logprobs, "n_logprobs", n_logprobs, "0 to 20");
    check(logprobs || n_logprobs == 0, Status::invalid, "n_logprobs is %d, want 0 while logprobs is off", n_logprobs);
}

} // namespace dflash
