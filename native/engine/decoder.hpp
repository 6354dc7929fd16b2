#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cancel.hpp"
#include "decode/acceptance.hpp"
#include "engine/draft_forward.hpp"
#include "engine/target_forward.hpp"
#include "state/draft_feature_mirror.hpp"
#include "state/prefix_snapshot.hpp"

namespace dflash {

struct DecoderOptions {
    int32_t prefill_chunk = 512;
    /// What a failure of the draft side does: false throws it, true logs it, says so in the stats and goes on alone.
    bool autoregressive_on_draft_failure = false;
};

/// What one prefill or step did.
struct StepResult {
    std::vector<int32_t> tokens; // emitted, in order
    std::vector<Draw> draws;     // log-probabilities, one per token, when asked for
    int32_t width = 0;           // rows of the target forward
    int32_t n_proposed = 0;      // proposals that were verified: width - 1
    int32_t n_accepted = 0;
    int32_t tree = 0;             // nodes of the tree that was verified; 0: a chain, or nothing
    int32_t depth = 0;            // of the deepest proposal
    int32_t n_chain = 0;          // the drafter's first choices one behind the other, from the first slot on
    int32_t n_chain_accepted = 0; // of these, in a row
    StopReason reason = StopReason::none;
    double draft_ms = 0, verify_ms = 0, accept_ms = 0, commit_ms = 0, append_ms = 0;
};

constexpr size_t max_draft_slots = 64;

/// Totals since begin().
struct DecoderStats {
    int64_t prompt_tokens = 0;
    int64_t emitted = 0;     // tokens, the first one from the prefill included
    int64_t steps = 0;       // target forwards after the prefill
    int64_t draft_steps = 0; // of these, with proposals
    int64_t proposed = 0;
    int64_t accepted = 0;
    std::array<int64_t, max_draft_slots> proposed_by_slot{};
    std::array<int64_t, max_draft_slots> accepted_by_slot{};
    double prefill_ms = 0, draft_ms = 0, verify_ms = 0, accept_ms = 0, commit_ms = 0, append_ms = 0;
    std::string draft_disabled; // why the drafter stopped, empty while it works
};

/// Which tokens the next draw may give: sets bit id % 32 of word id / 32 for each of them; all bits are clear before.
/// emitted: the n tokens that the running call has drawn so far. Called once for each row that is drawn from, in order,
/// also behind accepted proposals. What it throws ends the call.
using RowMask = std::function<void(const int32_t * emitted, int64_t n, std::vector<uint32_t> & allowed)>;

/// The token loop over one target cache, with or without a drafter: each step proposes, verifies, draws and accepts;
/// what a step accepted is committed by the next step, or by settle(), so that a caller may still cut it. One user at
/// a time; cancel() from any thread.
class Decoder {
  public:
    /// draft may be null. With the drafter on another device, features travel through `mirror`.
    Decoder(TargetCache & cache, TargetForward & target, DraftContext * context, DraftForward * draft,
            DraftFeatureMirror * mirror, DecoderOptions options);

