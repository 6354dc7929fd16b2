#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

namespace dflash {

/// Block size of the Hadamard rotation that spreads outliers over a head before quantisation: the largest power of two
/// from 64 to 256 that divides head_dim; 0 (no rotation) for types that are not quantised or other head sizes.
int64_t rotation_size(enum ggml_type type, int64_t head_dim);

/// H[i][j] = (-1)^popcount(i & j) / sqrt(n), row after row: orthogonal, symmetric, its own inverse.
std::vector<float> hadamard(int64_t n);

} // namespace dflash
