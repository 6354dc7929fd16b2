#pragma once

#include <cstdint>

#include "ggmlx/graph.hpp"

// What a DeltaNet layer does differently when the rows of a forward pass are the nodes of a tree. A node must see its
// ancestors and no one else. So each root-to-leaf path is run as a sequence of its own through the same operations as a
// chain, from the same state; what paths share comes out equal in all of them and is taken once. On a CPU a node's
// values are thus those of a chain that holds its path, bit for bit.
namespace dflash {

/// Index inputs of a tree, shared by all layers. A node index is a row index.
struct TreeRows {
    int64_t n_levels = 0;
    int64_t n_paths = 0;
    ggml_tensor * conv_rows = nullptr; // i32 [d_conv * n_rows]: columns of each row's window, oldest first
    ggml_tensor * path_rows = nullptr; // i32 [n_levels * n_paths]: the nodes of each path by depth; 0 past its end
    ggml_tensor * place = nullptr;     // i32 [n_rows]: where a node stands in path_rows
};

/// Depthwise convolution of every row over its own ancestors. window: f32 [channels, d_conv - 1 + n_rows], the old
/// columns first; weight f32 [d_conv, channels]. Returns f32 [channels, n_rows].
ggml_tensor * build_tree_conv(ggml_context * ctx, ggml_tensor * window, ggml_tensor * weight, const TreeRows & tree);

/// The recurrence over every path. qk f32 [S, 2 * Hk, n_rows], qkv f32 [channels, n_rows] with the values last,
/// g and beta f32 [1, Hv, n_rows], state f32 [S, S, Hv], which stays as it is. Returns f32 [S * Hv, n_rows].
ggml_tensor * build_tree_delta(Graph & graph, ggml_tensor * qk, ggml_tensor * qkv, ggml_tensor * g, ggml_tensor * beta,
                               ggml_tensor * state, const TreeRows & tree);

} // namespace dflash
