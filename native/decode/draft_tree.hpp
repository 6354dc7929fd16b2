#pragma once

#include <cstdint>
#include <vector>

// Trees of drafted tokens. Node 0 is the anchor, every other node stands behind its parent, which has a smaller index;
// the depth of a node is its distance to the anchor.
namespace dflash {

/// Most nodes besides the anchor.
constexpr int32_t max_tree_nodes = 64;
/// Candidates of a slot that a tree is made from.
constexpr int32_t tree_candidates = 8;

/// The likeliest tokens of one slot, best first.
struct SlotCandidates {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs; // natural, under the drafter
    std::vector<int32_t> places; // of each in the slot's own order of candidates, by which the next slot's choices go
};

/// A slot's tokens by the place of the candidate before it; with one entry they are the same behind all of them.
using SlotChoices = std::vector<SlotCandidates>;

/// Orders candidates by value, then by id, and turns values (logits) into log-probabilities: log p = value -
/// log_normaliser. Of equal tokens the best stays. Throws Status::internal when a value is not a number.
SlotCandidates sorted_candidates(const int32_t * tokens, const float * values, int32_t n, float log_normaliser);

/// Room for the paths of a tree from the anchor to its leaves. The recurrence of a hybrid model runs over all of it.
struct TreeSize {
    int32_t n_levels = 0; // greatest depth + 1
    int32_t n_paths = 0;  // leaves

    bool holds(int32_t levels, int32_t paths) const { return levels <= n_levels && paths <= n_paths; }
};

struct DraftTree {
    std::vector<int32_t> parents; // parents[0] = -1
    std::vector<int32_t> tokens;  // tokens[0]: the anchor
    std::vector<float> scores;    // log-probability of the path to a node; 0 for the anchor
    TreeSize size;                // the first of TreeLimits::sizes that it fits
    int32_t n_chain = 0;          // nodes 1..n_chain are each slot's best token, one behind the other
    int32_t depth = 0;            // of the deepest node
};

struct TreeLimits {
    int32_t n_nodes = 0; // besides the anchor, 1 to max_tree_nodes
    int32_t n_seed = 0;  // of these, the chain of best tokens that is taken unseen; at most n_nodes and the slots
    std::vector<TreeSize> sizes; // what the tree may become, at least one; the first holds the chain
};

/// What a tree of n_nodes behind n_slots slots is made with: a quarter of the nodes as a chain, against a drafter that
/// thinks too well of its second choices, and three sizes of about 4.5 places a node, deep and narrow to flat and wide.
/// Three fixed sizes are three graphs, and few places keep the recurrence cheap.
TreeLimits tree_limits(int32_t n_nodes, int32_t n_slots);

/// A chain of best tokens, then always the node with the greatest score that is not in yet and with which the tree
/// still has one of the sizes, until n_nodes are there. Slots are independent in a block drafter, so a node's score is
/// the sum of its path's log-probabilities. Equal scores: the one that was found first. Fewer nodes come out only when
/// the candidates are used up. Throws Status::invalid for limits out of range or a slot without candidates.
DraftTree build_draft_tree(int32_t anchor, const std::vector<SlotCandidates> & slots, const TreeLimits & limits);
/// The same with slots that depend on the candidate before them. A slot has one entry, or one for each place of the
/// slot before it (Status::invalid otherwise); the first slot has one.
DraftTree build_draft_tree(int32_t anchor, const std::vector<SlotChoices> & slots, const TreeLimits & limits);

/// A tree as sequences: one for each leaf, from the anchor down.
struct TreeLayout {
    std::vector<int32_t> parents;
    std::vector<int32_t> depth;              // by node
    std::vector<std::vector<int32_t>> paths; // nodes of each sequence, by depth
    std::vector<int32_t> path_of;            // by node: a sequence that it is in
    int32_t n_levels = 0;                    // greatest depth + 1
    bool is_chain = false;                   // every node's parent is the one before it
};

/// Throws Status::invalid naming the node unless n >= 1, parents[0] is -1 and 0 <= parents[i] < i for the others.
TreeLayout lay_out_tree(const int32_t * parents, int64_t n);

/// Nodes of a walk down the tree: path[0] is node 0 and each one's parent is the one before. Throws Status::invalid.
void check_tree_path(const std::vector<int32_t> & parents, const std::vector<int32_t> & path);

} // namespace dflash
