#pragma once

// Attention of a few rows over a K/V cache in half precision, with a mask. Positions are taken in fixed runs of 256,
// each summed in a fixed order and the runs then added in order, so a row's result has the same bits whatever the
// number of rows and however many masked positions follow.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace dflash::cuda {

struct AttentionArgs {
    const float * q = nullptr; // value d of row r, head h: q[r * q_row + h * q_head + d]
    int64_t q_row = 0, q_head = 0;
    const void * k = nullptr; // half; byte offsets below
    const void * v = nullptr;
    int64_t k_position = 0, k_head = 0, v_position = 0, v_head = 0; // bytes
    const void * mask = nullptr;                                    // half [n_rows][mask_row]
    int64_t mask_row = 0;                                           // elements
    float * out = nullptr;                                          // [n_rows, n_head, head_dim]
    int n_rows = 0, n_head = 0, n_head_kv = 0, head_dim = 0, n_kv = 0;
    float scale = 1.0f;
    float * partials = nullptr; // attention_partial_floats(...)
};

constexpr int attention_run = 256; // positions

bool attention_supports(int head_dim);
size_t attention_partial_floats(int n_rows, int n_head, int head_dim, int n_kv);
cudaError_t attention(const AttentionArgs & args, int n_multiprocessors, cudaStream_t stream);

} // namespace dflash::cuda
