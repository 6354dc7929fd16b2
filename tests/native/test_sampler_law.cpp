#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "chi_square.hpp"
#include "decode/random.hpp"
#include "decode/sampler.hpp"
#include "reference_law.hpp"
#include "toy_sampler.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

constexpr int toy_vocab = 32;
constexpr int toy_draws = 120000;

std::vector<int64_t> count_draws(const std::vector<float> & row, const SamplingParams & params) {
    const Sampler sampler(params, static_cast<int32_t>(row.size()));
    const TokenHistory history = make_history(sampler, toy_history);
    std::vector<int64_t> counts(row.size(), 0);
    Draw draw;
    for (int64_t position = 0; position < toy_draws; ++position) {
        sampler.draw(row.data(), position, history, draw);
        ++counts[static_cast<size_t>(draw.token)];
    }
    return counts;
}

} // namespace

TEST(draws_follow_the_reference_law) {
    const std::vector<float> row = random_row(toy_vocab, 11, 1.5f);
    for (const auto & [name, set] : toy_settings()) {
        const SamplingParams params = make_params(set);
        const double p = fit_p_value(count_draws(row, params), reference_law(row, params, toy_history));
        if (!CHECK(p > 0.001)) {
            std::printf("  %s: p = %g\n", name, p);
        }
    }
}

TEST(the_fit_test_rejects_a_missing_stage) {
    const std::vector<float> row = random_row(toy_vocab, 11, 1.5f);
    const SamplingParams plain = make_params([](SamplingParams & p) { p.temperature = 0.7f; });
    for (const auto & [name, set] : toy_settings()) {
        const SamplingParams params = make_params(set);
        if (std::string(name) == "temperature 0.7") {
            continue;
        }
        const double p = fit_p_value(count_draws(row, plain), reference_law(row, params, toy_history));
        if (!CHECK(p < 1e-9)) {
            std::printf("  %s: p = %g\n", name, p);
        }
    }
    SamplingParams cooler = plain;
    cooler.temperature = 0.72f;
    CHECK(fit_p_value(count_draws(row, cooler), reference_law(row, plain, toy_history)) < 1e-9);
}

TEST(a_seed_series_follows_the_law_too) {
    const std::vector<float> row = random_row(toy_vocab, 12, 1.5f);
    SamplingParams params = make_params([](SamplingParams & p) { p.temperature = 1.0f; });
    std::vector<int64_t> counts(toy_vocab, 0);
    for (int seed = 0; seed < toy_draws; ++seed) {
        params.seed = static_cast<uint64_t>(seed);
        ++counts[static_cast<size_t>(draw_one(row, params, 40))];
    }
    CHECK(fit_p_value(counts, reference_law(row, params, {})) > 0.001);
}

