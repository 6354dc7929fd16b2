#include "cuda/rows_matmul.hpp"

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/quants.cuh"

namespace dflash::cuda {
namespace {

constexpr int warps = 8;
constexpr int warp_features = 16; // of one tensor-core tile
constexpr int tile_features = warps * warp_features;
constexpr int blocks_per_multiprocessor = 2;
constexpr unsigned min_units = 2; // of a block

struct Args {
    MatmulPart part[max_parts];
    unsigned first_tile[max_parts]; // of each part; unused parts begin behind the last tile
    unsigned steps_per_tile;        // along k
    unsigned units;                 // along k
    unsigned n_tiles, total_steps;
    size_t row_bytes;
    int n_rows, row_tiles;
    const uint8_t * x;
    const float * row_scale;
    float * partials;
    unsigned * arrivals;
};

__device__ __forceinline__ void copy_16(uint32_t to, const uint8_t * from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
/// The same, but bytes from `valid` on become zero and are not read.
__device__ __forceinline__ void copy_16(uint32_t to, const uint8_t * from, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid));
}
__device__ __forceinline__ void close_group() {
    asm volatile("cp.async.commit_group;");
}
template <int pending> __device__ __forceinline__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending));
}

/// c[16 features, 8 rows] += a[16, 16] b[16, 8]
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class Quant> constexpr int step_bytes = Quant::unit_bytes * Quant::step_units;
/// Of 16 bytes, for one row's step. Where rows may begin anywhere, whole sectors of the second-level cache around it.
template <class Quant>
constexpr int slot_pieces = Quant::aligned ? step_bytes<Quant> / 16 : (step_bytes<Quant> + 30 + 31) / 32 * 2;
template <class Quant> constexpr int warp_stage_bytes = warp_features * slot_pieces<Quant> * 16;

/// As deep as the blocks of a multiprocessor can be beside each other and some first-level cache.
template <class Quant> constexpr int stages = std::min(6, 80 * 1024 / (warps * warp_stage_bytes<Quant>));

__device__ __forceinline__ int part_of(const Args & args, unsigned tile) {
    int part = 0;
#pragma unroll
    for (int i = 1; i < max_parts; ++i) {
        part += tile >= args.first_tile[i] ? 1 : 0;
    }
    return part;
}

/// The rows of W that a warp multiplies in one tile; behind the last row of a part, that row again.
struct WarpRows {
    const uint8_t * base;
    int last;
    __device__ __forceinline__ WarpRows(const Args & args, unsigned tile, int warp) {
        const int p = part_of(args, tile);
        const int feature = static_cast<int>(tile - args.first_tile[p]) * tile_features + warp * warp_features;
        const int end = args.part[p].n_features - 1;
        last = max(0, end - feature);
        base = static_cast<const uint8_t *>(args.part[p].weights) +
               static_cast<size_t>(min(feature, end)) * args.row_bytes;
    }
    __device__ __forceinline__ const uint8_t * row(const Args & args, int r) const {
        return base + static_cast<size_t>(min(r, last)) * args.row_bytes;
    }
};

/// Copies a warp's weights, step after step and tile after tile, into shared memory.
template <class Quant, bool aligned = Quant::aligned> struct Loader;

