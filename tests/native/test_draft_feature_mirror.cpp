#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <limits>
#include <thread>

#include "feature_ring.hpp"

// The life of a DraftFeatureMirror, what counts as held, views, and what a failing device leaves behind.

using namespace dflash;
using namespace dflash::testing;

namespace {

constexpr int64_t largest = std::numeric_limits<int64_t>::max();

} // namespace

TEST(type_names) {
    CHECK_EQ(feature_type_from_name("f32"), GGML_TYPE_F32);
    CHECK_EQ(feature_type_from_name("f16"), GGML_TYPE_F16);
    CHECK_EQ(feature_type_from_name("bf16"), GGML_TYPE_BF16);
    CHECK_EQ(feature_type_from_name("q8_0"), GGML_TYPE_Q8_0);
    CHECK_EQ(feature_type_from_name("q4_0"), GGML_TYPE_Q4_0);
    CHECK_THROWS_WITH(Status::invalid, "\"int8\", want one of: f32, f16, bf16, q8_0, q4_0",
                      feature_type_from_name("int8"));
    CHECK_THROWS(Status::invalid, feature_type_from_name(""));
    CHECK_THROWS(Status::invalid, feature_type_from_name("q4_K"));
}

TEST(widths) {
    CHECK(check_feature_width_compatible(GGML_TYPE_F32, 1));
    CHECK(check_feature_width_compatible(GGML_TYPE_BF16, 33));
    CHECK(check_feature_width_compatible(GGML_TYPE_Q8_0, 64));
    CHECK(!check_feature_width_compatible(GGML_TYPE_Q8_0, 48));
    CHECK(!check_feature_width_compatible(GGML_TYPE_Q4_0, 33));
    CHECK(!check_feature_width_compatible(GGML_TYPE_F32, 0));
    CHECK(!check_feature_width_compatible(GGML_TYPE_F32, -32));
    CHECK(!check_feature_width_compatible(static_cast<enum ggml_type>(-1), 32));
    CHECK(!check_feature_width_compatible(GGML_TYPE_COUNT, 32));
    CHECK(!check_feature_width_compatible(static_cast<enum ggml_type>(4), 32)); // a retired type
}

TEST(options_that_cannot_be_leave_an_open_mirror_alone) {
    const auto mirror = filled_mirror("f16");
    const auto refuse = [&](Status status, const char * part, auto && change) {
        DraftFeatureMirrorOptions o = mirror_options("f16", 8);
        change(o);
        CHECK_REFUSED(*mirror, status, part, draft_feature_mirror_init(*mirror, here(), o));
        CHECK(mirror->holds(10, 6));
    };
    refuse(Status::invalid, "capacity 0", [](auto & o) { o.capacity = 0; });
    refuse(Status::invalid, "capacity -4", [](auto & o) { o.capacity = -4; });
    refuse(Status::invalid, "capacity", [](auto & o) { o.capacity = largest; });
    refuse(Status::invalid, "n_target_layers 0", [](auto & o) { o.n_target_layers = 0; });
    refuse(Status::invalid, "n_target_layers", [](auto & o) { o.n_target_layers = 1 << 30; });
    refuse(Status::invalid, "hidden_size 0", [](auto & o) { o.hidden_size = 0; });
    refuse(Status::invalid, "hidden_size", [](auto & o) { o.hidden_size = 1 << 30; });
    refuse(Status::invalid, "transfer_bytes 0", [](auto & o) { o.transfer_bytes = 0; });
    refuse(Status::invalid, "\"f64\"", [](auto & o) { o.type = "f64"; });
    refuse(Status::unsupported, "blocks of 32 values, hidden_size is 48", [](auto & o) {
        o.type = "q8_0";
        o.hidden_size = 48;
    });
    // Two slices of half a block make a whole row, but a slice would start inside a block.
    refuse(Status::unsupported, "hidden_size is 16", [](auto & o) {
        o.type = "q4_0";
        o.hidden_size = 16;
    });
    CHECK_REFUSED(*mirror, Status::invalid, "needs a device",
                  draft_feature_mirror_init(*mirror, nullptr, mirror_options("f16", 8)));
}

