// Products of few rows with Q8_0 matrices in the packed layout of ggml's AMX backend. Compiled into ggml's CPU backend
// in place of its entry point; amx_kernels.h gives the original another name.
//
// ggml multiplies one row with vector instructions and more with tiles of 16 rows, which cost nearly the same for 2
// rows as for 16. Here each block of 16 columns is loaded once and multiplied with every row, in the order of ggml's
// kernels and with their roundings: the result has the same bits as theirs.
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#include "amx/mmq.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "quants.h"

void dflash_stock_amx_mul_mat(const ggml_compute_params * params, ggml_tensor * dst);

namespace {

constexpr int columns = 16;
constexpr int depth = 32;                         // weights of a column in a tile
constexpr int scale_at = columns * depth;         // f16 [columns]
constexpr int sums_at = scale_at + columns * 2;   // i32 [columns], 128 times the sum of weights
constexpr int tile_bytes = sums_at + columns * 4; // tiles of a block of columns follow each other
constexpr int few = 12;

/// Rows [rows] of `n_tiles` blocks, whose values have 128 added, times 16 columns.
template <int rows>
void multiply(int n_tiles, const block_q8_0 * a, const float * scales, const char * b, float * c, int ldc) {
    __m512 sums[rows];
    for (int m = 0; m < rows; ++m) {
        sums[m] = _mm512_setzero_ps();
    }
    for (int i = 0; i < n_tiles; ++i) {
        const char * tile = b + i * tile_bytes;
        for (int line = 0; line < tile_bytes; line += 64) {
            _mm_prefetch(tile + 4096 + line, _MM_HINT_T0);
        }
        __m512i weights[8];
        for (int k = 0; k < 8; ++k) {
            weights[k] = _mm512_loadu_si512(tile + k * 64);
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(tile + scale_at)));
        const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(tile + sums_at));
        for (int m = 0; m < rows; ++m) {
            const int8_t * values = a[m * n_tiles + i].qs;
            __m512i even = start;
            __m512i odd = _mm512_setzero_si512();
            for (int k = 0; k < 8; k += 2) {
                int32_t four[2];
                std::memcpy(four, values + 4 * k, sizeof(four));
                even = _mm512_dpbusd_epi32(even, _mm512_set1_epi32(four[0]), weights[k]);
                odd = _mm512_dpbusd_epi32(odd, _mm512_set1_epi32(four[1]), weights[k + 1]);
            }
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
            sums[m] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(scales[m * n_tiles + i])), sums[m]);
        }
    }
    for (int m = 0; m < rows; ++m) {
        _mm512_storeu_ps(c + m * ldc, sums[m]);
    }
}

using Multiply = void (*)(int, const block_q8_0 *, const float *, const char *, float *, int);

constexpr Multiply kernels[few + 1] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>,  multiply<4>,  multiply<5>,  multiply<6>,
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
};

bool takes(const ggml_tensor * dst) {
    return dst->src[0]->type == GGML_TYPE_Q8_0 && dst->ne[1] <= few && dst->ne[2] * dst->ne[3] == 1;
}

} // namespace

void ggml_backend_amx_mul_mat(const ggml_compute_params * params, ggml_tensor * dst) {
    if (!takes(dst)) {
        dflash_stock_amx_mul_mat(params, dst);
        return;
    }
    const ggml_tensor * w = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    const int rows = static_cast<int>(dst->ne[1]);
    const int n = static_cast<int>(dst->ne[0]);
    const int k = static_cast<int>(w->ne[0]);
    const int n_tiles = k / depth;
    auto * a = static_cast<block_q8_0 *>(params->wdata);
    for (int m = params->ith; m < rows; m += params->nth) {
        block_q8_0 * row = a + m * n_tiles;
        quantize_row_q8_0(reinterpret_cast<const float *>(static_cast<const char *>(x->data) + m * x->nb[1]), row, k);
        for (int i = 0; i < n_tiles; ++i) {
            const auto all = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(row[i].qs));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(row[i].qs),
                                _mm256_xor_si256(all, _mm256_set1_epi8(static_cast<char>(0x80))));
        }
    }
    ggml_barrier(params->threadpool);

    static thread_local std::vector<float> scales;
    scales.resize(static_cast<size_t>(rows * n_tiles));
    for (int i = 0; i < rows * n_tiles; ++i) {
        scales[static_cast<size_t>(i)] = _cvtsh_ss(a[i].d);
    }
    const int blocks = n / columns;
    const int share = (blocks + params->nth - 1) / params->nth;
    const int end = std::min(blocks, (params->ith + 1) * share);
    for (int block = params->ith * share; block < end; ++block) {
        kernels[rows](n_tiles, a, scales.data(),
                      static_cast<const char *>(w->data) + static_cast<size_t>(block) * n_tiles * tile_bytes,
                      static_cast<float *>(dst->data) + block * columns, static_cast<int>(dst->nb[1] / sizeof(float)));
    }
}

#endif
