#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "graph/draft_heads.hpp"
#include "graph/draft_mask.hpp"
#include "graph/target_blocks.hpp"
#include "state/draft_context.hpp"

namespace dflash {

/// Turns n feature rows into context K/V of every layer: u = rms_norm(fc f) * hidden_norm; K = rope(rms_norm(Wk u) *
/// k_norm), V = Wv u.
struct DraftAppendGraph {
    std::unique_ptr<Graph> graph;
    int32_t n_rows = 0;
    const ggml_tensor * ring = nullptr; // features come from these rows of a ring; null: from `features`
    uint64_t ring_serial = 0;           // of the group that holds the ring, since addresses come again
    ggml_tensor * features = nullptr;   // f32 [n_taps * n_embd, n_rows]
    ggml_tensor * ints = nullptr;       // i32: positions, ring rows of the features (if any), K/V rows per layer
};

/// ring: [n_taps * n_embd, capacity] on the drafter's device, any type that get_rows reads; null for host features.
std::unique_ptr<DraftAppendGraph> build_draft_append_graph(const DraftContext & context, int32_t n_rows,
                                                           ggml_tensor * ring);

/// One pass over the block [anchor, mask, ...] at the context's cursor.
struct DraftProposeGraph {
    std::unique_ptr<Graph> graph;
    std::vector<int64_t> n_kv;          // keys per layer that it was built for
    int32_t n_out = 0;                  // proposals that come out; the block always has its trained size
    ggml_tensor * positions = nullptr;  // i32 [block]
    ggml_tensor * embeddings = nullptr; // f32 [n_embd, block] when the embedding is on the host
    std::vector<std::unique_ptr<DraftMask>> masks;
    ggml_tensor * logits = nullptr; // f32 [vocabulary, n_out]
    ggml_tensor * hidden = nullptr; // f32 [n_embd, n_out], normed
    ggml_tensor * ids = nullptr;    // i32 [n_out], target ids
    ChainResult chain;              // of a drafter whose proposals depend on each other; its ids are the ones above
    int32_t n_top = 0;
    ggml_tensor * top_ids = nullptr;    // i32 [n_top * n_out], target ids, no order in a slot; null for n_top 0, chains
    ggml_tensor * top_values = nullptr; // f32 [2 * n_top, n_out]: their logits, then their probabilities
};

/// block_ids: i32 [block] on the device, anchor first. verify_ids: i32 [>= n_out + 1], receives anchor, proposals.
/// n_top: candidates of each slot, at most as many as the draft vocabulary has; 0: none.
/// n_out: only the first proposals that are wanted; the last layer and the head are not run for the others.
std::unique_ptr<DraftProposeGraph> build_draft_propose_graph(const DraftContext & context, int32_t n_out, int32_t n_top,
                                                             ggml_tensor * block_ids, ggml_tensor * verify_ids);

/// Keys that each layer's attention looks at for the present cursor, a multiple of 256.
std::vector<int64_t> draft_keys(const DraftContext & context);

} // namespace dflash
