#include "cuda/rows.hpp"

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/pack.cuh"

namespace dflash::cuda {
namespace {

__device__ __forceinline__ float sigmoid(float x) {
    return __frcp_rn(1.0f + __expf(-x));
}
__device__ __forceinline__ float silu(float x) {
    return x * sigmoid(x);
}
__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

__device__ __forceinline__ float4 load_4(const float * p) {
    return *reinterpret_cast<const float4 *>(p);
}
__device__ __forceinline__ void store_4(float * p, float4 v) {
    *reinterpret_cast<float4 *>(p) = v;
}
template <typename F> __device__ __forceinline__ float4 map(float4 a, float4 b, F f) {
    return make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}

/// Calls f(i, h, column) for each run of four values that this thread holds of a row of k.
template <typename F> __device__ __forceinline__ void each_run(int k, F f) {
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

__global__ void __launch_bounds__(pack_threads)
    add_norm_kernel(const float * a, const float * b, float * sum, const float * weight, float eps, Rows rows) {
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
            const float4 v =
                map(value[i][h], load_4(weight + column), [factor](float x, float w) { return x * factor * w; });
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
            const float4 v = map(load_4(gate + at + column), load_4(other + at + column),
                                 [](float x, float y) { return kind == Gate::swiglu ? silu(x) * y : y * sigmoid(x); });
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
__global__ void __launch_bounds__(pack_threads)
    gated_norm_kernel(const float * x, long long x_row, const float * z, const float * weight, float eps, Rows rows) {
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
constexpr int conv_rows = 4; // of a warp

template <int width> struct alignas(4 * width) Channels {
    float v[width];
};

/// A warp takes a head's channels, `width` to a lane, and conv_rows rows.
template <int width> __global__ void delta_conv_kernel(const ConvArgs args) {
    using Lane = Channels<width>;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int lane = threadIdx.x, head = blockIdx.x, first = blockIdx.y * conv_rows;
    const int channel = head * width * 32 + lane * width;
    const auto at = [&](auto * base, int row) {
        return reinterpret_cast<Lane *>(const_cast<float *>(base) + static_cast<size_t>(row) * args.channels + channel);
    };
    const auto column = [&](int i) { // of the window
        return i < history ? *at(args.state, i) : *at(args.rows, min(i - history, args.n_rows - 1));
    };
    Lane window[history + conv_rows], newest[history], taps[4];
#pragma unroll
    for (int i = 0; i < history + conv_rows; ++i) {
        window[i] = column(first + i);
    }
    float4 own_taps[width];
#pragma unroll
    for (int w = 0; w < width; ++w) {
        own_taps[w] = load_4(args.taps + static_cast<size_t>(channel + w) * 4);
        taps[0].v[w] = own_taps[w].x, taps[1].v[w] = own_taps[w].y;
        taps[2].v[w] = own_taps[w].z, taps[3].v[w] = own_taps[w].w;
    }
    if (first == 0) {
        if (args.new_state != nullptr) {
#pragma unroll
            for (int t = 0; t < history; ++t) {
                newest[t] = column(args.n_rows + t);
            }
#pragma unroll
            for (int t = 0; t < history; ++t) { // no other warp reads the old state of these channels
                *at(args.new_state, t) = newest[t];
            }
        }
        if (args.window != nullptr) {
#pragma unroll
            for (int t = 0; t < history; ++t) {
                *at(args.window, t) = window[t];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < conv_rows; ++r) {
        const int row = first + r;
        if (row >= args.n_rows) {
            break;
        }
        if (args.window != nullptr) {
            *at(args.window, history + row) = window[history + r];
        }
        Lane y;
        float squares = 0.0f;
#pragma unroll
        for (int w = 0; w < width; ++w) {
            float sum = window[r].v[w] * taps[0].v[w];
            sum = fmaf(window[r + 1].v[w], taps[1].v[w], sum);
            sum = fmaf(window[r + 2].v[w], taps[2].v[w], sum);
            sum = fmaf(window[r + 3].v[w], taps[3].v[w], sum);
            y.v[w] = silu(sum);
            squares = fmaf(y.v[w], y.v[w], squares);
        }
        *at(args.mixed, row) = y;
        if (head < args.n_normed) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                squares += __shfl_xor_sync(~0u, squares, offset);
            }
            const float factor = rsqrtf(squares / (width * 32) + args.eps) * args.scale;
#pragma unroll
            for (int w = 0; w < width; ++w) {
                y.v[w] *= factor;
            }
            float * to = args.normed + (static_cast<size_t>(row) * args.n_normed + head) * (width * 32) + lane * width;
            *reinterpret_cast<Lane *>(to) = y;
        }
    }
}

constexpr int argmax_blocks = 32; // of a row
constexpr int argmax_threads = 256;

struct Best {
    float value;
    int index;
};
__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__global__ void __launch_bounds__(argmax_threads) argmax_kernel(const float * x, long long n, Best * best) {
    __shared__ Best shared[argmax_threads / 32];
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const float * row = x + blockIdx.y * n;
    const long long first = blockIdx.x * n / argmax_blocks, end = (blockIdx.x + 1) * n / argmax_blocks;
    Best mine = {-INFINITY, static_cast<int>(first)};
    for (long long i = first + threadIdx.x; i < end; i += argmax_threads) {
        mine = better(mine, {row[i], static_cast<int>(i)});
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        mine = better(mine, {__shfl_xor_sync(~0u, mine.value, offset), __shfl_xor_sync(~0u, mine.index, offset)});
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < argmax_threads / 32; ++i) {
            mine = better(mine, shared[i]);
        }
        best[blockIdx.y * argmax_blocks + blockIdx.x] = mine;
    }
}

__global__ void argmax_finish_kernel(const Best * best, int32_t * out) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    Best mine = best[blockIdx.x * argmax_blocks + threadIdx.x];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        mine = better(mine, {__shfl_xor_sync(~0u, mine.value, offset), __shfl_xor_sync(~0u, mine.index, offset)});
    }
    if (threadIdx.x == 0) {
        out[blockIdx.x] = mine.index;
    }
}
static_assert(argmax_blocks == 32, "one warp finishes a row");

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
    return launch(pack_kernel, dim3(static_cast<unsigned>(padded_rows(n_rows))), dim3(row_threads(output.k)), 0, stream,
                  x, static_cast<long long>(row_stride), rows_of(output, scratch));
}

cudaError_t add_norm(const float * a, const float * b, float * sum, const float * weight, float eps,
                     const RowOutput & output, const MatmulScratch & scratch, cudaStream_t stream) {
    if (!fits(output)) {
        return cudaErrorInvalidValue;
    }
    return launch(add_norm_kernel, dim3(static_cast<unsigned>(padded_rows(output.n_rows))), dim3(row_threads(output.k)),
                  0, stream, a, b, sum, weight, eps, rows_of(output, scratch));
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

cudaError_t delta_gates(const float * a, const float * bias, const float * rate, float * g, const float * b,
                        float * beta, int n_rows, int n_heads, cudaStream_t stream) {
    const int n = n_rows * n_heads, threads = 128;
    return launch(delta_gates_kernel, dim3(static_cast<unsigned>((n + threads - 1) / threads)), dim3(threads), 0,
                  stream, a, bias, rate, g, b, beta, n, n_heads);
}

cudaError_t delta_conv(const ConvArgs & args, cudaStream_t stream) {
    if ((args.head != 64 && args.head != 128) || args.channels % args.head != 0) {
        return cudaErrorInvalidValue;
    }
    const dim3 grid(static_cast<unsigned>(args.channels / args.head),
                    static_cast<unsigned>((args.n_rows + conv_rows - 1) / conv_rows));
    return args.head == 64 ? launch(delta_conv_kernel<2>, grid, dim3(32), 0, stream, args)
                           : launch(delta_conv_kernel<4>, grid, dim3(32), 0, stream, args);
}

size_t argmax_scratch_bytes(int n_rows) {
    return static_cast<size_t>(n_rows) * argmax_blocks * sizeof(Best);
}

cudaError_t argmax_rows(const float * x, int64_t n, int n_rows, int32_t * out, void * scratch, cudaStream_t stream) {
    auto * best = static_cast<Best *>(scratch);
    const cudaError_t error = launch(argmax_kernel, dim3(argmax_blocks, static_cast<unsigned>(n_rows)),
                                     dim3(argmax_threads), 0, stream, x, static_cast<long long>(n), best);
    return error != cudaSuccess ? error
                                : launch(argmax_finish_kernel, dim3(static_cast<unsigned>(n_rows)), dim3(argmax_blocks),
                                         0, stream, static_cast<const Best *>(best), out);
}

} // namespace dflash::cuda