template <class Quant> struct Loader<Quant, true> {
    static constexpr int pieces = slot_pieces<Quant>, copies = (warp_features * pieces + 31) / 32;
    const uint8_t * from[copies];
    int left; // bytes from here to the end of a row
    unsigned tile, step;
    __device__ __forceinline__ void seek(const Args & args, int warp, int lane) {
        const WarpRows rows(args, tile, warp);
#pragma unroll
        for (int i = 0; i < copies; ++i) {
            const int piece = min(lane + 32 * i, warp_features * pieces - 1);
            from[i] =
                rows.row(args, piece / pieces) + (piece % pieces) * 16 + static_cast<size_t>(step) * step_bytes<Quant>;
        }
        left = static_cast<int>(args.row_bytes - static_cast<size_t>(step) * step_bytes<Quant>);
    }
    __device__ __forceinline__ void load(const Args & args, uint32_t stage, int warp, int lane) {
        if (left >= step_bytes<Quant>) {
#pragma unroll
            for (int i = 0; i < copies; ++i) {
                if (lane + 32 * i < warp_features * pieces) {
                    copy_16(stage + (lane + 32 * i) * 16, from[i]);
                }
            }
        } else { // a row's last step is short
#pragma unroll
            for (int i = 0; i < copies; ++i) {
                if (lane + 32 * i < warp_features * pieces) {
                    const bool inside = (lane + 32 * i) % pieces * 16 < left;
                    copy_16(stage + (lane + 32 * i) * 16, inside ? from[i] : from[i] - step_bytes<Quant> / 2,
                            inside ? 16 : 0);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < copies; ++i) {
            from[i] += step_bytes<Quant>;
        }
        left -= step_bytes<Quant>;
        if (++step == args.steps_per_tile) {
            step = 0;
            ++tile;
            seek(args, warp, lane);
        }
    }
};

/// Rows of any even alignment: the copy starts at the sector in which the step begins. Eight lanes share a row.
template <class Quant> struct Loader<Quant, false> {
    static constexpr int pieces = slot_pieces<Quant>;
    const uint8_t * from[4];
    int left; // bytes from here to the end of a row
    unsigned tile, step;
    __device__ __forceinline__ void seek(const Args & args, int warp, int lane) {
        const WarpRows rows(args, tile, warp);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            from[i] = rows.row(args, lane / 8 + 4 * i) + static_cast<size_t>(step) * step_bytes<Quant>;
        }
        left = static_cast<int>(args.row_bytes - static_cast<size_t>(step) * step_bytes<Quant>);
    }
    __device__ __forceinline__ void load(const Args & args, uint32_t stage, int warp, int lane) {
        const int column = lane % 8;
        // The last copies may reach beyond the row, whose last step may also be short.
        const bool near_end = left < step_bytes<Quant> + 31;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t over = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from[i])) & 31u;
            const uint8_t * start = from[i] - over + column * 16;
            const uint32_t to = stage + ((lane / 8 + 4 * i) * pieces + column) * 16;
#pragma unroll
            for (int j = 0; j < (pieces + 7) / 8; ++j) {
                if (column + 8 * j < pieces) {
                    if (near_end) {
                        const int valid = max(0, min(16, left + static_cast<int>(over) - (column + 8 * j) * 16));
                        copy_16(to + 128 * j, valid > 0 ? start + 128 * j : from[i] - (over & 15u), valid);
                    } else {
                        copy_16(to + 128 * j, start + 128 * j);
                    }
                }
            }
            from[i] += step_bytes<Quant>;
        }
        left -= step_bytes<Quant>;
        if (++step == args.steps_per_tile) {
            step = 0;
            ++tile;
            seek(args, warp, lane);
        }
    }
};

/// Writes a tile's sums, or, when other blocks hold parts of them, leaves them in memory: the last block to arrive adds
/// all parts in the order of k, so the result does not depend on who was last.
template <int row_tiles>
__device__ __forceinline__ void finish_tile(const Args & args, unsigned tile, unsigned first_step, unsigned end_step,
                                            float (&sum)[row_tiles][4], int warp, int lane) {
    __shared__ bool is_last;
    constexpr unsigned slot_float4s = warps * 32 * row_tiles;
    const unsigned per_tile = args.steps_per_tile;
    if (end_step - first_step < per_tile) {
        auto * slots = reinterpret_cast<float4 *>(args.partials) + warp * row_tiles * 32 + lane;
        float4 * mine = slots + (2 * blockIdx.x + (first_step == 0 ? 1 : 0)) * slot_float4s;
#pragma unroll
        for (int j = 0; j < row_tiles; ++j) {
            __stcg(mine + j * 32, make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]));
        }
        // The block of step s is the largest c with c * total / grid <= s.
        const unsigned begin = tile * per_tile;
        const unsigned first_block = ((begin + 1) * gridDim.x - 1) / args.total_steps;
        const unsigned last_block = ((begin + per_tile) * gridDim.x - 1) / args.total_steps;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(args.arrivals + tile, 1u) == last_block - first_block;
            if (is_last) {
                args.arrivals[tile] = 0;
            }
        }
        __syncthreads();
        if (!is_last) {
            return;
        }
        __threadfence();
        constexpr int at_once = row_tiles > 2 ? 2 : 4;
        bool first = true;
        for (unsigned c = first_block; c <= last_block; c += at_once) {
            float4 v[at_once][row_tiles];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const unsigned block = min(c + i, last_block);
                const unsigned theirs = 2 * block + (block == first_block ? 1 : 0); // it holds the tile's first step
#pragma unroll
                for (int j = 0; j < row_tiles; ++j) {
                    v[i][j] = __ldcg(slots + theirs * slot_float4s + j * 32);
                }
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (c + i <= last_block) {
#pragma unroll
                    for (int j = 0; j < row_tiles; ++j) {
                        sum[j][0] = first ? v[i][j].x : sum[j][0] + v[i][j].x;
                        sum[j][1] = first ? v[i][j].y : sum[j][1] + v[i][j].y;
                        sum[j][2] = first ? v[i][j].z : sum[j][2] + v[i][j].z;
                        sum[j][3] = first ? v[i][j].w : sum[j][3] + v[i][j].w;
                    }
                    first = false;
                }
            }
        }
    }
    const int p = part_of(args, tile);
    const int n_features = args.part[p].n_features;
    const int feature = static_cast<int>(tile - args.first_tile[p]) * tile_features + warp * warp_features + lane / 4;
    float * out = args.part[p].out;
