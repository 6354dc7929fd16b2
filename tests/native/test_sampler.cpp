#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "decode/sampler.hpp"
#include "toy_sampler.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

long n_allocations = 0;

} // namespace

// Not inlined: the compiler would take the malloc and free inside for a mismatched pair.
[[gnu::noinline]] void * operator new(std::size_t size, const std::nothrow_t &) noexcept {
    ++n_allocations;
    return std::malloc(size > 0 ? size : 1);
}
[[gnu::noinline]] void * operator new(std::size_t size) {
    if (void * memory = ::operator new(size, std::nothrow)) {
        return memory;
    }
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void * memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void * memory, std::size_t) noexcept {
    std::free(memory);
}

TEST(equal_logits_go_to_the_lowest_token) {
    const SamplingParams greedy;
    for (const int32_t n : {1, 2, 63, 64, 65, 127, 128, 129, 1000}) {
        CHECK_EQ(draw_one(std::vector<float>(static_cast<size_t>(n), -3.0f), greedy), 0);
        for (const int32_t first : {0, 1, 62, 63, 64, 65, 100, n - 1}) {
            if (first >= n) {
                continue;
            }
            std::vector<float> row(static_cast<size_t>(n), -3.0f);
            for (int32_t token = first; token < n; token += 7) {
                row[static_cast<size_t>(token)] = 2.0f;
            }
            row.back() = 2.0f;
            CHECK_EQ(draw_one(row, greedy), first);
        }
    }
    CHECK_EQ(draw_one({-1.0f, -0.0f, 0.0f}, greedy), 1);

    // Ties at the edge of a truncated set keep the lowest tokens as well.
    const std::vector<float> flat(200, 0.0f);
    for (const Setter & set :
         std::vector<Setter>{[](SamplingParams & p) { p.top_k = 5; }, [](SamplingParams & p) { p.top_p = 0.0249f; },
                             [](SamplingParams & p) { p.typical_p = 0.0249f; }}) {
        SamplingParams params = make_params(set);
        params.temperature = 1.0f;
        std::vector<int64_t> counts(5, 0);
        for (int64_t position = 0; position < 500; ++position) {
            const int32_t token = draw_one(flat, params, position);
            REQUIRE(token < 5);
            ++counts[static_cast<size_t>(token)];
        }
        CHECK(*std::min_element(counts.begin(), counts.end()) > 50);
    }
}

TEST(mass_that_equals_the_limit_ends_top_p_and_not_typical_p) {
    const std::vector<float> flat(4, 0.0f);
    const auto kept = [&](const Setter & set) {
        SamplingParams params = make_params(set);
        params.temperature = 1.0f;
        std::vector<bool> seen(flat.size(), false);
        for (int64_t position = 0; position < 200; ++position) {
            seen[static_cast<size_t>(draw_one(flat, params, position))] = true;
        }
        return seen;
    };
    CHECK(kept([](SamplingParams & p) { p.top_p = 0.5f; }) == (std::vector<bool>{true, true, false, false}));
    CHECK(kept([](SamplingParams & p) { p.typical_p = 0.5f; }) == (std::vector<bool>{true, true, true, false}));
}

TEST(zero_top_p_and_typical_p_keep_one_token) {
    const std::vector<float> row = random_row(100, 21);
    const auto peak = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    const SamplingParams params = make_params([](SamplingParams & p) { p.temperature = 1.0f, p.top_p = 0.0f; });
    const SamplingParams typical = make_params([](SamplingParams & p) { p.temperature = 1.0f, p.typical_p = 0.0f; });
    const int32_t kept = draw_one(row, typical, 0);
    for (int64_t position = 0; position < 50; ++position) {
        CHECK_EQ(draw_one(row, params, position), peak);
        CHECK_EQ(draw_one(row, typical, position), kept);
    }
}

