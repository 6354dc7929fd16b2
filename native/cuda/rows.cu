#include "cuda/rows.hpp"

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/pack.cuh"

namespace dflash::cuda {
namespace {

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float4 load_4(const float * p) { return *reinterpret_cast<const float4 *>(p); }
__device__ __forceinline__ void store_4(float * p, float4 v) { *reinterpret_cast<float4 *>(p) = v; }
template <typename F>
__device__ __forceinline__ float4 map(float4 a, float4 b, F f) {
    return make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}

/// Calls f(i, h, column) for each run of four values that this thread holds of a row of k.
template <typename F>
__device__ __forceinline__ void each_run(int k, F f) {
#pragma unroll
    for (int i = 0; i < pack_items; ++i) {
        const int item = threadIdx.x + i * blockDim.x;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = item_column(item) + 32 * h;
            if (column < k) {
                f(i, h, column);
            }
        }
    }
}

struct Rows {
    float * out;
    int n_rows, k;
    PackTarget pack;
};

__global__ void __launch_bounds__(pack_threads) pack_kernel(const float * x, long long row_stride, Rows rows) {
    __shared__ float shared[32];
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int row = blockIdx.x;
    float4 value[pack_items][2] = {};
    if (row < rows.n_rows) {
        each_run(rows.k, [&](int i, int h, int column) { value[i][h] = load_4(x + row * row_stride + column); });
    }
    pack_row(value, row, rows.n_rows, rows.pack, shared);
}

__global__ void __launch_bounds__(pack_threads) add_norm_kernel(const float * a, const float * b, float * sum,
                                                                const float * weight, float eps, Rows rows) {
    __shared__ float shared[32];
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int row = blockIdx.x, k = rows.k;
    const size_t at = static_cast<size_t>(row) * k;
    float4 value[pack_items][2] = {};
    float squares = 0.0f;
    if (row < rows.n_rows) {
        each_run(k, [&](int i, int h, int column) {
            float4 v = load_4(a + at + column);
            if (b != nullptr) {
                v = map(v, load_4(b + at + column), [](float x, float y) { return x + y; });
            }
            value[i][h] = v;
            squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
        });
    }
    squares = block_reduce(squares, 0.0f, shared, [](float x, float y) { return x + y; });
    const float factor = rsqrtf(squares / static_cast<float>(k) + eps);
    if (row < rows.n_rows) {
        each_run(k, [&](int i, int h, int column) {
            if (b != nullptr) {
                store_4(sum + at + column, value[i][h]);
            }
            const float4 v = map(value[i][h], load_4(weight + column), [factor](float x, float w) { return x * factor * w; });
            value[i][h] = v;
            store_4(rows.out + at + column, v);
        });
    }
    if (rows.pack.packed != nullptr) {
        pack_row(value, row, rows.n_rows, rows.pack, shared);
    }
}

template <Gate kind>
__global__ void __launch_bounds__(pack_threads) gate_kernel(const float * gate, const float * other, Rows rows) {
    __shared__ float shared[32];
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int row = blockIdx.x;
    const size_t at = static_cast<size_t>(row) * rows.k;
    float4 value[pack_items][2] = {};
    if (row < rows.n_rows) {
        each_run(rows.k, [&](int i, int h, int column) {
            const float4 v = map(load_4(gate + at + column), load_4(other + at + column), [](float x, float y) {
                return kind == Gate::swiglu ? silu(x) * y : y * sigmoid(x);
            });
            value[i][h] = v;
            store_4(rows.out + at + column, v);
        });
    }
    if (rows.pack.packed != nullptr) {
        pack_row(value, row, rows.n_rows, rows.pack, shared);
    }
}

/// 16 or 8 neighbouring threads hold a head of 128 or 64 values.
template <int head>
__global__ void __launch_bounds__(pack_threads) gated_norm_kernel(const float * x, long long x_row, const float * z,
                                                                  const float * weight, float eps, Rows rows) {
    __shared__ float shared[32];
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int row = blockIdx.x;
    const size_t at = static_cast<size_t>(row) * rows.k;
    float4 value[pack_items][2] = {};
    if (row < rows.n_rows) {
        each_run(rows.k, [&](int i, int h, int column) { value[i][h] = load_4(x + row * x_row + column); });
    }
#pragma unroll
    for (int i = 0; i < pack_items; ++i) {
        float squares = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 v = value[i][h];
            squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
        }
#pragma unroll
        for (int offset = head / 16; offset > 0; offset /= 2) {
            squares += __shfl_xor_sync(~0u, squares, offset);
        }
        const float factor = rsqrtf(squares / head + eps);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = item_column(threadIdx.x + i * blockDim.x) + 32 * h;
            if (row < rows.n_rows && column < rows.k) {
                const float4 normed = map(value[i][h], load_4(weight + column % head),
                                          [factor](float v, float w) { return v * factor * w; });
                const float4 v = map(normed, load_4(z + at + column), [](float n, float g) { return n * silu(g); });
                value[i][h] = v;
                store_4(rows.out + at + column, v);
            }
        }
    }
    if (rows.pack.packed != nullptr) {
        pack_row(value, row, rows.n_rows, rows.pack, shared);
    }
}