#pragma unroll
    for (int j = 0; j < row_tiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 8 * j + 2 * (lane % 4) + (i & 1), f = feature + (i & 2) * 4;
            if (row < args.n_rows && f < n_features) {
                out[static_cast<size_t>(row) * n_features + f] = sum[j][i] * __ldg(args.row_scale + row);
            }
        }
    }
}

/// The steps of all tiles are dealt to the blocks in equal runs, so that every multiprocessor reads equally much.
template <class Quant, int row_tiles>
__global__ void __launch_bounds__(warps * 32, blocks_per_multiprocessor)
    rows_matmul_kernel(const __grid_constant__ Args args) {
    constexpr int depth = stages<Quant>;
    constexpr uint32_t stage_bytes = warp_stage_bytes<Quant>;
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t w_stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * depth * stage_bytes;
    let_next_kernel_start();

    const unsigned begin = blockIdx.x * args.total_steps / gridDim.x;
    const unsigned count = (blockIdx.x + 1) * args.total_steps / gridDim.x - begin;
    const unsigned per_tile = args.steps_per_tile;
    unsigned tile = begin / per_tile, step = begin % per_tile;
    Loader<Quant> loader;
    loader.tile = tile;
    loader.step = step;
    loader.seek(args, warp, lane);

    // Weights are constants: their first stages are under way before the activations are known.
#pragma unroll
    for (int s = 0; s < depth - 1; ++s) {
        if (static_cast<unsigned>(s) < count) {
            loader.load(args, w_stages + s * stage_bytes, warp, lane);
        }
        close_group();
    }
    wait_for_earlier_kernels();

    // Two chains of sums, since each product waits for the one before it; they are added where a tile ends.
    float sum[row_tiles][4] = {}, other[row_tiles][4] = {};
    unsigned first_step = step, stage = 0;
    uint32_t misaligned[2] = {0, 0}; // of the lane's two rows, by its low bits
    bool new_tile = true;
    for (unsigned i = 0; i < count; ++i) {
        wait_groups<depth - 2>();
        __syncwarp();
        if (i + depth - 1 < count) {
            loader.load(args, w_stages + (stage == 0 ? depth - 1 : stage - 1) * stage_bytes, warp, lane);
        }
        close_group();

        const uint32_t slots = w_stages + stage * stage_bytes + lane / 4 * (slot_pieces<Quant> * 16);
        uint32_t rows[2] = {slots, slots + 8 * (slot_pieces<Quant> * 16)};
        if constexpr (!Quant::aligned) {
            if (new_tile) {
                const WarpRows w(args, tile, warp);
                misaligned[0] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(w.row(args, lane / 4)));
                misaligned[1] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(w.row(args, lane / 4 + 8)));
                new_tile = false;
            }
            rows[0] += (misaligned[0] + step * step_bytes<Quant>)&31;
            rows[1] += (misaligned[1] + step * step_bytes<Quant>)&31;
        }
