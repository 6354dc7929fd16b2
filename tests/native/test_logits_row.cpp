#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "decode/logits_row.hpp"
#include "toy_sampler.hpp"

using namespace dflash;
using namespace dflash::testing;

TEST(exponential_is_accurate) {
    double worst = 0.0;
    for (int i = 0; i <= 876000; ++i) {
        const float x = -1e-4f * static_cast<float>(i);
        const double want = std::exp(static_cast<double>(x));
        worst = std::max(worst, std::fabs(static_cast<double>(exp_nonpositive(x)) - want) / want);
    }
    CHECK(worst < 3e-7);
    CHECK_EQ(exp_nonpositive(0.0f), 1.0f);
    for (const float x : {-87.7f, -88.0f, -1000.0f, -3e38f, -infinity}) {
        CHECK_EQ(exp_nonpositive(x), 0.0f);
    }
    std::vector<float> block = random_row(row_block, 3, 30.0f);
    block[5] = -infinity;
    const float peak = *std::max_element(block.begin(), block.end());
    std::vector<float> weights(row_block);
    block_weights(block.data(), peak, 0.8f, weights.data());
    for (size_t i = 0; i < weights.size(); ++i) {
        CHECK_NEAR(weights[i], std::exp(0.8 * (static_cast<double>(block[i]) - peak)), 3e-6);
    }
}

TEST(partial_selection_equals_a_full_sort) {
    std::mt19937 generator(77);
    for (int round = 0; round < 400; ++round) {
        const auto n = static_cast<int32_t>(1 + generator() % 3000);
        const auto k = static_cast<int32_t>(1 + generator() % 400);
        std::vector<float> row = random_row(n, generator(), 3.0f);
        for (float & logit : row) {
            logit = round % 3 == 0 ? std::round(logit) : logit; // many ties
            logit = generator() % 10 == 0 ? -infinity : logit;
        }
        if (round % 7 == 0) {
            std::sort(row.begin(), row.end()); // every later token beats the threshold
        }
        std::vector<Candidate> want;
        for (int32_t token = 0; token < n; ++token) {
            if (row[static_cast<size_t>(token)] > -infinity) {
                want.push_back({token, row[static_cast<size_t>(token)], 0.0f, 0.0f});
            }
        }
        std::sort(want.begin(), want.end(), likelier);
        want.resize(std::min(want.size(), static_cast<size_t>(k)));
        std::vector<Candidate> got;
        got.reserve(top_capacity(k));
        const Candidate * const memory = got.data();
        REQUIRE(collect_top(LogitsRow(row.data(), n), k, got));
        CHECK(got.data() == memory);
        std::sort(got.begin(), got.end(), likelier);
        CHECK(got.size() == want.size() &&
              std::equal(got.begin(), got.end(), want.begin(),
                         [](const auto & a, const auto & b) { return a.token == b.token && a.logit == b.logit; }));
    }
}
