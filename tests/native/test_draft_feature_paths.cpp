#include <cstring>

#include "feature_ring.hpp"
#include "ggml-alloc.h"
#include "ggmlx/graph.hpp"

// Every way a feature row can take: source types and mirror types, wraps, one device, two devices, a source that spans
// devices, and back out to a tensor or the host.

using namespace dflash;
using namespace dflash::testing;

namespace {

const char * const mirror_types[] = {"f32", "f16", "bf16", "q8_0", "q4_0"};
constexpr enum ggml_type source_types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};

/// feature_value of `n` values as the source type holds them.
std::vector<float> as_stored(enum ggml_type type, const std::vector<float> & values) {
    return decode(type, encode(type, values).data(), static_cast<int64_t>(values.size()));
}

/// Rows of the ring: those of [begin, begin + n) close to the wanted values, all others painted.
void check_ring(const DraftFeatureMirror & mirror, int64_t begin, int64_t n, const std::vector<float> & want) {
    const std::vector<uint8_t> bytes = ring_bytes(mirror);
    const size_t row_bytes = ggml_row_size(mirror.type(), mirror.width());
    const int64_t capacity = mirror.capacity();
    for (int64_t row = 0; row < capacity; ++row) {
        const uint8_t * at = bytes.data() + row_bytes * static_cast<size_t>(row);
        const int64_t ahead = ((row - begin) % capacity + capacity) % capacity; // position begin + ahead, if < n
        if (ahead >= n) {
            CHECK(is_painted(at, row_bytes));
            continue;
        }
        const std::vector<float> have = decode(mirror.type(), at, mirror.width());
        check_close(mirror.type(), want.data() + ahead * mirror.width(), have.data(), mirror.width());
    }
}

ggml_backend_meta_split_state split_columns(const ggml_tensor * tensor, void *) {
    ggml_backend_meta_split_state state{};
    state.axis = GGML_BACKEND_SPLIT_AXIS_0;
    state.n_segments = 1;
    state.nr[0] = 1;
    state.ne[0] = tensor->ne[0] / 3 * 2;
    state.ne[1] = tensor->ne[0] - state.ne[0];
    return state;
}

ggml_backend_meta_split_state mirror_columns(const ggml_tensor *, void *) {
    ggml_backend_meta_split_state state{};
    state.axis = GGML_BACKEND_SPLIT_AXIS_MIRRORED;
    state.n_segments = 1;
    state.nr[0] = 1;
    return state;
}

/// A tensor whose columns lie on two devices (or on both), as in tensor-parallel inference.
class SpanningTensor {
  public:
    SpanningTensor(ggml_backend_meta_get_split_state_t split, enum ggml_type type, int64_t ne0, int64_t ne1) {
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        ggml_backend_dev_t parts[] = {cpu, cpu};
        ggml_backend_dev_t meta = ggml_backend_meta_device(parts, 2, split, nullptr);
        ggml_init_params params{};
        params.mem_size = 4 * ggml_tensor_overhead();
        params.no_alloc = true;
        ctx_.reset(ggml_init(params));
        tensor_ = ggml_new_tensor_2d(ctx_.get(), type, ne0, ne1);
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), ggml_backend_dev_buffer_type(meta)));
    }

    ggml_tensor * get() { return tensor_; }
    void set_row(int64_t row, const std::vector<uint8_t> & bytes) {
        ggml_backend_tensor_set(tensor_, bytes.data(), static_cast<size_t>(row) * tensor_->nb[1], bytes.size());
    }

  private:
    ggml_context_ptr ctx_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * tensor_ = nullptr;
};

} // namespace

// ggml keeps the buffer types of its meta devices for ever.
extern "C" const char * __lsan_default_suppressions() {
    return "leak:ggml_backend_meta_device_get_buffer_type\n";
}

TEST(sync_of_every_type_at_every_offset) {
    constexpr int64_t source_capacity = 11;
    constexpr int64_t capacity = 7;
    for (const char * name : mirror_types) {
        const auto mirror = make_mirror(name, capacity);
        for (const enum ggml_type type : source_types) {
            for (int64_t base = 0; base < source_capacity * capacity; ++base) { // all pairs of ring offsets
                const SourceRing ring(here(), type, width, source_capacity, {base, base + capacity});
                const int64_t n = base % capacity + 1;
                mirror->clear();
                paint(*mirror);
                CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, base, n), n);
                CHECK_EQ(mirror->valid_range().begin, base);
                CHECK_EQ(mirror->valid_range().end, base + n);
                check_ring(*mirror, base, n, as_stored(type, feature_rows(base, n, width)));
            }
        }
    }
}

