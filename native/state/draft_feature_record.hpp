#pragma once

#include <cstdint>
#include <vector>

#include "base/checked.hpp"

namespace dflash {

/// Which absolute position each row of a feature ring holds, kept for every captured layer on its own: a position is
/// held once all layers of it are there. Host memory only, 8 bytes per row and layer. Not thread-safe.
class DraftFeatureRecord {
  public:
    DraftFeatureRecord() = default;
    DraftFeatureRecord(int64_t capacity, int32_t n_layers);

    /// True if all layers of every position in [begin, begin + n) are there. n >= 0.
    bool holds(int64_t begin, int64_t n) const;
    /// The unbroken run of held positions that ends with the largest one; empty at 0 when there is none.
    PositionRange newest() const;

    /// Before rows are written: positions [begin, begin + n) of layers [layer, layer + n_layers) are no longer there,
    /// nor is what their rows held. If one of these rows holds its new position already, or a later one, the sequence
    /// has been taken back, and every position from `begin` on is forgotten for all layers.
    void begin_write(int32_t layer, int32_t n_layers, int64_t begin, int64_t n);
    /// After they were written.
    void end_write(int32_t layer, int32_t n_layers, int64_t begin, int64_t n);
    /// Forgets every position >= `position`.
    void drop_from(int64_t position);
    void clear();

  private:
    template <class Visit> void visit(int32_t layer, int32_t n_layers, int64_t begin, int64_t n, Visit && visit);

    int64_t capacity_ = 0;
    int32_t n_layers_ = 0;
    std::vector<int64_t> held_; // [n_layers][capacity]; -1: nothing
};

} // namespace dflash
