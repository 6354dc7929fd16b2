#pragma once

// Decoders of ggml's weight types for tensor cores. Each turns one row's 256 weights, as they lie in a GGUF file, into
// half-precision pairs in the order that rows_matmul.cu multiplies them.
//
// The order, the same for every type: lane t of a group of four owns weights 64 t .. 64 t + 63; step s of 16 takes four
// of them, 64 t + 4 s + {0, 2} as one pair and {1, 3} as the other. pair(p) yields the steps p and p + 8, p = 0 .. 7.

#include <cuda_fp16.h>

#include <cstdint>

namespace dflash::cuda {

struct HalfPairs {
    uint32_t first[2];  // step p: weights {0, 2} and {1, 3} of its four
    uint32_t second[2]; // step p + 8
};

__device__ __forceinline__ uint32_t bits(__half2 h) {
    return *reinterpret_cast<uint32_t *>(&h);
}
__device__ __forceinline__ __half2 as_half2(uint32_t b) {
    return *reinterpret_cast<__half2 *>(&b);
}
__device__ __forceinline__ float half_bits_to_float(uint32_t b) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(b)));
}

// Shared memory by its 32-bit address.
__device__ __forceinline__ uint32_t shared_16(uint32_t at) {
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t shared_32(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 shared_64(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ uint4 shared_128(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

/// (x & mask) | magic in one instruction; the compiler makes two of it when both are constants.
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t magic) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(magic));
    return out;
}
/// Small unsigned integers in the low bits of both halves, as floating point: 1024 + u is exact in half precision.
__device__ __forceinline__ uint32_t biased(uint32_t x, uint32_t mask) {
    return masked_or(x, mask, 0x64006400u);
}

/// (u - zero) * scale for both halves.
__device__ __forceinline__ uint32_t scaled(uint32_t u, uint32_t zero, __half2 scale) {
    return bits(__hmul2(__hsub2(as_half2(u), as_half2(zero)), scale));
}
/// u * scale + offset for both halves.
__device__ __forceinline__ uint32_t affine(uint32_t u, __half2 scale, __half2 offset) {
    return bits(__hfma2(__hsub2(as_half2(u), as_half2(0x64006400u)), scale, offset));
}

/// Four unsigned bytes, less a zero point, times a scale. `zero`: 1024 + the zero point, in both halves.
__device__ __forceinline__ void scaled_bytes(uint32_t bytes, uint32_t zero, __half2 scale, uint32_t (&out)[2]) {
    out[0] = scaled(biased(bytes, 0x00ff00ffu), zero, scale);
    out[1] = scaled(biased(bytes >> 8, 0x00ff00ffu), zero, scale);
}

/// n words of shared memory that start at any even byte.
template <int n> __device__ __forceinline__ void shared_words(uint32_t at, uint32_t * out) {
    const uint32_t first = at & ~3u, shift = (at & 2u) * 8;
    uint32_t word = shared_32(first);
#pragma unroll
    for (int i = 0; i < n; ++i) {
        const uint32_t next = shared_32(first + 4 * i + 4);
        out[i] = __funnelshift_r(word, next, shift);
        word = next;
    }
}

// Scale and offset of two neighbouring blocks of 32, out of the packed 6-bit scales that Q4_K and Q5_K share.
struct PackedScales {
    __half2 scale[2];
    __half2 offset[2];
    /// header: d and dmin as halves, then 12 bytes; blocks 2 t and 2 t + 1. The offset also takes `bias` off every
    /// code.
    __device__ __forceinline__ void read(uint4 header, int t, float bias) {
        const __half2 d = as_half2(header.x);
        const uint32_t low = header.y, mid = header.z, high = header.w;
        const bool upper = t >= 2;
        const uint32_t sc = upper ? (high & 0x0f0f0f0fu) | ((low >> 2) & 0x30303030u) : low & 0x3f3f3f3fu;
        const uint32_t mn = upper ? ((high >> 4) & 0x0f0f0f0fu) | ((mid >> 2) & 0x30303030u) : mid & 0x3f3f3f3fu;
        const int by = (t & 1) * 16;
        const float ds = __low2float(d), dm = __high2float(d);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float step = ds * static_cast<float>((sc >> (by + 8 * i)) & 0xffu);
            scale[i] = __float2half2_rn(step);
            offset[i] = __float2half2_rn(-dm * static_cast<float>((mn >> (by + 8 * i)) & 0xffu) - bias * step);
        }
    }
};

/// A table of 16 bytes.
struct ByteTable {
    uint32_t words[4];
};
/// Table entries for four bytes that hold 0 .. 15 each.
__device__ __forceinline__ uint32_t looked_up(uint32_t x, const ByteTable & table) {
    // The lower three bits of each byte become the four selectors of a permutation.
    uint32_t select = x & 0x07070707u;
    select = (select | (select >> 4)) & 0x00ff00ffu;
    select = (select | (select >> 8)) & 0x0000ffffu;
    const uint32_t low = __byte_perm(table.words[0], table.words[1], select);
    const uint32_t high = __byte_perm(table.words[2], table.words[3], select);
    const uint32_t upper = ((x >> 3) & 0x01010101u) * 0xffu;
    return (low & ~upper) | (high & upper);
}