TEST(sync_in_many_small_passes) {
    constexpr int64_t capacity = 21;
    for (const char * name : mirror_types) {
        for (const int64_t rows : {1, 2, 3, 4, 8}) { // rows in flight
            const auto mirror = make_mirror(name, capacity, rows);
            CHECK(mirror->staging_bytes() >= static_cast<uint64_t>(rows * width) * sizeof(float));
            CHECK(mirror->staging_bytes() < static_cast<uint64_t>((rows + 1) * width) * sizeof(float));
            for (int64_t n = 1; n <= capacity; ++n) {
                const int64_t base = 100 + 3 * n;
                const SourceRing ring(here(), GGML_TYPE_BF16, width, 30, {base, base + n});
                mirror->clear();
                paint(*mirror);
                CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, base, n), n);
                check_ring(*mirror, base, n, as_stored(GGML_TYPE_BF16, feature_rows(base, n, width)));
            }
        }
    }
}

TEST(rows_apart_in_the_source) {
    const auto mirror = make_mirror("q8_0", 6);
    const SourceRing ring(here(), GGML_TYPE_F16, width, 9, {20, 26}, 5);
    paint(*mirror);
    CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 20, 6), 6);
    check_ring(*mirror, 20, 6, as_stored(GGML_TYPE_F16, feature_rows(20, 6, width)));
}

TEST(one_memory_read_at_two_strides) {
    const auto mirror = make_mirror("f32", 4);
    TensorGroup group(here(), 3);
    ggml_tensor * all = group.add(GGML_TYPE_F32, "all", width, 8);
    ggml_tensor * half = ggml_view_2d(group.ctx(), all, width, 4, all->nb[1], 0);
    ggml_tensor * even = ggml_view_2d(group.ctx(), all, width, 4, 2 * all->nb[1], 0);
    group.allocate("rows");
    const std::vector<float> rows = feature_rows(0, 8, width);
    tensor_write(all, rows.data(), 0, rows.size() * sizeof(float));
    std::vector<float> have;
    for (int round = 0; round < 2; ++round) {
        CHECK_EQ(draft_feature_mirror_sync_range({half, 4, {0, 4}, here()}, *mirror, 0, 4), 4);
        copy_feature_ring_range_to_host_f32(*mirror, 0, 4, have);
        CHECK(have == feature_rows(0, 4, width));
        CHECK_EQ(draft_feature_mirror_sync_range({even, 4, {0, 4}, here()}, *mirror, 0, 4), 4);
        copy_feature_ring_range_to_host_f32(*mirror, 0, 4, have);
        for (int64_t r = 0; r < 4; ++r) {
            const std::vector<float> want = feature_rows(2 * r, 1, width);
            CHECK(std::equal(want.begin(), want.end(), have.begin() + r * width));
        }
    }
}

TEST(another_device_gives_the_same_bytes) {
    for (const char * name : mirror_types) {
        for (const enum ggml_type type : source_types) {
            const auto near = make_mirror(name, 7);
            const auto far = make_mirror(name, 7, 2);
            const auto parts = make_mirror(name, 7, 2);
            const auto both = make_mirror(name, 7);
            for (int64_t base = 0; base < 33; ++base) {
                const int64_t n = base % 7 + 1;
                const PositionRange valid{base, base + 7};
                const SourceRing a(here(), type, width, 11, valid);
                const SourceRing b(elsewhere(), type, width, 11, valid);
                SpanningTensor c(split_columns, type, width, 11);
                SpanningTensor d(mirror_columns, type, width, 11);
                CHECK(spans_devices(c.get()));
                CHECK(!spans_devices(a.source().rows));
                for (int64_t p = valid.begin; p < valid.end; ++p) {
                    c.set_row(p % 11, encode(type, feature_rows(p, 1, width)));
                    d.set_row(p % 11, encode(type, feature_rows(p, 1, width)));
                }
                for (const auto * mirror : {&near, &far, &parts, &both}) {
                    (*mirror)->clear();
                    paint(**mirror);
                }
                CHECK_EQ(draft_feature_mirror_sync_range(a.source(), *near, base, n), n);
                CHECK_EQ(draft_feature_mirror_sync_range(b.source(), *far, base, n), n);
                CHECK_EQ(draft_feature_mirror_sync_range({c.get(), 11, valid, elsewhere()}, *parts, base, n), n);
                CHECK_EQ(draft_feature_mirror_sync_range({d.get(), 11, valid, elsewhere()}, *both, base, n), n);
                check_ring(*near, base, n, as_stored(type, feature_rows(base, n, width)));
                CHECK(ring_bytes(*far) == ring_bytes(*near));
                CHECK(ring_bytes(*parts) == ring_bytes(*near));
                CHECK(ring_bytes(*both) == ring_bytes(*near));
                CHECK_EQ(parts->valid_range().end, base + n);
            }
        }
    }
}