TEST(greedy_applies_bias_and_penalties_only) {
    std::vector<float> row(50, 0.0f);
    row[10] = 5.0f, row[20] = 4.0f, row[30] = 3.0f;
    const auto token = [&](const Setter & set, const std::vector<int32_t> & tokens) {
        const Sampler sampler(make_params(set), 50);
        return sampler.draw(row.data(), 0, make_history(sampler, tokens)).token;
    };
    CHECK_EQ(token([](SamplingParams &) {}, {}), 10);
    CHECK_EQ(token([](SamplingParams & p) { p.top_k = 4, p.typical_p = 0.1f, p.top_p = 0.5f, p.min_p = 0.5f; }, {}),
             10);
    CHECK_EQ(token([](SamplingParams & p) { p.logit_bias = {{30, 2.5f}}; }, {}), 30);
    CHECK_EQ(token([](SamplingParams & p) { p.ignore_eos = true, p.eos_ids = {10}; }, {}), 20);
    CHECK_EQ(token([](SamplingParams & p) { p.eos_ids = {10}; }, {}), 10);
    CHECK_EQ(token([](SamplingParams & p) { p.logit_bias = {{10, 50.0f}}, p.ignore_eos = true, p.eos_ids = {10}; }, {}),
             20);
    CHECK_EQ(token([](SamplingParams & p) { p.repeat_penalty = 2.0f; }, {10}), 20);
    CHECK_EQ(token([](SamplingParams & p) { p.presence_penalty = 1.5f; }, {10, 10}), 20);
    CHECK_EQ(token([](SamplingParams & p) { p.frequency_penalty = 0.8f; }, {10}), 10);
    CHECK_EQ(token([](SamplingParams & p) { p.frequency_penalty = 0.8f; }, {10, 10}), 20);
    CHECK_EQ(token([](SamplingParams & p) { p.presence_penalty = 9.0f, p.penalty_last_n = 2; }, {10, 20, 30}), 10);
    CHECK_EQ(token([](SamplingParams & p) { p.presence_penalty = 9.0f, p.penalty_last_n = -1; }, {10, 20, 30}), 0);
    CHECK_EQ(token([](SamplingParams & p) { p.presence_penalty = 9.0f, p.penalty_last_n = 0; }, {10}), 10);
    for (float & logit : row) {
        logit -= 10.0f; // a negative logit is multiplied: a penalty never makes a token likelier
    }
    CHECK_EQ(token([](SamplingParams & p) { p.repeat_penalty = 2.0f; }, {10}), 20);
}

/// A mask is the same as a bias of -infinity on what it leaves out, with every setting.
TEST(a_mask_forbids_what_it_leaves_out) {
    constexpr int32_t n_vocab = 77;
    const std::vector<float> row = random_row(n_vocab, 5);
    std::vector<uint32_t> words(3, 0);
    std::vector<std::pair<int32_t, float>> forbidden;
    for (int32_t token = 0; token < n_vocab; ++token) {
        if (token % 3 == 1) {
            words[static_cast<size_t>(token / 32)] |= 1u << (token % 32);
        } else {
            forbidden.emplace_back(token, -infinity);
        }
    }
    for (const auto & [name, set] : toy_settings()) {
        Sampler masked(make_params(set), n_vocab);
        masked.set_allowed(words.data());
        SamplingParams params = make_params(set);
        params.logit_bias.insert(params.logit_bias.end(), forbidden.begin(), forbidden.end());
        const Sampler biased(params, n_vocab);
        const Sampler plain(make_params(set), n_vocab);
        int32_t n_other = 0;
        for (int64_t position = 0; position < 64; ++position) {
            const int32_t token = masked.draw(row.data(), position, make_history(masked, toy_history)).token;
            CHECK_EQ(token % 3, 1);
            CHECK_EQ(token, biased.draw(row.data(), position, make_history(biased, toy_history)).token);
            n_other += token != plain.draw(row.data(), position, make_history(plain, toy_history)).token;
        }
        CHECK(n_other > 0);
        masked.set_allowed(nullptr);
        CHECK_EQ(masked.draw(row.data(), 3, make_history(masked, toy_history)).token,
                 plain.draw(row.data(), 3, make_history(plain, toy_history)).token);
    }
}

