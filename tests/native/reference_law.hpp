#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "decode/sampling_params.hpp"

namespace dflash::testing {

inline std::vector<double> softmax_of_kept(const std::vector<double> & logits, const std::vector<bool> & kept,
                                           double temperature) {
    double peak = -INFINITY;
    for (size_t i = 0; i < logits.size(); ++i) {
        peak = kept[i] ? std::max(peak, logits[i]) : peak;
    }
    std::vector<double> p(logits.size(), 0.0);
    double total = 0.0;
    for (size_t i = 0; i < logits.size(); ++i) {
        p[i] = kept[i] ? std::exp((logits[i] - peak) / temperature) : 0.0;
        total += p[i];
    }
    for (double & value : p) {
        value /= total;
    }
    return p;
}

/// The law of the next token, written down stage by stage in double precision with full sorts.
inline std::vector<double> reference_law(const std::vector<float> & row, const SamplingParams & params,
                                         const std::vector<int32_t> & history) {
    const size_t n = row.size();
    std::vector<double> logits(row.begin(), row.end());
    for (const auto & [token, bias] : params.logit_bias) {
        logits[static_cast<size_t>(token)] += static_cast<double>(bias);
    }
    for (const int32_t token : params.eos_ids) {
        if (params.ignore_eos) {
            logits[static_cast<size_t>(token)] = -INFINITY;
        }
    }

    const size_t window = params.penalty_last_n < 0 ? history.size() : static_cast<size_t>(params.penalty_last_n);
    for (size_t token = 0; token < n; ++token) {
        const auto first = history.end() - static_cast<std::ptrdiff_t>(std::min(window, history.size()));
        const auto count = std::count(first, history.end(), static_cast<int32_t>(token));
        if (count > 0) {
            const double penalty = static_cast<double>(params.repeat_penalty);
            logits[token] = logits[token] > 0.0 ? logits[token] / penalty : logits[token] * penalty;
            logits[token] -= static_cast<double>(count) * static_cast<double>(params.frequency_penalty);
            logits[token] -= static_cast<double>(params.presence_penalty);
        }
    }

    if (params.temperature == 0.0f) {
        std::vector<double> law(n, 0.0);
        law[static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())] = 1.0;
        return law;
    }

    std::vector<bool> kept(n);
    for (size_t i = 0; i < n; ++i) {
        kept[i] = std::isfinite(logits[i]);
    }
    const auto keep_first = [&](auto key, auto enough) { // ascending key, then ascending token
        const std::vector<double> p = softmax_of_kept(logits, kept, 1.0);
        std::vector<size_t> order;
        for (size_t i = 0; i < n; ++i) {
            if (kept[i]) {
                order.push_back(i);
            }
        }
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a, p) < key(b, p); });
        std::fill(kept.begin(), kept.end(), false);
        double mass = 0.0;
        size_t taken = 0;
        for (const size_t i : order) {
            kept[i] = true;
            mass += p[i];
            if (enough(++taken, mass)) {
                break;
            }
        }
    };
    const auto by_logit = [&](size_t i, const std::vector<double> &) { return -logits[i]; };
    if (params.top_k > 0) {
        keep_first(by_logit, [&](size_t taken, double) { return taken >= static_cast<size_t>(params.top_k); });
    }
    if (params.typical_p < 1.0f) {
        double entropy = 0.0;
        for (const double p : softmax_of_kept(logits, kept, 1.0)) {
            entropy -= p > 0.0 ? p * std::log(p) : 0.0;
        }
        const auto distance = [&](size_t i, const std::vector<double> & p) {
            return std::fabs(-std::log(p[i]) - entropy);
        };
        keep_first(distance, [&](size_t, double mass) { return mass > static_cast<double>(params.typical_p); });
    }
    if (params.top_p < 1.0f) {
        keep_first(by_logit, [&](size_t, double mass) { return mass >= static_cast<double>(params.top_p); });
    }
    if (params.min_p > 0.0f) {
        const std::vector<double> p = softmax_of_kept(logits, kept, 1.0);
        const double peak = *std::max_element(p.begin(), p.end());
        for (size_t i = 0; i < n; ++i) {
            kept[i] = kept[i] && p[i] >= static_cast<double>(params.min_p) * peak;
        }
    }
    return softmax_of_kept(logits, kept, static_cast<double>(params.temperature));
}

} // namespace dflash::testing
