#include <limits>

#include "feature_ring.hpp"
#include "ggmlx/graph.hpp"

// What a DraftFeatureMirror refuses: the status, the message, and that nothing was touched.

using namespace dflash;
using namespace dflash::testing;

namespace {

constexpr int64_t largest = std::numeric_limits<int64_t>::max();

} // namespace

TEST(a_closed_mirror_refuses_everything) {
    DraftFeatureMirror closed;
    const SourceRing ring(here(), GGML_TYPE_F32, width, 8, {0, 8});
    LoneTensor act(here(), GGML_TYPE_F32, hidden, 4);
    LoneTensor dst(here(), GGML_TYPE_F32, width, 4);
    std::vector<float> rows = feature_rows(0, 1, width);
    for (const int64_t n : {0, 1}) {
        CHECK_REFUSED(closed, Status::invalid, "closed", draft_feature_mirror_sync_range(ring.source(), closed, 0, n));
        CHECK_REFUSED(closed, Status::invalid, "closed", draft_feature_mirror_sync_tail(ring.source(), closed, n));
        CHECK_REFUSED(closed, Status::invalid, "closed",
                      copy_capture_slice_to_draft_ring(closed, 0, act.get(), here(), 0, 0, n));
        CHECK_REFUSED(closed, Status::invalid, "closed",
                      copy_host_capture_slice_to_draft_ring(closed, 0, 0, n, rows.data(), 0));
        CHECK_REFUSED(closed, Status::invalid, "closed",
                      copy_feature_ring_range_to_tensor(closed, dst.get(), here(), 0, n));
        CHECK_REFUSED(closed, Status::invalid, "closed", copy_feature_ring_range_to_host_f32(closed, 0, n, rows));
        CHECK_REFUSED(closed, Status::invalid, "closed", copy_host_f32_to_feature_ring_range(closed, 0, n, rows));
    }
    CHECK(rows == feature_rows(0, 1, width));
    int64_t slot = -7;
    CHECK(!draft_feature_mirror_can_view(closed, 1, 1, slot));
    CHECK_EQ(slot, -7);
}

TEST(no_rows_are_a_legal_request) {
    const auto mirror = filled_mirror("q8_0");
    const std::vector<uint8_t> before = ring_bytes(*mirror);
    const SourceRing ring(here(), GGML_TYPE_F32, width, 8, {0, 8});
    LoneTensor act(here(), GGML_TYPE_F32, hidden, 4);
    LoneTensor dst(here(), GGML_TYPE_F32, width, 4);
    std::vector<float> out(7, 1.0f);
    const uint64_t computed = work_counters().graphs_computed;
    CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 12, 0), 0);
    CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, largest, 0), 0);
    CHECK_EQ(draft_feature_mirror_sync_tail(ring.source(), *mirror, 0), 0);
    CHECK_EQ(draft_feature_mirror_sync_tail(ring.with_valid({0, 0}), *mirror, 0), 0);
    CHECK_EQ(copy_capture_slice_to_draft_ring(*mirror, 1, act.get(), here(), 4, 12, 0), 0);
    CHECK_EQ(copy_host_capture_slice_to_draft_ring(*mirror, 1, 12, 0, nullptr, 0), 0);
    CHECK_EQ(copy_feature_ring_range_to_tensor(*mirror, dst.get(), here(), 100, 0), 0);
    CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, 100, 0, out), 0);
    CHECK(out.empty());
    CHECK_EQ(copy_host_f32_to_feature_ring_range(*mirror, 12, 0, out), 0);
    CHECK_EQ(work_counters().graphs_computed, computed);
    CHECK(ring_bytes(*mirror) == before);
    CHECK(mirror->holds(10, 6));
}

