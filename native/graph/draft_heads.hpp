#pragma once

#include <vector>

#include "ggmlx/graph.hpp"
#include "model/draft_model.hpp"

// The pieces of a drafter's forward that only DFlash2 and DSpark have. They add nodes to a graph and own nothing.
namespace dflash {

/// One grouped dynamic causal convolution of a DFlash2 layer, of both its sides. With g(c) the group of channel c and
/// d = proj x_0 for the sublayer's normed input x_0 [n_embd, n]:
///   y[c, i] = sum over taps t of (base[c, t, side] + d[g(c), t, side, i]) * x[c, i - t],   x[c, i < 0] = 0
class GroupedConv {
  public:
    /// base: f32 [n_embd, kernel, 2]; null: a convolution that is not there, apply() returns its input.
    GroupedConv(ggml_context * ctx, const DraftConfig & config, ggml_tensor * base, const Linear & proj,
                ggml_tensor * x_0);
    /// side 0: in front of the sublayer, 1: behind it. x [n_embd, n'] are the first n' <= n rows.
    ggml_tensor * apply(ggml_tensor * x, int side) const;

  private:
    ggml_context * ctx_;
    const DraftConfig & config_;
    ggml_tensor * base_;
    ggml_tensor * dynamic_ = nullptr; // f32 [groups, kernel, 2, n]
};

/// What the chain of proposals and its alternatives came out as. Null or empty in a drafter without a chain.
struct ChainResult {
    ggml_tensor * ids = nullptr;     // i32 [n_out], target ids
    ggml_tensor * chances = nullptr; // f32 [n_out]: the drafter's own estimate that a proposal is right, given those
                                     // before it; NaN or infinite when its numbers are broken
    ggml_tensor * top_ids = nullptr; // i32 [n_top * n_out], target ids
    ggml_tensor * first = nullptr;   // f32 [n_top]: scores of slot 0's candidates behind the anchor
    ggml_tensor * pairs = nullptr;   // f32 [n_top, n_top, n_out - 1]: of slot j + 1's candidates (ne0) behind each of
                                     // slot j's (ne1); null for one slot
    ggml_tensor * top_chance = nullptr; // f32 [n_top, n_out]: probability of each candidate behind the chain
    int32_t n_top = 0;
};

/// Walks from the anchor over the slots, each one's proposal chosen given the one before it: by a selector from the
/// selector_top_k likeliest tokens, score(c) = logit(c) + <previous[p] * (gate h), next[c]>, or by a Markov head,
/// logit(c) + <previous[p], next[c]> over the whole draft vocabulary. A Markov head's sums replace the logits.
///   logits f32 [draft vocabulary, n_out], hidden f32 [n_embd, n_out] normed, anchor i32 [1]
///   n_top  alternatives of each slot that a tree is made from; 0: none
ChainResult build_chain(Graph & graph, const DraftModel & model, ggml_tensor * logits, ggml_tensor * hidden,
                        ggml_tensor * anchor, int32_t n_top);

} // namespace dflash