__global__ void delta_gates_kernel(const float * a, const float * bias, const float * rate, float * g, const float * b,
                                   float * beta, int n, int n_heads) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) {
        const int head = i % n_heads;
        const float alpha = a[i], other = b[i];
        g[i] = softplus(alpha + bias[head]) * rate[head];
        beta[i] = sigmoid(other);
    }
}

constexpr int history = 3;

/// A warp takes a head's channels, `width` to a lane, and rows_per_warp rows.
template <int width>
__global__ void delta_conv_kernel(const ConvArgs args, int rows_per_warp) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int lane = threadIdx.x, head = blockIdx.x, first = blockIdx.y * rows_per_warp;
    const int channel = head * width * 32 + lane * width;
    const auto column = [&](int i, int w) { // of the window
        return i < history ? args.state[static_cast<size_t>(i) * args.channels + channel + w]
                           : args.rows[static_cast<size_t>(i - history) * args.channels + channel + w];
    };
    float taps[width][4], past[width][history];
#pragma unroll
    for (int w = 0; w < width; ++w) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            taps[w][t] = args.taps[static_cast<size_t>(channel + w) * 4 + t];
        }
#pragma unroll
        for (int t = 0; t < history; ++t) {
            past[w][t] = column(first + t, w);
            if (args.window != nullptr && first == 0) {
                args.window[static_cast<size_t>(t) * args.channels + channel + w] = past[w][t];
            }
        }
    }
    if (args.new_state != nullptr && first == 0) {
        // Only this warp reads the old state of its channels, and it has.
        float last[width][history];
#pragma unroll
        for (int w = 0; w < width; ++w) {
#pragma unroll
            for (int t = 0; t < history; ++t) {
                last[w][t] = column(args.n_rows + t, w);
            }
        }
#pragma unroll
        for (int w = 0; w < width; ++w) {
#pragma unroll
            for (int t = 0; t < history; ++t) {
                args.new_state[static_cast<size_t>(t) * args.channels + channel + w] = last[w][t];
            }
        }
    }
    const bool normed = head < args.n_normed;
    for (int row = first; row < min(first + rows_per_warp, args.n_rows); ++row) {
        float y[width];
        float squares = 0.0f;
#pragma unroll
        for (int w = 0; w < width; ++w) {
            const float now = args.rows[static_cast<size_t>(row) * args.channels + channel + w];
            if (args.window != nullptr) {
                args.window[static_cast<size_t>(history + row) * args.channels + channel + w] = now;
            }
            float sum = past[w][0] * taps[w][0];
            sum = fmaf(past[w][1], taps[w][1], sum);
            sum = fmaf(past[w][2], taps[w][2], sum);
            sum = fmaf(now, taps[w][3], sum);
            past[w][0] = past[w][1];
            past[w][1] = past[w][2];
            past[w][2] = now;
            y[w] = silu(sum);
            args.mixed[static_cast<size_t>(row) * args.channels + channel + w] = y[w];
            squares = fmaf(y[w], y[w], squares);
        }
        if (normed) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                squares += __shfl_xor_sync(~0u, squares, offset);
            }
            const float factor = rsqrtf(squares / (width * 32) + args.eps) * args.scale;
            float * to = args.normed + (static_cast<size_t>(row) * args.n_normed + head) * (width * 32) + lane * width;