TEST(negative_and_overflowing_positions) {
    for (const char * type : {"f32", "q4_0"}) {
        const auto mirror = filled_mirror(type);
        const SourceRing ring(here(), GGML_TYPE_F32, width, 8, {0, 8});
        LoneTensor act(here(), GGML_TYPE_F32, hidden, 8);
        LoneTensor dst(here(), GGML_TYPE_F32, width, 8);
        std::vector<float> rows = feature_rows(0, 4, width);
        const std::vector<float> slice = feature_rows(0, 4, hidden);
        for (const auto & [start, n, part] :
             {std::tuple{int64_t{-1}, int64_t{4}, "position -1"}, std::tuple{int64_t{-8}, int64_t{4}, "position -8"},
              std::tuple{int64_t{2}, int64_t{-1}, "-1 rows, want >= 0"},
              std::tuple{largest - 2, int64_t{4}, "overflows"},
              std::tuple{std::numeric_limits<int64_t>::min(), int64_t{0}, "position -"}}) {
            CHECK_REFUSED(*mirror, Status::invalid, part,
                          draft_feature_mirror_sync_range(ring.source(), *mirror, start, n));
            CHECK_REFUSED(*mirror, Status::invalid, part,
                          copy_capture_slice_to_draft_ring(*mirror, 0, act.get(), here(), 0, start, n));
            CHECK_REFUSED(*mirror, Status::invalid, part,
                          copy_host_capture_slice_to_draft_ring(*mirror, 0, start, n, slice.data(), slice.size()));
            CHECK_REFUSED(*mirror, Status::invalid, part,
                          copy_feature_ring_range_to_tensor(*mirror, dst.get(), here(), start, n));
            CHECK_REFUSED(*mirror, Status::invalid, part, copy_feature_ring_range_to_host_f32(*mirror, start, n, rows));
            CHECK_REFUSED(*mirror, Status::invalid, part, copy_host_f32_to_feature_ring_range(*mirror, start, n, rows));
        }
        CHECK(rows == feature_rows(0, 4, width));
        CHECK_REFUSED(*mirror, Status::invalid, "-5 committed",
                      draft_feature_mirror_sync_tail(ring.source(), *mirror, -5));
        CHECK_THROWS(Status::invalid, mirror->rewind(-1));
        int64_t slot = -7;
        CHECK(!draft_feature_mirror_can_view(*mirror, -3, 2, slot));
        CHECK(!draft_feature_mirror_can_view(*mirror, 1, 2, slot));
        CHECK(!draft_feature_mirror_can_view(*mirror, 14, -1, slot));
        CHECK(!draft_feature_mirror_can_view(*mirror, 14, 0, slot));
        CHECK_EQ(slot, -7);
    }
}

TEST(positions_near_the_largest) {
    const auto mirror = make_mirror("f16", 8);
    const int64_t start = largest - 5;
    const std::vector<float> rows = feature_rows(0, 5, width);
    CHECK_EQ(copy_host_f32_to_feature_ring_range(*mirror, start, 5, rows), 5);
    CHECK_EQ(mirror->valid_range().end, largest);
    std::vector<float> have;
    CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, start, 5, have), 5);
    check_close(GGML_TYPE_F16, rows.data(), have.data(), 5 * width);
}

TEST(more_rows_than_a_ring_has) {
    const auto mirror = filled_mirror("bf16");
    const SourceRing wide(here(), GGML_TYPE_BF16, width, 16, {20, 36});
    const SourceRing narrow(here(), GGML_TYPE_BF16, width, 5, {20, 25});
    LoneTensor act(here(), GGML_TYPE_F32, hidden, 16);
    LoneTensor dst(here(), GGML_TYPE_F32, width, 16);
    std::vector<float> rows = feature_rows(0, 9, width);
    const std::vector<float> slice = feature_rows(0, 9, hidden);
    const char * const part = "9 rows, the feature mirror has 8";
    CHECK_REFUSED(*mirror, Status::capacity, part, draft_feature_mirror_sync_range(wide.source(), *mirror, 20, 9));
    CHECK_REFUSED(*mirror, Status::capacity, part,
                  copy_capture_slice_to_draft_ring(*mirror, 0, act.get(), here(), 0, 20, 9));
    CHECK_REFUSED(*mirror, Status::capacity, part,
                  copy_host_capture_slice_to_draft_ring(*mirror, 0, 20, 9, slice.data(), slice.size()));
    CHECK_REFUSED(*mirror, Status::capacity, part,
                  copy_feature_ring_range_to_tensor(*mirror, dst.get(), here(), 10, 9));
    CHECK_REFUSED(*mirror, Status::capacity, part, copy_feature_ring_range_to_host_f32(*mirror, 10, 9, rows));
    CHECK_REFUSED(*mirror, Status::capacity, part, copy_host_f32_to_feature_ring_range(*mirror, 20, 9, rows));
    CHECK_REFUSED(*mirror, Status::capacity, "6 rows, the feature source has 5",
                  draft_feature_mirror_sync_range(narrow.source(), *mirror, 19, 6));
    CHECK_EQ(draft_feature_mirror_sync_range(wide.source(), *mirror, 20, 8), 8); // n = capacity
    CHECK_EQ(mirror->valid_range().begin, 20);
    CHECK_EQ(draft_feature_mirror_sync_range(narrow.source(), *mirror, 20, 5), 5); // n = capacity of the source
}

