#include "check.hpp"

#include <limits>

#include "base/checked.hpp"

using namespace dflash;

namespace {
constexpr uint64_t most = std::numeric_limits<uint64_t>::max();
}

TEST(sums_stop_at_64_bits) {
    CHECK_EQ(checked_add(0, 0, "n"), 0u);
    CHECK_EQ(checked_add(most, 0, "n"), most);
    CHECK_EQ(checked_add(0, most, "n"), most);
    CHECK_EQ(checked_add(most - 7, 7, "n"), most);
    CHECK_THROWS_WITH(Status::format, "rows: 18446744073709551615 + 1 overflows", checked_add(most, 1, "rows"));
    CHECK_THROWS(Status::format, checked_add(1, most, "n"));
    CHECK_THROWS(Status::format, checked_add(1ull << 63, 1ull << 63, "n"));
}

TEST(products_stop_at_64_bits) {
    CHECK_EQ(checked_mul(0, most, "n"), 0u);
    CHECK_EQ(checked_mul(most, 0, "n"), 0u);
    CHECK_EQ(checked_mul(1, most, "n"), most);
    CHECK_EQ(checked_mul(most / 5, 5, "n"), most); // 2^64 - 1 is a multiple of 5
    CHECK_EQ(checked_mul(1ull << 32, (1ull << 32) - 1, "n"), most - 0xffffffffu);
    CHECK_THROWS_WITH(Status::format, "bytes: 4294967296 * 4294967296 overflows",
                      checked_mul(1ull << 32, 1ull << 32, "bytes"));
    CHECK_THROWS(Status::format, checked_mul(most, 2, "n"));
    CHECK_THROWS(Status::format, checked_mul(2, most, "n"));
    CHECK_THROWS(Status::format, checked_mul(most / 5 + 1, 5, "n"));
}

TEST(rounding_goes_up_to_the_next_multiple) {
    for (int64_t step = 1; step <= 9; ++step) {
        for (int64_t n = 0; n <= 40; ++n) {
            const int64_t rounded = round_up(n, step);
            CHECK(rounded % step == 0 && rounded >= n && rounded < n + step);
        }
    }
    CHECK_EQ(round_up(257, 256), 512);
}

TEST(ranges_are_half_open) {
    const PositionRange range{10, 20};
    CHECK_EQ(range.size(), 10);
    CHECK(range.contains(10, 20));
    CHECK(range.contains(15, 15));
    CHECK(range.contains(20, 20));
    CHECK(!range.contains(9, 12));
    CHECK(!range.contains(19, 21));
    CHECK(!range.contains(15, 14));
    CHECK(PositionRange().contains(0, 0));
    CHECK(!PositionRange().contains(0, 1));
}
