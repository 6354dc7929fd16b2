#pragma once

// How a block writes one row of activations in the order that rows_matmul.cu reads them.

#include <cuda_fp16.h>

#include "cuda/rows_matmul.hpp"

namespace dflash::cuda {

constexpr int x_bytes = 4096; // packed activations of one unit and eight rows
constexpr int pack_threads = 1024;
constexpr int pack_items = 4; // of eight values, per thread

struct PackTarget {
    uint8_t * packed; // null: not wanted
    float * row_scale;
    int row_tiles; // of a slab of 32 rows
    int units;
};

inline int row_tiles_of(int n_rows) {
    return n_rows <= 8 ? 1 : n_rows <= 16 ? 2 : 4;
}

/// Blocks of a kernel that packs: every row of the tiles, the ones behind the last row as zeros.
inline int padded_rows(int n_rows) {
    const int tile = 8 * row_tiles_of(n_rows);
    return (n_rows + tile - 1) / tile * tile;
}
inline unsigned row_threads(int k) {
    const int items = (k + unit_weights - 1) / unit_weights * 32;
    return static_cast<unsigned>(items < pack_threads ? items : pack_threads);
}
inline PackTarget pack_target(const MatmulScratch & scratch, int n_rows, int k) {
    return {static_cast<uint8_t *>(scratch.packed), scratch.row_scale, row_tiles_of(n_rows),
            (k + unit_weights - 1) / unit_weights};
}

/// A thread holds the items threadIdx.x + i * blockDim.x: of each, four values from item_column() on and four more 32
/// values later.
__device__ __forceinline__ int item_column(int item) {
    return item / 32 * unit_weights + item / 8 % 4 * 64 + item % 8 * 4;
}

template <typename Combine>
__device__ __forceinline__ float block_reduce(float value, float neutral, float * shared, Combine combine) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value = combine(value, __shfl_xor_sync(~0u, value, offset));
    }
    __syncthreads(); // an earlier reduction may still be read
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : neutral;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value = combine(value, __shfl_xor_sync(~0u, value, offset));
    }
    return value;
}

/// Packs row `row`, whose values the block's threads hold. A row is scaled by a power of two, so that its largest value
/// lies in [128, 256): half precision then holds every value that matters, and the product is scaled back exactly.
__device__ __forceinline__ void pack_row(const float4 (&value)[pack_items][2], int row, int n_rows,
                                         const PackTarget & to, float * shared) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < pack_items; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 v = value[i][h];
            most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        }
    }
    most = block_reduce(most, 0.0f, shared, [](float a, float b) { return fmaxf(a, b); });
    // 2^(7 - exponent of the largest), within what a float can hold together with its inverse.
    const int exponent = min(max(static_cast<int>(__float_as_uint(most) >> 23) - 127, -100), 120);
    const float up = most > 0.0f ? __uint_as_float(static_cast<unsigned>(127 + 7 - exponent) << 23) : 1.0f;
    const float down = most > 0.0f ? __uint_as_float(static_cast<unsigned>(127 - 7 + exponent) << 23) : 1.0f;
    if (threadIdx.x == 0 && row < n_rows) {
        to.row_scale[row] = down;
    }
    const int slab = row / max_rows, j = row % max_rows / 8, g = row % 8;
    auto * packed =
        reinterpret_cast<uint4 *>(to.packed + static_cast<size_t>(slab) * to.units * (max_rows / 8) * x_bytes);
#pragma unroll
    for (int i = 0; i < pack_items; ++i) {
        const int item = threadIdx.x + i * blockDim.x;
        if (item < to.units * 32) {
            const int unit = item / 32, t = item / 8 % 4, p = item % 8;
            const auto two = [up](float a, float b) {
                const __half2 h = __floats2half2_rn(a * up, b * up);
                return *reinterpret_cast<const uint32_t *>(&h);
            };
            const float4 a = value[i][0], b = value[i][1];
            packed[((unit * 8 + p) * to.row_tiles + j) * 32 + g * 4 + t] =
                make_uint4(two(a.x, a.z), two(a.y, a.w), two(b.x, b.z), two(b.y, b.w));
        }
    }
}

} // namespace dflash::cuda