TEST(positions_the_source_does_not_have) {
    const auto mirror = filled_mirror("f32");
    const SourceRing ring(here(), GGML_TYPE_F32, width, 8, {20, 26});
    const char * const part = "it has [20, 26)";
    CHECK_REFUSED(*mirror, Status::invalid, part,
                  draft_feature_mirror_sync_range(ring.source(), *mirror, 19, 3)); // overwritten there
    CHECK_REFUSED(*mirror, Status::invalid, part,
                  draft_feature_mirror_sync_range(ring.source(), *mirror, 24, 3)); // not written yet
    CHECK_REFUSED(*mirror, Status::invalid, part, draft_feature_mirror_sync_range(ring.source(), *mirror, 0, 1));
    CHECK_REFUSED(*mirror, Status::invalid, part, draft_feature_mirror_sync_tail(ring.source(), *mirror, 27));
    CHECK_REFUSED(*mirror, Status::invalid, part, draft_feature_mirror_sync_tail(ring.source(), *mirror, 20));
    CHECK_REFUSED(*mirror, Status::invalid, "it has [5, 5)",
                  draft_feature_mirror_sync_tail(ring.with_valid({5, 5}), *mirror, 5));
    // A source that claims more than its ring can hold.
    CHECK_REFUSED(*mirror, Status::invalid, "[10, 19) in 8 rows",
                  draft_feature_mirror_sync_range(ring.with_valid({10, 19}), *mirror, 10, 1));
    CHECK_REFUSED(*mirror, Status::invalid, "[-2, 3) in 8 rows",
                  draft_feature_mirror_sync_range(ring.with_valid({-2, 3}), *mirror, 0, 1));
    CHECK_REFUSED(*mirror, Status::invalid, "[3, 2) in 8 rows",
                  draft_feature_mirror_sync_range(ring.with_valid({3, 2}), *mirror, 2, 0));
}

TEST(positions_the_mirror_does_not_have) {
    for (const char * type : {"f32", "f16", "q8_0"}) {
        const auto mirror = filled_mirror(type); // [10, 16) in 8 rows
        LoneTensor dst(here(), GGML_TYPE_F32, width, 8);
        std::vector<float> out(1, 3.0f);
        for (const auto & [start, n] : {std::pair{9, 2}, std::pair{15, 2}, std::pair{2, 3}, std::pair{18, 1}}) {
            const char * const part = "its newest are [10, 16)";
            CHECK_REFUSED(*mirror, Status::invalid, part,
                          copy_feature_ring_range_to_tensor(*mirror, dst.get(), here(), start, n));
            CHECK_REFUSED(*mirror, Status::invalid, part, copy_feature_ring_range_to_host_f32(*mirror, start, n, out));
        }
        CHECK_EQ(out.size(), 1u);
        const std::vector<float> zero(static_cast<size_t>(8 * width), 0.0f);
        CHECK(dst.values() == zero);
        copy_host_f32_to_feature_ring_range(*mirror, 16, 3, feature_rows(16, 3, width)); // over position 10
        CHECK_THROWS(Status::invalid, copy_feature_ring_range_to_host_f32(*mirror, 10, 1, out));
        CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, 11, 8, out), 8);
        mirror->rewind(14);
        CHECK_THROWS(Status::invalid, copy_feature_ring_range_to_host_f32(*mirror, 14, 1, out));
        CHECK_EQ(mirror->valid_range().end, 14);
        mirror->clear();
        CHECK_THROWS_WITH(Status::invalid, "[0, 0)", copy_feature_ring_range_to_host_f32(*mirror, 11, 1, out));
    }
}

