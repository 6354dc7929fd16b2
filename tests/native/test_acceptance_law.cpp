#include "check.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "chi_square.hpp"
#include "decode/acceptance.hpp"
#include "decode/draft_tree.hpp"
#include "decode/random.hpp"
#include "reference_law.hpp"
#include "toy_sampler.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

constexpr int32_t n_vocab = 32;
constexpr int32_t anchor = 5;
constexpr int64_t anchor_position = 2;
constexpr int n_runs = 100000;
const std::vector<int32_t> prompt = {3, 8, anchor};

/// A target whose next-token logits depend on the last token.
const std::vector<std::vector<float>> & target_rows() {
    static const std::vector<std::vector<float>> rows = [] {
        std::vector<std::vector<float>> made;
        for (uint32_t token = 0; token < n_vocab; ++token) {
            made.push_back(random_row(n_vocab, 1000 + token, 1.5f));
        }
        return made;
    }();
    return rows;
}

const std::vector<float> & row_after(int32_t token) {
    return target_rows()[static_cast<size_t>(token)];
}

int32_t extreme_token(int32_t after, bool likeliest) {
    const std::vector<float> & row = row_after(after);
    const auto at = likeliest ? std::max_element(row.begin(), row.end()) : std::min_element(row.begin(), row.end());
    return static_cast<int32_t>(at - row.begin());
}

/// Proposes `n` tokens to follow the history; `run` seeds what is random in it.
using Proposer = std::vector<int32_t> (*)(const TokenHistory & history, int n, uint32_t run);

std::vector<int32_t> propose_extreme(const TokenHistory & history, int n, bool likeliest) {
    std::vector<int32_t> proposals;
    int32_t last = history.tokens().back();
    for (int i = 0; i < n; ++i) {
        last = extreme_token(last, likeliest);
        proposals.push_back(last);
    }
    return proposals;
}

std::vector<int32_t> propose_good(const TokenHistory & history, int n, uint32_t) {
    return propose_extreme(history, n, true);
}

std::vector<int32_t> propose_bad(const TokenHistory & history, int n, uint32_t) {
    return propose_extreme(history, n, false);
}

std::vector<int32_t> propose_random(const TokenHistory & history, int n, uint32_t run) {
    std::vector<int32_t> proposals;
    for (int64_t i = 0; i < n; ++i) {
        const double u = keyed_uniform(uint64_t{3} << 40 | run, history.size() * 100 + i); // no seed of a run
        proposals.push_back(static_cast<int32_t>(u * n_vocab));
    }
    return proposals;
}

struct Tally {
    std::array<std::vector<int64_t>, 3> single; // [n_vocab] of the 1st, 2nd and 3rd token
    std::array<std::vector<int64_t>, 2> pair;   // [n_vocab^2] of the 1st with the 2nd, the 2nd with the 3rd

    Tally() {
        single.fill(std::vector<int64_t>(n_vocab, 0));
        pair.fill(std::vector<int64_t>(n_vocab * n_vocab, 0));
    }
    void add(const std::vector<int32_t> & emitted) {
        for (size_t i = 0; i < 3; ++i) {
            ++single[i][static_cast<size_t>(emitted[i])];
        }
        for (size_t i = 0; i < 2; ++i) {
            ++pair[i][static_cast<size_t>(emitted[i] * n_vocab + emitted[i + 1])];
        }
    }
};

struct Law {
    std::array<std::vector<double>, 3> single;
    std::array<std::vector<double>, 2> pair;
};

/// The exact law of the first three tokens, over all paths.
Law exact_law(const SamplingParams & params) {
    Law law;
    law.single.fill(std::vector<double>(n_vocab, 0.0));
    law.pair.fill(std::vector<double>(n_vocab * n_vocab, 0.0));
    std::vector<int32_t> history = prompt;
    const std::vector<double> first = reference_law(row_after(anchor), params, history);
    for (size_t a = 0; a < n_vocab; ++a) {
        if (first[a] == 0.0) {
            continue;
        }
        law.single[0][a] += first[a];
        history.push_back(static_cast<int32_t>(a));
        const std::vector<double> second = reference_law(row_after(history.back()), params, history);
        for (size_t b = 0; b < n_vocab; ++b) {
            if (second[b] == 0.0) {
                continue;
            }
            law.single[1][b] += first[a] * second[b];
            law.pair[0][a * n_vocab + b] += first[a] * second[b];
            history.push_back(static_cast<int32_t>(b));
            const std::vector<double> third = reference_law(row_after(history.back()), params, history);
            for (size_t c = 0; c < n_vocab; ++c) {
                law.single[2][c] += first[a] * second[b] * third[c];
                law.pair[1][b * n_vocab + c] += first[a] * second[b] * third[c];
            }
            history.pop_back();
        }
        history.pop_back();
    }
    return law;
}

