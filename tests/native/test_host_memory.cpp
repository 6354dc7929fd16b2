#include "ggmlx/host_memory.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace dflash;

TEST(a_prepared_block_is_the_next_one_taken) {
    const auto device = Device::open("cpu", 1);
    HostMemoryPool & pool = device->host_memory();
    const uint64_t n = 3 << 20;
    pool.prepare(*device, n);
    pool.stop();
    CHECK(pool.free_bytes() >= n);
    const uint64_t before = pool.free_bytes();
    pool.prepare(*device, n - 1000); // the free one serves
    pool.stop();
    CHECK_EQ(pool.free_bytes(), before);
    pool.prepare(*device, n / 8); // it is too large for this
    pool.stop();
    CHECK(pool.free_bytes() > before);
    {
        const HostMemory memory(device, n, "test");
        CHECK(memory.size() >= n);
        CHECK(!memory.is_pinned());
        memory.data()[n - 1] = 7;
        CHECK(pool.free_bytes() < before);
    }
    pool.prepare(*device, 0);
    pool.stop();
    pool.stop();
    CHECK(pool.take(uint64_t{1} << 40).data() == nullptr);
}

TEST(a_block_that_cannot_be_had_is_not_kept) {
    const auto device = Device::open("cpu", 1);
    device->host_memory().prepare(*device, uint64_t{1} << 62);
    device->host_memory().stop();
    CHECK_EQ(device->host_memory().free_bytes(), 0u);
}

TEST(threads_prepare_and_take_at_once) {
    const auto device = Device::open("cpu", 1);
    std::atomic<int64_t> taken{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] {
            for (int j = 0; j < 200; ++j) {
                const uint64_t n = static_cast<uint64_t>(1 + i + j % 3) << 16;
                device->host_memory().prepare(*device, n);
                const HostMemory memory(device, n, "test");
                memory.data()[0] = 1;
                taken += memory.size() >= n ? 1 : 0;
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK_EQ(taken.load(), 800);
    CHECK(device->host_memory().free_bytes() < uint64_t{3} << 20); // at most two blocks stay
}

TEST(a_device_waits_for_what_is_being_prepared) {
    for (int i = 0; i < 20; ++i) {
        const auto device = Device::open("cpu", 1);
        device->host_memory().prepare(*device, uint64_t{64} << 20);
        CHECK(device->is_cpu());
    }
}