TEST(source_tensors_that_do_not_fit) {
    const auto mirror = filled_mirror("f16");
    const SourceRing good(here(), GGML_TYPE_F32, width, 8, {0, 8});
    const auto sync = [&](FeatureSource source) { return draft_feature_mirror_sync_range(source, *mirror, 0, 4); };
    FeatureSource s = good.source();
    s.rows = nullptr;
    CHECK_REFUSED(*mirror, Status::invalid, "no feature source", sync(s));
    s = good.source();
    s.device = nullptr;
    CHECK_REFUSED(*mirror, Status::invalid, "no device", sync(s));
    s = good.source();
    s.capacity = 9;
    CHECK_REFUSED(*mirror, Status::invalid, "capacity 9, its tensor has 8 rows", sync(s));
    s.capacity = 0;
    CHECK_REFUSED(*mirror, Status::invalid, "capacity 0", sync(s));
    const SourceRing other_width(here(), GGML_TYPE_F32, width + 32, 8, {0, 8});
    CHECK_REFUSED(*mirror, Status::mismatch, "rows of 128 values, want 96", sync(other_width.source()));
    LoneTensor quantised(here(), GGML_TYPE_Q8_0, width, 8);
    CHECK_REFUSED(*mirror, Status::unsupported, "is q8_0", sync({quantised.get(), 8, {0, 8}, here()}));
    LoneTensor integers(here(), GGML_TYPE_I32, width, 8);
    CHECK_REFUSED(*mirror, Status::unsupported, "is i32", sync({integers.get(), 8, {0, 8}, here()}));
    LoneTensor deep(here(), GGML_TYPE_F32, width, 4, 2);
    CHECK_REFUSED(*mirror, Status::mismatch, "more than two dimensions", sync({deep.get(), 4, {0, 4}, here()}));
    TensorGroup group(here(), 4);
    ggml_tensor * base = group.add(GGML_TYPE_F32, "base", width, width);
    ggml_tensor * turned = ggml_transpose(group.ctx(), base);
    group.allocate("transposed source");
    CHECK_REFUSED(*mirror, Status::mismatch, "not adjacent", sync({turned, 8, {0, 8}, here()}));
    TensorGroup bare(here(), 1);
    ggml_tensor * no_memory = bare.add(GGML_TYPE_F32, "bare", width, 8);
    CHECK_REFUSED(*mirror, Status::invalid, "has no memory", sync({no_memory, 8, {0, 8}, here()}));
    CHECK_REFUSED(*mirror, Status::invalid, "is the feature mirror itself",
                  sync({mirror->target_feat(), 8, {0, 8}, here()}));
    CHECK_EQ(sync(good.source()), 4);
}

TEST(captured_outputs_that_do_not_fit) {
    const auto mirror = filled_mirror("q8_0");
    const auto copy = [&](int32_t layer, const ggml_tensor * act, const std::shared_ptr<Device> & device,
                          int64_t chunk_start, int64_t n) {
        return copy_capture_slice_to_draft_ring(*mirror, layer, act, device, chunk_start, 16, n);
    };
    LoneTensor act(here(), GGML_TYPE_F32, hidden, 4);
    CHECK_REFUSED(*mirror, Status::invalid, "no captured layer output", copy(0, nullptr, here(), 0, 2));
    CHECK_REFUSED(*mirror, Status::invalid, "no captured layer output", copy(0, nullptr, here(), 0, 0));
    CHECK_REFUSED(*mirror, Status::invalid, "no device", copy(0, act.get(), nullptr, 0, 2));
    CHECK_REFUSED(*mirror, Status::invalid, "captured layer -1, want 0 to 2", copy(-1, act.get(), here(), 0, 2));
    CHECK_REFUSED(*mirror, Status::invalid, "captured layer 3, want 0 to 2", copy(3, act.get(), here(), 0, 2));
    CHECK_REFUSED(*mirror, Status::mismatch, "rows [3, +2) of", copy(0, act.get(), here(), 3, 2));
    CHECK_REFUSED(*mirror, Status::mismatch, "rows [-1, +2) of", copy(0, act.get(), here(), -1, 2));
    CHECK_REFUSED(*mirror, Status::mismatch, "rows [", copy(0, act.get(), here(), largest, 2));
    LoneTensor wide(here(), GGML_TYPE_F32, width, 4);
    CHECK_REFUSED(*mirror, Status::mismatch, "rows of 96 values, want 32", copy(0, wide.get(), here(), 0, 2));
    LoneTensor quantised(here(), GGML_TYPE_Q4_0, hidden, 4);
    CHECK_REFUSED(*mirror, Status::unsupported, "is q4_0", copy(0, quantised.get(), here(), 0, 2));
    const std::vector<float> slice = feature_rows(16, 2, hidden);
    const auto host = [&](int32_t layer, const float * values, uint64_t count) {
        return copy_host_capture_slice_to_draft_ring(*mirror, layer, 16, 2, values, count);
    };
    CHECK_REFUSED(*mirror, Status::invalid, "captured layer 3", host(3, slice.data(), slice.size()));
    CHECK_REFUSED(*mirror, Status::mismatch, "63 values for 2 rows of 32", host(0, slice.data(), 63));
    CHECK_REFUSED(*mirror, Status::mismatch, "65 values", host(0, slice.data(), 65));
    CHECK_REFUSED(*mirror, Status::invalid, "no values", host(0, nullptr, 64));
    CHECK_EQ(copy(0, act.get(), here(), 2, 2), 2);
    CHECK_EQ(host(1, slice.data(), 64), 2);
    CHECK(!mirror->holds(16, 1));
    CHECK_EQ(host(2, slice.data(), 64), 2);
    CHECK(mirror->holds(16, 2));
}