TEST(a_mask_needs_a_token_and_processing) {
    const std::vector<float> row = random_row(40, 6);
    const std::vector<uint32_t> none(2, 0);
    Sampler greedy(SamplingParams{}, 40);
    CHECK(greedy.is_greedy_without_processing());
    greedy.set_allowed(none.data());
    CHECK(!greedy.is_greedy_without_processing());
    CHECK_THROWS(Status::invalid, greedy.draw(row.data(), 0, make_history(greedy, {})));
    greedy.set_allowed(nullptr);
    CHECK(greedy.is_greedy_without_processing());
}

TEST(device_argmax_suffices_only_without_processing) {
    const auto plain = [](const Setter & set) { return Sampler(make_params(set), 50).is_greedy_without_processing(); };
    CHECK(plain([](SamplingParams &) {}));
    CHECK(plain(
        [](SamplingParams & p) { p.top_k = 3, p.top_p = 0.5f, p.min_p = 0.1f, p.typical_p = 0.5f, p.eos_ids = {1}; }));
    CHECK(plain([](SamplingParams & p) { p.penalty_last_n = 0, p.presence_penalty = 1.0f; }));
    CHECK(plain([](SamplingParams & p) { p.ignore_eos = true; })); // a model without an end token
    CHECK(!plain([](SamplingParams & p) { p.temperature = 0.1f; }));
    CHECK(!plain([](SamplingParams & p) { p.presence_penalty = 1.0f; }));
    CHECK(!plain([](SamplingParams & p) { p.frequency_penalty = 1.0f; }));
    CHECK(!plain([](SamplingParams & p) { p.repeat_penalty = 1.1f; }));
    CHECK(!plain([](SamplingParams & p) { p.logit_bias = {{1, 1.0f}}; }));
    CHECK(!plain([](SamplingParams & p) { p.ignore_eos = true, p.eos_ids = {1}; }));
    CHECK(!plain([](SamplingParams & p) { p.logprobs = true; }));
}

TEST(log_probabilities_are_those_of_the_plain_row) {
    const std::vector<float> row = random_row(500, 31);
    double total = 0.0;
    for (const float logit : row) {
        total += std::exp(static_cast<double>(logit));
    }
    std::vector<int32_t> order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int32_t a, int32_t b) { return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)]; });
    const auto logprob = [&](int32_t token) { return row[static_cast<size_t>(token)] - std::log(total); };

    SamplingParams params = make_params([](SamplingParams & p) {
        p.temperature = 0.5f, p.top_k = 3, p.logprobs = true, p.n_logprobs = 20, p.logit_bias = {{7, 100.0f}};
    });
    Draw draw;
    {
        const Sampler sampler(params, 500);
        sampler.draw(row.data(), 1, make_history(sampler, {}), draw);
    }
    CHECK_EQ(draw.token, 7);
    CHECK_NEAR(draw.logprob, logprob(7), 1e-5);
    REQUIRE(draw.top.size() == 20);
    for (size_t i = 0; i < 20; ++i) {
        CHECK_EQ(draw.top[i].token, order[i]);
        CHECK_NEAR(draw.top[i].logprob, logprob(order[i]), 1e-5);
    }

    params = make_params([](SamplingParams & p) { p.logprobs = true; });
    const Sampler greedy(params, 500);
    greedy.draw(row.data(), 1, make_history(greedy, {}), draw);
    CHECK_EQ(draw.token, order[0]);
    CHECK_NEAR(draw.logprob, logprob(order[0]), 1e-5);
    CHECK(draw.top.empty());

    const Sampler silent(SamplingParams{}, 500);
    silent.draw(row.data(), 1, make_history(silent, {}), draw);
    CHECK(std::isnan(draw.logprob));

    params.n_logprobs = 20;
    const Sampler tiny(params, 3);
    CHECK_EQ(tiny.draw(row.data(), 0, make_history(tiny, {})).top.size(), size_t{3});
}

