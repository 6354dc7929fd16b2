#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "decode/draft_chain.hpp"

using namespace dflash;

namespace {

constexpr int32_t k = 3;
constexpr int32_t n = 4;

ChainScores random_scores(uint32_t seed) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-4.0f, 4.0f);
    ChainScores s;
    s.n_slots = n;
    s.n_candidates = k;
    for (int32_t i = 0; i < n * k; ++i) {
        s.tokens.push_back(10 * (i / k) + i % k);
    }
    for (int32_t i = 0; i < k; ++i) {
        s.first.push_back(uniform(generator));
    }
    for (int32_t i = 0; i < (n - 1) * k * k; ++i) {
        s.pairs.push_back(uniform(generator));
    }
    s.shares.assign(n, 1.0f);
    int32_t before = 0;
    for (int32_t slot = 0; slot < n; ++slot) { // the walk of best choices
        const float * scores = slot == 0 ? s.first.data() : s.pairs.data() + ((slot - 1) * k + before) * k;
        before = static_cast<int32_t>(std::max_element(scores, scores + k) - scores);
        s.chain.push_back(s.tokens[static_cast<size_t>(slot * k + before)]);
    }
    return s;
}

/// Probability of candidate `next` of a slot behind candidate `before` of the slot in front of it.
double probability(const ChainScores & s, int32_t slot, int32_t before, int32_t next) {
    const float * scores = slot == 0 ? s.first.data() : s.pairs.data() + ((slot - 1) * k + before) * k;
    double sum = 0.0;
    for (int32_t i = 0; i < k; ++i) {
        sum += std::exp(static_cast<double>(scores[i]));
    }
    return std::exp(static_cast<double>(scores[next])) / sum * static_cast<double>(s.shares[static_cast<size_t>(slot)]);
}

bool fails(const ChainScores & s) {
    try {
        chained_choices(s);
    } catch (const Error & error) {
        return error.status() == Status::internal;
    }
    return false;
}

} // namespace

TEST(scores_of_a_tree_are_the_probabilities_of_its_paths) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
        ChainScores s = random_scores(seed);
        s.shares = {1.0f, 0.9f, 0.5f, 0.25f};
        const DraftTree tree = build_draft_tree(7, chained_choices(s), {30, 0, {{max_tree_nodes + 1, max_tree_nodes}}});
        CHECK(tree.tokens.size() == 31);
        std::vector<double> all; // every path's probability
        std::vector<double> found;
        for (size_t node = 1; node < tree.tokens.size(); ++node) {
            std::vector<int32_t> path;
            for (auto at = static_cast<int32_t>(node); at > 0; at = tree.parents[static_cast<size_t>(at)]) {
                path.insert(path.begin(), tree.tokens[static_cast<size_t>(at)] % 10);
            }
            double wanted = 1.0;
            for (size_t slot = 0; slot < path.size(); ++slot) {
                wanted *= probability(s, static_cast<int32_t>(slot), slot == 0 ? 0 : path[slot - 1], path[slot]);
            }
            found.push_back(wanted);
            CHECK(std::abs(std::exp(static_cast<double>(tree.scores[node])) - wanted) < 1e-5 * wanted + 1e-9);
        }
        const auto visit = [&](const auto & self, int32_t slot, int32_t before, double so_far) -> void {
            for (int32_t next = 0; slot < n && next < k; ++next) {
                const double here = so_far * probability(s, slot, before, next);
                all.push_back(here);
                self(self, slot + 1, next, here);
            }
        };
        visit(visit, 0, 0, 1.0);
        std::sort(all.rbegin(), all.rend());
        std::sort(found.rbegin(), found.rend());
        for (size_t i = 0; i < found.size(); ++i) {
            CHECK(std::abs(found[i] - all[i]) < 1e-6); // the best ones there are
        }
    }
}

TEST(the_seed_of_a_tree_is_the_chain) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
        const ChainScores s = random_scores(seed);
        const DraftTree tree = build_draft_tree(7, chained_choices(s), tree_limits(16, n));
        for (size_t i = 1; i <= 4; ++i) {
            CHECK(tree.tokens[i] == s.chain[i - 1]);
        }
    }
}

TEST(a_confidence_stands_for_the_probability_of_a_proposal_behind_the_chain) {
    ChainScores s = random_scores(3);
    const std::vector<SlotChoices> before = chained_choices(s);
    s.confidences = {0.9f, 0.2f, 1.0f, 0.0f};
    const std::vector<SlotChoices> after = chained_choices(s);
    for (size_t slot = 0; slot < n; ++slot) {
        for (size_t place = 0; place < after[slot].size(); ++place) {
            const SlotCandidates & a = after[slot][place];
            const SlotCandidates & b = before[slot][place];
            const bool on_chain = slot == 0 || s.tokens[(slot - 1) * k + place] == s.chain[slot - 1];
            double sum = 0.0;
            for (size_t i = 0; i < a.tokens.size(); ++i) {
                sum += std::exp(static_cast<double>(a.logprobs[i]));
                CHECK(on_chain || a.logprobs[i] == b.logprobs[i]);
                if (on_chain && a.tokens[i] == s.chain[slot]) {
                    CHECK(std::abs(std::exp(a.logprobs[i]) - s.confidences[slot]) < 1e-4f);
                }
            }
            CHECK(std::abs(sum - 1.0) < 1e-3);
        }
    }
}

TEST(numbers_that_are_none_are_an_error) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int which = 0; which < 4; ++which) {
        ChainScores s = random_scores(1);
        s.confidences.assign(n, 0.5f);
        CHECK(!fails(s));
        (which == 0 ? s.first[1] : which == 1 ? s.pairs[4] : which == 2 ? s.shares[2] : s.confidences[3]) = nan;
        CHECK(fails(s));
    }
}

TEST(rows_worth_verifying_end_in_front_of_the_first_that_hardly_stands_a_chance) {
    CHECK(n_worth_verifying({0.9f, 0.9f, 0.1f, 1.0f}, 0.3f) == 2);
    CHECK(n_worth_verifying({0.9f, 0.9f, 0.5f, 1.0f}, 0.3f) == 4);
    CHECK(n_worth_verifying({0.1f}, 0.3f) == 0);
    CHECK(n_worth_verifying({0.1f, 0.0f}, 0.0f) == 2);
    CHECK(n_worth_verifying({}, 0.3f) == 0);
    bool refused = false;
    try {
        n_worth_verifying({0.5f, std::numeric_limits<float>::quiet_NaN()}, 0.0f);
    } catch (const Error & error) {
        refused = error.status() == Status::internal;
    }
    CHECK(refused);
}

TEST(slots_that_do_not_fit_together_are_refused) {
    std::vector<SlotChoices> slots = chained_choices(random_scores(2));
    const auto refused = [&] {
        try {
            build_draft_tree(1, slots, {4, 0, {{5, 4}}});
        } catch (const Error & error) {
            return error.status() == Status::invalid;
        }
        return false;
    };
    CHECK(!refused());
    slots[2].pop_back();
    CHECK(refused());
    slots[2].clear();
    CHECK(refused());
}
