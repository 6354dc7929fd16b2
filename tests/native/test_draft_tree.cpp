#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "decode/draft_tree.hpp"

using namespace dflash;

namespace {

std::vector<SlotCandidates> random_slots(uint32_t seed, size_t n_slots, int32_t n_candidates, bool coarse = false) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-6.0f, 0.0f);
    std::vector<SlotCandidates> slots;
    for (size_t i = 0; i < n_slots; ++i) {
        std::vector<int32_t> tokens;
        std::vector<float> values;
        for (int32_t k = 0; k < n_candidates; ++k) {
            tokens.push_back(100 * static_cast<int32_t>(i) + k);
            const float value = uniform(generator);
            values.push_back(coarse ? std::round(value / 2.0f) * 2.0f : value);
        }
        slots.push_back(sorted_candidates(tokens.data(), values.data(), n_candidates, 0.0f));
    }
    return slots;
}

TreeLimits free_limits(int32_t n_nodes, int32_t n_seed = 0) {
    return {n_nodes, n_seed, {{max_tree_nodes + 1, max_tree_nodes}}};
}

std::vector<int32_t> path_to(const DraftTree & tree, int32_t node) {
    std::vector<int32_t> tokens;
    for (; node > 0; node = tree.parents[static_cast<size_t>(node)]) {
        tokens.insert(tokens.begin(), tree.tokens[static_cast<size_t>(node)]);
    }
    return tokens;
}

/// Scores of all paths that the candidates make, greatest first.
std::vector<float> all_scores(const std::vector<SlotCandidates> & slots) {
    std::vector<float> all;
    std::vector<float> level = {0.0f};
    for (const SlotCandidates & slot : slots) {
        std::vector<float> next;
        for (const float score : level) {
            for (const float logprob : slot.logprobs) {
                next.push_back(score + logprob);
            }
        }
        all.insert(all.end(), next.begin(), next.end());
        level = std::move(next);
    }
    std::sort(all.rbegin(), all.rend());
    return all;
}

Status status_of(const std::vector<SlotCandidates> & slots, const TreeLimits & limits) {
    try {
        build_draft_tree(1, slots, limits);
    } catch (const Error & error) {
        return error.status();
    }
    return Status::ok;
}

std::string layout_error(const std::vector<int32_t> & parents) {
    try {
        lay_out_tree(parents.data(), static_cast<int64_t>(parents.size()));
    } catch (const Error & error) {
        return error.what();
    }
    return "";
}

} // namespace

TEST(the_best_paths_are_taken) {
    for (uint32_t seed = 0; seed < 40; ++seed) {
        const std::vector<SlotCandidates> slots = random_slots(seed, 4, 4);
        const std::vector<float> want = all_scores(slots);
        for (const int32_t n : {1, 2, 5, 17, 64}) {
            const DraftTree tree = build_draft_tree(7, slots, free_limits(n));
            REQUIRE(tree.tokens.size() == static_cast<size_t>(n) + 1);
            std::vector<float> got(tree.scores.begin() + 1, tree.scores.end());
            CHECK(std::is_sorted(got.rbegin(), got.rend()));
            for (size_t i = 0; i < got.size(); ++i) {
                CHECK(std::fabs(got[i] - want[i]) < 1e-5f);
            }
        }
    }
}

TEST(a_tree_is_one_of_distinct_paths_with_true_scores) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
        const std::vector<SlotCandidates> slots = random_slots(seed, 15, 8);
        for (int32_t n = 1; n <= max_tree_nodes; ++n) {
            const TreeLimits limits = tree_limits(n, 15);
            const DraftTree tree = build_draft_tree(7, slots, limits);
            CHECK_EQ(tree.tokens.size(), static_cast<size_t>(n) + 1);
            CHECK_EQ(tree.tokens[0], 7);
            const TreeLayout layout = lay_out_tree(tree.parents.data(), n + 1);
            CHECK_EQ(layout.n_levels, tree.depth + 1);
            CHECK(tree.size.holds(layout.n_levels, static_cast<int32_t>(layout.paths.size())));
            CHECK(std::any_of(limits.sizes.begin(), limits.sizes.end(), [&](const TreeSize & size) {
                return size.n_levels == tree.size.n_levels && size.n_paths == tree.size.n_paths;
            }));
            std::set<std::vector<int32_t>> paths;
            for (int32_t node = 1; node <= n; ++node) {
                const std::vector<int32_t> path = path_to(tree, node);
                paths.insert(path);
                float score = 0.0f;
                for (size_t d = 0; d < path.size(); ++d) {
                    const auto & slot = slots[d];
                    const auto at = std::find(slot.tokens.begin(), slot.tokens.end(), path[d]);
                    REQUIRE(at != slot.tokens.end());
                    score += slot.logprobs[static_cast<size_t>(at - slot.tokens.begin())];
                }
                CHECK(std::fabs(score - tree.scores[static_cast<size_t>(node)]) < 1e-4f);
            }
            CHECK_EQ(paths.size(), static_cast<size_t>(n));
            CHECK(tree.n_chain >= limits.n_seed);
            for (int32_t i = 1; i <= tree.n_chain; ++i) {
                CHECK_EQ(tree.parents[static_cast<size_t>(i)], i - 1);
                CHECK_EQ(tree.tokens[static_cast<size_t>(i)], slots[static_cast<size_t>(i) - 1].tokens[0]);
            }
        }
    }
}

