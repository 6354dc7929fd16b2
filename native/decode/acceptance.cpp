#include "decode/acceptance.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace dflash {
namespace {

constexpr int32_t no_node = -1;

class HistoryRollback {
  public:
    explicit HistoryRollback(TokenHistory & history) : history_(history), size_(history.size()) {}
    ~HistoryRollback() {
        if (size_ >= 0) {
            history_.truncate(size_);
        }
    }
    HistoryRollback(const HistoryRollback &) = delete;
    HistoryRollback & operator=(const HistoryRollback &) = delete;

    void dismiss() { size_ = -1; }

  private:
    TokenHistory & history_;
    int64_t size_;
};

/// Walks down from node 0. draw(node, depth) gives the token after a node, next(node, token) the child to go on with or
/// no_node.
template <class DrawAt, class Next>
AcceptResult walk(TokenHistory & history, const StopRule & stop, DrawAt draw, Next next) {
    check(stop.budget >= 1, Status::invalid, "budget of %lld tokens, want >= 1", static_cast<long long>(stop.budget));
    HistoryRollback rollback(history);
    AcceptResult result;
    for (int32_t node = 0; node != no_node;) {
        const int32_t token = draw(node, static_cast<int64_t>(result.emitted.size()), result);
        history.push(token);
        result.path.push_back(node);
        result.emitted.push_back(token);
        if (std::find(stop.stop_ids.begin(), stop.stop_ids.end(), token) != stop.stop_ids.end()) {
            result.reason = StopReason::stop_token;
            break;
        }
        if (static_cast<int64_t>(result.emitted.size()) >= stop.budget) {
            result.reason = StopReason::budget;
            break;
        }
        node = next(node, token);
    }
    result.n_accepted = static_cast<int32_t>(result.emitted.size()) - 1;
    result.stopped = result.reason != StopReason::none;
    rollback.dismiss();
    return result;
}

/// Draws from the rows of a verify forward.
class RowDraw {
  public:
    RowDraw(const RowLogits & row, int64_t anchor_position, const Sampler & sampler, const TokenHistory & history)
        : row_(row), anchor_position_(anchor_position), sampler_(sampler), history_(history) {
        check(anchor_position >= 0, Status::invalid, "anchor at position %lld, want >= 0",
              static_cast<long long>(anchor_position));
    }

    int32_t operator()(int32_t node, int64_t depth, AcceptResult & result) {
        const float * logits = row_(node);
        check(logits != nullptr, Status::internal, "row %d has no logits", node);
        try {
            sampler_.draw(logits, anchor_position_ + depth + 1, history_, draw_);
        } catch (const Error & error) {
            fail(error.status(), "row %d: %s", node, error.what());
        }
        if (sampler_.params().logprobs) {
            result.draws.push_back(draw_);
        }
        return draw_.token;
    }

  private:
    const RowLogits & row_;
    int64_t anchor_position_;
    const Sampler & sampler_;
    const TokenHistory & history_;
    Draw draw_;
};

/// Reads what the device already decided.
class ArgmaxDraw {
  public:
    ArgmaxDraw(const std::vector<int32_t> & argmax, size_t n_rows, const TokenHistory & history)
        : argmax_(argmax), n_vocab_(history.n_vocab()) {
        check(argmax.size() == n_rows, Status::invalid, "argmax of %zu rows, want %zu", argmax.size(), n_rows);
    }

    int32_t operator()(int32_t node, int64_t, AcceptResult &) const {
        const int32_t token = argmax_[static_cast<size_t>(node)];
        check(token >= 0 && token < n_vocab_, Status::internal, "row %d has argmax %d, want 0 <= token < %d", node,
              token, n_vocab_);
        return token;
    }

  private:
    const std::vector<int32_t> & argmax_;
    int32_t n_vocab_;
};

class Chain {
  public:
    Chain(const std::vector<int32_t> & proposals, int32_t n_vocab) : proposals_(proposals) {
        for (size_t i = 0; i < proposals.size(); ++i) {
            check(proposals[i] >= 0 && proposals[i] < n_vocab, Status::invalid,
                  "proposal %zu is token %d, want 0 <= token < %d", i, proposals[i], n_vocab);
        }
    }

    int32_t operator()(int32_t node, int32_t token) const {
        const auto i = static_cast<size_t>(node);
        return i < proposals_.size() && proposals_[i] == token ? node + 1 : no_node;
    }

  private:
    const std::vector<int32_t> & proposals_;
};

class Tree {
  public:
    Tree(const std::vector<int32_t> & parents, const std::vector<int32_t> & tokens, int32_t n_vocab)
        : parents_(parents), tokens_(tokens) {
        check(!parents.empty() && parents.size() == tokens.size(), Status::invalid,
              "tree of %zu parents and %zu tokens, want equal numbers >= 1", parents.size(), tokens.size());
        check(parents[0] == no_node, Status::invalid, "parent of node 0 is %d, want -1", parents[0]);
        for (size_t i = 0; i < parents.size(); ++i) {
            check(i == 0 || (parents[i] >= 0 && static_cast<size_t>(parents[i]) < i), Status::invalid,
                  "parent of node %zu is %d, want 0 <= parent < %zu", i, parents[i], i);
            check(tokens[i] >= 0 && tokens[i] < n_vocab, Status::invalid, "node %zu is token %d, want 0 <= token < %d",
                  i, tokens[i], n_vocab);
        }
    }

    int32_t operator()(int32_t node, int32_t token) const {
        for (size_t i = static_cast<size_t>(node) + 1; i < parents_.size(); ++i) {
            if (parents_[i] == node && tokens_[i] == token) {
                return static_cast<int32_t>(i);
            }
        }
        return no_node;
    }

  private:
    const std::vector<int32_t> & parents_;
    const std::vector<int32_t> & tokens_;
};

} // namespace

AcceptResult accept_chain(const std::vector<int32_t> & proposals, const RowLogits & row, int64_t anchor_position,
                          const Sampler & sampler, TokenHistory & history, const StopRule & stop) {
    const Chain chain(proposals, sampler.n_vocab());
    return walk(history, stop, RowDraw(row, anchor_position, sampler, history), chain);
}

AcceptResult accept_tree(const std::vector<int32_t> & parents, const std::vector<int32_t> & tokens,
                         const RowLogits & row, int64_t anchor_position, const Sampler & sampler,
                         TokenHistory & history, const StopRule & stop) {
    const Tree tree(parents, tokens, sampler.n_vocab());
    return walk(history, stop, RowDraw(row, anchor_position, sampler, history), tree);
}

AcceptResult accept_chain_greedy(const std::vector<int32_t> & proposals, const std::vector<int32_t> & argmax,
                                 TokenHistory & history, const StopRule & stop) {
    const Chain chain(proposals, history.n_vocab());
    return walk(history, stop, ArgmaxDraw(argmax, proposals.size() + 1, history), chain);
}

AcceptResult accept_tree_greedy(const std::vector<int32_t> & parents, const std::vector<int32_t> & tokens,
                                const std::vector<int32_t> & argmax, TokenHistory & history, const StopRule & stop) {
    const Tree tree(parents, tokens, history.n_vocab());
    return walk(history, stop, ArgmaxDraw(argmax, parents.size(), history), tree);
}

} // namespace dflash