TEST(life_of_a_mirror) {
    DraftFeatureMirror mirror;
    CHECK(!mirror.is_open());
    for (int round = 0; round < 2; ++round) {
        draft_feature_mirror_init(mirror, here(), mirror_options("q8_0", 8));
        CHECK(mirror.is_open());
        CHECK_EQ(mirror.type(), GGML_TYPE_Q8_0);
        CHECK_EQ(mirror.nbytes(), 8u * 3u * 34u);
        CHECK_EQ(mirror.width(), width);
        CHECK(mirror.device() == here());
        CHECK_EQ(mirror.valid_range().size(), 0);
        const std::vector<uint8_t> bytes = ring_bytes(mirror);
        CHECK(std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; }));
        copy_host_f32_to_feature_ring_range(mirror, 3, 8, feature_rows(3, 8, width));
        paint(mirror);
        // Opened again with another shape, nothing of the old one is left.
        DraftFeatureMirrorOptions o = mirror_options("f32", 3);
        o.n_target_layers = 5;
        o.hidden_size = 7;
        draft_feature_mirror_init(mirror, elsewhere(), o);
        CHECK_EQ(mirror.type(), GGML_TYPE_F32);
        CHECK_EQ(mirror.capacity(), 3);
        CHECK_EQ(mirror.n_target_layers(), 5);
        CHECK_EQ(mirror.hidden_size(), 7);
        CHECK_EQ(mirror.width(), 35);
        CHECK(mirror.device() == elsewhere());
        CHECK_EQ(mirror.valid_range().size(), 0);
        CHECK(!mirror.holds(3, 1));
        const std::vector<uint8_t> fresh = ring_bytes(mirror);
        CHECK_EQ(fresh.size(), 3u * 35u * 4u);
        CHECK(std::all_of(fresh.begin(), fresh.end(), [](uint8_t b) { return b == 0; }));
        const std::vector<float> rows = feature_rows(1, 3, 35);
        std::vector<float> have;
        CHECK_EQ(copy_host_f32_to_feature_ring_range(mirror, 1, 3, rows), 3);
        CHECK_EQ(copy_feature_ring_range_to_host_f32(mirror, 1, 3, have), 3);
        CHECK(have == rows);
        draft_feature_mirror_free(mirror);
        CHECK(!mirror.is_open());
        CHECK(mirror.target_feat() == nullptr);
        CHECK(mirror.device() == nullptr);
        CHECK_EQ(mirror.capacity(), 0);
        CHECK_EQ(mirror.n_target_layers(), 0);
        CHECK_EQ(mirror.hidden_size(), 0);
        CHECK_EQ(mirror.width(), 0);
        CHECK_EQ(mirror.nbytes(), 0u);
        CHECK_EQ(mirror.staging_bytes(), 0u);
        CHECK_EQ(mirror.type(), GGML_TYPE_F32);
        CHECK_EQ(mirror.valid_range().size(), 0);
        draft_feature_mirror_free(mirror); // again
        CHECK(!mirror.is_open());
    }
}

TEST(the_device_outlives_its_last_other_owner) {
    auto device = Device::open("cpu", 1);
    auto mirror = DraftFeatureMirror::create(device, mirror_options("bf16", 4));
    const std::weak_ptr<Device> watch = device;
    device.reset();
    CHECK_EQ(copy_host_f32_to_feature_ring_range(*mirror, 0, 4, feature_rows(0, 4, width)), 4);
    CHECK(!watch.expired());
    mirror.reset();
    CHECK(watch.expired());
}