#pragma unroll
        for (unsigned u = 0; u < Quant::step_units; ++u) {
            const unsigned unit = step * Quant::step_units + u;
            if (Quant::step_units > 1 && unit >= args.units) {
                break;
            }
            // The block's warps read the same activations at about the same time: the first-level cache serves all but
            // one of them.
            const auto * x =
                reinterpret_cast<const uint4 *>(args.x + static_cast<size_t>(unit) * (row_tiles * x_bytes)) + lane;
            Quant upper, lower;
            upper.load(rows[0] + u * Quant::unit_bytes, lane % 4);
            lower.load(rows[1] + u * Quant::unit_bytes, lane % 4);
#pragma unroll
            for (int p = 0; p < 8; ++p) {
                const HalfPairs h = upper.pair(p), l = lower.pair(p);
                const uint32_t first[4] = {h.first[0], l.first[0], h.first[1], l.first[1]};
                const uint32_t second[4] = {h.second[0], l.second[0], h.second[1], l.second[1]};
#pragma unroll
                for (int j = 0; j < row_tiles; ++j) {
                    const uint4 b = x[(p * row_tiles + j) * 32];
                    multiply(sum[j], first, b.x, b.y);
                    multiply(other[j], second, b.z, b.w);
                }
            }
        }
        stage = stage + 1 == depth ? 0 : stage + 1;
        ++step;
        if (step == per_tile || i + 1 == count) {
#pragma unroll
            for (int j = 0; j < row_tiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[j][e] += other[j][e];
                }
            }
            finish_tile<row_tiles>(args, tile, first_step, step, sum, warp, lane);
#pragma unroll
            for (int j = 0; j < row_tiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[j][e] = other[j][e] = 0.0f;
                }
            }
            first_step = step = 0;
            ++tile;
            new_tile = true;
        }
    }
}

template <class Quant, int row_tiles> cudaError_t launch_matmul(Args args, int n_multiprocessors, cudaStream_t stream) {
    constexpr int bytes = stages<Quant> * warps * warp_stage_bytes<Quant>;
    auto * kernel = rows_matmul_kernel<Quant, row_tiles>;
    static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (allowed != cudaSuccess) {
        return allowed;
    }
    args.steps_per_tile = (args.units + Quant::step_units - 1) / Quant::step_units;
    args.total_steps = args.n_tiles * args.steps_per_tile;
    // Few units each: the start and the meeting of the partial sums would cost more than the reading.
    const unsigned most = static_cast<unsigned>(blocks_per_multiprocessor * n_multiprocessors);
    const unsigned blocks = std::max(1u, std::min(most, args.total_steps * Quant::step_units / min_units));
    if (static_cast<unsigned long long>(args.total_steps + args.steps_per_tile) * blocks > 0xffffffffull) {
        return cudaErrorInvalidValue;
    }
    return launch(kernel, dim3(blocks), dim3(warps * 32), bytes, stream, args);
}

template <class Quant> cudaError_t launch_for_rows(const Args & args, int n_multiprocessors, cudaStream_t stream) {
    switch (args.row_tiles) {
    case 1:
        return launch_matmul<Quant, 1>(args, n_multiprocessors, stream);
    case 2:
        return launch_matmul<Quant, 2>(args, n_multiprocessors, stream);
    default:
        return launch_matmul<Quant, 4>(args, n_multiprocessors, stream);
    }
}

__device__ __forceinline__ float weight_at(const float * w, int64_t i) {
    return w[i];
}
__device__ __forceinline__ float weight_at(const __half * w, int64_t i) {
    return __half2float(w[i]);
}
__device__ __forceinline__ float weight_at(const unsigned short * w, int64_t i) { // bfloat16
    return __uint_as_float(static_cast<unsigned>(w[i]) << 16);
}

constexpr int float_threads = 128;
constexpr int float_rows = 8; // of one pass

/// One block for each feature and eight rows: each thread sums every 128th product, then the sums are added pairwise.
template <typename W>
__global__ void __launch_bounds__(float_threads)
    float_matmul_kernel(const W * weights, const float * x, long long row_stride, float * out, int n_features, int k,
                        int n_rows) {
    __shared__ float partial[float_rows][float_threads / 32];
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int feature = blockIdx.x, first = blockIdx.y * float_rows;
    const W * w = weights + static_cast<size_t>(feature) * k;
    float sum[float_rows] = {};
    for (int i = threadIdx.x; i < k; i += float_threads) {
        const float v = weight_at(w, i);
#pragma unroll
        for (int r = 0; r < float_rows; ++r) {
            if (first + r < n_rows) {
                sum[r] = fmaf(v, x[(first + r) * row_stride + i], sum[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < float_rows; ++r) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], offset);
        }
        if (threadIdx.x % 32 == 0) {
            partial[r][threadIdx.x / 32] = sum[r];
        }
    }
    __syncthreads();
    if (threadIdx.x < float_rows && first + static_cast<int>(threadIdx.x) < n_rows) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < float_threads / 32; ++i) {
            total += partial[threadIdx.x][i];
        }
        out[static_cast<size_t>(first + threadIdx.x) * n_features + feature] = total;
    }
}