TEST(destinations_that_do_not_fit) {
    const auto mirror = filled_mirror("bf16");
    const auto copy = [&](ggml_tensor * dst, const std::shared_ptr<Device> & device) {
        return copy_feature_ring_range_to_tensor(*mirror, dst, device, 10, 4);
    };
    LoneTensor good(here(), GGML_TYPE_F32, width, 4);
    CHECK_REFUSED(*mirror, Status::invalid, "no feature destination", copy(nullptr, here()));
    CHECK_REFUSED(*mirror, Status::invalid, "no device", copy(good.get(), nullptr));
    LoneTensor halves(here(), GGML_TYPE_F16, width, 4);
    CHECK_REFUSED(*mirror, Status::mismatch, "is f16, want f32", copy(halves.get(), here()));
    LoneTensor narrow(here(), GGML_TYPE_F32, width - 1, 4);
    CHECK_REFUSED(*mirror, Status::mismatch, "rows of 95 values, want 96", copy(narrow.get(), here()));
    LoneTensor brief(here(), GGML_TYPE_F32, width, 3);
    CHECK_REFUSED(*mirror, Status::mismatch, "has 3 rows, want 4", copy(brief.get(), here()));
    TensorGroup group(here(), 4);
    ggml_tensor * base = group.add(GGML_TYPE_F32, "base", width + 8, 4);
    ggml_tensor * columns = ggml_view_2d(group.ctx(), base, width, 4, base->nb[1], 0);
    group.allocate("padded destination");
    CHECK_REFUSED(*mirror, Status::mismatch, "not contiguous", copy(columns, here()));
    CHECK_REFUSED(*mirror, Status::invalid, "is the feature mirror itself", copy(mirror->target_feat(), here()));
    std::vector<float> out(static_cast<size_t>(4 * width));
    CHECK_REFUSED(*mirror, Status::mismatch, "383 values for 4 rows of 96",
                  copy_feature_ring_range_to_host_f32(*mirror, 10, 4, out.data(), 383));
    CHECK_REFUSED(*mirror, Status::invalid, "no memory",
                  copy_feature_ring_range_to_host_f32(*mirror, 10, 4, nullptr, 384));
    CHECK_REFUSED(*mirror, Status::mismatch, "383 values for 4 rows of 96",
                  copy_host_f32_to_feature_ring_range(*mirror, 10, 4, out.data(), 383));
    CHECK_REFUSED(*mirror, Status::invalid, "no values",
                  copy_host_f32_to_feature_ring_range(*mirror, 10, 4, nullptr, 384));
    CHECK_EQ(copy(good.get(), here()), 4);
    CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, 10, 4, out.data(), 384), 4);
    CHECK(good.values() == out);
    out.resize(400); // more values than needed are left unread
    CHECK_EQ(copy_host_f32_to_feature_ring_range(*mirror, 16, 4, out), 4);
}