namespace {

/// The token that wins both exponential races, of blocks and of the winning block's tokens, or -1 when a second one
/// arrives so close behind that rounding decides.
int32_t race(const std::vector<double> & law, uint64_t seed, int64_t position) {
    constexpr double rounding = 2e-6;
    const auto first = [&](const std::vector<double> & weights, size_t from, uint32_t stream) -> int64_t {
        double best = infinity;
        double second = infinity;
        size_t winner = 0;
        for (size_t i = 0; i < weights.size(); ++i) {
            const double u = keyed_uniform(seed, position, static_cast<uint32_t>(from + i), stream);
            const double time = weights[i] > 0.0 ? -std::log(1.0 - u) / weights[i] : infinity;
            if (time < best) {
                winner = from + i;
            }
            second = std::min(second, std::max(best, time));
            best = std::min(best, time);
        }
        return second - best > rounding * best ? static_cast<int64_t>(winner) : -1;
    };
    constexpr size_t length = 64;
    std::vector<double> sums((law.size() + length - 1) / length, 0.0);
    for (size_t i = 0; i < law.size(); ++i) {
        sums[i / length] += law[i];
    }
    const int64_t block = first(sums, 0, 1);
    if (block < 0) {
        return -1;
    }
    const size_t from = static_cast<size_t>(block) * length;
    const std::vector<double> tokens(law.begin() + static_cast<std::ptrdiff_t>(from),
                                     law.begin() + static_cast<std::ptrdiff_t>(std::min(law.size(), from + length)));
    return static_cast<int32_t>(first(tokens, from, 2));
}

SamplingParams random_params(std::mt19937 & generator, int32_t n) {
    const auto unit = [&] { return std::uniform_real_distribution<float>(0.0f, 1.0f)(generator); };
    const auto id = [&] { return static_cast<int32_t>(generator() % static_cast<uint32_t>(n)); };
    SamplingParams params;
    params.seed = generator();
    params.temperature = 0.2f + 1.5f * unit();
    params.top_k = unit() < 0.5f ? 0 : 1 + id();
    params.top_p = unit() < 0.5f ? 1.0f : unit();
    params.min_p = unit() < 0.5f ? 0.0f : 0.3f * unit();
    params.typical_p = unit() < 0.6f ? 1.0f : unit();
    params.repeat_penalty = unit() < 0.6f ? 1.0f : 0.8f + unit();
    params.presence_penalty = unit() < 0.6f ? 0.0f : 2.0f * unit() - 1.0f;
    params.frequency_penalty = unit() < 0.6f ? 0.0f : unit() - 0.3f;
    params.penalty_last_n = static_cast<int32_t>(generator() % 40) - 1;
    for (uint32_t i = generator() % 4; i > 0; --i) {
        params.logit_bias.push_back({id(), unit() < 0.3f ? -infinity : 4.0f * unit() - 2.0f});
    }
    params.ignore_eos = unit() < 0.3f;
    params.eos_ids = {id()};
    return params;
}

} // namespace

TEST(every_draw_is_the_race_of_the_reference_law) {
    std::mt19937 generator(2024);
    int compared = 0;
    for (int round = 0; round < 3000; ++round) {
        const auto n = static_cast<int32_t>(2 + generator() % 400);
        const std::vector<float> row = random_row(n, generator(), 0.5f + 0.01f * static_cast<float>(generator() % 400));
        const SamplingParams params = random_params(generator, n);
        std::vector<int32_t> tokens(generator() % 60);
        for (int32_t & token : tokens) {
            token = static_cast<int32_t>(generator() % static_cast<uint32_t>(n));
        }
        const Sampler sampler(params, n);
        const int64_t position = static_cast<int64_t>(generator());
        const std::vector<double> law = reference_law(row, params, tokens);
        if (std::none_of(law.begin(), law.end(), [](double p) { return p > 0.0; })) {
            CHECK_THROWS(Status::invalid, sampler.draw(row.data(), position, make_history(sampler, tokens)));
            continue;
        }
        const int32_t want = race(law, params.seed, position);
        if (want >= 0) {
            CHECK_EQ(sampler.draw(row.data(), position, make_history(sampler, tokens)).token, want);
            ++compared;
        }
    }
    CHECK(compared > 2900);
}

TEST(a_full_size_vocabulary_agrees_with_the_reference) {
    constexpr int32_t n = 248320;
    std::vector<float> row = random_row(n, 5, 2.5f);
    for (size_t i = 0; i < 200; ++i) {
        row[i * 1237] += 9.0f;
    }
    const std::vector<Setter> settings = {
        [](SamplingParams & p) { p.temperature = 1.0f; },
        [](SamplingParams & p) { p.temperature = 1.0f, p.top_k = 20, p.top_p = 0.95f; },
        [](SamplingParams & p) { p.temperature = 0.6f, p.top_p = 0.95f; },
        [](SamplingParams & p) { p.temperature = 0.8f, p.top_p = 0.3f, p.min_p = 0.1f; },
        [](SamplingParams & p) { p.temperature = 0.8f, p.min_p = 0.05f; },
        [](SamplingParams & p) { p.temperature = 1.0f, p.typical_p = 0.4f; },
        [](SamplingParams & p) { p.temperature = 1.0f, p.top_k = 5000, p.presence_penalty = 2.0f; },
    };
    for (const Setter & set : settings) {
        SamplingParams params = make_params(set);
        const std::vector<int32_t> tokens = {0, 1237, 2474, 5};
        const std::vector<double> law = reference_law(row, params, tokens);
        const Sampler sampler(params, n);
        const TokenHistory history = make_history(sampler, tokens);
        int compared = 0;
        for (int64_t position = 0; position < 40; ++position) {
            const int32_t want = race(law, params.seed, position);
            if (want >= 0) {
                CHECK_EQ(sampler.draw(row.data(), position, history).token, want);
                ++compared;
            }
        }
        CHECK(compared > 30);
    }
}

