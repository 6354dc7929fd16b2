#pragma once

#include <cstdint>
#include <vector>

#include "ggmlx/graph.hpp"
#include "graph/tree_blocks.hpp"
#include "model/target_model.hpp"
#include "state/target_cache.hpp"

// The pieces of a Qwen3.5 forward pass. They add nodes to a graph and own nothing. Activations are float32
// [n_embd, n_rows]; n_rows is a * b for a rows of b sequences, here always one sequence.
namespace dflash {

/// Index inputs that every layer of one forward pass shares.
struct RowInputs {
    ggml_tensor * positions = nullptr; // i32 [n_rows], absolute
    ggml_tensor * kv_rows = nullptr;   // i64 [n_rows], row of K/V that each token writes
    ggml_tensor * mask = nullptr;      // f16 [n_kv, n_rows], 0 or -inf
    const TreeRows * tree = nullptr;   // the rows are nodes of a tree; null: of a chain
    int64_t n_kv = 0;
};

/// What a commit needs of one DeltaNet layer of a verify forward. The tensors keep their content until the next run
/// of the same graph.
struct DeltaNetCapture {
    int32_t layer = -1;
    ggml_tensor * conv_input = nullptr; // f32 [conv_channels, d_conv - 1 + n_rows]: old columns, then one per row
    ggml_tensor * qk = nullptr;         // f32 [S, 2 * Hk, n_rows], L2-normalised
    ggml_tensor * qkv = nullptr;        // f32 [conv_channels, n_rows] after convolution and SiLU; values are the tail
    ggml_tensor * g = nullptr;          // f32 [1, Hv, n_rows], log decay
    ggml_tensor * beta = nullptr;       // f32 [1, Hv, n_rows]
    ggml_tensor * states = nullptr;     // f32 [S, S, Hv, n_rows], newest row first; only with keep_states
};

/// (w x) * scale + bias.
ggml_tensor * build_linear(ggml_context * ctx, const Linear & linear, ggml_tensor * x);
/// rms_norm(x, eps) * weight over ne0.
ggml_tensor * build_norm(ggml_context * ctx, ggml_tensor * x, ggml_tensor * weight, float eps);
/// Rotary embedding of x [head_dim, n_heads, n_rows] at positions i32 [n_rows]. freq_factors: f32 [n_dims/2] or null.
ggml_tensor * build_rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, const RopeParams & rope,
                         ggml_tensor * freq_factors = nullptr);
/// A recurrent state as the target of a copy, in the form in which a backend fuses that copy into the DeltaNet kernel.
ggml_tensor * state_target(ggml_context * ctx, ggml_tensor * state);
/// x [width, ...] with each block of r->ne[0] values multiplied by the symmetric matrix r.
ggml_tensor * build_rotation(ggml_context * ctx, ggml_tensor * r, ggml_tensor * x);

/// Dense or expert feed-forward of normalised x. selected: where not null, receives the router's choice
/// i32 [n_expert_used, n_rows] of an expert layer.
ggml_tensor * build_feed_forward(ggml_context * ctx, const TargetConfig & config, const TargetLayer & layer,
                                 ggml_tensor * x, ggml_tensor ** selected);

enum class StateUpdate {
    write, // recurrent and conv state move on to the last row
    keep,  // state stays; `capture` receives what a later commit needs
};

/// The mixer of one layer (attention or DeltaNet) on normalised x, K/V write included. Returns the value that is added
/// to the residual stream.
ggml_tensor * build_mixer(Graph & graph, const TargetCache & cache, int32_t layer, ggml_tensor * x,
                          const RowInputs & rows, StateUpdate update, DeltaNetCapture * capture);

} // namespace dflash
