#include <set>

#include "check.hpp"
#include "state/draft_feature_record.hpp"

using dflash::DraftFeatureRecord;
using dflash::PositionRange;

namespace {

void write(DraftFeatureRecord & record, int32_t layer, int32_t n_layers, int64_t begin, int64_t n) {
    record.begin_write(layer, n_layers, begin, n);
    record.end_write(layer, n_layers, begin, n);
}

bool is(const PositionRange & range, int64_t begin, int64_t end) {
    return range.begin == begin && range.end == end;
}

} // namespace

TEST(nothing_at_first) {
    const DraftFeatureRecord none;
    CHECK(is(none.newest(), 0, 0));
    CHECK(!none.holds(0, 1));
    const DraftFeatureRecord record(4, 2);
    CHECK(is(record.newest(), 0, 0));
    CHECK(record.holds(0, 0));
    CHECK(!record.holds(0, 1));
    CHECK(!record.holds(-1, 1));
}

TEST(every_wrap) {
    for (int64_t capacity = 1; capacity <= 6; ++capacity) {
        for (int64_t base = 0; base < 3 * capacity; ++base) {
            for (int64_t n = 1; n <= capacity; ++n) {
                DraftFeatureRecord record(capacity, 3);
                write(record, 0, 3, base, n);
                CHECK(is(record.newest(), base, base + n));
                for (int64_t b = 0; b < base + 2 * capacity; ++b) {
                    for (int64_t m = 1; m <= capacity + 1; ++m) {
                        CHECK_EQ(record.holds(b, m), b >= base && b + m <= base + n);
                    }
                }
            }
        }
    }
}

TEST(newer_positions_replace_older_ones) {
    DraftFeatureRecord record(4, 1);
    for (int64_t p = 0; p < 11; ++p) {
        write(record, 0, 1, p, 1);
        CHECK(is(record.newest(), p < 4 ? 0 : p - 3, p + 1));
    }
    CHECK(record.holds(7, 4));
    CHECK(!record.holds(6, 1));
    CHECK(!record.holds(7, 5));
}

TEST(a_row_counts_when_all_layers_are_there) {
    DraftFeatureRecord record(8, 3);
    write(record, 0, 1, 4, 3);
    write(record, 2, 1, 4, 3);
    CHECK(is(record.newest(), 0, 0));
    write(record, 1, 1, 4, 2);
    CHECK(is(record.newest(), 4, 6));
    CHECK(!record.holds(6, 1));
    write(record, 1, 1, 6, 1);
    CHECK(is(record.newest(), 4, 7));
    // One layer of the next lap takes the place of a whole row.
    write(record, 2, 1, 12, 1);
    CHECK(!record.holds(4, 1));
    CHECK(!record.holds(12, 1));
    CHECK(is(record.newest(), 5, 7));
}

TEST(a_gap_is_never_held) {
    DraftFeatureRecord record(16, 2);
    write(record, 0, 2, 0, 4);
    write(record, 0, 2, 6, 3);
    CHECK(is(record.newest(), 6, 9));
    CHECK(record.holds(0, 4));
    CHECK(!record.holds(3, 4));
    CHECK(!record.holds(4, 2));
    write(record, 0, 2, 4, 2);
    CHECK(is(record.newest(), 0, 9));
}

TEST(writing_again_takes_the_sequence_back) {
    DraftFeatureRecord record(16, 2);
    write(record, 0, 2, 0, 12);
    write(record, 0, 2, 5, 1);
    CHECK(is(record.newest(), 0, 6));
    CHECK(!record.holds(6, 1));
    // One layer alone starts its position anew: the other layer still has the old one.
    write(record, 1, 1, 3, 2);
    CHECK(is(record.newest(), 0, 3));
    write(record, 0, 1, 3, 2);
    CHECK(is(record.newest(), 0, 5));
}

TEST(an_older_position_over_a_newer_one_takes_it_back) {
    DraftFeatureRecord record(4, 1);
    write(record, 0, 1, 8, 4);
    write(record, 0, 1, 2, 1); // the row of position 10
    CHECK(is(record.newest(), 2, 3));
    CHECK(!record.holds(8, 1));
    CHECK(!record.holds(11, 1));
}

TEST(an_unfinished_write_holds_nothing) {
    DraftFeatureRecord record(4, 2);
    write(record, 0, 2, 0, 4);
    record.begin_write(0, 2, 4, 2);
    CHECK(is(record.newest(), 2, 4));
    CHECK(!record.holds(0, 1));
    CHECK(!record.holds(4, 1));
}

TEST(drop_and_clear) {
    DraftFeatureRecord record(8, 2);
    write(record, 0, 2, 3, 8);
    record.drop_from(9);
    CHECK(is(record.newest(), 3, 9));
    record.drop_from(100);
    CHECK(is(record.newest(), 3, 9));
    record.drop_from(3);
    CHECK(is(record.newest(), 0, 0));
    write(record, 0, 2, 3, 8);
    record.clear();
    CHECK(!record.holds(3, 1));
}

TEST(random_writes_against_a_set_of_positions) {
    uint64_t seed = 12345;
    const auto random = [&](int64_t n) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<int64_t>((seed >> 33) % static_cast<uint64_t>(n));
    };
    for (int64_t capacity : {1, 3, 8}) {
        constexpr int32_t layers = 3;
        DraftFeatureRecord record(capacity, layers);
        std::set<std::pair<int32_t, int64_t>> held; // (layer, position)
        for (int step = 0; step < 3000; ++step) {
            const int32_t layer = static_cast<int32_t>(random(layers));
            const int32_t n_layers = random(2) == 0 ? layers : 1;
            const int32_t first = n_layers == 1 ? layer : 0;
            const int64_t begin = random(3 * capacity);
            const int64_t n = random(capacity + 1);
            bool back = false;
            for (int32_t l = first; l < first + n_layers; ++l) {
                for (int64_t p = begin; p < begin + n; ++p) {
                    for (auto it = held.begin(); it != held.end();) {
                        const bool same_row = it->first == l && it->second % capacity == p % capacity;
                        back = back || (same_row && it->second >= p);
                        it = same_row ? held.erase(it) : std::next(it);
                    }
                }
            }
            for (auto it = held.begin(); back && it != held.end();) {
                it = it->second >= begin ? held.erase(it) : std::next(it);
            }
            for (int32_t l = first; l < first + n_layers; ++l) {
                for (int64_t p = begin; p < begin + n; ++p) {
                    held.insert({l, p});
                }
            }
            write(record, first, n_layers, begin, n);
            for (int64_t p = 0; p < 4 * capacity; ++p) {
                const bool all = held.count({0, p}) + held.count({1, p}) + held.count({2, p}) == 3;
                CHECK_EQ(record.holds(p, 1), all);
            }
        }
    }
}