TEST(two_types_in_one_process_whatever_the_environment) {
    setenv("DFLASH_FEATURE_DTYPE", "q8_0", 1);
    const auto a = make_mirror("f32", 8);
    const auto b = make_mirror("q4_0", 8);
    unsetenv("DFLASH_FEATURE_DTYPE");
    CHECK_EQ(a->type(), GGML_TYPE_F32);
    CHECK_EQ(b->type(), GGML_TYPE_Q4_0);
    const SourceRing ring(here(), GGML_TYPE_BF16, width, 8, {5, 13});
    for (const auto * mirror : {&a, &b, &a, &b}) {
        CHECK_EQ(draft_feature_mirror_sync_tail(ring.source(), **mirror, 13), 8);
    }
    const std::vector<float> want = feature_rows(5, 8, width);
    const std::vector<float> stored = decode(GGML_TYPE_BF16, encode(GGML_TYPE_BF16, want).data(), 8 * width);
    for (const auto * mirror : {&a, &b}) {
        std::vector<float> have;
        copy_feature_ring_range_to_host_f32(**mirror, 5, 8, have);
        check_close((*mirror)->type(), stored.data(), have.data(), 8 * width);
    }
}

TEST(gaps_and_stale_rows_are_seen) {
    const auto mirror = make_mirror("bf16", 32);
    const SourceRing ring(here(), GGML_TYPE_BF16, width, 32, {0, 32});
    // Tokens without capture between two stretches.
    CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 0, 8), 8);
    CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 12, 4), 4);
    CHECK(!mirror->holds(6, 8));
    CHECK_EQ(mirror->valid_range().begin, 12);
    std::vector<float> out;
    CHECK_THROWS(Status::invalid, copy_feature_ring_range_to_host_f32(*mirror, 7, 6, out));
    CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 8, 4), 4);
    CHECK_EQ(mirror->valid_range().begin, 0);
    CHECK_EQ(mirror->valid_range().end, 16);
    // The sequence is restored at 5 and goes on by one token: what lay behind is gone.
    CHECK_EQ(draft_feature_mirror_sync_range(ring.with_valid({0, 6}), *mirror, 5, 1), 1);
    CHECK_EQ(mirror->valid_range().begin, 0);
    CHECK_EQ(mirror->valid_range().end, 6);
}

TEST(an_incomplete_row_is_not_held) {
    for (const char * type : {"f32", "q8_0"}) {
        const auto mirror = make_mirror(type, 8);
        const std::vector<float> slice = feature_rows(0, 4, hidden);
        std::vector<float> out;
        int64_t slot = 0;
        CHECK_EQ(copy_host_capture_slice_to_draft_ring(*mirror, 1, 4, 4, slice.data(), slice.size()), 4);
        CHECK_EQ(copy_host_capture_slice_to_draft_ring(*mirror, 2, 4, 4, slice.data(), slice.size()), 4);
        CHECK(!mirror->holds(4, 1));
        CHECK_THROWS(Status::invalid, copy_feature_ring_range_to_host_f32(*mirror, 4, 4, out));
        CHECK(!draft_feature_mirror_can_view(*mirror, 8, 4, slot));
        CHECK_EQ(copy_host_capture_slice_to_draft_ring(*mirror, 0, 4, 3, slice.data(), slice.size() - hidden), 3);
        CHECK_EQ(mirror->valid_range().begin, 4);
        CHECK_EQ(mirror->valid_range().end, 7);
        CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, 4, 3, out), 3);
        // A slice of the next lap alone takes the row away.
        CHECK_EQ(copy_host_capture_slice_to_draft_ring(*mirror, 0, 12, 1, slice.data(), hidden), 1);
        CHECK(!mirror->holds(4, 1));
        CHECK(!mirror->holds(12, 1));
        CHECK(mirror->holds(5, 2));
    }
}