struct Q4K {
    static constexpr int unit_bytes = 144; // of 256 weights
    static constexpr int step_units = 2;   // copied at once
    static constexpr bool aligned = true;  // every row and unit starts at a multiple of 16 bytes
    PackedScales s;
    uint32_t q[8];
    __device__ __forceinline__ void load(uint32_t row, int t) {
        s.read(shared_128(row), t, 16.0f);
        const uint4 a = shared_128(row + 16 + 32 * t), b = shared_128(row + 32 + 32 * t);
        q[0] = a.x, q[1] = a.y, q[2] = a.z, q[3] = a.w;
        q[4] = b.x, q[5] = b.y, q[6] = b.z, q[7] = b.w;
    }
    /// A nibble in bits 6 .. 9 of each half, as 16 + the nibble; the 16 is in the offset.
    static __device__ __forceinline__ uint32_t weights(uint32_t x, __half2 scale, __half2 offset) {
        return bits(__hfma2(as_half2(masked_or(x, 0x03c003c0u, 0x4c004c00u)), scale, offset));
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        const uint32_t x = q[p];
        HalfPairs out;
        out.first[0] = weights(x << 6, s.scale[0], s.offset[0]);
        out.first[1] = weights(x >> 2, s.scale[0], s.offset[0]);
        out.second[0] = weights(x << 2, s.scale[1], s.offset[1]);
        out.second[1] = weights(x >> 6, s.scale[1], s.offset[1]);
        return out;
    }
};

struct Q5K {
    static constexpr int unit_bytes = 176;
    static constexpr int step_units = 2; // copied at once
    static constexpr bool aligned = true;
    PackedScales s;
    uint32_t q[8], h[8];
    int t2;
    __device__ __forceinline__ void load(uint32_t row, int t) {
        s.read(shared_128(row), t, 0.0f);
        const uint4 a = shared_128(row + 48 + 32 * t), b = shared_128(row + 64 + 32 * t);
        const uint4 c = shared_128(row + 16), d = shared_128(row + 32);
        q[0] = a.x, q[1] = a.y, q[2] = a.z, q[3] = a.w;
        q[4] = b.x, q[5] = b.y, q[6] = b.z, q[7] = b.w;
        h[0] = c.x, h[1] = c.y, h[2] = c.z, h[3] = c.w;
        h[4] = d.x, h[5] = d.y, h[6] = d.z, h[7] = d.w;
        t2 = 2 * t;
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        const uint32_t fifth = h[p] >> t2;
        const uint32_t low = (q[p] & 0x0f0f0f0fu) | ((fifth << 4) & 0x10101010u);
        const uint32_t high = ((q[p] >> 4) & 0x0f0f0f0fu) | ((fifth << 3) & 0x10101010u);
        HalfPairs out;
        out.first[0] = affine(biased(low, 0x00ff00ffu), s.scale[0], s.offset[0]);
        out.first[1] = affine(biased(low >> 8, 0x00ff00ffu), s.scale[0], s.offset[0]);
        out.second[0] = affine(biased(high, 0x00ff00ffu), s.scale[1], s.offset[1]);
        out.second[1] = affine(biased(high >> 8, 0x00ff00ffu), s.scale[1], s.offset[1]);
        return out;
    }
};

struct Q6K {
    static constexpr int unit_bytes = 210;
    static constexpr int step_units = 1; // copied at once
    static constexpr bool aligned = false;
    __half2 scale[4]; // of the lane's four runs of 16
    uint32_t low[16], high[8];
    int nibble;
    __device__ __forceinline__ void load(uint32_t row, int t) {
        const int half = t >> 1;
        nibble = 4 * (t & 1);
        uint32_t scales;
        shared_words<1>(row + 192 + 4 * t, &scales);
        const float d = half_bits_to_float(shared_16(row + 208));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int signed_scale = static_cast<int8_t>(scales >> (8 * i));
            scale[i] = __float2half2_rn(d * static_cast<float>(signed_scale));
        }
        shared_words<16>(row + 64 * half, low);
        shared_words<8>(row + 128 + 32 * half, high);
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        const uint32_t zero = 0x64206420u; // 1024 + 32
        const uint32_t top = high[p] >> nibble;
        const uint32_t a = ((low[p] >> nibble) & 0x0f0f0f0fu) | ((top << 4) & 0x30303030u);
        const uint32_t b = ((low[8 + p] >> nibble) & 0x0f0f0f0fu) | ((top << 2) & 0x30303030u);
        HalfPairs out;
        scaled_bytes(a, zero, scale[p / 4], out.first);
        scaled_bytes(b, zero, scale[2 + p / 4], out.second);
        return out;
    }
};

