#pragma once

#include <cstdint>

#include "ggmlx/graph.hpp"

namespace dflash {

/// Attention over q [head_dim, n_head, n_rows] and cached K/V rows [head_dim * n_head_kv, ...], the first n_kv of
/// them, which may be of any type that ggml can turn into floats. mask: f16 [n_kv, n_rows], 0 or -inf. Returns
/// [head_dim * n_head, n_rows]. On a CPU a row's result has the same bits whatever the number of rows and threads.
ggml_tensor * build_attention(Graph & graph, ggml_tensor * q, ggml_tensor * k_rows, ggml_tensor * v_rows,
                              ggml_tensor * mask, int64_t head_dim, int64_t n_head_kv, int64_t n_kv);

} // namespace dflash