TEST(views) {
    constexpr int64_t capacity = 6;
    for (const char * type : {"f32", "f16", "bf16", "q8_0", "q4_0"}) {
        const auto mirror = make_mirror(type, capacity);
        for (int64_t begin = 0; begin < 2 * capacity; ++begin) {
            for (int64_t n = 1; n <= capacity; ++n) {
                mirror->clear();
                copy_host_f32_to_feature_ring_range(*mirror, begin, n, feature_rows(begin, n, width));
                for (int64_t committed = 0; committed <= begin + n + 1; ++committed) {
                    for (int64_t ctx_len = 0; ctx_len <= capacity + 1; ++ctx_len) {
                        const int64_t start = committed - ctx_len;
                        const bool want = std::string(type) == "f32" && ctx_len > 0 && start >= begin &&
                                          committed <= begin + n && start % capacity + ctx_len <= capacity;
                        int64_t slot = -7;
                        CHECK_EQ(draft_feature_mirror_can_view(*mirror, committed, ctx_len, slot), want);
                        CHECK_EQ(slot, want ? start % capacity : -7);
                        if (want) {
                            std::vector<float> rows(static_cast<size_t>(ctx_len * width));
                            tensor_read(mirror->target_feat(), rows.data(),
                                        static_cast<uint64_t>(slot * width) * sizeof(float),
                                        rows.size() * sizeof(float));
                            CHECK(rows == feature_rows(start, ctx_len, width));
                        }
                    }
                }
            }
        }
    }
}

TEST(the_tail_is_the_least_of_both_rings_and_the_position) {
    for (const int64_t capacity : {4, 9}) {
        for (const int64_t source_capacity : {4, 6, 12}) {
            for (const int64_t committed : {1, 3, 4, 5, 9, 30}) {
                const auto mirror = make_mirror("f16", capacity);
                const int64_t begin = std::max<int64_t>(0, committed - source_capacity);
                const SourceRing ring(here(), GGML_TYPE_F16, width, source_capacity, {begin, committed});
                const int64_t n = std::min({capacity, source_capacity, committed});
                CHECK_EQ(draft_feature_mirror_sync_tail(ring.source(), *mirror, committed), n);
                CHECK_EQ(mirror->valid_range().begin, committed - n);
                CHECK_EQ(mirror->valid_range().end, committed);
                std::vector<float> have;
                copy_feature_ring_range_to_host_f32(*mirror, committed - n, n, have);
                const std::vector<float> want = feature_rows(committed - n, n, width);
                check_close(GGML_TYPE_F16, want.data(), have.data(), n * width);
            }
        }
    }
    // Rows that a verify forward has overwritten in the source are no part of its tail.
    const auto mirror = make_mirror("f32", 8);
    const SourceRing ring(here(), GGML_TYPE_F32, width, 8, {25, 30});
    CHECK_EQ(draft_feature_mirror_sync_tail(ring.source(), *mirror, 30), 5);
    CHECK_EQ(mirror->valid_range().begin, 25);
    CHECK_EQ(draft_feature_mirror_sync_tail(ring.source(), *mirror, 28), 3);
    CHECK_EQ(mirror->valid_range().end, 28);
}

TEST(all_types_out_of_one_growing_sequence_of_calls) {
    // Sizes up and down, devices in turn: staging memory is reused while earlier rows are already in place.
    for (const char * type : {"f32", "bf16", "q8_0"}) {
        const auto mirror = make_mirror(type, 64);
        int64_t position = 0;
        for (const int64_t n : {1, 40, 3, 64, 2, 17, 33, 5}) {
            const auto & device = n % 2 == 0 ? here() : elsewhere();
            const SourceRing ring(device, GGML_TYPE_F16, width, 64, {position, position + n});
            CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, position, n), n);
            position += n;
        }
        std::vector<float> have;
        const PositionRange valid = mirror->valid_range();
        CHECK_EQ(valid.end, position);
        CHECK_EQ(valid.size(), 64);
        CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, valid.begin, 64, have), 64);
        const std::vector<float> want =
            decode(GGML_TYPE_F16, encode(GGML_TYPE_F16, feature_rows(valid.begin, 64, width)).data(), 64 * width);
        check_close(mirror->type(), want.data(), have.data(), 64 * width);
    }
}

