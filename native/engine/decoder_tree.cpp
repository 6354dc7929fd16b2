#include <algorithm>

#include "base/error.hpp"
#include "engine/decoder.hpp"
#include "engine/stopwatch.hpp"

// The part of Decoder that steps with trees.
namespace dflash {

int32_t Decoder::max_tree() const {
    return has_drafter() ? std::min(cache_.options().max_verify - 1, max_tree_nodes) : 0;
}

StepResult Decoder::step_tree(int32_t n_nodes, int64_t budget) {
    check(n_nodes >= 1 && n_nodes <= max_tree_nodes, Status::invalid, "a tree of %d nodes, want 1 to %d", n_nodes,
          max_tree_nodes);
    const int32_t max_verify = cache_.options().max_verify;
    check(!has_drafter() || n_nodes < max_verify, Status::invalid,
          "a tree of %d nodes and the token before it, the cache verifies at most max_verify %d rows", n_nodes,
          max_verify);
    begin_step(budget);
    if (!has_drafter() || budget == 1) {
        return end_step(step_alone(budget));
    }
    if (room() <= n_nodes) { // the end of the context
        const int64_t width = std::min<int64_t>({n_nodes + 1, max_width(), budget, room()});
        return end_step(width > 1 ? step_drafted(static_cast<int32_t>(width), budget) : step_alone(budget));
    }
    return end_step(step_drafted_tree(n_nodes, budget));
}

StepResult Decoder::step_drafted_tree(int32_t n_nodes, int64_t budget) {
    Stopwatch watch;
    StepResult result;
    DraftTree tree;
    const int32_t n_slots = context_->model().config().n_proposals();
    const TreeLimits limits = tree_limits(n_nodes, n_slots);
    const int32_t anchor = history_->tokens().back();
    try {
        append_features();
        result.append_ms = watch.lap_ms();
        tree = draft_->propose_tree(anchor, n_nodes);
    } catch (const Error & error) {
        disable_draft(error);
        return step_alone(budget);
    }
    result.draft_ms = watch.lap_ms();
    const auto n = static_cast<int32_t>(tree.tokens.size());
    result.width = n;
    result.n_proposed = n - 1;
    result.tree = n - 1;
    result.depth = tree.depth;
    result.n_chain = tree.n_chain;
    // A tree that is used for the first time may need any of its sizes later: none is built amid a request then.
    target_.prepare_tree(n, limits.sizes);
    pending_ = target_.verify_tree(tree.tokens.data(), tree.parents.data(), n, tree.size);
    const StopRule rule{stop_ids_, budget};
    AcceptResult accepted;
    if (sampler_->is_greedy_without_processing()) {
        const std::vector<int32_t> argmax = target_.verify_argmax(pending_);
        result.verify_ms = watch.lap_ms();
        accepted = accept_tree_greedy(tree.parents, tree.tokens, argmax, *history_, rule);
    } else {
        target_.wait();
        result.verify_ms = watch.lap_ms();
        accepted = accept_tree(
            tree.parents, tree.tokens, [&](int32_t row) { return target_.verify_logits(pending_, row); }, pending_.base,
            *sampler_, *history_, rule);
    }
    pending_rows_ = static_cast<int64_t>(accepted.emitted.size());
    pending_path_ = std::move(accepted.path);
    result.n_accepted = accepted.n_accepted;
    while (result.n_chain_accepted < std::min(result.n_accepted, result.n_chain) &&
           pending_path_[static_cast<size_t>(result.n_chain_accepted) + 1] == result.n_chain_accepted + 1) {
        result.n_chain_accepted += 1;
    }
    result.tokens = std::move(accepted.emitted);
    result.draws = std::move(accepted.draws);
    result.reason = accepted.reason;
    result.accept_ms = watch.lap_ms();
    return result;
}

} // namespace dflash