    /// Starts a request: sampling, ids that end it. The cache keeps what it has. Throws Status::invalid.
    void begin(const SamplingParams & params, std::vector<int32_t> stop_ids);
    /// Appends n tokens behind what the cache holds and draws nothing: part of a prompt whose rest follows.
    void feed(const int32_t * ids, int64_t n, const std::function<bool(int64_t, int64_t)> & progress);
    /// Appends n tokens behind what the cache holds and draws the first new token (not yet in the cache: the anchor).
    /// n = 0 is legal with an anchor, or when the cache has the logits of its newest token, as after a restore.
    StepResult prefill(const int32_t * ids, int64_t n, int64_t budget,
                       const std::function<bool(int64_t, int64_t)> & progress);
    /// Restricts the draws of the calls that follow; an empty function lifts that. Verified proposals stand only while
    /// they are draws that the mask allows, so the text is that of masked plain decoding.
    void set_mask(RowMask mask);
    /// From now on a chain ends in front of the first proposal whose chance to be reached and right is below this,
    /// rounded up to a width of 2, 4, 8, ... rows; 0, as at first: it never does. Only with a drafter that says what
    /// its proposals are worth. The text does not depend on it. Throws Status::invalid unless 0 <= min_chance < 1.
    void set_min_chance(float min_chance);
    /// Consumes the anchor and up to width - 1 proposals, emits at least one token and at most `budget`.
    /// width <= 1, or no drafter: plain decoding. Throws Status::capacity when the context is full.
    StepResult step(int32_t width, int64_t budget);
    /// The same with a tree of n_nodes proposals (build_draft_tree): one target forward of n_nodes + 1 rows. Emits at
    /// most the depth of the tree + 1. Near the end of the context a chain takes its place. Throws Status::invalid
    /// unless 1 <= n_nodes <= max_tree_nodes, and when max_verify of the cache is below n_nodes + 1.
    StepResult step_tree(int32_t n_nodes, int64_t budget);
    /// Commits the last step, but only its first n_keep emitted tokens: with n_keep = 1 just the anchor that it
    /// consumed. Negative: all of it. After this the cache, its features and the drafter agree on position(), and the
    /// last kept token is the anchor again. No-op when nothing is pending.
    void settle(int64_t n_keep = -1);
    /// Forgets the anchor: the next tokens come right behind what the cache holds. Commits what is pending first.
    void drop_anchor();
    /// Lets the drafter read the features that wait for it while decoding plainly, so that a snapshot needs none.
    void catch_up();
    /// Forgets the sequence: cache, drafter, history.
    void reset();
    /// After the cache was changed from outside (restore): the tokens it now holds. The drafter starts at `draft_from`
    /// when its own state was not restored along.
    void adopt(std::vector<int32_t> tokens, int64_t draft_from);
    /// Puts a snapshot into the cache and the drafter's context, and goes on from there; what was pending is forgotten.
    /// Errors are those of restore_target_cache(), and Status::invalid for a snapshot without tokens; then nothing
    /// changed.
    void restore(const PrefixSnapshot & snapshot);

    void cancel() { cancel_.raise(); }
    const DecoderStats & stats() const { return stats_; }
    bool has_drafter() const { return draft_ != nullptr && stats_.draft_disabled.empty(); }
    /// Tokens in the cache once the last step is committed.
    int64_t position() const { return cache_.position() + pending_rows_; }
    int64_t room() const { return cache_.capacity() - position(); }
    bool has_anchor() const { return has_anchor_; }
    /// Committed and pending tokens, the anchor last.
    const std::vector<int32_t> & tokens() const { return history_->tokens(); }
    int32_t max_width() const;
    /// Most nodes of a tree; 0 without a drafter.
    int32_t max_tree() const;
    TargetCache & cache() { return cache_; }
    DraftContext * draft_context() { return context_; }

  private:
    void append_features();
    /// The anchor and n tokens through the target; with logits of the last one where asked for.
    ForwardResult ingest(const int32_t * ids, int64_t n, bool logits,
                         const std::function<bool(int64_t, int64_t)> & progress);
    RowLogits masked(RowLogits row);
    bool draws_on_device() const { return !mask_ && sampler_->is_greedy_without_processing(); }
    void begin_step(int64_t budget);
    StepResult end_step(StepResult result);
    StepResult step_alone(int64_t budget);
    StepResult step_drafted(int32_t width, int64_t budget);
    StepResult step_drafted_tree(int32_t n_nodes, int64_t budget);
    void disable_draft(const Error & error);
    /// Rows of at most `width` that are worth verifying by the drafter's own word.
    int32_t worthy_width(int32_t width);
    void count(const StepResult & result);

    TargetCache & cache_;
    TargetForward & target_;
    DraftContext * context_;
    DraftForward * draft_;
    DraftFeatureMirror * mirror_;
    DecoderOptions options_;
    CancelToken cancel_;
    std::unique_ptr<Sampler> sampler_;
    std::unique_ptr<TokenHistory> history_;
    std::vector<int32_t> stop_ids_;
    DecoderStats stats_;
    bool has_anchor_ = false;
    /// While decoding plainly, features wait in the ring until the drafter is asked again or this many are there: a
    /// drafter that does not pay then costs nothing.
    int64_t backlog_ = 1;
    RowMask mask_;
    std::vector<uint32_t> allowed_; // words of the mask in use
    float min_chance_ = 0.0f;
    VerifyOutcome pending_;
    int64_t pending_rows_ = 0;
    std::vector<int32_t> pending_path_; // of a tree: its nodes, one per pending row
    double carried_commit_ms_ = 0;      // of the previous step, reported with the one that pays for it
    double carried_append_ms_ = 0;
};

} // namespace dflash
