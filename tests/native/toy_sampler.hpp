#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "decode/sampler.hpp"

namespace dflash::testing {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

using Setter = std::function<void(SamplingParams &)>;

inline SamplingParams make_params(const Setter & set) {
    SamplingParams params;
    set(params);
    return params;
}

inline std::vector<float> random_row(int32_t n, uint32_t seed, float spread = 2.0f) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> row(static_cast<size_t>(n));
    for (float & logit : row) {
        logit = normal(generator);
    }
    return row;
}

inline TokenHistory make_history(const Sampler & sampler, const std::vector<int32_t> & tokens) {
    TokenHistory history(sampler.n_vocab(), sampler.history_window());
    for (const int32_t token : tokens) {
        history.push(token);
    }
    return history;
}

inline int32_t draw_one(const std::vector<float> & row, const SamplingParams & params, int64_t position = 0) {
    const Sampler sampler(params, static_cast<int32_t>(row.size()));
    return sampler.draw(row.data(), position, make_history(sampler, {})).token;
}

inline const std::vector<int32_t> toy_history = {3, 3, 9, 17, 3, 20, 9, 31, 0, 3};

/// Each truncation and penalty alone and together; every set changes the law of the toy row.
inline const std::vector<std::pair<const char *, Setter>> & toy_settings() {
    static const std::vector<std::pair<const char *, Setter>> settings = {
        {"temperature 1", [](SamplingParams & p) { p.temperature = 1.0f; }},
        {"temperature 0.7", [](SamplingParams & p) { p.temperature = 0.7f; }},
        {"temperature 1.6", [](SamplingParams & p) { p.temperature = 1.6f; }},
        {"top_k", [](SamplingParams & p) { p.temperature = 0.7f, p.top_k = 7; }},
        {"top_p", [](SamplingParams & p) { p.temperature = 0.7f, p.top_p = 0.8f; }},
        {"min_p", [](SamplingParams & p) { p.temperature = 0.7f, p.min_p = 0.08f; }},
        {"typical_p", [](SamplingParams & p) { p.temperature = 0.7f, p.typical_p = 0.6f; }},
        {"repeat", [](SamplingParams & p) { p.temperature = 0.7f, p.repeat_penalty = 1.8f; }},
        {"presence", [](SamplingParams & p) { p.temperature = 0.7f, p.presence_penalty = 0.9f; }},
        {"frequency", [](SamplingParams & p) { p.temperature = 0.7f, p.frequency_penalty = 0.4f; }},
        {"window", [](SamplingParams & p) { p.temperature = 0.7f, p.frequency_penalty = 0.4f, p.penalty_last_n = 4; }},
        {"whole", [](SamplingParams & p) { p.temperature = 0.7f, p.repeat_penalty = 1.3f, p.penalty_last_n = -1; }},
        {"bias",
         [](SamplingParams & p) { p.temperature = 0.7f, p.logit_bias = {{4, 1.5f}, {5, -infinity}, {4, 0.5f}}; }},
        {"eos", [](SamplingParams & p) { p.temperature = 0.7f, p.ignore_eos = true, p.eos_ids = {1, 30}; }},
        {"all",
         [](SamplingParams & p) {
             p.temperature = 0.7f, p.top_k = 20, p.top_p = 0.95f, p.min_p = 0.02f, p.typical_p = 0.9f;
             p.repeat_penalty = 1.2f, p.presence_penalty = 0.3f, p.frequency_penalty = 0.1f, p.penalty_last_n = 6;
             p.logit_bias = {{11, 0.7f}}, p.ignore_eos = true, p.eos_ids = {2};
         }},
    };
    return settings;
}

} // namespace dflash::testing
