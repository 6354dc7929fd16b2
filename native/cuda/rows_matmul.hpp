#pragma once

// y = W x for a few rows of x (32 at a time), W quantised as in a GGUF file. Each row's result has the same bits
// whatever the number of rows and wherever the row stands among them: weights and activations become half precision,
// products are summed in float32 by tensor cores, and the order of the sum depends on the shape of W and the device
// alone.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace dflash::cuda {

constexpr int max_rows = 32;   // of a tile
constexpr int max_batch = 512; // of a call, tile after tile
constexpr int max_parts = 4;
constexpr int unit_weights = 256; // a row of W is consumed in units of so many

enum class WeightType { q4_k, q5_k, q6_k, q8_0, q4_0, iq4_xs, nvfp4 };

/// One matrix of a launch; all parts of a launch share x.
struct MatmulPart {
    const void * weights = nullptr; // [n_features] rows of row_bytes
    float * out = nullptr;          // [n_rows, n_features], contiguous
    int n_features = 0;
};

/// Device memory that launches on one stream share. Sizes in bytes.
struct MatmulScratch {
    void * packed = nullptr;       // activations: packed_bytes(k)
    float * row_scale = nullptr;   // max_batch floats
    float * partials = nullptr;    // partial_bytes(device)
    unsigned * arrivals = nullptr; // counter_bytes, zero; a launch leaves zeros
};

size_t packed_bytes(int64_t k);
size_t partial_bytes(int n_multiprocessors);
constexpr size_t max_tiles = 8192; // of 128 features, over all parts of a launch
constexpr size_t counter_bytes = max_tiles * sizeof(unsigned);

/// Writes x [n_rows, k] (float32, rows row_stride floats apart) into scratch.packed as the matmul reads it.
cudaError_t pack_activations(const float * x, int64_t row_stride, int n_rows, int64_t k, const MatmulScratch & scratch,
                             cudaStream_t stream);

/// out = W x of the packed activations. row_bytes: of one row of W, k weights.
cudaError_t rows_matmul(WeightType type, const MatmulPart * parts, int n_parts, int64_t k, size_t row_bytes, int n_rows,
                        const MatmulScratch & scratch, int n_multiprocessors, cudaStream_t stream);

/// Weights in floating point (2 or 4 bytes each), by plain float32 arithmetic; x as it is, not packed. For small
/// matrices. `type`: 0 float32, 1 half, 2 bfloat16.
cudaError_t float_matmul(int type, const void * weights, const float * x, int64_t row_stride, float * out,
                         int n_features, int64_t k, int n_rows, cudaStream_t stream);

} // namespace dflash::cuda