std::vector<double> fit(const Tally & counts, const Law & law) {
    std::vector<double> p_values;
    for (size_t i = 0; i < 3; ++i) {
        p_values.push_back(fit_p_value(counts.single[i], law.single[i]));
    }
    for (size_t i = 0; i < 2; ++i) {
        p_values.push_back(fit_p_value(counts.pair[i], law.pair[i]));
    }
    return p_values;
}

double smallest(const std::vector<double> & values) {
    return *std::min_element(values.begin(), values.end());
}

const StopRule endless = {{}, 1000};

TokenHistory history_for(const Sampler & sampler) {
    TokenHistory history(n_vocab, sampler.history_window());
    for (const int32_t token : prompt) {
        history.push(token);
    }
    return history;
}

/// One draft-verify step with the real acceptance. The rows are those a verify forward of the block would give.
AcceptResult chain_step(const std::vector<int32_t> & proposals, const Sampler & sampler, TokenHistory & history) {
    const int32_t current = history.tokens().back();
    const auto row = [&](int32_t i) {
        return row_after(i == 0 ? current : proposals[static_cast<size_t>(i) - 1]).data();
    };
    return accept_chain(proposals, row, history.size() - 1, sampler, history, endless);
}

/// Two candidates per node, two levels: the likeliest and a poor one.
AcceptResult tree_step(const Sampler & sampler, TokenHistory & history) {
    const std::vector<int32_t> parents = {-1, 0, 0, 1, 1, 2, 2};
    std::vector<int32_t> tokens = {history.tokens().back()};
    for (size_t i = 1; i < parents.size(); ++i) {
        const int32_t parent = tokens[static_cast<size_t>(parents[i])];
        tokens.push_back(i % 2 == 1 ? extreme_token(parent, true) : (parent + 7) % n_vocab);
    }
    const auto row = [&](int32_t node) { return row_after(tokens[static_cast<size_t>(node)]).data(); };
    return accept_tree(parents, tokens, row, history.size() - 1, sampler, history, endless);
}

/// Slots of a drafter that believes the target's own first step everywhere (good), its contrary, or nothing in
/// particular.
std::vector<SlotCandidates> believe(Proposer propose, const TokenHistory & history, uint32_t run) {
    std::vector<SlotCandidates> slots;
    const std::vector<int32_t> chain = propose(history, 3, run);
    for (size_t i = 0; i < chain.size(); ++i) {
        const std::vector<float> & row = row_after(i == 0 ? history.tokens().back() : chain[i - 1]);
        std::vector<int32_t> tokens;
        std::vector<float> values;
        for (int32_t k = 0; k < 4; ++k) {
            tokens.push_back(k == 0 ? chain[i] : (chain[i] + 5 * k) % n_vocab);
            values.push_back(k == 0 ? 4.0f : row[static_cast<size_t>(tokens.back())]);
        }
        slots.push_back(sorted_candidates(tokens.data(), values.data(), 4, 4.5f));
    }
    return slots;
}

/// One step with a tree as the decoder builds it.
AcceptResult built_tree_step(Proposer propose, const Sampler & sampler, TokenHistory & history, uint32_t run) {
    const DraftTree tree = build_draft_tree(history.tokens().back(), believe(propose, history, run), tree_limits(9, 3));
    const auto row = [&](int32_t node) { return row_after(tree.tokens[static_cast<size_t>(node)]).data(); };
    return accept_tree(tree.parents, tree.tokens, row, history.size() - 1, sampler, history, endless);
}

std::vector<int32_t> after_prompt(const TokenHistory & history, size_t n) {
    const auto first = history.tokens().begin() + static_cast<std::ptrdiff_t>(prompt.size());
    return {first, first + static_cast<std::ptrdiff_t>(n)};
}

template <class Step> std::vector<int32_t> generate(const SamplingParams & params, size_t n, Step step) {
    const Sampler sampler(params, n_vocab);
    TokenHistory history = history_for(sampler);
    while (history.size() < static_cast<int64_t>(prompt.size() + n)) {
        step(sampler, history);
    }
    return after_prompt(history, n);
}

