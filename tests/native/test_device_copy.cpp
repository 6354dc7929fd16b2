#include "ggmlx/device_copy.hpp"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ggmlx/graph.hpp"
#include "ggmlx/tensors.hpp"

using namespace dflash;

namespace {

constexpr uint8_t canary = 0xa5;

std::vector<uint8_t> pattern(uint64_t n_bytes) {
    std::vector<uint8_t> bytes(n_bytes);
    for (uint64_t i = 0; i < n_bytes; ++i) {
        bytes[i] = static_cast<uint8_t>((i * 131 + i / 251) % 255); // never twice the same over two pieces
    }
    return bytes;
}

struct Bytes {
    Bytes(const std::shared_ptr<Device> & where, uint64_t n_bytes) : device(where), group(where, 1) {
        tensor = group.add(GGML_TYPE_I8, "bytes", static_cast<int64_t>(n_bytes));
        group.allocate("test");
        group.clear(canary);
    }
    std::vector<uint8_t> read() const {
        std::vector<uint8_t> bytes(ggml_nbytes(tensor));
        tensor_read(tensor, bytes.data(), 0, bytes.size());
        return bytes;
    }
    std::shared_ptr<Device> device;
    TensorGroup group;
    ggml_tensor * tensor = nullptr;
};

/// Every device of this machine twice: two queues of one device, and each pair of devices.
std::vector<std::shared_ptr<Device>> devices() {
    std::vector<std::shared_ptr<Device>> all;
    for (const DeviceInfo & info : Device::list()) {
        if (info.kind != "meta" && info.kind != "accel") {
            all.push_back(Device::open(info.name, 1));
            all.push_back(Device::open(info.name, 1));
        }
    }
    return all;
}

const std::shared_ptr<Device> & cpu() {
    static const std::shared_ptr<Device> device = Device::open("cpu", 1);
    return device;
}

} // namespace

TEST(bytes_arrive_and_nothing_else_changes) {
    const uint64_t piece = copy_staging_bytes;
    for (const auto & from : devices()) {
        for (const auto & to : devices()) {
            for (const uint64_t n : {uint64_t{1}, uint64_t{4099}, piece - 1, piece, piece + 1, 2 * piece + 17}) {
                Bytes src(from, n + 5);
                const std::vector<uint8_t> wanted = pattern(n + 5);
                tensor_write(src.tensor, wanted.data(), 0, wanted.size());
                for (const CopyRoute route : {CopyRoute::shortest, CopyRoute::host}) {
                    Bytes dst(to, n + 9);
                    const CopyPath path = copy_between_devices(*from, src.tensor, 3, *to, dst.tensor, 7, n, route);
                    CHECK(path != CopyPath::none);
                    CHECK(route == CopyRoute::shortest || path == CopyPath::staged);
                    CHECK(route == CopyRoute::host || from->name() != to->name() || path == CopyPath::local);
                    CHECK(route == CopyRoute::host || from->name() == to->name() || path != CopyPath::local);
                    const std::vector<uint8_t> got = dst.read();
                    CHECK(std::memcmp(got.data() + 7, wanted.data() + 3, n) == 0);
                    for (const uint64_t i : {uint64_t{0}, uint64_t{6}, n + 7, n + 8}) {
                        CHECK_EQ(static_cast<int>(got[i]), static_cast<int>(canary));
                    }
                    CHECK(src.read() == wanted);
                }
            }
        }
    }
}

// A CPU computes at once, so only a GPU can be caught not waiting.
TEST(what_is_queued_on_the_source_is_waited_for) {
    for (const auto & from : devices()) {
        const int64_t n = 256;
        Graph graph(from, 16);
        ggml_tensor * x = graph.input(GGML_TYPE_F32, "x", n, n);
        ggml_tensor * y = ggml_mul_mat(graph.ctx(), x, x);
        graph.keep(y);
        graph.finish("product");
        const std::vector<float> ones(static_cast<size_t>(n * n), 1.0f);
        graph.write(x, ones.data(), 0, ones.size() * sizeof(float));
        Bytes dst(cpu(), ones.size() * sizeof(float));
        graph.compute_async();
        copy_between_devices(*from, y, 0, *cpu(), dst.tensor, 0, ones.size() * sizeof(float));
        const std::vector<uint8_t> got = dst.read();
        for (const size_t i : {size_t{0}, ones.size() / 2, ones.size() - 1}) {
            float value = 0.0f;
            std::memcpy(&value, got.data() + i * sizeof(float), sizeof(float));
            CHECK_EQ(value, static_cast<float>(n));
        }
    }
}

TEST(parts_of_one_tensor) {
    Bytes both(cpu(), 100);
    const std::vector<uint8_t> wanted = pattern(50);
    tensor_write(both.tensor, wanted.data(), 0, 50);
    CHECK(copy_between_devices(*cpu(), both.tensor, 0, *cpu(), both.tensor, 50, 50) == CopyPath::local);
    CHECK(std::memcmp(both.read().data() + 50, wanted.data(), 50) == 0);
    const std::vector<uint8_t> before = both.read();
    CHECK_THROWS_WITH(Status::invalid, "49 bytes apart",
                      copy_between_devices(*cpu(), both.tensor, 0, *cpu(), both.tensor, 49, 50));
    CHECK_THROWS_WITH(Status::invalid, "0 bytes apart",
                      copy_between_devices(*cpu(), both.tensor, 9, *cpu(), both.tensor, 9, 1, CopyRoute::host));
    CHECK(both.read() == before);
}

