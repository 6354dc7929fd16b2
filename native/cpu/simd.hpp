#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

// A register of floats as the compiler's vector type, and the few operations that have no operator. Files of this
// folder are compiled for the instruction set that ggml's CPU backend is compiled for.
namespace dflash::cpu {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#else
constexpr int lanes = 8;
#endif

typedef float Floats __attribute__((vector_size(lanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(lanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(lanes * sizeof(float)))); // may wrap around

inline Floats all(float value) {
    return Floats{} + value;
}

inline Floats load(const float * from) {
    Floats v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}

inline void store(float * to, Floats v) {
    std::memcpy(to, &v, sizeof(v));
}

/// a * b + c. Rounded once where the machine can; always in the same way.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

/// The sum of all lanes, always in the same order.
inline float sum_of(Floats v) {
#if defined(__AVX512F__)
    const __m512 half = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    const __m512 quarter = _mm512_add_ps(half, _mm512_shuffle_f32x4(half, half, 0xb1));
    __m128 four = _mm512_castps512_ps128(quarter);
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float x[lanes];
    std::memcpy(x, &v, sizeof(v));
    for (int n = lanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            x[i] += x[i + n];
        }
    }
    return x[0];
#endif
}

inline float largest_of(Floats v) {
    float x[lanes];
    std::memcpy(x, &v, sizeof(v));
    for (int n = lanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
        }
    }
    return x[0];
}

/// 2^(x - high) for an integer `high` that is at least x - 1; 0 where x - high < -126. The relative error is below
/// 2e-7: 2^n * e^r with |r| <= ln(2) / 2 and 8 terms of the series. Another `high` changes the exponent and no other
/// bit.
inline Floats power_of_two(Floats x, float high) {
    const Floats magic = all(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Floats shifted = x + magic;
    const Floats n = shifted - magic;
    const Floats r = (x - n) * all(0.693147180559945309f);
    Floats p = all(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = multiply_add(p, r, all(c));
    }
    const Floats offset = all(high) + magic;
    Words bits;
    Words exponent;
    Words base;
    std::memcpy(&bits, &p, sizeof(bits));
    std::memcpy(&exponent, &shifted, sizeof(exponent));
    std::memcpy(&base, &offset, sizeof(base));
    bits += (exponent - base) << 23;
    Floats y;
    std::memcpy(&y, &bits, sizeof(y));
    y = y + (x - x); // what is not a number stays that
    return x - all(high) < all(-126.0f) ? Floats{} : y;
}

#if defined(__AVX512F__) || defined(__F16C__)
constexpr bool converts_half = true;
inline Floats load_half(const uint16_t * from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#endif
}
#else
constexpr bool converts_half = false;
inline Floats load_half(const uint16_t *) {
    return Floats{};
}
#endif

/// Rows become columns: lane i of out row j is lane j of in row i.
inline void transpose(Floats (&rows)[lanes]) {
#if defined(__AVX512F__)
    __m512 a[16];
    for (int i = 0; i < 16; i += 2) { // pairs of rows, element by element
        a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    __m512 b[16];
    for (int i = 0; i < 16; i += 4) { // then fours: b[i + j] has column j of each quarter
        for (int half = 0; half < 2; ++half) {
            const __m512d lo = _mm512_castps_pd(a[i + half]);
            const __m512d hi = _mm512_castps_pd(a[i + half + 2]);
            b[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
            b[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
        }
    }
    for (int j = 0; j < 4; ++j) { // quarters of a register change places with registers
        const __m512 even = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
        const __m512 even_high = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
        const __m512 odd_high = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
        rows[j] = _mm512_shuffle_f32x4(even, even_high, 0x88);
        rows[j + 8] = _mm512_shuffle_f32x4(even, even_high, 0xdd);
        rows[j + 4] = _mm512_shuffle_f32x4(odd, odd_high, 0x88);
        rows[j + 12] = _mm512_shuffle_f32x4(odd, odd_high, 0xdd);
    }
#else
    for (int i = 0; i < lanes; ++i) {
        for (int j = i + 1; j < lanes; ++j) {
            const float t = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = t;
        }
    }
#endif
}

} // namespace dflash::cpu
