#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decode/draft_chain.hpp"
#include "decode/draft_tree.hpp"
#include "graph/draft_graph.hpp"
#include "state/draft_context.hpp"
#include "state/target_cache.hpp"

namespace dflash {

/// Runs the drafter over one context and owns the graphs that do it. One user at a time; takes the device's lock.
class DraftForward {
  public:
    explicit DraftForward(DraftContext & context);

    /// Writes the context K/V of positions [base, base + n) from the features in ring rows p % capacity. ring lies on
    /// the drafter's device. All checks of DraftContext::check_append come before the first write; n = 0 does nothing.
    /// After a device error the context is empty and starts again at base.
    /// serial: TensorGroup::serial of the group that holds the ring.
    void append_ring(ggml_tensor * ring, uint64_t serial, int64_t capacity, int64_t base, int64_t n);
    /// The same from a target cache on this device; Status::invalid when the rows are not in its ring (any more).
    void append(const TargetCache & cache, int64_t base, int64_t n);
    /// The same from host memory, f32 [n, n_taps * n_embd].
    void append_host(const float * features, int64_t base, int64_t n);

    /// Drafts the block at the context's cursor behind `anchor`, which stands at that position. Queued; the proposals
    /// are in verify_ids() and can be read with proposals(). n_wanted: the first that many proposals, at most
    /// n_proposals; negative: all. n_top > 0: also finds the n_top likeliest tokens of each of these slots. Throws
    /// Status::invalid for an id outside the vocabulary, another n_wanted or a negative n_top.
    void propose(int32_t anchor, int32_t n_wanted = -1, int32_t n_top = 0);
    /// i32 [n_proposals + 1] on the device: anchor, proposals (the wanted ones).
    ggml_tensor * verify_ids() const { return verify_ids_; }
    uint64_t ids_serial() const { return ids_->serial(); }
    /// The proposals of the last propose(). Throws Status::internal when one is no token (logits of NaN).
    std::vector<int32_t> proposals();
    /// The n_top likeliest tokens of each slot of the last propose(), fewer where the vocabulary is smaller. Throws
    /// Status::internal for logits that are not numbers.
    std::vector<SlotCandidates> candidates();
    /// The same as a tree's slots; of a drafter whose proposals depend on each other with what stands behind each one.
    std::vector<SlotChoices> choices();
    /// The drafter's own estimate for each proposal of the last propose() that it is right, given those before it: of
    /// a confidence head, else the probability that chose it. Status::unsupported for a drafter without either.
    std::vector<float> chances();
    /// propose() of every slot, and a tree of up to n_nodes proposals made from it with tree_limits().
    DraftTree propose_tree(int32_t anchor, int32_t n_nodes);
    /// Draft logits of the last propose(), f32 [n_wanted, vocabulary], and hidden rows [n_wanted, n_embd].
    std::vector<float> logits();
    std::vector<float> hidden();
    bool has_proposals() const { return propose_ != nullptr && proposed_; }
    uint64_t graph_bytes() const;

  private:
    void check_is_token(int32_t id, const char * what) const;
    void run_append(ggml_tensor * ring, uint64_t serial, int64_t capacity, const float * features, int64_t base,
                    int64_t n, int64_t end);
    DraftProposeGraph & propose_graph(int32_t n_out, int32_t n_top);
    DraftAppendGraph & append_graph(int32_t n_rows, ggml_tensor * ring, uint64_t serial);
    void append_all(ggml_tensor * ring, uint64_t serial, int64_t capacity, const float * features, int64_t base,
                    int64_t n);

    DraftContext & context_;
    std::unique_ptr<TensorGroup> ids_;
    ggml_tensor * block_ids_ = nullptr;
    ggml_tensor * verify_ids_ = nullptr;
    std::vector<std::unique_ptr<DraftAppendGraph>> appends_;
    std::vector<std::unique_ptr<DraftProposeGraph>> proposes_; // by n_out and n_top, most recent last
    DraftProposeGraph * propose_ = nullptr;                    // of the last propose()
    std::vector<int32_t> ints_;
    std::vector<int32_t> block_;
    std::vector<int32_t> positions_;
    std::vector<float> embeddings_;
    bool proposed_ = false;
};

} // namespace dflash