TEST(unusable_rows_are_errors_and_never_tokens) {
    constexpr int32_t n = 200; // three whole blocks and a tail
    std::vector<Setter> settings = {[](SamplingParams & p) { p.logprobs = true; }};
    for (const auto & [name, set] : toy_settings()) {
        settings.push_back(set);
    }
    settings.push_back([](SamplingParams &) {});
    for (const Setter & set : settings) {
        const Sampler sampler(make_params(set), n);
        const TokenHistory history = make_history(sampler, toy_history);
        const auto draw = [&](const std::vector<float> & row) { return sampler.draw(row.data(), 41, history); };
        for (const int32_t at : {0, 3, 5, 30, 63, 64, 191, 192, 199}) {
            std::vector<float> row = random_row(n, 6);
            row[static_cast<size_t>(at)] = not_a_number;
            const std::string where = " at token " + std::to_string(at);
            CHECK_THROWS_WITH(Status::internal, ("logits for position 41 hold nan" + where).c_str(), draw(row));
            row[static_cast<size_t>(at)] = -not_a_number;
            CHECK_THROWS_WITH(Status::internal, where.c_str(), draw(row));
            row[static_cast<size_t>(at)] = infinity;
            CHECK_THROWS_WITH(Status::internal, ("hold inf" + where).c_str(), draw(row));
        }
        CHECK_THROWS_WITH(Status::internal, "position 41 hold nan at token 0",
                          draw(std::vector<float>(n, not_a_number)));
        CHECK_THROWS_WITH(Status::internal, "position 41 hold no finite value", draw(std::vector<float>(n, -infinity)));
        std::vector<float> one(n, -infinity); // what is left is drawn
        one[77] = -5.0f;
        CHECK_EQ(draw(one).token, 77);
    }
}

TEST(bias_that_leaves_no_token_is_refused) {
    SamplingParams params;
    params.logit_bias = {{0, -infinity}, {1, -infinity}};
    params.ignore_eos = true;
    params.eos_ids = {2};
    const std::vector<float> row = {1.0f, 2.0f, 3.0f};
    for (const float temperature : {0.0f, 1.0f}) {
        for (const int32_t top_k : {0, 2}) {
            params.temperature = temperature;
            params.top_k = top_k;
            CHECK_THROWS_WITH(Status::invalid, "forbid every token at position 9", draw_one(row, params, 9));
        }
    }
    params = SamplingParams{};
    params.logit_bias = {{1, 3e38f}, {1, 3e38f}};
    CHECK_THROWS_WITH(Status::invalid, "turn logit 2 of token 1 at position 9 into inf", draw_one(row, params, 9));
    params = SamplingParams{};
    params.repeat_penalty = 1e-38f;
    const Sampler sampler(params, 3);
    const std::vector<float> large = {1.0f, 2e3f, 3.0f};
    CHECK_THROWS_WITH(Status::invalid, "of token 1", sampler.draw(large.data(), 9, make_history(sampler, {1})));
}

TEST(draws_check_position_and_history) {
    const std::vector<float> row(40, 0.0f);
    const Sampler plain(SamplingParams{}, 40);
    CHECK_THROWS_WITH(Status::invalid, "position -1", plain.draw(row.data(), -1, TokenHistory(40, 0)));
    CHECK_THROWS_WITH(Status::invalid, "vocabulary of 39, want 40", plain.draw(row.data(), 0, TokenHistory(39, 0)));
    CHECK_EQ(plain.draw(row.data(), 0, TokenHistory(40, 7)).token, 0);
    const Sampler penal(make_params([](SamplingParams & p) { p.presence_penalty = 1.0f, p.penalty_last_n = 8; }), 40);
    CHECK_EQ(penal.history_window(), 8);
    CHECK_EQ(plain.history_window(), 0);
    CHECK_THROWS_WITH(Status::invalid, "window of 7 tokens, want penalty_last_n = 8",
                      penal.draw(row.data(), 0, TokenHistory(40, 7)));
}

