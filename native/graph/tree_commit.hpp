#pragma once

#include <cstdint>
#include <memory>

#include "graph/target_graph.hpp"

namespace dflash {

/// Accepts a path of a tree verify: re-runs the recurrence along it from the live state, keeps the last convolution
/// columns of its ancestry, and moves K, V and feature rows from the node's places to those of a chain. Rows are moved
/// as they are stored, byte for byte.
struct TreeCommitGraph {
    std::unique_ptr<Graph> graph;
    int64_t n_levels = 0;
    ggml_tensor * keep = nullptr;     // f32 [1, n_levels]: 1 for nodes of the path, 0 past its end
    ggml_tensor * ints = nullptr;     // i32: nodes of the path [n_levels], columns of conv_input [d_conv - 1], K/V
                                      // rows and feature rows to read [n_levels each]
    ggml_tensor * row_ints = nullptr; // i64: K/V rows and feature rows to write [n_levels each]
};

/// Past its end a path repeats node 0, with keep 0 and the row that node 0 has already.
std::unique_ptr<TreeCommitGraph> build_tree_commit_graph(const TargetCache & cache, const TargetGraph & verify);

} // namespace dflash
