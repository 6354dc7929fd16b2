#include "cuda/attention.hpp"

#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/launch.cuh"

namespace dflash::cuda {
namespace {

constexpr int warps = 8;
constexpr int group_positions = 64; // loaded together
constexpr int groups = attention_run / group_positions;
constexpr int tile_queries = 16; // of one tensor-core tile; a query is a (row, head) pair
constexpr int max_tiles = 4;     // of a block

struct Args {
    AttentionArgs a;
    int heads_per_kv; // queries of one row that share a K/V head
    int n_queries;    // rows * heads_per_kv
    int n_runs;
};

__device__ __forceinline__ uint32_t shared_address(const void * p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy_16(uint32_t to, const void * from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

/// Bytes of a row in shared memory: 16 more than the row, so that eight rows fall on different banks.
template <int head_dim> constexpr int row_bytes = head_dim * 2 + 16;
constexpr int weight_row_bytes = attention_run * 2 + 16;

template <int head_dim> constexpr size_t shared_bytes(int tiles) {
    return static_cast<size_t>(attention_run) * row_bytes<head_dim> +
           static_cast<size_t>(tiles) * tile_queries * (row_bytes<head_dim> + weight_row_bytes);
}

/// K or V of one group of positions into shared memory; positions behind the last become zero.
template <int head_dim>
__device__ __forceinline__ void load_group(uint32_t to, const char * from, int64_t stride, int first, int n_kv) {
    constexpr int pieces = head_dim / 8; // of 16 bytes, in a row
#pragma unroll
    for (int i = 0; i < group_positions * pieces / (warps * 32); ++i) {
        const int piece = threadIdx.x + i * warps * 32;
        const int p = piece / pieces, c = piece % pieces;
        const bool real = first + p < n_kv;
        copy_16(to + p * row_bytes<head_dim> + c * 16, from + (real ? first + p : 0) * stride + c * 16, real);
    }
    asm volatile("cp.async.commit_group;");
}

/// One block: one run of positions, one K/V head, up to max_tiles tiles of the queries that share it.
template <int head_dim, int tiles>
__global__ void __launch_bounds__(warps * 32, 1) attention_kernel(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float extreme[tiles * tile_queries][warps], total[tiles * tile_queries][warps];
    const AttentionArgs & a = args.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int run = blockIdx.x, kv_head = blockIdx.y, first_query = blockIdx.z * tiles * tile_queries;
    const int first = run * attention_run;
    const uint32_t rows = shared_address(shared);
    const uint32_t queries = rows + attention_run * row_bytes<head_dim>;
    const uint32_t weights = queries + tiles * tile_queries * row_bytes<head_dim>;
    uint8_t * query_rows = shared + attention_run * row_bytes<head_dim>;
    uint8_t * weight_rows = query_rows + tiles * tile_queries * row_bytes<head_dim>;
    const char * k = static_cast<const char *>(a.k) + kv_head * a.k_head;
    const char * v = static_cast<const char *>(a.v) + kv_head * a.v_head;
    let_next_kernel_start();
    wait_for_earlier_kernels();

#pragma unroll
    for (int i = 0; i < groups; ++i) {
        load_group<head_dim>(rows + i * group_positions * row_bytes<head_dim>, k, a.k_position,
                             first + i * group_positions, a.n_kv);
    }
    for (int i = threadIdx.x; i < tiles * tile_queries * (head_dim / 2); i += warps * 32) {
        const int query = i / (head_dim / 2), d = i % (head_dim / 2) * 2, index = first_query + query;
        float2 value = make_float2(0.0f, 0.0f);
        if (index < args.n_queries) {
            const int row = index / args.heads_per_kv, head = kv_head * args.heads_per_kv + index % args.heads_per_kv;
            value = *reinterpret_cast<const float2 *>(a.q + row * a.q_row + head * a.q_head + d);
        }
        *reinterpret_cast<__half2 *>(query_rows + query * row_bytes<head_dim> + d * 2) =
            __floats2half2_rn(value.x * a.scale, value.y * a.scale);
    }

    // Scores: of each group of 64 positions a warp takes eight.
    float score[tiles][groups][4] = {};
#pragma unroll
    for (int i = 0; i < groups; ++i) {
        // A V group joins the queue for each K group that leaves it.
        asm volatile("cp.async.wait_group %0;" ::"n"(groups - 1) : "memory");
        __syncthreads();
        const uint32_t k_at = rows + (i * group_positions + warp * 8 + lane % 8) * row_bytes<head_dim> + lane / 8 * 16;
#pragma unroll
        for (int d = 0; d < head_dim / 32; ++d) {
            uint32_t b[4];
            load_matrix(b, k_at + d * 64);
#pragma unroll
            for (int m = 0; m < tiles; ++m) {
                uint32_t q[4];
                const uint32_t q_at =
                    queries + (m * tile_queries + lane % 16) * row_bytes<head_dim> + d * 64 + lane / 16 * 16;
                load_matrix(q, q_at);
                multiply(score[m][i], q, b[0], b[1]);
                load_matrix(q, q_at + 32);
                multiply(score[m][i], q, b[2], b[3]);
            }
        }
        __syncthreads();
        load_group<head_dim>(rows + i * group_positions * row_bytes<head_dim>, v, a.v_position,
                             first + i * group_positions, a.n_kv);
    }

    // Softmax over the run. Lane (g, t) holds queries g and g + 8, positions 2 t and 2 t + 1 of its warp's eight.
    const auto * mask = static_cast<const __half *>(a.mask);
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = m * tile_queries + g + 8 * h, index = first_query + query;
            const int row = min(index / args.heads_per_kv, a.n_rows - 1);
            float most = -INFINITY;
#pragma unroll
            for (int i = 0; i < groups; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int position = first + i * group_positions + warp * 8 + 2 * t + e;
                    float & s = score[m][i][2 * h + e];
                    s = position < a.n_kv ? s + __half2float(mask[row * a.mask_row + position]) : -INFINITY;
                    most = fmaxf(most, s);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            if (t == 0) {
                extreme[query][warp] = most;
            }
        }
    }
    __syncthreads();
    float largest[tiles][2];
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = m * tile_queries + g + 8 * h;
            float most = extreme[query][0];
#pragma unroll
            for (int w = 1; w < warps; ++w) {
                most = fmaxf(most, extreme[query][w]);
            }
            largest[m][h] = most;
            const float base = most == -INFINITY ? 0.0f : most;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < groups; ++i) {
                const float p0 = expf(score[m][i][2 * h] - base), p1 = expf(score[m][i][2 * h + 1] - base);
                sum += p0 + p1;
                *reinterpret_cast<__half2 *>(weight_rows + query * weight_row_bytes +
                                             (i * group_positions + warp * 8 + 2 * t) * 2) = __floats2half2_rn(p0, p1);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) {
                total[query][warp] = sum;
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    // Weighted sums of V: a warp takes its share of the head's dimensions, over all positions of the run.
    constexpr int columns = head_dim / (warps * 8); // tiles of eight dimensions
    float sum[tiles][columns][4] = {};
#pragma unroll
    for (int p = 0; p < attention_run / 16; ++p) {
        uint32_t b[(columns + 1) / 2][4];
#pragma unroll
        for (int c = 0; c < columns; c += 2) {
            // Two tiles of eight dimensions at once; with a single one, its sixteen positions twice.
            const int column = warp * columns * 8 + c * 8 + (columns > 1 ? lane / 16 * 8 : 0);
            load_transposed(b[c / 2], rows + (p * 16 + lane % 16) * row_bytes<head_dim> + column * 2);
        }
#pragma unroll
        for (int m = 0; m < tiles; ++m) {
            uint32_t w[4];
            load_matrix(w, weights + (m * tile_queries + lane % 16) * weight_row_bytes + p * 32 + lane / 16 * 16);
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                multiply(sum[m][c], w, b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
            }
        }
    }

    const int64_t vectors = static_cast<int64_t>(a.n_rows) * a.n_head;
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = m * tile_queries + g + 8 * h, index = first_query + query;
            if (index >= args.n_queries) {
                continue;
            }
            const int row = index / args.heads_per_kv, head = kv_head * args.heads_per_kv + index % args.heads_per_kv;
            const int64_t vector = static_cast<int64_t>(row) * a.n_head + head;
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < warps; ++w) {
                all += total[query][w];
            }
            float * to = a.out + vector * head_dim;
            float factor = 1.0f / all;
            if (args.n_runs > 1) {
                to = a.partials + (run * vectors + vector) * head_dim;
                factor = 1.0f;
                if (warp == 0 && t == 0) {
                    float2 * state = reinterpret_cast<float2 *>(a.partials + args.n_runs * vectors * head_dim);
                    state[run * vectors + vector] = make_float2(largest[m][h], all);
                }
            }
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                *reinterpret_cast<float2 *>(to + warp * columns * 8 + c * 8 + 2 * t) =
                    make_float2(sum[m][c][2 * h] * factor, sum[m][c][2 * h + 1] * factor);
            }
        }
    }
}