template <class Step> Tally count_runs(SamplingParams params, Step step) {
    Tally counts;
    for (uint32_t run = 0; run < n_runs; ++run) {
        params.seed = run;
        counts.add(generate(params, 3, [&](const Sampler & s, TokenHistory & h) { step(s, h, run); }));
    }
    return counts;
}

const Setter plain = [](SamplingParams & p) { p.temperature = 1.0f; };
const Setter processed = [](SamplingParams & p) {
    p.temperature = 0.7f, p.top_k = 12, p.top_p = 0.95f, p.min_p = 0.01f;
    p.repeat_penalty = 1.3f, p.presence_penalty = 0.4f, p.frequency_penalty = 0.2f, p.penalty_last_n = 4;
};

} // namespace

TEST(chain_and_tree_keep_the_law_of_the_target) {
    for (const Setter & set : {plain, processed}) {
        const SamplingParams params = make_params(set);
        const Law law = exact_law(params);
        for (const Proposer propose : {propose_good, propose_bad, propose_random}) {
            const Tally counts = count_runs(params, [&](const Sampler & s, TokenHistory & h, uint32_t run) {
                chain_step(propose(h, 2, run), s, h);
            });
            CHECK(smallest(fit(counts, law)) > 0.001);
        }
        const Tally tree = count_runs(params, [](const Sampler & s, TokenHistory & h, uint32_t) { tree_step(s, h); });
        CHECK(smallest(fit(tree, law)) > 0.001);
        for (const Proposer propose : {propose_good, propose_bad, propose_random}) {
            const Tally built = count_runs(params, [&](const Sampler & s, TokenHistory & h, uint32_t run) {
                built_tree_step(propose, s, h, run);
            });
            CHECK(smallest(fit(built, law)) > 0.001);
        }
    }
}

namespace {

int32_t invert(const std::vector<double> & law, double u) {
    double mass = 0.0;
    int32_t last = 0;
    for (size_t i = 0; i < law.size(); ++i) {
        mass += law[i];
        last = law[i] > 0.0 ? static_cast<int32_t>(i) : last;
        if (mass > u) {
            break;
        }
    }
    return last;
}

std::vector<double> law_after(const Sampler & sampler, const TokenHistory & history) {
    return reference_law(row_after(history.tokens().back()), sampler.params(), history.tokens());
}

double fresh_uniform(uint32_t run, int64_t position, uint64_t purpose) {
    return keyed_uniform(purpose << 32 | run, position);
}

} // namespace

// The three tests below plant errors that other engines have shipped. Each must be seen by the statistic that passes
// above.

TEST(a_redraw_after_a_mismatch_is_noticed) {
    const SamplingParams params = make_params(plain);
    const Tally counts = count_runs(params, [](const Sampler & s, TokenHistory & h, uint32_t run) {
        const int32_t proposal = propose_good(h, 1, run)[0];
        const std::vector<double> law = law_after(s, h);
        const int32_t drawn = invert(law, fresh_uniform(run, h.size(), 1));
        h.push(drawn == proposal ? drawn : invert(law, fresh_uniform(run, h.size(), 2)));
    });
    const std::vector<double> p_values = fit(counts, exact_law(params));
    CHECK(p_values[0] < 1e-9 && p_values[1] < 1e-9 && p_values[2] < 1e-9);
}

TEST(ratio_acceptance_of_an_argmax_draft_is_noticed) {
    const SamplingParams params = make_params(plain);
    const Tally counts = count_runs(params, [](const Sampler & s, TokenHistory & h, uint32_t run) {
        const int32_t proposal = propose_good(h, 1, run)[0];
        const std::vector<double> p = law_after(s, h);
        std::vector<double> q(n_vocab); // the drafter's own belief, flatter than the target's
        double q_total = 0.0;
        for (size_t i = 0; i < q.size(); ++i) {
            q[i] = std::sqrt(p[i]);
            q_total += q[i];
        }
        std::vector<double> residual(n_vocab);
        double residual_total = 0.0;
        for (size_t i = 0; i < q.size(); ++i) {
            q[i] /= q_total;
            residual[i] = std::max(0.0, p[i] - q[i]);
            residual_total += residual[i];
        }
        const auto d = static_cast<size_t>(proposal);
        if (fresh_uniform(run, h.size(), 1) < std::min(1.0, p[d] / q[d])) {
            h.push(proposal);
            return;
        }
        for (double & value : residual) {
            value /= residual_total;
        }
        h.push(invert(residual, fresh_uniform(run, h.size(), 2)));
    });
    const std::vector<double> p_values = fit(counts, exact_law(params));
    CHECK(p_values[0] < 1e-9 && p_values[1] < 1e-9 && p_values[2] < 1e-9);
}

