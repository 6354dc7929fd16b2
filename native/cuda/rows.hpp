#pragma once

// What stands between the products of a layer, each as one kernel over whole rows: sums, norms and gates. A row that a
// product reads next is also packed for it. All values float32; a row's result does not depend on the other rows.

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/rows_matmul.hpp"

namespace dflash::cuda {

/// Where a row kernel leaves its rows: out [n_rows, k], contiguous, and packed.
struct RowOutput {
    float * out = nullptr;
    int n_rows = 0;
    int k = 0;
};

/// sum = a + b, which may be left out (b null: sum = a, not written); out = sum / sqrt(mean(sum^2) + eps) * weight.
/// a, b: contiguous rows.
cudaError_t add_norm(const float * a, const float * b, float * sum, const float * weight, float eps,
                     const RowOutput & output, const MatmulScratch & scratch, cudaStream_t stream);

/// out = silu(gate) * up, or value * sigmoid(gate).
enum class Gate { swiglu, sigmoid };
cudaError_t gate_rows(Gate kind, const float * gate, const float * value, const RowOutput & output,
                      const MatmulScratch & scratch, cudaStream_t stream);

/// Per head of `head` values (64 or 128): out = x / sqrt(mean(x^2) + eps) * weight * silu(z).
cudaError_t gated_norm(const float * x, int64_t x_row, const float * z, const float * weight, float eps, int head,
                       const RowOutput & output, const MatmulScratch & scratch, cudaStream_t stream);

/// beta = sigmoid(b); g = softplus(a + bias) * rate; [n_rows, n_heads] each.
cudaError_t delta_gates(const float * a, const float * bias, const float * rate, float * g, const float * b,
                        float * beta, int n_rows, int n_heads, cudaStream_t stream);

/// The causal convolution of a DeltaNet layer and what follows it: 4 taps, SiLU, norm of the query and key heads.
struct ConvArgs {
    const float * state = nullptr; // [3, channels], oldest first
    const float * rows = nullptr;  // [n_rows, channels]
    const float * taps = nullptr;  // [channels, 4]
    float * window = nullptr;      // [3 + n_rows, channels]: state and rows; null: not wanted
    float * new_state = nullptr;   // [3, channels]: the last three of the window; null: not wanted; may be `state`
    float * mixed = nullptr;       // [n_rows, channels], after SiLU
    float * normed = nullptr;      // [n_rows, n_normed * head]: x / sqrt(mean(x^2) + eps) * scale of the first heads
    int n_rows = 0, channels = 0, head = 0, n_normed = 0;
    float eps = 0.0f, scale = 1.0f;
};
cudaError_t delta_conv(const ConvArgs & args, cudaStream_t stream);

/// Index of the largest of each row's n values, the first of equals. scratch: argmax_scratch_bytes(n_rows).
cudaError_t argmax_rows(const float * x, int64_t n, int n_rows, int32_t * out, void * scratch, cudaStream_t stream);
size_t argmax_scratch_bytes(int n_rows);

} // namespace dflash::cuda