TEST(a_device_that_fails_in_the_middle) {
    static int left = 0; // operations before the device gives up
    static const auto give_up = [](void *) { return left-- <= 0; };
    const auto device = Device::open("cpu", 1);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(device->backend()));
    const auto set_abort = reinterpret_cast<ggml_backend_set_abort_callback_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback"));
    REQUIRE(set_abort != nullptr);
    for (const auto & source_device : {device, here()}) {
        DraftFeatureMirrorOptions o = mirror_options("f32", 16);
        o.transfer_bytes = 2 * width * sizeof(float);
        const auto mirror = DraftFeatureMirror::create(device, o);
        const SourceRing ring(source_device, GGML_TYPE_F32, width, 16, {0, 16});
        CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 0, 8), 8);
        left = 3; // the second of four passes
        set_abort(device->backend(), give_up, nullptr);
        CHECK_THROWS_WITH(Status::device, "failed a computation",
                          draft_feature_mirror_sync_range(ring.source(), *mirror, 8, 8));
        set_abort(device->backend(), nullptr, nullptr);
        CHECK(mirror->holds(0, 8));
        for (int64_t p = 8; p < 16; ++p) {
            CHECK(!mirror->holds(p, 1));
        }
        std::vector<float> have;
        CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, 0, 8, have), 8);
        CHECK(have == feature_rows(0, 8, width));
        CHECK_EQ(draft_feature_mirror_sync_range(ring.source(), *mirror, 8, 8), 8);
        CHECK_EQ(copy_feature_ring_range_to_host_f32(*mirror, 0, 16, have), 16);
        CHECK(have == feature_rows(0, 16, width));
    }
}

TEST(device_locks_are_taken_in_one_order) {
    const bool ordered = std::less<>()(here().get(), elsewhere().get());
    const auto & first = ordered ? here() : elsewhere();
    const auto & second = ordered ? elsewhere() : here();
    for (const auto & [own, other] : {std::pair{here(), elsewhere()}, std::pair{elsewhere(), here()}}) {
        const auto mirror = DraftFeatureMirror::create(own, mirror_options("f32", 4));
        const SourceRing ring(other, GGML_TYPE_F32, width, 4, {0, 4});
        auto guard = first->lock();
        std::thread copy([&] { draft_feature_mirror_sync_range(ring.source(), *mirror, 0, 4); });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        // Whoever waits for the first lock holds no second one.
        const auto probe = std::async(std::launch::async, [&] { second->lock(); });
        const bool is_free = probe.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
        guard.unlock();
        copy.join();
        CHECK(is_free);
        CHECK(mirror->holds(0, 4));
    }
}

TEST(two_threads_in_opposite_directions) {
    // Each mirror copies from the other one's device; locks taken in a fixed order cannot block each other.
    const auto work = [](const std::shared_ptr<Device> & own, const std::shared_ptr<Device> & other, bool * good) {
        const auto mirror = DraftFeatureMirror::create(own, mirror_options("q8_0", 16));
        const SourceRing ring(other, GGML_TYPE_BF16, width, 16, {0, 16});
        LoneTensor dst(other, GGML_TYPE_F32, width, 16);
        std::vector<float> host;
        *good = true;
        for (int i = 0; i < 500; ++i) {
            const int64_t n = i % 16 + 1;
            *good = *good && draft_feature_mirror_sync_range(ring.source(), *mirror, 0, n) == n &&
                    copy_feature_ring_range_to_tensor(*mirror, dst.get(), other, 0, n) == n &&
                    copy_feature_ring_range_to_host_f32(*mirror, 0, n, host) == n;
            const std::vector<float> device_rows = dst.values();
            *good = *good && std::equal(host.begin(), host.end(), device_rows.begin());
        }
    };
    bool good[2] = {false, false};
    std::thread a(work, here(), elsewhere(), &good[0]);
    std::thread b(work, elsewhere(), here(), &good[1]);
    a.join();
    b.join();
    CHECK(good[0]);
    CHECK(good[1]);
}
