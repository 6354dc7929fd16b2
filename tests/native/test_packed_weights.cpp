#include "ggmlx/packed_weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "check.hpp"
#include "ggmlx/graph.hpp"

using namespace dflash;

namespace {

/// w x for a matrix [n_in, n_out] of random values in `type` and random rows; empty when no layout takes it.
std::vector<float> product(const std::shared_ptr<Device> & device, enum ggml_type type, int64_t n_in, int64_t n_out,
                           int64_t n_rows, bool packed) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(n_in * n_out));
    std::vector<float> rows(static_cast<size_t>(n_in * n_rows));
    for (std::vector<float> * list : {&values, &rows}) {
        for (float & value : *list) {
            value = normal(generator);
        }
    }
    std::vector<uint8_t> bytes(ggml_row_size(type, n_in) * static_cast<size_t>(n_out));
    ggml_quantize_chunk(type, values.data(), bytes.data(), 0, n_out, n_in, nullptr);

    PackedWeights weights(device, 1);
    TensorGroup plain(device, 1);
    ggml_tensor * w = packed ? weights.add(type, "w", n_in, n_out) : plain.add(type, "w", n_in, n_out);
    if (w == nullptr) {
        CHECK_EQ(weights.bytes(), 0u);
        return {};
    }
    if (packed) {
        weights.allocate("test");
        CHECK(weights.bytes() >= bytes.size());
        PackedWeights::write(w, bytes.data());
    } else {
        plain.allocate("test");
        tensor_write(w, bytes.data(), 0, bytes.size());
    }
    Graph graph(device, 8);
    ggml_tensor * x = graph.input(GGML_TYPE_F32, "x", n_in, n_rows);
    ggml_tensor * y = ggml_mul_mat(graph.ctx(), w, x);
    graph.keep(y);
    graph.finish("product");
    graph.write(x, rows.data(), 0, rows.size() * sizeof(float));
    graph.compute();
    std::vector<float> out(static_cast<size_t>(n_out * n_rows));
    graph.read(y, out.data(), 0, out.size() * sizeof(float));
    return out;
}

double largest_difference(const std::vector<float> & a, const std::vector<float> & b, int64_t n) {
    double largest = 0.0;
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        largest = std::max(largest, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    }
    return largest;
}

} // namespace

TEST(packed_products_equal_plain_ones) {
    int n_packed = 0;
    for (const int32_t n_threads : {1, 2}) {
        const std::shared_ptr<Device> device = Device::open("cpu", n_threads);
        for (const enum ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
            for (const int64_t n_rows : {1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 70}) {
                const std::vector<float> got = product(device, type, 512, 96, n_rows, true);
                if (got.empty()) {
                    continue;
                }
                const std::vector<float> wanted = product(device, type, 512, 96, n_rows, false);
                // Sums of 512 products of unit variance. Some layouts round the rows to 8 bits otherwise, AMX does not.
                CHECK(largest_difference(got, wanted, 96 * n_rows) < (type == GGML_TYPE_Q8_0 ? 1e-3 : 0.3));
                ++n_packed;
            }
        }
    }
    std::printf("%d products in packed layouts\n", n_packed);
}

#if defined(__x86_64__)
TEST(rows_of_amx_tiles_do_not_depend_on_their_number) { // the only packed layout of Q8_0 on x86
    const std::shared_ptr<Device> device = Device::open("cpu", 1);
    const std::vector<float> one = product(device, GGML_TYPE_Q8_0, 256, 64, 1, true);
    if (one.empty()) {
        return; // a CPU without AMX
    }
    // Few rows and many are multiplied by different kernels: the rows of each must be those of the largest.
    const std::vector<float> most = product(device, GGML_TYPE_Q8_0, 256, 64, 40, true);
    CHECK(largest_difference(most, one, 64) == 0.0);
    for (int64_t n_rows = 2; n_rows <= 20; ++n_rows) {
        for (const int32_t n_threads : {1, 3}) {
            const std::shared_ptr<Device> threads = Device::open("cpu", n_threads);
            const std::vector<float> got = product(threads, GGML_TYPE_Q8_0, 256, 64, n_rows, true);
            CHECK(largest_difference(got, most, 64 * n_rows) == 0.0);
        }
    }
}

TEST(tiles_that_another_library_released_are_set_up_again) {
    const std::shared_ptr<Device> device = Device::open("cpu", 1);
    const std::vector<float> before = product(device, GGML_TYPE_Q8_0, 256, 64, 16, true);
    if (before.empty()) {
        return;
    }
    __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"); // tilerelease
    CHECK(largest_difference(product(device, GGML_TYPE_Q8_0, 256, 64, 16, true), before, 64 * 16) == 0.0);
}
#endif

TEST(what_no_layout_takes_stays_as_it_is) {
    PackedWeights weights(Device::open("cpu", 1), 4);
    CHECK(weights.add(GGML_TYPE_F32, "f32", 256, 64) == nullptr);
    CHECK(weights.add(GGML_TYPE_F16, "f16", 256, 64) == nullptr);
    CHECK(weights.add(GGML_TYPE_Q8_0, "narrow", 256, 3) == nullptr);
    weights.allocate("nothing");
    CHECK_EQ(weights.bytes(), 0u);
}
