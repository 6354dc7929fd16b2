#include "check.hpp"

#include <limits>

#include "base/ring_span.hpp"

using namespace dflash;

namespace {

/// Walks the runs and checks that index i of the span lies in row (base + i) % capacity, in order, each once.
void check_rows(int64_t capacity, int64_t base, int64_t n) {
    const RingSpan span(capacity, base, n);
    int64_t index = 0;
    int runs = 0;
    for (const RingRun & run : span) {
        CHECK_EQ(run.first, index);
        CHECK(run.count > 0 && run.row >= 0 && run.row + run.count <= capacity);
        for (int64_t i = 0; i < run.count; ++i, ++index) {
            CHECK_EQ(run.row + i, (base % capacity + index) % capacity);
        }
        ++runs;
    }
    CHECK_EQ(index, n);
    CHECK_EQ(runs, n == 0 ? 0 : base % capacity + n > capacity ? 2 : 1);
}

} // namespace

TEST(every_offset_and_length) {
    for (int64_t capacity = 1; capacity <= 9; ++capacity) {
        for (int64_t base = 0; base <= 3 * capacity; ++base) {
            for (int64_t n = 0; n <= capacity; ++n) {
                check_rows(capacity, base, n);
            }
        }
    }
}

TEST(positions_near_the_largest) {
    constexpr int64_t largest = std::numeric_limits<int64_t>::max();
    check_rows(4096, largest, 4096);
    check_rows(7, largest - 3, 7);
    const RingSpan huge(largest, largest - 2, 5);
    REQUIRE(huge.end() - huge.begin() == 2);
    CHECK_EQ(huge.begin()[0].row, largest - 2);
    CHECK_EQ(huge.begin()[0].count, 2);
    CHECK_EQ(huge.begin()[1].row, 0);
    CHECK_EQ(huge.begin()[1].first, 2);
    CHECK_EQ(huge.begin()[1].count, 3);
}

TEST(spans_that_cannot_be) {
    CHECK_THROWS_WITH(Status::invalid, "9 rows in a ring of 8", RingSpan(8, 0, 9));
    CHECK_THROWS_WITH(Status::invalid, "position -1", RingSpan(8, -1, 1));
    CHECK_THROWS(Status::invalid, RingSpan(8, std::numeric_limits<int64_t>::min(), 1));
    CHECK_THROWS_WITH(Status::invalid, "-1 rows", RingSpan(8, 0, -1));
    CHECK_THROWS_WITH(Status::invalid, "ring capacity 0", RingSpan(0, 0, 0));
    CHECK_THROWS(Status::invalid, RingSpan(-8, 0, 0));
}
