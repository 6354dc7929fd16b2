#include "decode/draft_tree.hpp"

#include <algorithm>
#include <cmath>
#include <queue>

#include "base/error.hpp"

namespace dflash {
namespace {

/// A node that may be added: candidate `rank` of slot `slot` behind node `parent`.
struct Choice {
    float score = 0;
    int64_t order = 0;
    int32_t parent = 0;
    size_t slot = 0;
    size_t rank = 0;

    bool operator<(const Choice & o) const { return score != o.score ? score < o.score : order > o.order; }
};

class Builder {
  public:
    Builder(int32_t anchor, const std::vector<SlotChoices> & slots, const TreeLimits & limits)
        : slots_(slots), limits_(limits) {
        tree_.parents.push_back(-1);
        tree_.tokens.push_back(anchor);
        tree_.scores.push_back(0.0f);
        is_inner_.push_back(false);
        places_.push_back(0);
    }

    DraftTree build() {
        int32_t node = 0;
        for (int32_t i = 0; i < limits_.n_seed; ++i) {
            const size_t slot = static_cast<size_t>(i);
            offer(node, slot, 1);
            node = add({score_of(node, slot, 0), 0, node, slot, 0});
        }
        tree_.n_chain = limits_.n_seed;
        offer(node, static_cast<size_t>(limits_.n_seed), 0);
        bool on_chain = true;
        while (!open_.empty() && n_nodes() < limits_.n_nodes) {
            const Choice choice = open_.top();
            open_.pop();
            const int32_t levels = std::max(tree_.depth, static_cast<int32_t>(choice.slot) + 1) + 1;
            if (size_for(levels, n_leaves_ + (is_inner_[static_cast<size_t>(choice.parent)] ? 1 : 0)) == nullptr) {
                continue; // neither would its siblings fit
            }
            on_chain = on_chain && choice.parent == tree_.n_chain && choice.rank == 0;
            node = add(choice);
            tree_.n_chain = on_chain ? node : tree_.n_chain;
            offer(choice.parent, choice.slot, choice.rank + 1);
            offer(node, choice.slot + 1, 0);
        }
        tree_.size = *size_for(tree_.depth + 1, n_leaves_);
        return std::move(tree_);
    }

  private:
    const TreeSize * size_for(int32_t n_levels, int32_t n_paths) const {
        const auto it = std::find_if(limits_.sizes.begin(), limits_.sizes.end(),
                                     [&](const TreeSize & size) { return size.holds(n_levels, n_paths); });
        return it == limits_.sizes.end() ? nullptr : &*it;
    }
    int32_t n_nodes() const { return static_cast<int32_t>(tree_.parents.size()) - 1; }
    const SlotCandidates & behind(int32_t parent, size_t slot) const {
        const SlotChoices & choices = slots_[slot];
        return choices.size() == 1 ? choices[0] : choices[static_cast<size_t>(places_[static_cast<size_t>(parent)])];
    }
    float score_of(int32_t parent, size_t slot, size_t rank) const {
        return tree_.scores[static_cast<size_t>(parent)] + behind(parent, slot).logprobs[rank];
    }
    void offer(int32_t parent, size_t slot, size_t rank) {
        if (slot < slots_.size() && rank < behind(parent, slot).tokens.size()) {
            open_.push({score_of(parent, slot, rank), n_offers_++, parent, slot, rank});
        }
    }
    int32_t add(const Choice & choice) {
        n_leaves_ += is_inner_[static_cast<size_t>(choice.parent)] ? 1 : 0;
        is_inner_[static_cast<size_t>(choice.parent)] = true;
        is_inner_.push_back(false);
        tree_.parents.push_back(choice.parent);
        const SlotCandidates & choices = behind(choice.parent, choice.slot);
        tree_.tokens.push_back(choices.tokens[choice.rank]);
        places_.push_back(choice.rank < choices.places.size() ? choices.places[choice.rank] : 0);
        tree_.scores.push_back(choice.score);
        tree_.depth = std::max(tree_.depth, static_cast<int32_t>(choice.slot) + 1);
        return n_nodes();
    }

    const std::vector<SlotChoices> & slots_;
    TreeLimits limits_;
    DraftTree tree_;
    std::priority_queue<Choice> open_;
    std::vector<bool> is_inner_;  // has a child
    std::vector<int32_t> places_; // of a node's token among its slot's candidates
    int32_t n_leaves_ = 1;
    int64_t n_offers_ = 0;
};

} // namespace

SlotCandidates sorted_candidates(const int32_t * tokens, const float * values, int32_t n, float log_normaliser) {
    std::vector<int32_t> order(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        check(!std::isnan(values[i]), Status::internal, "the drafter's logit of token %d is not a number", tokens[i]);
        order[static_cast<size_t>(i)] = i;
    }
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return values[a] != values[b] ? values[a] > values[b] : tokens[a] < tokens[b];
    });
    SlotCandidates out;
    for (const int32_t i : order) {
        if (std::find(out.tokens.begin(), out.tokens.end(), tokens[i]) == out.tokens.end()) {
            out.tokens.push_back(tokens[i]);
            out.logprobs.push_back(values[i] - log_normaliser);
            out.places.push_back(i);
        }
    }
    return out;
}

