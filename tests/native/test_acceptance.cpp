#include "check.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode/acceptance.hpp"
#include "toy_sampler.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

constexpr int32_t n_vocab = 64;

/// A verify forward whose row i has its largest logit at argmax[i]; counts which rows are read.
class FixedRows {
  public:
    explicit FixedRows(const std::vector<int32_t> & argmax) {
        for (const int32_t token : argmax) {
            rows_.push_back(random_row(n_vocab, static_cast<uint32_t>(token)));
            rows_.back()[static_cast<size_t>(token)] = 50.0f;
        }
    }

    RowLogits logits() {
        return [this](int32_t row) {
            asked.push_back(row);
            return rows_.at(static_cast<size_t>(row)).data();
        };
    }
    std::vector<float> & row(size_t i) { return rows_[i]; }

    std::vector<int32_t> asked;

  private:
    std::vector<std::vector<float>> rows_;
};

TokenHistory prompt() {
    TokenHistory history(n_vocab, 0);
    history.push(1);
    history.push(2);
    return history;
}

std::vector<int32_t> first_of(const std::vector<int32_t> & tokens, size_t n) {
    return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n)};
}

std::vector<int32_t> count_up(size_t n) {
    std::vector<int32_t> ids(n);
    for (size_t i = 0; i < n; ++i) {
        ids[i] = static_cast<int32_t>(i);
    }
    return ids;
}

/// Runs the chain in its four forms and checks that they agree and read no row too many.
AcceptResult accept_all_forms(const std::vector<int32_t> & proposals, const std::vector<int32_t> & argmax,
                              const StopRule & stop) {
    const Sampler greedy(SamplingParams{}, n_vocab);
    FixedRows rows(argmax);
    TokenHistory history = prompt();
    const AcceptResult chain = accept_chain(proposals, rows.logits(), 1, greedy, history, stop);

    std::vector<int32_t> tokens = {2};
    tokens.insert(tokens.end(), proposals.begin(), proposals.end());
    std::vector<int32_t> parents = count_up(tokens.size());
    for (int32_t & parent : parents) {
        --parent;
    }
    const auto same = [&](const AcceptResult & other, const TokenHistory & after) {
        CHECK(other.emitted == chain.emitted && other.path == chain.path && other.n_accepted == chain.n_accepted);
        CHECK(other.reason == chain.reason && other.stopped == chain.stopped);
        CHECK(after.tokens() == history.tokens());
    };
    TokenHistory again = prompt();
    same(accept_tree(parents, tokens, FixedRows(argmax).logits(), 1, greedy, again, stop), again);
    again = prompt();
    same(accept_chain_greedy(proposals, argmax, again, stop), again);
    again = prompt();
    same(accept_tree_greedy(parents, tokens, argmax, again, stop), again);

    CHECK(rows.asked == chain.path);
    CHECK_EQ(chain.path.size(), chain.emitted.size());
    CHECK_EQ(chain.n_accepted + 1, static_cast<int32_t>(chain.emitted.size()));
    std::vector<int32_t> want = {1, 2};
    want.insert(want.end(), chain.emitted.begin(), chain.emitted.end());
    CHECK(history.tokens() == want);
    return chain;
}

const std::vector<int32_t> target = {10, 11, 12, 13, 14, 15, 16, 17}; // argmax of the 8 rows of a block
const StopRule endless = {{}, 1000};

} // namespace

TEST(a_right_draft_is_accepted_whole) {
    const AcceptResult result = accept_all_forms(first_of(target, 7), target, endless);
    CHECK(result.emitted == target);
    CHECK(result.path == count_up(8));
    CHECK(!result.stopped && result.reason == StopReason::none);
    CHECK(result.draws.empty());
}

TEST(no_proposal_is_one_plain_draw) {
    const AcceptResult result = accept_all_forms({}, {33}, endless);
    CHECK(result.emitted == std::vector<int32_t>{33});
    CHECK_EQ(result.n_accepted, 0);
}

TEST(a_mismatch_at_each_slot_ends_the_walk) {
    for (size_t wrong = 0; wrong < 7; ++wrong) {
        std::vector<int32_t> proposals = first_of(target, 7);
        proposals[wrong] = 40;
        const AcceptResult result = accept_all_forms(proposals, target, endless);
        CHECK(result.emitted == first_of(target, wrong + 1)); // the draw, not the proposal, and nothing after it
        CHECK(!result.stopped);
    }
}