struct Q80 {
    static constexpr int unit_bytes = 272;
    static constexpr int step_units = 1; // copied at once
    static constexpr bool aligned = false;
    __half2 scale[2];
    uint32_t q[16];
    __device__ __forceinline__ void load(uint32_t row, int t) {
        const uint32_t blocks = row + 68 * t; // two of 34 bytes: a half, 32 signed bytes
        scale[0] = as_half2(shared_16(blocks) * 0x10001u);
        scale[1] = as_half2(shared_16(blocks + 34) * 0x10001u);
        shared_words<8>(blocks + 2, q);
        shared_words<8>(blocks + 36, q + 8);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            q[i] ^= 0x80808080u;
        }
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        HalfPairs out;
        scaled_bytes(q[p], 0x64806480u, scale[0], out.first);
        scaled_bytes(q[8 + p], 0x64806480u, scale[1], out.second);
        return out;
    }
};

struct Q40 {
    static constexpr int unit_bytes = 144;
    static constexpr int step_units = 2; // copied at once
    static constexpr bool aligned = false;
    __half2 scale[2];
    uint32_t q[8];
    __device__ __forceinline__ void load(uint32_t row, int t) {
        const uint32_t blocks = row + 36 * t; // two of 18 bytes: a half, 16 bytes with weights i and 16 + i
        scale[0] = as_half2(shared_16(blocks) * 0x10001u);
        scale[1] = as_half2(shared_16(blocks + 18) * 0x10001u);
        shared_words<4>(blocks + 2, q);
        shared_words<4>(blocks + 20, q + 4);
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        const uint32_t a = q[p % 4] >> (p >= 4 ? 4 : 0), b = q[4 + p % 4] >> (p >= 4 ? 4 : 0);
        const uint32_t zero = 0x64086408u;
        HalfPairs out;
        out.first[0] = scaled(biased(a, 0x000f000fu), zero, scale[0]);
        out.first[1] = scaled(biased(a >> 8, 0x000f000fu), zero, scale[0]);
        out.second[0] = scaled(biased(b, 0x000f000fu), zero, scale[1]);
        out.second[1] = scaled(biased(b >> 8, 0x000f000fu), zero, scale[1]);
        return out;
    }
};

struct IQ4XS {
    static constexpr int unit_bytes = 136;
    static constexpr int step_units = 2; // copied at once
    static constexpr bool aligned = false;
    __half2 scale[2];
    uint32_t q[8];
    __device__ __forceinline__ void load(uint32_t row, int t) {
        // A half, 16 bits of high scale parts, 4 bytes of low ones, 8 blocks of 16 bytes with weights i and 16 + i.
        const uint2 words = shared_64(row);
        const uint32_t head = words.x, low = words.y;
        const float d = half_bits_to_float(head & 0xffffu);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = 2 * t + i;
            const int six = static_cast<int>(((low >> (4 * block)) & 15u) | (((head >> (16 + 2 * block)) & 3u) << 4));
            scale[i] = __float2half2_rn(d * static_cast<float>(six - 32));
            const uint2 a = shared_64(row + 8 + 32 * t + 16 * i), b = shared_64(row + 16 + 32 * t + 16 * i);
            q[4 * i] = a.x, q[4 * i + 1] = a.y, q[4 * i + 2] = b.x, q[4 * i + 3] = b.y;
        }
    }
    // 128 + {-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113}
    static __device__ __forceinline__ uint32_t levels(uint32_t x) {
        return looked_up(x, {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u});
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        const int by = p >= 4 ? 4 : 0;
        HalfPairs out;
        scaled_bytes(levels((q[p % 4] >> by) & 0x0f0f0f0fu), 0x64806480u, scale[0], out.first);
        scaled_bytes(levels((q[4 + p % 4] >> by) & 0x0f0f0f0fu), 0x64806480u, scale[1], out.second);
        return out;
    }
};

struct NVFP4 {
    static constexpr int unit_bytes = 144;
    static constexpr int step_units = 2; // copied at once
    static constexpr bool aligned = false;
    __half2 scale[4]; // of the lane's four runs of 16
    uint32_t q[8];
    __device__ __forceinline__ void load(uint32_t row, int t) {
        // 4 bytes of scales (unsigned, 4 bits of exponent, 3 of mantissa), then 4 runs of 8 bytes with weights i and 8
        // + i.
        const uint32_t scales = shared_32(row + 36 * t);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t code = (scales >> (8 * i)) & 0xffu;
            // As half precision the bits mean 2^-8 of the value; the levels below are doubled, so half of 2^8.
            const uint32_t half = code == 0x7fu ? 0u : (code & 0x7fu) << 7;
            scale[i] = __hmul2(as_half2(half * 0x10001u), __float2half2_rn(128.0f));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[i] = shared_32(row + 36 * t + 4 + 4 * i);
        }
    }
    __device__ __forceinline__ HalfPairs pair(int p) const {
        // 128 + {0 1 2 3 4 6 8 12} and 128 - the same
        const ByteTable table = {0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu};
        const int run = p / 4, word = 2 * run + (p & 1), by = (p & 2) ? 4 : 0;
        HalfPairs out;
        scaled_bytes(looked_up((q[word] >> by) & 0x0f0f0f0fu, table), 0x64806480u, scale[run], out.first);
        scaled_bytes(looked_up((q[word + 4] >> by) & 0x0f0f0f0fu, table), 0x64806480u, scale[run + 2], out.second);
        return out;
    }
};

} // namespace dflash::cuda