TEST(preferring_the_children_of_a_tree_is_noticed) {
    // Where the draw is no child, it is made once more: what a tree proposes comes out too often.
    const SamplingParams params = make_params(plain);
    const Tally counts = count_runs(params, [](const Sampler & s, TokenHistory & h, uint32_t run) {
        const DraftTree tree = build_draft_tree(h.tokens().back(), believe(propose_good, h, run), tree_limits(9, 3));
        int32_t drawn = invert(law_after(s, h), fresh_uniform(run, h.size(), 1));
        bool is_child = false;
        for (size_t i = 1; i < tree.parents.size(); ++i) {
            is_child = is_child || (tree.parents[i] == 0 && tree.tokens[i] == drawn);
        }
        h.push(is_child ? drawn : invert(law_after(s, h), fresh_uniform(run, h.size(), 2)));
    });
    const std::vector<double> p_values = fit(counts, exact_law(params));
    CHECK(p_values[0] < 1e-9 && p_values[1] < 1e-9 && p_values[2] < 1e-9);
}

TEST(one_number_for_a_whole_block_is_noticed) {
    const SamplingParams params = make_params(plain);
    const Tally counts = count_runs(params, [](const Sampler & s, TokenHistory & h, uint32_t) {
        h.push(s.draw(row_after(h.tokens().back()).data(), anchor_position + 1, h).token);
    });
    const std::vector<double> p_values = fit(counts, exact_law(params));
    CHECK(p_values[0] > 0.001);
    CHECK(p_values[3] < 1e-9 && p_values[4] < 1e-9);
}

TEST(the_same_seed_gives_the_same_text_with_any_draft) {
    constexpr size_t length = 150;
    std::vector<Setter> settings = {plain, processed, [](SamplingParams &) {}};
    for (const auto & [name, set] : toy_settings()) {
        settings.push_back(set);
    }
    long accepted = 0;
    for (const Setter & set : settings) {
        SamplingParams params = make_params(set);
        for (uint64_t seed = 0; seed < 3; ++seed) {
            params.seed = seed;
            const std::vector<int32_t> want = generate(params, length, [](const Sampler & s, TokenHistory & h) {
                h.push(s.draw(row_after(h.tokens().back()).data(), h.size(), h).token);
            });
            for (const int n_proposals : {0, 1, 2, 3, 7, 15}) {
                for (const Proposer propose : {propose_good, propose_bad, propose_random}) {
                    const auto step = [&](const Sampler & s, TokenHistory & h) {
                        accepted += chain_step(propose(h, n_proposals, 1), s, h).n_accepted;
                    };
                    CHECK(generate(params, length, step) == want);
                }
                // A draft that is right up to a slot that moves, and wrong from there on.
                size_t steps = 0;
                const auto oracle = [&](const Sampler & s, TokenHistory & h) {
                    std::vector<int32_t> proposals;
                    const size_t wrong = steps++ % static_cast<size_t>(n_proposals + 1);
                    for (size_t i = 0; i < static_cast<size_t>(n_proposals); ++i) {
                        const size_t at = static_cast<size_t>(h.size()) - prompt.size() + i;
                        const int32_t right = at < length ? want[at] : 0;
                        proposals.push_back(i == wrong ? (right + 1) % n_vocab : right);
                    }
                    const AcceptResult result = chain_step(proposals, s, h);
                    accepted += result.n_accepted;
                    if (h.size() < static_cast<int64_t>(length)) {
                        CHECK_EQ(static_cast<size_t>(result.n_accepted), wrong);
                    }
                };
                CHECK(generate(params, length, oracle) == want);
            }
            const auto tree = [&](const Sampler & s, TokenHistory & h) { accepted += tree_step(s, h).n_accepted; };
            CHECK(generate(params, length, tree) == want);
            for (const Proposer propose : {propose_good, propose_bad, propose_random}) {
                const auto built = [&](const Sampler & s, TokenHistory & h) {
                    accepted += built_tree_step(propose, s, h, 1).n_accepted;
                };
                CHECK(generate(params, length, built) == want);
            }
        }
    }
    CHECK(accepted > 10000);
}
