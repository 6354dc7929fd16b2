#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::cpu {

/// Keys or values: head h of key i lies at data + i * key_stride + h * head_stride.
struct KeyRows {
    enum class Type { f32, f16, other };

    const uint8_t * data = nullptr;
    size_t key_stride = 0; // bytes
    size_t head_stride = 0;
    Type type = Type::f32;
    /// Turns n values at `from` into float32; only read for Type::other, and for f16 where the machine cannot.
    void (*to_float)(const void * from, float * to, int64_t n) = nullptr;
};

/// softmax(q k / sqrt(head_dim)) v for n_rows rows of n_head heads, of which n_head / n_head_kv share keys and values.
/// A row's result has the same bits whatever the number of rows and threads.
struct AttentionCall {
    const uint8_t * q = nullptr; // float32 [head_dim] for each head and row
    size_t q_head_stride = 0;    // bytes
    size_t q_row_stride = 0;
    KeyRows k;
    KeyRows v;
    const uint8_t * mask = nullptr; // f16 [n_kv] for each row: 0 visible, anything else hidden
    size_t mask_stride = 0;
    int64_t head_dim = 0; // a multiple of 16
    int64_t n_head = 0;
    int64_t n_head_kv = 0;
    int64_t n_kv = 0;
    int64_t n_rows = 0;
};

/// Keys are summed up in parts of this many, one after the other.
constexpr int64_t attention_part = 512;

/// Pieces that the work of a call can be dealt out in, when each goes through all keys.
int64_t attention_pieces(int64_t n_rows, int64_t n_head, int64_t n_head_kv);

/// Thread ith of nth does its share; out: float32 [n_head * head_dim] for each row.
void attention(const AttentionCall & call, float * out, int ith, int nth);

/// The same in two calls, so that few rows keep many threads busy. The first one writes, for each part of the keys,
/// each row and each head, attention_partial_width(head_dim) floats; the second one sums them up.
int64_t attention_partial_width(int64_t head_dim);
void attention_partial(const AttentionCall & call, float * partials, int ith, int nth);
void attention_merge(const float * partials, int64_t head_dim, int64_t n_heads_and_rows, int64_t n_parts, float * out,
                     int ith, int nth);

} // namespace dflash::cpu
