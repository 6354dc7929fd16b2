#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace dflash {

/// How the next token is drawn from a row of logits. The defaults are greedy decoding without any processing; the order
/// of the stages is documented at Sampler. Ranges are those that validate() accepts.
struct SamplingParams {
    float temperature = 0.0f; // >= 0; 0 = greedy
    int32_t top_k = 0;        // >= 0; 0 = off
    float top_p = 1.0f;       // 0..1; 1 = off, 0 keeps one token
    float min_p = 0.0f;       // 0..1; 0 = off
    float typical_p = 1.0f;   // 0..1; 1 = off

    float repeat_penalty = 1.0f; // > 0; 1 = off
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    int32_t penalty_last_n = 64; // tokens of history that are penalised; -1 = all of it, 0 = none

    uint64_t seed = 0;

    std::vector<std::pair<int32_t, float>> logit_bias; // (token, added); -infinity forbids, entries of one token add up
    bool ignore_eos = false;                           // forbid eos_ids
    std::vector<int32_t> eos_ids;

    bool logprobs = false;  // report the log-probability of the drawn token
    int32_t n_logprobs = 0; // 0..20 likeliest tokens reported besides; needs logprobs

    static constexpr int32_t max_logprobs = 20;

    bool penalises() const {
        return penalty_last_n != 0 && (repeat_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f);
    }

    /// Throws Status::invalid naming field, value and limit. n_vocab is the length of a row of logits.
    void validate(int32_t n_vocab) const;
};

} // namespace dflash