TEST(a_stop_id_at_each_slot_is_the_last_token) {
    for (size_t slot = 0; slot < 8; ++slot) {
        const StopRule stop = {{50, target[slot]}, 1000};
        const AcceptResult result = accept_all_forms(first_of(target, 7), target, stop);
        CHECK(result.emitted == first_of(target, slot + 1));
        CHECK(result.stopped && result.reason == StopReason::stop_token);
    }
    // Only what is drawn counts: a stop id that was proposed and not drawn does not stop.
    std::vector<int32_t> proposals = first_of(target, 7);
    proposals[3] = 50;
    const AcceptResult result = accept_all_forms(proposals, target, {{50}, 1000});
    CHECK(result.emitted == first_of(target, 4) && !result.stopped);
    // A drawn stop id that was not proposed does.
    const AcceptResult drawn = accept_all_forms({10, 11, 12, 40}, {10, 11, 12, 50, 60}, {{50}, 1000});
    CHECK(drawn.emitted == (std::vector<int32_t>{10, 11, 12, 50}) && drawn.reason == StopReason::stop_token);
}

TEST(the_budget_ends_at_each_slot) {
    for (size_t budget = 1; budget <= 9; ++budget) {
        const StopRule stop = {{}, static_cast<int64_t>(budget)};
        const AcceptResult result = accept_all_forms(first_of(target, 7), target, stop);
        CHECK(result.emitted == first_of(target, std::min(budget, size_t{8})));
        CHECK(result.stopped == (budget <= 8));
        CHECK(result.reason == (budget <= 8 ? StopReason::budget : StopReason::none));
    }
    const AcceptResult both = accept_all_forms(first_of(target, 7), target, {{12}, 3});
    CHECK(both.reason == StopReason::stop_token);
}

TEST(a_tree_follows_the_child_that_was_drawn) {
    //              0 anchor
    //       1:10      2:20     3:10
    //    4:11  5:12   6:13     7:12
    //    8:14
    const std::vector<int32_t> parents = {-1, 0, 0, 0, 1, 1, 2, 3, 4};
    const std::vector<int32_t> tokens = {2, 10, 20, 10, 11, 12, 13, 12, 14};
    const Sampler greedy(SamplingParams{}, n_vocab);
    const auto walk = [&](const std::vector<int32_t> & argmax) {
        FixedRows rows(argmax);
        TokenHistory history = prompt();
        const AcceptResult result = accept_tree(parents, tokens, rows.logits(), 1, greedy, history, endless);
        TokenHistory again = prompt();
        const AcceptResult device = accept_tree_greedy(parents, tokens, argmax, again, endless);
        CHECK(device.path == result.path && device.emitted == result.emitted);
        CHECK(rows.asked == result.path);
        return result;
    };
    AcceptResult result = walk({20, 0, 13, 0, 0, 0, 30, 0, 0});
    CHECK(result.path == (std::vector<int32_t>{0, 2, 6}));
    CHECK(result.emitted == (std::vector<int32_t>{20, 13, 30}));
    result = walk({10, 12, 0, 0, 0, 31, 0, 0, 0}); // of two equal children the first
    CHECK(result.path == (std::vector<int32_t>{0, 1, 5}));
    CHECK(result.emitted == (std::vector<int32_t>{10, 12, 31}));
    result = walk({10, 11, 0, 0, 14, 0, 0, 0, 32});
    CHECK(result.path == (std::vector<int32_t>{0, 1, 4, 8}));
    CHECK(result.emitted == (std::vector<int32_t>{10, 11, 14, 32}));
    result = walk({13, 0, 0, 0, 0, 0, 0, 0, 0}); // 13 is in the tree, but no child of the anchor
    CHECK(result.path == std::vector<int32_t>{0});
    CHECK(result.emitted == std::vector<int32_t>{13});
}

TEST(each_row_sees_what_the_rows_before_it_emitted) {
    SamplingParams params =
        make_params([](SamplingParams & p) { p.presence_penalty = 1000.0f, p.penalty_last_n = -1; });
    const Sampler sampler(params, n_vocab);
    std::vector<float> row(n_vocab, 0.0f);
    for (size_t token = 0; token < n_vocab; ++token) {
        row[token] = -static_cast<float>(token); // every row prefers 0, then 1, then 2 ...
    }
    TokenHistory history(n_vocab, sampler.history_window());
    history.push(0);
    history.push(2); // the anchor
    const AcceptResult result =
        accept_chain({1, 3, 4, 4}, [&](int32_t) { return row.data(); }, 1, sampler, history, endless);
    CHECK(result.emitted == (std::vector<int32_t>{1, 3, 4, 5}));
    CHECK(history.tokens() == (std::vector<int32_t>{0, 2, 1, 3, 4, 5}));
}

TEST(log_probabilities_come_with_every_emitted_token) {
    const Sampler sampler(make_params([](SamplingParams & p) { p.logprobs = true, p.n_logprobs = 2; }), n_vocab);
    FixedRows rows(target);
    TokenHistory history = prompt();
    const AcceptResult result = accept_chain(first_of(target, 4), rows.logits(), 1, sampler, history, endless);
    REQUIRE(result.draws.size() == 5);
    for (size_t i = 0; i < 5; ++i) {
        CHECK_EQ(result.draws[i].token, result.emitted[i]);
        CHECK_NEAR(result.draws[i].logprob, 0.0, 1e-6);
        CHECK_EQ(result.draws[i].top.size(), size_t{2});
    }
}