TEST(the_chain_comes_first) {
    const std::vector<SlotCandidates> slots = random_slots(3, 6, 4);
    const DraftTree chain = build_draft_tree(7, slots, free_limits(6, 6));
    CHECK(lay_out_tree(chain.parents.data(), 7).is_chain);
    CHECK_EQ(chain.n_chain, 6);
    const DraftTree tree = build_draft_tree(7, slots, free_limits(20, 6));
    CHECK_EQ(tree.n_chain, 6);
    CHECK_EQ(tree.depth, 6);
}

TEST(equal_scores_have_one_order) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
        const std::vector<SlotCandidates> slots = random_slots(seed, 5, 6, true);
        const DraftTree a = build_draft_tree(7, slots, tree_limits(32, 5));
        const DraftTree b = build_draft_tree(7, slots, tree_limits(32, 5));
        CHECK(a.parents == b.parents && a.tokens == b.tokens);
    }
    const std::vector<int32_t> tokens = {9, 4, 6, 4};
    const std::vector<float> values = {1.0f, 1.0f, 2.0f, 0.5f};
    const SlotCandidates sorted = sorted_candidates(tokens.data(), values.data(), 4, 3.0f);
    CHECK(sorted.tokens == std::vector<int32_t>({6, 4, 9}));
    CHECK(sorted.logprobs == std::vector<float>({-1.0f, -2.0f, -2.0f}));
}

TEST(every_size_of_drafter_gives_full_trees_where_it_can) {
    for (const int32_t n_slots : {1, 2, 3, 7, 15, 31}) {
        size_t capacity = 0;
        for (size_t i = 0, level = 1; i < static_cast<size_t>(n_slots) && capacity < 100; ++i) {
            level *= 8;
            capacity += level;
        }
        for (int32_t n = 1; n <= max_tree_nodes; ++n) {
            const auto slots = random_slots(static_cast<uint32_t>(n), static_cast<size_t>(n_slots), 8);
            const DraftTree tree = build_draft_tree(1, slots, tree_limits(n, n_slots));
            CHECK_EQ(tree.tokens.size(), std::min(capacity, static_cast<size_t>(n)) + 1);
        }
    }
}

TEST(limits_out_of_range_are_refused) {
    const std::vector<SlotCandidates> slots = random_slots(1, 3, 2);
    CHECK(status_of(slots, free_limits(3)) == Status::ok);
    for (const int32_t n : {-1, 0, max_tree_nodes + 1}) {
        CHECK(status_of(slots, free_limits(n)) == Status::invalid);
    }
    CHECK(status_of(slots, free_limits(5, 4)) == Status::invalid); // three slots
    CHECK(status_of(slots, free_limits(2, 3)) == Status::invalid); // two nodes
    CHECK(status_of(slots, free_limits(2, -1)) == Status::invalid);
    CHECK(status_of(slots, {4, 0, {}}) == Status::invalid);
    CHECK(status_of(slots, {4, 3, {{3, 4}}}) == Status::invalid); // the chain has four levels
    CHECK(status_of({}, free_limits(3)) == Status::invalid);
    std::vector<SlotCandidates> broken = slots;
    broken[1].tokens.clear();
    CHECK(status_of(broken, free_limits(3)) == Status::invalid);
    const std::vector<int32_t> tokens = {1, 2};
    const std::vector<float> values = {1.0f, std::nanf("")};
    try {
        sorted_candidates(tokens.data(), values.data(), 2, 0.0f);
        CHECK(false);
    } catch (const Error & error) {
        CHECK(error.status() == Status::internal);
    }
}

TEST(a_layout_has_every_leaf_once) {
    const std::vector<int32_t> parents = {-1, 0, 0, 1, 1, 2, 4};
    const TreeLayout layout = lay_out_tree(parents.data(), 7);
    CHECK_EQ(layout.n_levels, 4);
    CHECK(!layout.is_chain);
    CHECK(layout.depth == std::vector<int32_t>({0, 1, 1, 2, 2, 2, 3}));
    const std::vector<std::vector<int32_t>> want = {{0, 1, 3}, {0, 2, 5}, {0, 1, 4, 6}};
    CHECK(layout.paths == want);
    for (size_t i = 0; i < parents.size(); ++i) {
        const auto & path = layout.paths[static_cast<size_t>(layout.path_of[i])];
        CHECK_EQ(path[static_cast<size_t>(layout.depth[i])], static_cast<int32_t>(i));
    }
    CHECK(lay_out_tree(parents.data(), 2).is_chain);
}

TEST(what_is_no_tree_is_named) {
    CHECK_EQ(layout_error({-1, 0, 1}), std::string());
    CHECK_EQ(layout_error({0}), std::string("parent of node 0 is 0, want -1: it is the root"));
    CHECK_EQ(layout_error({-1, 0, 3}), std::string("parent of node 2 is 3, want 0 to 1"));
    CHECK_EQ(layout_error({-1, 2, 1}),
             std::string("parent of node 1 is 2, want 0 to 0: a parent comes before its children"));
    CHECK_EQ(layout_error({-1, 1}),
             std::string("parent of node 1 is 1, want 0 to 0: a parent comes before its children"));
    CHECK(layout_error({}) != "");
    CHECK(layout_error(std::vector<int32_t>(70, -1)) != "");
}

TEST(paths_of_a_tree_are_checked) {
    const std::vector<int32_t> parents = {-1, 0, 0, 1};
    const auto ok = [&](const std::vector<int32_t> & path) {
        try {
            check_tree_path(parents, path);
        } catch (const Error & error) {
            return error.status() == Status::ok;
        }
        return true;
    };
    CHECK(ok({}) && ok({0}) && ok({0, 2}) && ok({0, 1, 3}));
    CHECK(!ok({1}) && !ok({0, 3}) && !ok({0, 2, 3}) && !ok({0, 4}) && !ok({-1}) && !ok({0, 0}));
}