TreeLimits tree_limits(int32_t n_nodes, int32_t n_slots) {
    TreeLimits limits;
    limits.n_nodes = n_nodes;
    limits.n_seed = std::min(n_nodes / 4, n_slots);
    const int32_t deepest = std::min(n_nodes, n_slots) + 1;
    for (const int32_t quarters : {4, 3, 2}) {
        const int32_t n_levels = (deepest * quarters + 3) / 4;
        limits.sizes.push_back({n_levels, std::clamp(n_nodes * 9 / (2 * n_levels), 1, n_nodes)});
    }
    return limits;
}

DraftTree build_draft_tree(int32_t anchor, const std::vector<SlotCandidates> & slots, const TreeLimits & limits) {
    std::vector<SlotChoices> choices;
    for (const SlotCandidates & slot : slots) {
        choices.push_back({slot});
    }
    return build_draft_tree(anchor, choices, limits);
}

DraftTree build_draft_tree(int32_t anchor, const std::vector<SlotChoices> & slots, const TreeLimits & limits) {
    check(limits.n_nodes >= 1 && limits.n_nodes <= max_tree_nodes, Status::invalid, "a tree of %d nodes, want 1 to %d",
          limits.n_nodes, max_tree_nodes);
    check(!slots.empty(), Status::invalid, "a tree without slots");
    check(limits.n_seed >= 0 && limits.n_seed <= limits.n_nodes && static_cast<size_t>(limits.n_seed) <= slots.size(),
          Status::invalid, "a chain of %d nodes in a tree of %d over %zu slots", limits.n_seed, limits.n_nodes,
          slots.size());
    check(!limits.sizes.empty() && limits.sizes[0].holds(limits.n_seed + 1, 1), Status::invalid,
          "a chain of %d nodes does not fit the tree's first size", limits.n_seed);
    for (size_t i = 0; i < slots.size(); ++i) {
        check(slots[i].size() == 1 || (i > 0 && !slots[i].empty()), Status::invalid,
              "slot %zu has choices behind %zu candidates", i, slots[i].size());
        for (const SlotCandidates & choices : slots[i]) {
            check(!choices.tokens.empty() && choices.tokens.size() == choices.logprobs.size(), Status::invalid,
                  "slot %zu has %zu candidates and %zu log-probabilities", i, choices.tokens.size(),
                  choices.logprobs.size());
            for (const int32_t place : choices.places) {
                check(i + 1 == slots.size() || slots[i + 1].size() == 1 ||
                          (place >= 0 && static_cast<size_t>(place) < slots[i + 1].size()),
                      Status::invalid, "slot %zu has a candidate at place %d, the next slot has choices behind %zu", i,
                      place, slots[i + 1].size());
            }
        }
    }
    return Builder(anchor, slots, limits).build();
}

TreeLayout lay_out_tree(const int32_t * parents, int64_t n) {
    check(n >= 1 && n <= max_tree_nodes + 1, Status::invalid, "a tree of %lld rows, want 1 to %d",
          static_cast<long long>(n), max_tree_nodes + 1);
    check(parents[0] == -1, Status::invalid, "parent of node 0 is %d, want -1: it is the root", parents[0]);
    TreeLayout layout;
    const auto rows = static_cast<size_t>(n);
    layout.parents.assign(parents, parents + n);
    layout.depth.assign(rows, 0);
    layout.path_of.assign(rows, 0);
    layout.is_chain = true;
    std::vector<bool> is_inner(rows, false);
    for (size_t i = 1; i < rows; ++i) {
        check(parents[i] >= 0 && parents[i] < n, Status::invalid, "parent of node %zu is %d, want 0 to %zu", i,
              parents[i], i - 1);
        check(static_cast<size_t>(parents[i]) < i, Status::invalid,
              "parent of node %zu is %d, want 0 to %zu: a parent comes before its children", i, parents[i], i - 1);
        const auto parent = static_cast<size_t>(parents[i]);
        layout.depth[i] = layout.depth[parent] + 1;
        layout.is_chain = layout.is_chain && parent + 1 == i;
        is_inner[parent] = true;
    }
    for (size_t i = 0; i < rows; ++i) {
        layout.n_levels = std::max(layout.n_levels, layout.depth[i] + 1);
        if (is_inner[i]) {
            continue;
        }
        std::vector<int32_t> path(static_cast<size_t>(layout.depth[i]) + 1);
        for (int32_t node = static_cast<int32_t>(i); node >= 0; node = parents[node]) {
            path[static_cast<size_t>(layout.depth[static_cast<size_t>(node)])] = node;
            layout.path_of[static_cast<size_t>(node)] = static_cast<int32_t>(layout.paths.size());
        }
        layout.paths.push_back(std::move(path));
    }
    return layout;
}

void check_tree_path(const std::vector<int32_t> & parents, const std::vector<int32_t> & path) {
    for (size_t i = 0; i < path.size(); ++i) {
        check(path[i] >= 0 && static_cast<size_t>(path[i]) < parents.size(), Status::invalid,
              "path[%zu] is node %d, want 0 to %zu", i, path[i], parents.size() - 1);
        const int32_t before = i == 0 ? -1 : path[i - 1];
        check(parents[static_cast<size_t>(path[i])] == before, Status::invalid,
              "path[%zu] is node %d, whose parent is %d and not %d", i, path[i], parents[static_cast<size_t>(path[i])],
              before);
    }
}

} // namespace dflash