cudaError_t launch_type(WeightType type, const Args & args, int n_multiprocessors, cudaStream_t stream) {
    switch (type) {
    case WeightType::q4_k:
        return launch_for_rows<Q4K>(args, n_multiprocessors, stream);
    case WeightType::q5_k:
        return launch_for_rows<Q5K>(args, n_multiprocessors, stream);
    case WeightType::q6_k:
        return launch_for_rows<Q6K>(args, n_multiprocessors, stream);
    case WeightType::q8_0:
        return launch_for_rows<Q80>(args, n_multiprocessors, stream);
    case WeightType::q4_0:
        return launch_for_rows<Q40>(args, n_multiprocessors, stream);
    case WeightType::iq4_xs:
        return launch_for_rows<IQ4XS>(args, n_multiprocessors, stream);
    case WeightType::nvfp4:
        return launch_for_rows<NVFP4>(args, n_multiprocessors, stream);
    }
    return cudaErrorInvalidValue;
}

} // namespace

size_t packed_bytes(int64_t k) {
    return static_cast<size_t>((k + unit_weights - 1) / unit_weights) * (max_batch / 8) * x_bytes;
}

size_t partial_bytes(int n_multiprocessors) {
    const size_t slots = 2 * static_cast<size_t>(blocks_per_multiprocessor) * static_cast<size_t>(n_multiprocessors);
    return slots * tile_features * max_rows * sizeof(float);
}

cudaError_t rows_matmul(WeightType type, const MatmulPart * parts, int n_parts, int64_t k, size_t row_bytes, int n_rows,
                        const MatmulScratch & scratch, int n_multiprocessors, cudaStream_t stream) {
    if (n_parts < 1 || n_parts > max_parts || n_rows < 1 || n_rows > max_batch || k < 1) {
        return cudaErrorInvalidValue;
    }
    Args args = {};
    unsigned tiles = 0;
    for (int i = 0; i < max_parts; ++i) {
        args.first_tile[i] = tiles;
        if (i < n_parts) {
            args.part[i] = parts[i];
            tiles += static_cast<unsigned>((parts[i].n_features + tile_features - 1) / tile_features);
        }
    }
    for (int i = n_parts; i < max_parts; ++i) {
        args.first_tile[i] = ~0u;
    }
    if (tiles == 0 || tiles > max_tiles) {
        return cudaErrorInvalidValue;
    }
    args.units = static_cast<unsigned>((k + unit_weights - 1) / unit_weights);
    args.n_tiles = tiles;
    args.row_bytes = row_bytes;
    args.partials = scratch.partials;
    args.arrivals = scratch.arrivals;
    args.row_tiles = row_tiles_of(n_rows);
    // More rows than a tile holds: slab after slab, each with the sums in the same order.
    for (int first = 0; first < n_rows; first += max_rows) {
        args.n_rows = std::min(max_rows, n_rows - first);
        args.x = static_cast<const uint8_t *>(scratch.packed) +
                 static_cast<size_t>(first / max_rows) * args.units * (max_rows / 8) * x_bytes;
        args.row_scale = scratch.row_scale + first;
        for (int i = 0; i < n_parts; ++i) {
            args.part[i].out = parts[i].out + static_cast<size_t>(first) * static_cast<size_t>(parts[i].n_features);
        }
        const cudaError_t error = launch_type(type, args, n_multiprocessors, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

cudaError_t float_matmul(int type, const void * weights, const float * x, int64_t row_stride, float * out,
                         int n_features, int64_t k, int n_rows, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(n_features), static_cast<unsigned>((n_rows + float_rows - 1) / float_rows));
    const auto stride = static_cast<long long>(row_stride);
    const int kk = static_cast<int>(k);
    switch (type) {
    case 0:
        return launch(float_matmul_kernel<float>, grid, dim3(float_threads), 0, stream,
                      static_cast<const float *>(weights), x, stride, out, n_features, kk, n_rows);
    case 1:
        return launch(float_matmul_kernel<__half>, grid, dim3(float_threads), 0, stream,
                      static_cast<const __half *>(weights), x, stride, out, n_features, kk, n_rows);
    case 2:
        return launch(float_matmul_kernel<unsigned short>, grid, dim3(float_threads), 0, stream,
                      static_cast<const unsigned short *>(weights), x, stride, out, n_features, kk, n_rows);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace dflash::cuda