#pragma unroll
            for (int w = 0; w < width; ++w) {
                to[w] = y[w] * factor;
            }
        }
    }
}

Rows rows_of(const RowOutput & output, const MatmulScratch & scratch) {
    return {output.out, output.n_rows, output.k, pack_target(scratch, output.n_rows, output.k)};
}

bool fits(const RowOutput & o) {
    return o.n_rows >= 1 && o.n_rows <= max_batch && o.k >= 4 && o.k % 4 == 0 && o.k <= pack_threads * pack_items * 8;
}

} // namespace

cudaError_t pack_activations(const float * x, int64_t row_stride, int n_rows, int64_t k, const MatmulScratch & scratch,
                             cudaStream_t stream) {
    const RowOutput output = {nullptr, n_rows, static_cast<int>(k)};
    if (!fits(output)) {
        return cudaErrorInvalidValue;
    }
    return launch(pack_kernel, dim3(static_cast<unsigned>(padded_rows(n_rows))), dim3(row_threads(output.k)), 0, stream, x,
                  static_cast<long long>(row_stride), rows_of(output, scratch));
}

cudaError_t add_norm(const float * a, const float * b, float * sum, const float * weight, float eps,
                     const RowOutput & output, const MatmulScratch & scratch, cudaStream_t stream) {
    if (!fits(output)) {
        return cudaErrorInvalidValue;
    }
    return launch(add_norm_kernel, dim3(static_cast<unsigned>(padded_rows(output.n_rows))), dim3(row_threads(output.k)), 0,
                  stream, a, b, sum, weight, eps, rows_of(output, scratch));
}

cudaError_t gate_rows(Gate kind, const float * gate, const float * value, const RowOutput & output,
                      const MatmulScratch & scratch, cudaStream_t stream) {
    if (!fits(output)) {
        return cudaErrorInvalidValue;
    }
    const dim3 grid(static_cast<unsigned>(padded_rows(output.n_rows))), block(row_threads(output.k));
    const Rows rows = rows_of(output, scratch);
    return kind == Gate::swiglu ? launch(gate_kernel<Gate::swiglu>, grid, block, 0, stream, gate, value, rows)
                                : launch(gate_kernel<Gate::sigmoid>, grid, block, 0, stream, gate, value, rows);
}

cudaError_t gated_norm(const float * x, int64_t x_row, const float * z, const float * weight, float eps, int head,
                       const RowOutput & output, const MatmulScratch & scratch, cudaStream_t stream) {
    if (!fits(output) || (head != 64 && head != 128) || output.k % head != 0) {
        return cudaErrorInvalidValue;
    }
    const dim3 grid(static_cast<unsigned>(padded_rows(output.n_rows))), block(row_threads(output.k));
    const Rows rows = rows_of(output, scratch);
    const auto stride = static_cast<long long>(x_row);
    return head == 64 ? launch(gated_norm_kernel<64>, grid, block, 0, stream, x, stride, z, weight, eps, rows)
                      : launch(gated_norm_kernel<128>, grid, block, 0, stream, x, stride, z, weight, eps, rows);
}

cudaError_t delta_gates(const float * a, const float * bias, const float * rate, float * g, const float * b, float * beta,
                        int n_rows, int n_heads, cudaStream_t stream) {
    const int n = n_rows * n_heads, threads = 128;
    return launch(delta_gates_kernel, dim3(static_cast<unsigned>((n + threads - 1) / threads)), dim3(threads), 0, stream, a,
                  bias, rate, g, b, beta, n, n_heads);
}

cudaError_t delta_conv(const ConvArgs & args, cudaStream_t stream) {
    if ((args.head != 64 && args.head != 128) || args.channels % args.head != 0) {
        return cudaErrorInvalidValue;
    }
    // In place, a row may only be replaced once the rows behind it have been computed: one warp then takes all.
    const int per_warp = args.mixed == args.rows ? args.n_rows : 8;
    const dim3 grid(static_cast<unsigned>(args.channels / args.head),
                    static_cast<unsigned>((args.n_rows + per_warp - 1) / per_warp));
    return args.head == 64 ? launch(delta_conv_kernel<2>, grid, dim3(32), 0, stream, args, per_warp)
                           : launch(delta_conv_kernel<4>, grid, dim3(32), 0, stream, args, per_warp);
}

} // namespace dflash::cuda
