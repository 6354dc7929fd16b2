#pragma once

#include <cstdint>
#include <vector>

#include "ggmlx/graph.hpp"

namespace dflash {

/// The f16 mask [n_kv, n_rows] of a causal block whose rows stand at base, base + 1, ... in a cache where position p
/// lies in row p. Keeps a host copy and uploads only the columns that changed since the last run.
class AttentionMask {
  public:
    /// window: row i sees keys at positions above base + i - window only; 0 sees all.
    AttentionMask(Graph & graph, int64_t n_kv, int64_t n_rows, int64_t window);

    ggml_tensor * tensor() const { return tensor_; }
    /// Queues the upload for rows starting at base. base + n_rows <= n_kv.
    void update(Graph & graph, int64_t base);
    /// The same for rows that are the nodes of a tree, node i in row base + i: it sees what lies before base, its
    /// ancestors and itself. parents: -1 for node 0, else a smaller index; depth: distance to node 0.
    void update_tree(Graph & graph, int64_t base, const std::vector<int32_t> & parents,
                     const std::vector<int32_t> & depth);

  private:
    void fill(int64_t first_column, int64_t end_column, int64_t base);
    void upload(Graph & graph, int64_t first_column, int64_t end_column);

    ggml_tensor * tensor_ = nullptr;
    std::vector<uint16_t> host_;
    int64_t n_kv_ = 0;
    int64_t n_rows_ = 0;
    int64_t window_ = 0;
    int64_t base_ = -1; // of the last upload; -1: never
};

constexpr uint16_t mask_visible = 0x0000; // f16 0
constexpr uint16_t mask_hidden = 0xFC00;  // f16 -inf

} // namespace dflash