TEST(captured_slices_of_every_type_at_every_offset) {
    constexpr int64_t capacity = 7;
    for (const char * name : mirror_types) {
        for (const enum ggml_type type : source_types) {
            const auto mirror = make_mirror(name, capacity);
            const size_t slice_bytes = ggml_row_size(mirror->type(), hidden);
            for (int64_t base = 0; base < 2 * capacity; ++base) {
                for (int32_t layer = 0; layer < layers; ++layer) {
                    for (int way = 0; way < 4; ++way) { // device tensor, another device's, spanning, host
                        const int64_t n = (base + layer) % capacity + 1;
                        const int64_t chunk_start = base % 3;
                        const std::vector<float> rows = feature_rows(1000 + base, chunk_start + n + 1, hidden);
                        const std::vector<float> want = as_stored(type, rows);
                        mirror->clear();
                        paint(*mirror);
                        int64_t done = 0;
                        if (way == 3) {
                            done = copy_host_capture_slice_to_draft_ring(*mirror, layer, base, n,
                                                                         want.data() + chunk_start * hidden,
                                                                         static_cast<uint64_t>(n * hidden));
                        } else if (way == 2) {
                            SpanningTensor act(split_columns, type, hidden, chunk_start + n + 1);
                            for (int64_t r = 0; r < chunk_start + n + 1; ++r) {
                                act.set_row(r,
                                            encode(type, {rows.begin() + r * hidden, rows.begin() + (r + 1) * hidden}));
                            }
                            done = copy_capture_slice_to_draft_ring(*mirror, layer, act.get(), elsewhere(), chunk_start,
                                                                    base, n);
                        } else {
                            const auto & device = way == 0 ? here() : elsewhere();
                            LoneTensor act(device, type, hidden, chunk_start + n + 1);
                            act.set(rows);
                            done = copy_capture_slice_to_draft_ring(*mirror, layer, act.get(), device, chunk_start,
                                                                    base, n);
                        }
                        CHECK_EQ(done, n);
                        CHECK(!mirror->holds(base, 1)); // the other layers are missing
                        const std::vector<uint8_t> bytes = ring_bytes(*mirror);
                        for (int64_t row = 0; row < capacity; ++row) {
                            const int64_t ahead = ((row - base) % capacity + capacity) % capacity;
                            for (int32_t l = 0; l < layers; ++l) {
                                const uint8_t * at = bytes.data() + static_cast<size_t>(row * layers + l) * slice_bytes;
                                if (l != layer || ahead >= n) {
                                    CHECK(is_painted(at, slice_bytes));
                                    continue;
                                }
                                const std::vector<float> have = decode(mirror->type(), at, hidden);
                                check_close(mirror->type(), want.data() + (chunk_start + ahead) * hidden, have.data(),
                                            hidden);
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(slices_of_all_layers_make_rows) {
    for (const char * name : mirror_types) {
        const auto mirror = make_mirror(name, 5);
        const auto whole = make_mirror(name, 5);
        constexpr int64_t base = 13;
        constexpr int64_t n = 4;
        const std::vector<float> rows = feature_rows(base, n, width);
        for (const int32_t layer : {2, 0, 1}) {
            std::vector<float> slice;
            for (int64_t r = 0; r < n; ++r) {
                const auto from = rows.begin() + r * width + layer * hidden;
                slice.insert(slice.end(), from, from + hidden);
            }
            CHECK(!mirror->holds(base, n));
            CHECK_EQ(copy_host_capture_slice_to_draft_ring(*mirror, layer, base, n, slice.data(), slice.size()), n);
        }
        CHECK(mirror->holds(base, n));
        CHECK_EQ(copy_host_f32_to_feature_ring_range(*whole, base, n, rows), n);
        CHECK(ring_bytes(*mirror) == ring_bytes(*whole));
    }
}

TEST(round_trips_through_the_host) {
    for (const char * name : mirror_types) {
        const auto mirror = make_mirror(name, 7, 3);
        double sum = 0.0;
        int64_t count = 0;
        for (int64_t base = 0; base < 14; ++base) {
            for (int64_t n = 1; n <= 7; ++n) {
                const std::vector<float> want = feature_rows(base, n, width);
                mirror->clear();
                paint(*mirror);
                CHECK_EQ(copy_host_f32_to_feature_ring_range(*mirror, base, n, want), n);
                check_ring(*mirror, base, n, want);
                std::vector<float> have(3, 5.0f);
                CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, base, n, have), n);
                REQUIRE(have.size() == want.size());
                check_close(mirror->type(), want.data(), have.data(), n * width);
                // What was stored comes out to the bit.
                const std::vector<uint8_t> bytes = ring_bytes(*mirror);
                for (int64_t r = 0; r < n; ++r) {
                    const size_t row = static_cast<size_t>((base + r) % 7);
                    const std::vector<float> stored =
                        decode(mirror->type(), bytes.data() + row * ggml_row_size(mirror->type(), width), width);
                    CHECK(std::equal(stored.begin(), stored.end(), have.begin() + r * width));
                }
                for (size_t i = 0; i < want.size(); ++i) {
                    sum += std::pow(static_cast<double>(want[i]) - static_cast<double>(have[i]), 2);
                    ++count;
                }
            }
        }
        const double rms = std::sqrt(sum / static_cast<double>(count));
        const enum ggml_type type = mirror->type();
        CHECK_NEAR(rms, 0.0, type == GGML_TYPE_F32 ? 0.0 : type == GGML_TYPE_Q4_0 ? 0.15 : 8e-3);
    }
}

TEST(rows_into_a_tensor_on_either_device) {
    for (const char * name : mirror_types) {
        const auto mirror = make_mirror(name, 7, 4);
        for (int64_t base = 0; base < 14; ++base) {
            for (int64_t n = 1; n <= 7; ++n) {
                mirror->clear();
                copy_host_f32_to_feature_ring_range(*mirror, base, n, feature_rows(base, n, width));
                const std::vector<uint8_t> before = ring_bytes(*mirror);
                std::vector<float> want;
                copy_feature_ring_range_to_host_f32(*mirror, base, n, want);
                for (const auto & device : {here(), elsewhere()}) {
                    LoneTensor dst(device, GGML_TYPE_F32, width, n + 2);
                    dst.set(std::vector<float>(static_cast<size_t>((n + 2) * width), 77.0f));
                    CHECK_EQ(copy_feature_ring_range_to_tensor(*mirror, dst.get(), device, base, n), n);
                    const std::vector<float> have = dst.values();
                    CHECK(std::equal(want.begin(), want.end(), have.begin()));
                    // Padding rows of the destination are the caller's; the ring is only read.
                    CHECK(std::all_of(have.begin() + n * width, have.end(), [](float v) { return v == 77.0f; }));
                    CHECK(ring_bytes(*mirror) == before);
                }
            }
        }
    }
}

TEST(rows_of_one_device_never_visit_the_host) {
    for (const char * name : mirror_types) {
        const auto mirror = make_mirror(name, 16);
        const SourceRing ring(here(), GGML_TYPE_BF16, width, 16, {40, 56});
        LoneTensor act(here(), GGML_TYPE_F32, hidden, 16);
        LoneTensor dst(here(), GGML_TYPE_F32, width, 16);
        const WorkCounters start = work_counters();
        draft_feature_mirror_sync_range(ring.source(), *mirror, 40, 16);
        copy_feature_ring_range_to_tensor(*mirror, dst.get(), here(), 40, 16);
        copy_capture_slice_to_draft_ring(*mirror, 0, act.get(), here(), 0, 56, 16);
        const WorkCounters end = work_counters();
        CHECK_EQ(end.bytes_to_host - start.bytes_to_host, 0u);
        // Row numbers only: source and target rows of two moves, source rows of one read.
        CHECK_EQ(end.bytes_to_device - start.bytes_to_device, 5 * 16 * sizeof(int32_t));
        CHECK_EQ(end.graphs_computed - start.graphs_computed, 3u);
    }
}

TEST(many_row_counts_few_graphs) {
    const auto mirror = make_mirror("q8_0", 64);
    const SourceRing ring(here(), GGML_TYPE_F32, width, 64, {0, 64});
    const uint64_t built = work_counters().graphs_built;
    for (int64_t n = 1; n <= 64; ++n) {
        const uint64_t computed = work_counters().graphs_computed;
        CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 0, n), n);
        CHECK(work_counters().graphs_computed - computed <= 2);
    }
    CHECK_EQ(work_counters().graphs_built - built, 7u); // 1, 2, 4, ..., 64 rows
    // Another source of the same shape needs no new graph and no new memory.
    const SourceRing other(here(), GGML_TYPE_F32, width, 64, {64, 128});
    const WorkCounters steady = work_counters();
    const uint64_t staging = mirror->staging_bytes();
    for (int64_t n = 1; n <= 64; ++n) {
        CHECK_EQ(draft_feature_mirror_sync_range(other.source(), *mirror, 64, n), n);
    }
    CHECK_EQ(work_counters().graphs_built, steady.graphs_built);
    CHECK_EQ(work_counters().buffers_allocated, steady.buffers_allocated);
    CHECK_EQ(mirror->staging_bytes(), staging);
    std::vector<float> have;
    copy_feature_ring_range_to_host_f32(*mirror, 64, 64, have);
    const std::vector<float> want = feature_rows(64, 64, width);
    check_close(GGML_TYPE_Q8_0, want.data(), have.data(), 64 * width);
}