TEST(parameters_are_validated) {
    const auto refused = [](const char * part, const Setter & set) {
        CHECK_THROWS_WITH(Status::invalid, part, Sampler(make_params(set), 100));
    };
    for (const float bad : {not_a_number, infinity, -infinity, -0.5f}) {
        refused("temperature is ", [&](SamplingParams & p) { p.temperature = bad; });
        refused("top_p is ", [&](SamplingParams & p) { p.top_p = bad; });
        refused("min_p is ", [&](SamplingParams & p) { p.min_p = bad; });
        refused("typical_p is ", [&](SamplingParams & p) { p.typical_p = bad; });
        refused("repeat_penalty is ", [&](SamplingParams & p) { p.repeat_penalty = bad; });
    }
    refused("temperature is -0.5, want finite and >= 0", [](SamplingParams & p) { p.temperature = -0.5f; });
    refused("top_p is 1.5, want 0 to 1", [](SamplingParams & p) { p.top_p = 1.5f; });
    refused("min_p is 1.5", [](SamplingParams & p) { p.min_p = 1.5f; });
    refused("typical_p is 1.5", [](SamplingParams & p) { p.typical_p = 1.5f; });
    refused("repeat_penalty is 0", [](SamplingParams & p) { p.repeat_penalty = 0.0f; });
    for (const float bad : {not_a_number, infinity, -infinity}) {
        refused("presence_penalty is ", [&](SamplingParams & p) { p.presence_penalty = bad; });
        refused("frequency_penalty is ", [&](SamplingParams & p) { p.frequency_penalty = bad; });
    }
    refused("top_k is -1, want >= 0", [](SamplingParams & p) { p.top_k = -1; });
    refused("penalty_last_n is -2", [](SamplingParams & p) { p.penalty_last_n = -2; });
    refused("logit_bias names token 100, want 0 <= token < 100",
            [](SamplingParams & p) { p.logit_bias = {{100, 1.0f}}; });
    refused("logit_bias names token -1", [](SamplingParams & p) { p.logit_bias = {{-1, 1.0f}}; });
    refused("logit_bias of token 3 is nan", [](SamplingParams & p) { p.logit_bias = {{3, not_a_number}}; });
    refused("logit_bias of token 3 is inf", [](SamplingParams & p) { p.logit_bias = {{3, infinity}}; });
    refused("eos_ids names token 100", [](SamplingParams & p) { p.eos_ids = {5, 100}; });
    refused("n_logprobs is 21, want 0 to 20", [](SamplingParams & p) { p.logprobs = true, p.n_logprobs = 21; });
    refused("n_logprobs is -1", [](SamplingParams & p) { p.logprobs = true, p.n_logprobs = -1; });
    refused("n_logprobs is 5, want 0 while logprobs is off", [](SamplingParams & p) { p.n_logprobs = 5; });
    CHECK_THROWS_WITH(Status::invalid, "n_vocab is 0", Sampler(SamplingParams{}, 0));
}

TEST(a_steady_state_draw_does_not_allocate) {
    constexpr int32_t n = 5000;
    std::vector<Setter> settings = {[](SamplingParams &) {}};
    for (const auto & [name, set] : toy_settings()) {
        settings.push_back(set);
    }
    settings.push_back([](SamplingParams & p) { p.temperature = 1.0f, p.logprobs = true, p.n_logprobs = 20; });
    for (const Setter & set : settings) {
        const Sampler sampler(make_params(set), n);
        const TokenHistory history = make_history(sampler, toy_history);
        const std::vector<float> row = random_row(n, 15, 1.0f);
        Draw draw;
        sampler.draw(row.data(), 0, history, draw);
        const long before = n_allocations;
        for (int64_t position = 1; position < 50; ++position) {
            sampler.draw(row.data(), position, history, draw);
        }
        CHECK_EQ(n_allocations - before, 0L);
    }
    const long before = n_allocations;
    std::vector<int> counted(10);
    CHECK(n_allocations > before && counted.size() == 10);
}