TEST(failures_name_the_row_and_leave_the_history) {
    const Sampler greedy(SamplingParams{}, n_vocab);
    for (size_t bad = 0; bad < 4; ++bad) {
        FixedRows rows(target);
        rows.row(bad)[30] = std::numeric_limits<float>::quiet_NaN();
        TokenHistory history = prompt();
        const std::string row = "row " + std::to_string(bad);
        CHECK_THROWS_WITH(Status::internal, (row + ": logits for position " + std::to_string(bad + 6)).c_str(),
                          accept_chain(first_of(target, 7), rows.logits(), 5, greedy, history, endless));
        CHECK(history.tokens() == prompt().tokens());

        const auto missing = [&](int32_t i) { return static_cast<size_t>(i) == bad ? nullptr : rows.logits()(i); };
        CHECK_THROWS_WITH(Status::internal, (row + " has no logits").c_str(),
                          accept_chain(first_of(target, 7), missing, 5, greedy, history, endless));
        CHECK(history.tokens() == prompt().tokens());

        std::vector<int32_t> argmax = target;
        argmax[bad] = bad % 2 == 0 ? -1 : n_vocab;
        CHECK_THROWS_WITH(Status::internal, (row + " has argmax " + std::to_string(argmax[bad])).c_str(),
                          accept_chain_greedy(first_of(target, 7), argmax, history, endless));
        CHECK(history.tokens() == prompt().tokens());
    }

    TokenHistory history = prompt();
    FixedRows rows(target);
    const auto thrower = [&](int32_t i) -> const float * {
        if (i == 2) {
            throw std::runtime_error("device lost");
        }
        return rows.logits()(i);
    };
    bool thrown = false;
    try {
        accept_chain(first_of(target, 7), thrower, 5, greedy, history, endless);
    } catch (const std::runtime_error &) {
        thrown = true;
    }
    CHECK(thrown);
    CHECK(history.tokens() == prompt().tokens());

    const Sampler forbidding(make_params([](SamplingParams & p) { p.logit_bias = {{63, -INFINITY}}; }), n_vocab);
    rows.row(1).assign(n_vocab, -INFINITY);
    rows.row(1)[63] = 1.0f;
    CHECK_THROWS_WITH(Status::invalid, "row 1: logit_bias",
                      accept_chain(first_of(target, 7), rows.logits(), 5, forbidding, history, endless));
    CHECK(history.tokens() == prompt().tokens());
}

TEST(arguments_are_checked) {
    const Sampler greedy(SamplingParams{}, n_vocab);
    FixedRows rows(target);
    TokenHistory history = prompt();
    const auto chain = [&](const std::vector<int32_t> & proposals, int64_t position, const StopRule & stop) {
        return accept_chain(proposals, rows.logits(), position, greedy, history, stop);
    };
    CHECK_THROWS_WITH(Status::invalid, "budget of 0 tokens, want >= 1", chain({10}, 1, {{}, 0}));
    CHECK_THROWS_WITH(Status::invalid, "budget of -3", accept_chain_greedy({10}, {10, 11}, history, {{}, -3}));
    CHECK_THROWS_WITH(Status::invalid, "anchor at position -1", chain({10}, -1, endless));
    CHECK_THROWS_WITH(Status::invalid, "proposal 1 is token 64, want 0 <= token < 64", chain({10, 64}, 1, endless));
    CHECK_THROWS_WITH(Status::invalid, "proposal 0 is token -1", accept_chain_greedy({-1}, {10, 11}, history, endless));
    CHECK_THROWS_WITH(Status::invalid, "argmax of 3 rows, want 2",
                      accept_chain_greedy({10}, {10, 11, 12}, history, endless));

    const auto tree = [&](const std::vector<int32_t> & parents, const std::vector<int32_t> & tokens) {
        return accept_tree(parents, tokens, rows.logits(), 1, greedy, history, endless);
    };
    CHECK_THROWS_WITH(Status::invalid, "0 parents and 0 tokens", tree({}, {}));
    CHECK_THROWS_WITH(Status::invalid, "2 parents and 1 tokens", tree({-1, 0}, {2}));
    CHECK_THROWS_WITH(Status::invalid, "parent of node 0 is 0, want -1", tree({0, 0}, {2, 10}));
    CHECK_THROWS_WITH(Status::invalid, "parent of node 2 is 2, want 0 <= parent < 2", tree({-1, 0, 2}, {2, 10, 11}));
    CHECK_THROWS_WITH(Status::invalid, "parent of node 1 is -1", tree({-1, -1}, {2, 10}));
    CHECK_THROWS_WITH(Status::invalid, "node 1 is token 64", tree({-1, 0}, {2, 64}));
    CHECK_THROWS_WITH(Status::invalid, "argmax of 1 rows, want 2",
                      accept_tree_greedy({-1, 0}, {2, 10}, {10}, history, endless));
    CHECK(history.tokens() == prompt().tokens());
    CHECK(rows.asked.empty());
}
