#include "decode/draft_chain.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace dflash {
namespace {

float log_sum(const float * values, int32_t n) {
    const float most = *std::max_element(values, values + n);
    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp(static_cast<double>(values[i] - most));
    }
    return most + static_cast<float>(std::log(sum));
}

/// The first choice gets this probability, the others what it leaves in their old proportion.
void trust(SlotCandidates & choices, int32_t token, float confidence) {
    const auto it = std::find(choices.tokens.begin(), choices.tokens.end(), token);
    if (it == choices.tokens.end()) {
        return;
    }
    constexpr float least = 1e-6f;
    const float wanted = std::clamp(confidence, least, 1.0f - least);
    const auto at = static_cast<size_t>(it - choices.tokens.begin());
    const float others = std::max(least, 1.0f - std::exp(choices.logprobs[at]));
    for (size_t i = 0; i < choices.tokens.size(); ++i) {
        choices.logprobs[i] = i == at ? std::log(wanted) : choices.logprobs[i] + std::log((1.0f - wanted) / others);
    }
}

} // namespace

std::vector<SlotChoices> chained_choices(const ChainScores & s) {
    std::vector<SlotChoices> slots;
    const auto k = static_cast<size_t>(s.n_candidates);
    for (size_t slot = 0; slot < static_cast<size_t>(s.n_slots); ++slot) {
        const int32_t * tokens = s.tokens.data() + slot * k;
        check(std::isfinite(s.shares[slot]), Status::internal, "the drafter's scores of slot %zu are not numbers",
              slot);
        const float share = std::log(std::clamp(s.shares[slot], 1e-30f, 1.0f));
        SlotChoices choices;
        for (size_t before = 0; before < (slot == 0 ? 1 : k); ++before) {
            const float * scores = slot == 0 ? s.first.data() : s.pairs.data() + ((slot - 1) * k + before) * k;
            const float whole = log_sum(scores, s.n_candidates);
            check(std::isfinite(whole), Status::internal, "the drafter's scores of slot %zu are not numbers", slot);
            SlotCandidates best = sorted_candidates(tokens, scores, s.n_candidates, whole - share);
            const bool on_chain = slot == 0 || s.tokens[(slot - 1) * k + before] == s.chain[slot - 1];
            if (!s.confidences.empty() && on_chain) {
                check(std::isfinite(s.confidences[slot]), Status::internal,
                      "the drafter's confidence in slot %zu is not a number", slot);
                trust(best, s.chain[slot], s.confidences[slot]);
            }
            choices.push_back(std::move(best));
        }
        slots.push_back(std::move(choices));
    }
    return slots;
}

int32_t n_worth_verifying(const std::vector<float> & chances, float min_chance) {
    double reached = 1.0;
    int32_t n = 0;
    for (size_t i = 0; i < chances.size(); ++i) {
        check(chances[i] >= 0.0f && chances[i] <= 1.0001f, Status::internal,
              "the drafter's chance of slot %zu is %g: its numbers are broken", i, static_cast<double>(chances[i]));
        reached *= static_cast<double>(chances[i]);
        n += reached >= static_cast<double>(min_chance) && static_cast<size_t>(n) == i ? 1 : 0;
    }
    return n;
}

} // namespace dflash
