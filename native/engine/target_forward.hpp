#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/cancel.hpp"
#include "decode/draft_tree.hpp"
#include "graph/target_graph.hpp"
#include "graph/tree_commit.hpp"
#include "state/prefix_snapshot.hpp"
#include "state/target_cache.hpp"

namespace dflash {

struct ForwardRequest {
    const int32_t * ids = nullptr;  // [n]; null when hidden is given
    const float * hidden = nullptr; // f32 [n, n_embd]: input of the first layer of the range instead of ids
    int64_t n = 0;
    int32_t chunk = 512;                // most rows of one graph
    std::vector<int64_t> logit_rows;    // strictly increasing indices into [0, n)
    std::vector<int32_t> hidden_layers; // layers whose outputs are returned for every row
    bool want_hidden = false;           // the range's last output is returned for every row
    int32_t layer_begin = -1;           // sub-range of the cache's layers; negative: all of them
    int32_t layer_end = -1;
    const CancelToken * cancel = nullptr;
    std::function<void(int64_t base, int64_t n)> after_chunk; // features of these rows are in the ring
    std::function<bool(int64_t done, int64_t n)> progress;    // false cancels
};

struct ForwardResult {
    std::vector<float> logits; // [logit_rows, n_vocab]
    std::vector<float> hidden; // [hidden_layers (+1 when want_hidden), n, n_embd]
};

/// Token ids that are on the target's device already.
struct DeviceIds {
    ggml_tensor * tensor = nullptr; // i32
    uint64_t serial = 0;            // TensorGroup::serial of the group that holds it
};

/// The outcome of a verify forward. Recurrent state is as before it; commit() moves it on.
struct VerifyOutcome {
    uint64_t serial = 0; // 0: none
    int64_t base = 0;    // position of row 0
    int32_t n_rows = 0;
    TargetGraph * graph = nullptr;
    bool committed = false;                 // nothing is left to commit
    std::shared_ptr<const TreeLayout> tree; // null: verify() ran a chain
};

/// Runs the target over one cache and owns the graphs that do it. One user at a time; takes the device's lock.
class TargetForward {
  public:
    explicit TargetForward(TargetCache & cache) : cache_(cache) {}

    /// Appends n tokens, chunk by chunk. A sub-range of layers that stops short of the cache's last layer leaves the
    /// position where it is, so that the next range can follow on the same rows. All arguments are checked first:
    /// Status::invalid names the value, Status::capacity says how many rows are left. After Status::cancelled or a
    /// device error the cache holds the chunks that were done: position() says how many.
    ForwardResult forward(const ForwardRequest & request);