/// Adds the runs of one (row, head) in order. A run that is masked throughout adds exact zeros.
__global__ void combine_kernel(const float * partials, float * out, long long vectors, int n_runs) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const long long vector = blockIdx.x;
    const int head_dim = blockDim.x, d = threadIdx.x;
    const auto * state = reinterpret_cast<const float2 *>(partials + n_runs * vectors * head_dim);
    float most = -INFINITY;
    for (int r = 0; r < n_runs; ++r) {
        most = fmaxf(most, state[r * vectors + vector].x);
    }
    float sum = 0.0f, total = 0.0f;
    for (int r = 0; r < n_runs; ++r) {
        const float2 s = state[r * vectors + vector];
        const float weight = s.x == -INFINITY ? 0.0f : expf(s.x - most);
        total = fmaf(weight, s.y, total);
        sum = fmaf(weight, partials[(r * vectors + vector) * head_dim + d], sum);
    }
    out[vector * head_dim + d] = sum * (1.0f / total);
}

template <int head_dim, int tiles> cudaError_t launch_tiles(const Args & args, cudaStream_t stream) {
    auto * kernel = attention_kernel<head_dim, tiles>;
    constexpr size_t bytes = shared_bytes<head_dim>(tiles);
    static const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (allowed != cudaSuccess) {
        return allowed;
    }
    const int per_block = tiles * tile_queries;
    const dim3 grid(static_cast<unsigned>(args.n_runs), static_cast<unsigned>(args.a.n_head_kv),
                    static_cast<unsigned>((args.n_queries + per_block - 1) / per_block));
    return launch(kernel, grid, dim3(warps * 32), bytes, stream, args);
}

