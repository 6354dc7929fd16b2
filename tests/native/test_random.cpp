#include "check.hpp"

#include <cstdint>
#include <limits>
#include <vector>

#include "chi_square.hpp"
#include "decode/random.hpp"

using dflash::keyed_uniform;
using dflash::philox4x32_10;
using dflash::PhiloxCounter;
using dflash::PhiloxKey;
using dflash::testing::chi_square_tail;
using dflash::testing::fit_p_value;

TEST(philox_gives_the_published_answers) {
    // The known answers for philox4x32-10 that the authors publish with Random123.
    CHECK((philox4x32_10({0, 0, 0, 0}, {0, 0}) == PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    const uint32_t ones = 0xffffffff;
    CHECK((philox4x32_10({ones, ones, ones, ones}, {ones, ones}) ==
           PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    CHECK((philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
           PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(philox_is_the_engine_of_the_standard_library) {
    // [rand.predef]: the 10000th number of a default-constructed std::philox4x32, whose seed is 20111115.
    CHECK_EQ(philox4x32_10({9999 / 4, 0, 0, 0}, {20111115, 0})[9999 % 4], 1955073260U);
}

TEST(uniform_is_made_of_the_words_it_documents) {
    // Words 0 and 1 of the first published answer, 0x6627e8d5 and 0xe169c58d.
    CHECK_EQ(keyed_uniform(0, 0), static_cast<double>(0xe169c58d6627e8d5ULL >> 11) / 9007199254740992.0);
    // Seed and position fill key and counter with their low words first; see the third published answer's key.
    const uint64_t seed = 0x299f31d0a4093822ULL;
    const int64_t position = 0x05a308d3243f6a88LL;
    const PhiloxCounter words = philox4x32_10({0x243f6a88, 0x05a308d3, 0, 0}, {0xa4093822, 0x299f31d0});
    const uint64_t bits = static_cast<uint64_t>(words[1]) << 32 | words[0];
    CHECK_EQ(keyed_uniform(seed, position), static_cast<double>(bits >> 11) / 9007199254740992.0);
}

TEST(uniform_stays_below_one) {
    double low = 1.0;
    double high = 0.0;
    for (int64_t position = 0; position < 1000000; ++position) {
        const double u = keyed_uniform(7, position);
        low = u < low ? u : low;
        high = u > high ? u : high;
    }
    CHECK(low >= 0.0 && low < 1e-5);
    CHECK(high < 1.0 && high > 1.0 - 1e-5);
    for (const int64_t position :
         {int64_t{0}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
        const double u = keyed_uniform(std::numeric_limits<uint64_t>::max(), position);
        CHECK(u >= 0.0 && u < 1.0);
    }
}

namespace {

constexpr int bins = 32;
constexpr int n_draws = 200000;

template <class First, class Second> double p_of_pairs(First first, Second second) {
    std::vector<int64_t> counts(bins * bins, 0);
    for (int i = 0; i < n_draws; ++i) {
        const int a = static_cast<int>(first(i) * bins);
        const int b = static_cast<int>(second(i) * bins);
        ++counts[static_cast<size_t>(a * bins + b)];
    }
    return fit_p_value(counts, std::vector<double>(bins * bins, 1.0 / (bins * bins)));
}

} // namespace

TEST(neighbours_are_independent) {
    const auto at = [](uint64_t seed, int64_t position) { return keyed_uniform(seed, position); };
    CHECK(p_of_pairs([&](int i) { return at(1, i); }, [&](int i) { return at(1, i + 1); }) > 0.001);
    CHECK(p_of_pairs([&](int i) { return at(static_cast<uint64_t>(i), 5); },
                     [&](int i) { return at(static_cast<uint64_t>(i), 6); }) > 0.001);
    CHECK(p_of_pairs([&](int i) { return at(static_cast<uint64_t>(i), 5); },
                     [&](int i) { return at(static_cast<uint64_t>(i) + 1, 5); }) > 0.001);
    // Seeds and positions that differ in their high words only.
    CHECK(p_of_pairs([&](int i) { return at(3, i); }, [&](int i) { return at(3, i + (int64_t{1} << 32)); }) > 0.001);
    CHECK(p_of_pairs([&](int i) { return at(3, i); }, [&](int i) { return at(3 + (uint64_t{1} << 32), i); }) > 0.001);
    // The test itself sees a dependence.
    CHECK(p_of_pairs([&](int i) { return at(1, i); }, [&](int i) { return at(1, i); }) < 1e-9);
}

TEST(chi_square_tail_matches_tables) {
    CHECK_NEAR(chi_square_tail(3.841459, 1), 0.05, 1e-6);
    CHECK_NEAR(chi_square_tail(29.588298, 10), 0.001, 1e-8);
    CHECK_NEAR(chi_square_tail(44.985343, 31), 0.05, 1e-7);
    CHECK_NEAR(chi_square_tail(2.155856, 10), 0.995, 1e-7);
    CHECK_NEAR(chi_square_tail(1142.848, 1023), 0.0051253048, 1e-9);
    CHECK(fit_p_value({100, 100, 1}, {0.5, 0.5, 0.0}) == 0.0);
    CHECK_NEAR(fit_p_value({60, 40}, {0.5, 0.5}), 0.0455003, 1e-6);
}
