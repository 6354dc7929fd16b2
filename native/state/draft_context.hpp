#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "ggmlx/tensors.hpp"
#include "model/draft_model.hpp"

namespace dflash {

struct DraftContextOptions {
    std::string k_type = "f16"; // f32 f16 q8_0 q4_0
    std::string v_type = "f16";
    /// Context rows that full-attention layers keep. Costs full_rows * n_head_kv * head_dim * (K + V bytes) for each
    /// such layer; older context is forgotten by them. Sliding layers keep window + block + slack rows whatever this
    /// is.
    int64_t full_rows = 8192;
    int32_t slack = 64; // extra rows of sliding layers, so that a rewind of that many tokens loses nothing
};

/// The drafter's K/V of the context. Each layer has scratch rows for the block that is being drafted, one trash row,
/// and a ring of context rows: position p lies in row ring_row(layer, p).
///   [0, block)                scratch: K/V made from mask tokens never stay
///   block                     trash: target of rows that must not be stored
///   [ring_offset, + ring_cap) ring
/// Not thread-safe.
class DraftContext {
  public:
    /// Throws Status::invalid, Status::unsupported (type does not divide a head), Status::out_of_memory.
    static std::unique_ptr<DraftContext> create(std::shared_ptr<const DraftModel> model, DraftContextOptions options);

    const DraftModel & model() const { return *model_; }
    const std::shared_ptr<const DraftModel> & model_handle() const { return model_; }
    const DraftContextOptions & options() const { return options_; }
    uint64_t bytes() const { return group_->bytes(); }

    /// Context rows [begin, cursor) are there. The cursor moves forward by appends, backward by rewind() alone.
    int64_t cursor() const { return cursor_; }
    int64_t begin() const { return begin_; }

    ggml_tensor * k(int32_t layer) const { return k_[static_cast<size_t>(layer)]; } // [head_dim * n_head_kv, rows]
    ggml_tensor * v(int32_t layer) const { return v_[static_cast<size_t>(layer)]; }
    ggml_tensor * k_rotation() const { return k_rotation_; } // f32 [n, n] or null
    ggml_tensor * v_rotation() const { return v_rotation_; }
    int64_t ring_offset() const { return ring_offset_; }
    int64_t ring_capacity(int32_t layer) const { return ring_capacity_[static_cast<size_t>(layer)]; }
    int64_t rows(int32_t layer) const { return k(layer)->ne[1]; }
    int64_t trash_row() const { return model_->config().block_size; }
    /// Row of position p, or the trash row when p falls out of the ring once positions up to end are written.
    int64_t ring_row(int32_t layer, int64_t position, int64_t end) const;
    /// First position that layer still holds.
    int64_t layer_begin(int32_t layer) const;
    /// Positions ever written below this one since the last reset.
    int64_t high() const { return high_; }
    /// Changes whenever rows were lost or moved other than by an append at the cursor.
    uint64_t epoch() const { return epoch_; }

    /// All checks of a write of rows [base, base + n), before any of it: base >= 0 and n >= 0 (Status::invalid), no gap
    /// (base <= cursor), the cursor would not move backward (base + n >= cursor), both Status::invalid.
    void check_append(int64_t base, int64_t n) const;
    void note_appended(int64_t base, int64_t n);
    /// After a device error: nothing is valid any more. Appending may start again at `position`.
    void invalidate(int64_t position);
    /// Forgets rows at and beyond position. Throws Status::invalid unless begin <= position <= cursor.
    void rewind(int64_t position);
    /// Rows were put in place by a restore: [begin, cursor) is there, and positions below high were written before.
    void note_restored(int64_t begin, int64_t cursor, int64_t high);
    /// Empties the context; the next append starts at position.
    void reset(int64_t position = 0);

  private:
    DraftContext(std::shared_ptr<const DraftModel> model, DraftContextOptions options);

    std::shared_ptr<const DraftModel> model_;
    DraftContextOptions options_;
    std::unique_ptr<TensorGroup> group_;
    std::vector<ggml_tensor *> k_, v_;
    ggml_tensor * k_rotation_ = nullptr;
    ggml_tensor * v_rotation_ = nullptr;
    std::vector<int64_t> ring_capacity_;
    int64_t ring_offset_ = 0;
    int64_t begin_ = 0;
    int64_t cursor_ = 0;
    int64_t high_ = 0;
    uint64_t epoch_ = 0;
};

} // namespace dflash