template <int head_dim> cudaError_t launch_head(const Args & args, int n_multiprocessors, cudaStream_t stream) {
    // As many tiles to a block as leave every multiprocessor a block: each block reads K and V anew.
    const int tiles = (args.n_queries + tile_queries - 1) / tile_queries;
    const int blocks = args.n_runs * args.a.n_head_kv;
    const int wanted = std::clamp(tiles * blocks / n_multiprocessors, 1, std::min(tiles, max_tiles));
    if (wanted >= 4) {
        return launch_tiles<head_dim, 4>(args, stream);
    }
    return wanted >= 2 ? launch_tiles<head_dim, 2>(args, stream) : launch_tiles<head_dim, 1>(args, stream);
}

} // namespace

bool attention_supports(int head_dim) {
    return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

size_t attention_partial_floats(int n_rows, int n_head, int head_dim, int n_kv) {
    const size_t runs = static_cast<size_t>((n_kv + attention_run - 1) / attention_run);
    return runs * static_cast<size_t>(n_rows) * static_cast<size_t>(n_head) * static_cast<size_t>(head_dim + 2);
}

cudaError_t attention(const AttentionArgs & a, int n_multiprocessors, cudaStream_t stream) {
    Args args = {};
    args.a = a;
    args.heads_per_kv = a.n_head / a.n_head_kv;
    args.n_queries = a.n_rows * args.heads_per_kv;
    args.n_runs = (a.n_kv + attention_run - 1) / attention_run;
    cudaError_t error = cudaErrorInvalidValue;
    switch (a.head_dim) {
    case 64:
        error = launch_head<64>(args, n_multiprocessors, stream);
        break;
    case 128:
        error = launch_head<128>(args, n_multiprocessors, stream);
        break;
    case 256:
        error = launch_head<256>(args, n_multiprocessors, stream);
        break;
    default:
        break;
    }
    if (error == cudaSuccess && args.n_runs > 1) {
        const int64_t vectors = int64_t{a.n_rows} * a.n_head;
        error =
            launch(combine_kernel, dim3(static_cast<unsigned>(vectors)), dim3(static_cast<unsigned>(a.head_dim)), 0,
                   stream, static_cast<const float *>(a.partials), a.out, static_cast<long long>(vectors), args.n_runs);
    }
    return error;
}

} // namespace dflash::cuda
