#pragma once

#include <cstdint>
#include <vector>

#include "decode/draft_tree.hpp"

namespace dflash {

/// What a drafter whose proposals depend on each other says about the k candidates of each of n slots.
struct ChainScores {
    int32_t n_slots = 0;
    int32_t n_candidates = 0;
    std::vector<int32_t> tokens;    // [n, k]
    std::vector<float> first;       // [k]: scores of slot 0 behind the anchor
    std::vector<float> pairs;       // [n - 1, k, k]: scores of slot j + 1's candidates behind each one of slot j
    std::vector<float> shares;      // [n]: probability that the true law gives to the k candidates together, behind the
                                    // chain; 1 when they are all there is
    std::vector<int32_t> chain;     // [n]: the proposals
    std::vector<float> confidences; // [n]: a head's estimate that they are right, or empty
};

/// A tree's slots: entry i of a slot holds the tokens behind candidate i of the slot before it. A score's probability
/// is its softmax over the k candidates times their share. Where there is a confidence, it stands for the probability
/// of a proposal behind the proposals before it, and the others share the rest as before. Throws Status::internal when
/// a number is none.
std::vector<SlotChoices> chained_choices(const ChainScores & scores);

/// How many of the first proposals have a chance of at least min_chance to be reached and right; chances: of each one
/// given those before it. Throws Status::internal when one is not between 0 and 1.
int32_t n_worth_verifying(const std::vector<float> & chances, float min_chance);

} // namespace dflash
