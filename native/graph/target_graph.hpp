#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "graph/attention_mask.hpp"
#include "graph/target_blocks.hpp"

namespace dflash {

/// What a forward graph is built for. Two equal shapes can share one graph.
struct TargetGraphShape {
    int32_t n_rows = 0;
    int32_t n_out = 0;        // rows whose logits are wanted
    int64_t n_kv = 0;         // keys that attention looks at, a multiple of 256
    bool verify = false;      // leave recurrent state alone and keep what a commit needs
    bool from_hidden = false; // input is float32 activations, not token ids
    bool want_hidden = false; // the last layer's output of every row is kept
    int32_t layer_begin = 0;
    int32_t layer_end = 0;
    std::vector<int32_t> hidden_layers; // layers whose outputs are kept for inspection
    ggml_tensor * device_ids = nullptr; // i32 [>= n_rows] already on the device; null: ids come from the host
    uint64_t device_ids_serial = 0;     // of the group that holds them, since addresses come again
    int32_t tree_levels = 0;            // verify of a tree of at most this depth + 1; 0: a chain
    int32_t tree_paths = 0;             // and at most this many leaves

    bool operator==(const TargetGraphShape & o) const {
        return n_rows == o.n_rows && n_out == o.n_out && n_kv == o.n_kv && verify == o.verify &&
               from_hidden == o.from_hidden && want_hidden == o.want_hidden && layer_begin == o.layer_begin &&
               layer_end == o.layer_end && hidden_layers == o.hidden_layers && device_ids == o.device_ids &&
               device_ids_serial == o.device_ids_serial && tree_levels == o.tree_levels && tree_paths == o.tree_paths;
    }
};

/// A built forward pass over one cache.
struct TargetGraph {
    TargetGraphShape shape;
    std::unique_ptr<Graph> graph;
    ggml_tensor * ints = nullptr;            // i32: positions, feature rows, out rows, host ids one after another
    ggml_tensor * kv_rows = nullptr;         // i64 [n_rows]
    ggml_tensor * tree_ints = nullptr;       // i32, tree only: conv rows, path rows, places of TreeRows
    ggml_tensor * activations = nullptr;     // f32 [n_embd, n_rows]: host embeddings or hidden states; null with ids
    std::unique_ptr<AttentionMask> mask;     // null without full-attention layers
    ggml_tensor * logits = nullptr;          // f32 [n_vocab, n_out]
    ggml_tensor * argmax = nullptr;          // i32 [n_out]
    ggml_tensor * hidden_out = nullptr;      // f32 [n_embd, n_rows]
    std::vector<ggml_tensor *> hidden;       // by hidden_layers
    std::vector<ggml_tensor *> moe_selected; // i32 [n_expert_used, n_rows] by layer of the range, null for dense layers
    std::vector<DeltaNetCapture> captures;   // verify only, one per DeltaNet layer
    bool has_host_ids = false;
};

/// Builds and allocates the graph. The cache must outlive it.
std::unique_ptr<TargetGraph> build_target_graph(const TargetCache & cache, const TargetGraphShape & shape);

/// Re-runs the recurrence of a verify forward on its accepted rows and stores the result as the live state.
struct CommitGraph {
    int32_t n_rows = 0; // most rows that it can commit
    std::unique_ptr<Graph> graph;
    ggml_tensor * keep = nullptr;      // f32 [1, n_rows]: 1 for accepted rows, 0 after them
    ggml_tensor * conv_rows = nullptr; // i32 [d_conv - 1]: columns of conv_input that become the conv state
};

/// For the first n_rows rows of the verify. Rows that are not kept get decay exp(0) and beta 0, which leave the state
/// as it is, so one shape serves every n up to n_rows.
std::unique_ptr<CommitGraph> build_commit_graph(const TargetCache & cache, const TargetGraph & verify, int32_t n_rows);

} // namespace dflash