TEST(rounding_seldom_changes_a_draw) {
    // Ten times what float32 logits of a forward of one row and of sixteen differ by.
    constexpr int32_t n = 4096;
    const std::vector<float> row = random_row(n, 21, 2.5f);
    std::mt19937 generator(22);
    std::vector<float> other = row;
    for (float & logit : other) {
        logit += std::uniform_real_distribution<float>(-4e-5f, 4e-5f)(generator);
    }
    const SamplingParams params = make_params([](SamplingParams & p) { p.temperature = 1.0f; });
    const Sampler sampler(params, n);
    const TokenHistory history = make_history(sampler, {});
    int64_t changed = 0;
    for (int64_t position = 0; position < 5000; ++position) {
        changed +=
            sampler.draw(row.data(), position, history).token != sampler.draw(other.data(), position, history).token;
    }
    CHECK(changed <= 3); // 0.1 are expected; inverting the cumulative sum changes about 12
}

TEST(the_seed_and_the_position_decide) {
    const std::vector<float> row = random_row(1000, 4, 1.0f);
    SamplingParams params = make_params([](SamplingParams & p) { p.temperature = 1.0f, p.seed = 99; });
    const Sampler sampler(params, 1000);
    const TokenHistory history = make_history(sampler, {});
    std::vector<int32_t> forwards;
    for (int64_t position = 0; position < 100; ++position) {
        forwards.push_back(sampler.draw(row.data(), position, history).token);
    }
    int other_seed = 0;
    params.seed = 100;
    for (int64_t position = 99; position >= 0; --position) {
        CHECK_EQ(sampler.draw(row.data(), position, history).token, forwards[static_cast<size_t>(position)]);
        other_seed += draw_one(row, params, position) == forwards[static_cast<size_t>(position)];
    }
    CHECK(other_seed < 10);
    std::sort(forwards.begin(), forwards.end());
    CHECK(std::unique(forwards.begin(), forwards.end()) - forwards.begin() > 60);
}

TEST(extreme_temperatures_keep_their_meaning) {
    std::vector<float> row = random_row(300, 8);
    row[170] = 30.0f;
    for (const float cold : {std::numeric_limits<float>::denorm_min(), 1e-40f, 1e-6f}) {
        const SamplingParams params = make_params([&](SamplingParams & p) { p.temperature = cold; });
        for (int64_t position = 0; position < 50; ++position) {
            CHECK_EQ(draw_one(row, params, position), 170);
        }
    }
    const SamplingParams hot = make_params([](SamplingParams & p) { p.temperature = 3e38f; });
    std::vector<int64_t> counts(300, 0);
    for (int64_t position = 0; position < 60000; ++position) {
        ++counts[static_cast<size_t>(draw_one(row, hot, position))];
    }
    CHECK(fit_p_value(counts, std::vector<double>(300, 1.0 / 300)) > 0.001);

    std::vector<float> huge(70, -3e38f);
    huge[66] = 3e38f;
    CHECK_EQ(draw_one(huge, make_params([](SamplingParams & p) { p.temperature = 1.0f; })), 66);
    CHECK_EQ(draw_one({4.0f}, hot), 0);
}
