// Times pydflash's matrix products of few rows, without a model:
//
//     nvcc -std=c++17 -O3 -arch=native -Inative scripts/bench_kernels.cu native/cuda/rows_matmul.cu native/cuda/rows.cu -o bench_kernels
//     ./bench_kernels [FEATURES K]
//
// Prints, for each weight type and number of rows, microseconds of one product, the bytes of its weights over that time,
// and that as a share of a device-to-device copy in the same run (bytes read plus bytes written). Products are replayed
// from a graph and go through more weights than the second-level cache holds. Medians.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cuda/rows_matmul.hpp"

using namespace dflash::cuda;

static void check(cudaError_t error, int line) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "bench_kernels: line %d: %s\n", line, cudaGetErrorString(error));
        std::exit(1);
    }
}
#define CHECK(call) check((call), __LINE__)

struct Type {
    WeightType type;
    const char * name;
    size_t unit_bytes; // of 256 weights
};
constexpr Type types[] = {{WeightType::q4_k, "q4_k", 144}, {WeightType::q5_k, "q5_k", 176},   {WeightType::q6_k, "q6_k", 210},
                          {WeightType::q8_0, "q8_0", 272}, {WeightType::q4_0, "q4_0", 144}, {WeightType::iq4_xs, "iq4_xs", 136},
                          {WeightType::nvfp4, "nvfp4", 144}};

template <typename Work>
static double median_us(cudaStream_t stream, int repeats, Work work) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < repeats + 2; ++i) {
        CHECK(cudaEventRecord(begin, stream));
        work();
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) {
            times.push_back(ms);
        }
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e3;
}

static void * allocate(size_t bytes) {
    void * p = nullptr;
    CHECK(cudaMalloc(&p, bytes));
    CHECK(cudaMemset(p, 0, bytes));
    return p;
}

int main(int argc, char ** argv) {
    std::vector<std::pair<int, int>> shapes = {{34816, 5120}, {17408, 5120}, {5120, 17408}, {16384, 5120}, {5120, 6144}};
    if (argc == 3) {
        shapes = {{std::atoi(argv[1]), std::atoi(argv[2])}};
    }
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    const int n_multiprocessors = device.multiProcessorCount;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    MatmulScratch scratch;
    scratch.packed = allocate(packed_bytes(32768));
    scratch.row_scale = static_cast<float *>(allocate(max_batch * sizeof(float)));
    scratch.partials = static_cast<float *>(allocate(partial_bytes(n_multiprocessors)));
    scratch.arrivals = static_cast<unsigned *>(allocate(counter_bytes));

    const size_t copied = size_t{2} << 30;
    void *from = allocate(copied), *to = allocate(copied);
    const double copy = 2.0 * copied / median_us(stream, 5, [&] {
                            CHECK(cudaMemcpyAsync(to, from, copied, cudaMemcpyDeviceToDevice, stream));
                        }) / 1e6;
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
    std::printf("%s, copy %.2f TB/s\n%-8s %7s %7s %9s", device.name, copy, "type", "rows of W", "k", "MB");
    for (int rows : {1, 8, 16, 32}) {
        std::printf("  | %2d rows: us, TB/s, share", rows);
    }
    std::printf("\n");
    std::mt19937 random(1);
    for (const Type & t : types) {
        for (const auto & [features, k] : shapes) {
            const size_t row_bytes = static_cast<size_t>(k) / 256 * t.unit_bytes, bytes = row_bytes * features;
            const int copies = static_cast<int>(std::clamp<size_t>((size_t{600} << 20) / bytes, 2, 40));
            std::vector<unsigned> data(bytes / 4);
            for (unsigned & word : data) {
                word = random();
            }
            auto * weights = static_cast<unsigned char *>(allocate(bytes * copies));
            for (int c = 0; c < copies; ++c) {
                CHECK(cudaMemcpy(weights + c * bytes, data.data(), data.size() * 4, cudaMemcpyHostToDevice));
            }
            std::vector<float> rows_of_x(static_cast<size_t>(32) * k);
            for (float & value : rows_of_x) {
                value = std::normal_distribution<float>()(random);
            }
            auto * x = static_cast<float *>(allocate(rows_of_x.size() * sizeof(float)));
            CHECK(cudaMemcpy(x, rows_of_x.data(), rows_of_x.size() * sizeof(float), cudaMemcpyHostToDevice));
            auto * out = static_cast<float *>(allocate(static_cast<size_t>(32) * features * sizeof(float)));
            std::printf("%-8s %7d %9d %9.1f", t.name, features, k, bytes / 1e6);
            for (int rows : {1, 8, 16, 32}) {
                CHECK(pack_activations(x, k, rows, k, scratch, stream));
                CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
                for (int c = 0; c < copies; ++c) {
                    const MatmulPart part = {weights + c * bytes, out, features};
                    CHECK(rows_matmul(t.type, &part, 1, k, row_bytes, rows, scratch, n_multiprocessors, stream));
                }
                cudaGraph_t graph;
                cudaGraphExec_t replay;
                CHECK(cudaStreamEndCapture(stream, &graph));
                CHECK(cudaGraphInstantiate(&replay, graph, 0));
                const double us = median_us(stream, 5, [&] { CHECK(cudaGraphLaunch(replay, stream)); }) / copies;
                std::printf("  | %7.1f %5.2f %3.0f %%      ", us, bytes / us / 1e6, 100 * bytes / us / 1e6 / copy);
                CHECK(cudaGraphExecDestroy(replay));
                CHECK(cudaGraphDestroy(graph));
            }
            std::printf("\n");
            for (void * p : {static_cast<void *>(weights), static_cast<void *>(x), static_cast<void *>(out)}) {
                CHECK(cudaFree(p));
            }
        }
    }
    return 0;
}