    /// Runs w = n rows at the current position without committing them. ids may be null when device_ids (i32 on this
    /// device, at least n long) is given. An earlier outcome becomes stale.
    VerifyOutcome verify(const int32_t * ids, int32_t n, DeviceIds device_ids = {});
    /// The same for the nodes of a tree: row i is ids[i] behind row parents[i], parents[0] = -1, at the position of its
    /// depth. A graph of the given size is used, so that steps with different trees share one; a tree that does not fit
    /// gets one that it does. A tree that is a chain runs as verify(). Throws Status::invalid naming the row
    /// for parents that are no tree, for more rows than max_verify or than max_tree_nodes + 1.
    VerifyOutcome verify_tree(const int32_t * ids, const int32_t * parents, int32_t n, TreeSize size = {});
    /// Builds what verify_tree() and its commit need for n rows at the current position, as far as it is not there.
    void prepare_tree(int32_t n, const std::vector<TreeSize> & sizes);
    /// Runs one token and commits it in the same pass. The outcome's logits can be read; it cannot be committed again.
    VerifyOutcome advance(int32_t id);
    /// Waits for what was queued.
    void wait() { cache_.model().device()->synchronize(); }
    /// Greatest logit of each row, lowest id first among equals on the CPU. Throws Status::internal for a row of NaN.
    std::vector<int32_t> verify_argmax(const VerifyOutcome & outcome);
    /// Logits of one row, float32 [n_vocab]; valid until the next call on this object.
    const float * verify_logits(const VerifyOutcome & outcome, int32_t row);
    /// The recurrent state of a layer after row i, f32 [S, S, Hv]; needs keep_states.
    std::vector<float> verify_state(const VerifyOutcome & outcome, int32_t layer, int32_t row);
    /// The convolution input of a layer, f32 [d_conv - 1 + n_rows, channels] by row.
    std::vector<float> verify_conv_input(const VerifyOutcome & outcome, int32_t layer);
    /// Accepts the first n rows, 0 <= n <= n_rows; of a tree they must be a path. Throws Status::invalid for a stale
    /// outcome or another n; after a device error the cache is poisoned until it is reset.
    void commit(const VerifyOutcome & outcome, int32_t n);
    /// Same, without waiting for the device.
    void commit_async(const VerifyOutcome & outcome, int32_t n);
    /// Accepts the nodes of a path from row 0 down, possibly none. Throws as commit() does, naming the entry that is no
    /// child of the one before.
    void commit_path(const VerifyOutcome & outcome, const std::vector<int32_t> & path);
    void commit_path_async(const VerifyOutcome & outcome, const std::vector<int32_t> & path);
    bool is_current(const VerifyOutcome & outcome) const { return outcome.serial != 0 && outcome.serial == serial_; }
    /// Makes any outcome stale; for resets and restores.
    void forget_outcome() { ++serial_; }
    bool poisoned() const { return poisoned_; }
    void clear_poison() { poisoned_ = false; }
    /// restore_target_cache() into this cache. Afterwards outcomes are stale and poison is gone.
    void restore(const PrefixSnapshot & snapshot, DraftContext * context);
    /// The same for restore_target_cache_chain().
    void restore_chain(const PrefixSnapshot * thick, const std::vector<const PrefixSnapshot *> & thins);

    /// Router choice of the last forward, i32 [n_rows, n_expert_used]; empty for dense layers.
    std::vector<int32_t> moe_selected(int32_t layer);
    /// Working memory of all graphs.
    uint64_t graph_bytes() const;

  private:
    struct Entry {
        std::unique_ptr<TargetGraph> graph;
        // For 1, 2, 4, ... rows, so that few accepted rows cost little; declared after the graph that they read from.
        std::vector<std::unique_ptr<CommitGraph>> commits;
        std::unique_ptr<TreeCommitGraph> tree_commit;
        std::vector<int32_t> ints; // host side of the index inputs
        std::vector<int32_t> tree_ints;
        std::vector<int64_t> kv_rows;
        std::vector<float> activations;
        uint64_t last_use = 0;
    };
    template <class Body> void restore_with(Body && body);
    Entry & entry(const TargetGraphShape & shape);
    void run(Entry & entry, int64_t base, const int32_t * ids, const float * hidden,
             const std::vector<int64_t> & out_rows, const TreeLayout * tree = nullptr);
    Entry & tree_entry(int32_t n, TreeSize size);
    void write_tree(Entry & entry, int64_t base, const TreeLayout & layout);
    int64_t keys_for(int64_t end) const;
    void check_ids(const int32_t * ids, int64_t n) const;
    void check_room(int64_t n) const;
    void check_outcome(const VerifyOutcome & outcome) const;
    void device_commit(const VerifyOutcome & outcome, int32_t n);
    void device_commit_path(const VerifyOutcome & outcome, const std::vector<int32_t> & path);
    /// path holds as many rows as are accepted; of a chain only their number counts.
    void commit_rows(const VerifyOutcome & outcome, const std::vector<int32_t> & path);

    TargetCache & cache_;
    std::vector<std::unique_ptr<Entry>> entries_;
    std::vector<float> row_buffer_;
    TargetGraph * last_ = nullptr;
    uint64_t clock_ = 0;
    uint64_t serial_ = 1;
    bool poisoned_ = false;
};

/// Index of the greatest value, the lowest one among equals. Throws Status::internal when there is a NaN.
int32_t argmax_lowest(const float * values, int64_t n, int64_t row);

} // namespace dflash
