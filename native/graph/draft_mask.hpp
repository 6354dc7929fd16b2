#pragma once

#include <cstdint>
#include <vector>

#include "ggmlx/graph.hpp"
#include "state/draft_context.hpp"

namespace dflash {

/// The f16 mask [n_kv, block] of one kind of drafter layer: what each block row sees of the context ring and of the
/// block itself. Uploads only the columns that changed.
class DraftMask {
  public:
    DraftMask(Graph & graph, const DraftContext & context, int32_t layer, int64_t n_kv);

    ggml_tensor * tensor() const { return tensor_; }
    /// True when layer has the same window, causality and ring as the one this mask was made for.
    bool serves(int32_t layer) const;
    /// For a block at the context's cursor.
    void update(Graph & graph);

  private:
    void fill_columns(int64_t first, int64_t end);
    void upload(Graph & graph, int64_t first, int64_t end);
    void refresh_positions(Graph & graph, int64_t first_position, int64_t end_position);

    const DraftContext & context_;
    int32_t layer_;
    int64_t n_kv_;
    int64_t n_rows_;
    ggml_tensor * tensor_;
    std::vector<uint16_t> host_;
    bool filled_ = false;
    int64_t cursor_ = 0;
    uint64_t epoch_ = 0;
};

} // namespace dflash
