#pragma once

#include <cstdint>

#include "ggmlx/graph.hpp"

namespace dflash {

/// What becomes of the state behind the rows.
enum class DeltaState {
    drop,  // `state` stays
    write, // `state` is the one behind the last row
    each,  // `state` stays; the one behind each row follows the output, newest first
};

/// The gated delta rule over float32 q, k [S, Hk, n, b], v [S, Hv, n, b], g and beta [1, Hv, n, b], and a state
/// [S, S, Hv] that b sequences start from. Returns [S * Hv, n * b] (with `each` more columns follow). `write` and
/// `each` are for one sequence. On a CPU a row's result has the same bits however many rows follow it.
ggml_tensor * build_delta_rule(Graph & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g,
                               ggml_tensor * beta, ggml_tensor * state, DeltaState what);

/// The same where only the state behind the last row is wanted, and written.
void build_delta_state(Graph & graph, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                       ggml_tensor * state);

} // namespace dflash