TEST(zero_bytes_copy_nothing_but_are_checked) {
    const auto other = Device::open("cpu", 1);
    Bytes src(cpu(), 8);
    Bytes dst(other, 8);
    for (const CopyRoute route : {CopyRoute::shortest, CopyRoute::host}) {
        CHECK(copy_between_devices(*cpu(), src.tensor, 8, *other, dst.tensor, 8, 0, route) == CopyPath::none);
        CHECK(copy_between_devices(*cpu(), src.tensor, 0, *cpu(), src.tensor, 0, 0, route) == CopyPath::none);
        CHECK_THROWS_WITH(Status::invalid, "[9, +0)",
                          copy_between_devices(*cpu(), src.tensor, 9, *other, dst.tensor, 0, 0, route));
    }
    CHECK(dst.read() == std::vector<uint8_t>(8, canary));
}

TEST(misuse_is_refused_before_a_byte_moves) {
    Bytes src(cpu(), 16);
    Bytes dst(cpu(), 8);
    const std::vector<uint8_t> wanted = pattern(16);
    tensor_write(src.tensor, wanted.data(), 0, 16);
    const auto copy = [&](const ggml_tensor * from, uint64_t at, ggml_tensor * to, uint64_t there, uint64_t n) {
        return copy_between_devices(*cpu(), from, at, *cpu(), to, there, n);
    };
    CHECK_THROWS_WITH(Status::invalid, "no source", copy(nullptr, 0, dst.tensor, 0, 1));
    CHECK_THROWS_WITH(Status::invalid, "no destination", copy(src.tensor, 0, nullptr, 0, 1));
    CHECK_THROWS_WITH(Status::invalid, "destination bytes [0, +9) of bytes, which has 8",
                      copy(src.tensor, 0, dst.tensor, 0, 9));
    CHECK_THROWS_WITH(Status::invalid, "source bytes [9, +8) of bytes, which has 16",
                      copy(src.tensor, 9, dst.tensor, 0, 8));
    CHECK_THROWS_WITH(Status::invalid, "source", copy(src.tensor, 1, dst.tensor, 0, UINT64_MAX));
    CHECK_THROWS_WITH(Status::invalid, "source", copy(src.tensor, UINT64_MAX, dst.tensor, 0, 2));
    TensorGroup bare(cpu(), 1);
    ggml_tensor * nowhere = bare.add(GGML_TYPE_I8, "nowhere", 8);
    CHECK_THROWS_WITH(Status::invalid, "nowhere has no memory", copy(nowhere, 0, dst.tensor, 0, 1));
    CHECK_THROWS_WITH(Status::invalid, "nowhere has no memory", copy(src.tensor, 0, nowhere, 0, 1));
    CHECK(dst.read() == std::vector<uint8_t>(8, canary));
    for (const auto & device : devices()) {
        if (!device->is_cpu()) {
            Bytes far(device, 8);
            CHECK_THROWS_WITH(Status::mismatch, "not on CPU", copy(far.tensor, 0, dst.tensor, 0, 8));
        }
    }
}

TEST(a_tensor_on_several_devices_is_refused) {
    const auto everywhere = [](const ggml_tensor *, void *) {
        ggml_backend_meta_split_state state{};
        state.axis = GGML_BACKEND_SPLIT_AXIS_MIRRORED;
        state.n_segments = 1;
        state.nr[0] = 1;
        return state;
    };
    ggml_backend_dev_t part = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_dev_t parts[] = {part, part};
    ggml_backend_dev_t meta = ggml_backend_meta_device(parts, 2, everywhere, nullptr);
    TensorGroup group(cpu(), 1);
    ggml_tensor * spanning = group.add(GGML_TYPE_F32, "spanning", 8);
    group.allocate("test", ggml_backend_dev_buffer_type(meta));
    Bytes plain(cpu(), 32);
    CHECK_THROWS_WITH(Status::unsupported, "spanning spans devices",
                      copy_between_devices(*cpu(), spanning, 0, *cpu(), plain.tensor, 0, 32));
    CHECK_THROWS_WITH(Status::unsupported, "spanning spans devices",
                      copy_between_devices(*cpu(), plain.tensor, 0, *cpu(), spanning, 0, 32));
    CHECK(plain.read() == std::vector<uint8_t>(32, canary));
}

TEST(opposite_directions_at_once_do_not_lock_each_other_out) {
    const auto other = Device::open("cpu", 1);
    Bytes a(cpu(), 64);
    Bytes b(other, 64);
    Bytes a_in(cpu(), 64);
    Bytes b_in(other, 64);
    std::atomic<int> n_done{0};
    const auto many = [&n_done](const Bytes & from, const Bytes & to) {
        for (int i = 0; i < 2000; ++i) {
            n_done +=
                copy_between_devices(*from.device, from.tensor, 0, *to.device, to.tensor, 0, 64) == CopyPath::local;
        }
    };
    std::thread there([&] { many(a, b_in); });
    std::thread back([&] { many(b, a_in); });
    there.join();
    back.join();
    CHECK_EQ(n_done.load(), 4000);
    CHECK(a_in.read() == b.read());
}
