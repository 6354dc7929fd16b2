#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "decode/sampler.hpp"
#include "decode/token_history.hpp"

// Which drafted tokens stand. Every row of a verify forward is drawn from the target's own processed distribution with
// the random number of its position; a draft token stands while it equals that draw, and the first draw that differs is
// the next anchor. So each emitted token is exactly what decoding without a drafter would have drawn there.
namespace dflash {

enum class StopReason : int32_t { none = 0, stop_token = 1, budget = 2 };

struct AcceptResult {
    int32_t n_accepted = 0;       // proposals that stand and are followed by another emitted token
    std::vector<int32_t> emitted; // the accepted proposals, then the final draw: n_accepted + 1 tokens
    std::vector<int32_t> path;    // the rows to commit, one per emitted token: 0 (the anchor), then accepted nodes
    std::vector<Draw> draws;      // one per emitted token when SamplingParams::logprobs, else empty
    bool stopped = false;         // reason != none
    StopReason reason = StopReason::none; // stop_token when the last emitted token is both
};

/// Logits [n_vocab] f32 of one verify row, valid until the next call. Rows after the first mismatch are not asked for.
using RowLogits = std::function<const float *(int32_t row)>;

/// What ends the walk besides a mismatch: a stop id (it is emitted, and nothing after it), or `budget` emitted tokens.
struct StopRule {
    std::vector<int32_t> stop_ids;
    int64_t budget = 0; // >= 1
};

// The functions below append what they emit to `history`, which must hold every token up to and including the anchor.
// On any error, one thrown by `row` included, `history` is as before. A failed draw keeps its status and its message
// names the row. Status::invalid: a proposal or tree that does not fit, or a budget below 1.
// One thread at a time per sampler and history.

/// Chain: row 0 is the anchor at absolute position anchor_position, row i + 1 is proposals[i]; row i predicts position
/// anchor_position + i + 1. There are proposals.size() + 1 rows; no proposals is plain decoding.
AcceptResult accept_chain(const std::vector<int32_t> & proposals, const RowLogits & row, int64_t anchor_position,
                          const Sampler & sampler, TokenHistory & history, const StopRule & stop);

/// Tree: node 0 is the anchor, parents[0] = -1, and every other node has a parent with a smaller index. A node predicts
/// the position after its own, which is anchor_position + depth. Of siblings with equal tokens the first one counts.
AcceptResult accept_tree(const std::vector<int32_t> & parents, const std::vector<int32_t> & tokens,
                         const RowLogits & row, int64_t anchor_position, const Sampler & sampler,
                         TokenHistory & history, const StopRule & stop);

/// The same rules where the argmax of every row was taken on the device, for samplers of which
/// is_greedy_without_processing() holds. Throws Status::internal naming the row when an argmax is not a token.
AcceptResult accept_chain_greedy(const std::vector<int32_t> & proposals, const std::vector<int32_t> & argmax,
                                 TokenHistory & history, const StopRule & stop);
AcceptResult accept_tree_greedy(const std::vector<int32_t> & parents, const std::vector<int32_t> & tokens,
                                const std::vector<int32_t> & argmax, TokenHistory & history, const StopRule & stop);

} // namespace dflash
