#include "graph/draft_mask.hpp"

#include <algorithm>

#include "base/ring_span.hpp"
#include "graph/attention_mask.hpp"

namespace dflash {

DraftMask::DraftMask(Graph & graph, const DraftContext & context, int32_t layer, int64_t n_kv)
    : context_(context), layer_(layer), n_kv_(n_kv), n_rows_(context.model().config().block_size),
      tensor_(graph.input(GGML_TYPE_F16, "draft_mask", n_kv, n_rows_)),
      host_(static_cast<size_t>(n_kv * n_rows_), mask_hidden) {
}

bool DraftMask::serves(int32_t layer) const {
    const DraftConfig & c = context_.model().config();
    const size_t a = static_cast<size_t>(layer_);
    const size_t b = static_cast<size_t>(layer);
    return c.windows[a] == c.windows[b] && c.causal[a] == c.causal[b] &&
           context_.ring_capacity(layer_) == context_.ring_capacity(layer);
}

void DraftMask::fill_columns(int64_t first, int64_t end) {
    const DraftConfig & c = context_.model().config();
    const int64_t window = c.windows[static_cast<size_t>(layer_)];
    const bool causal = c.causal[static_cast<size_t>(layer_)];
    const int64_t cursor = context_.cursor();
    const int64_t newest = context_.high() - 1;
    const int64_t capacity = context_.ring_capacity(layer_);
    const int64_t begin = context_.layer_begin(layer_);
    for (int64_t column = first; column < end; ++column) {
        const int64_t slot = column - context_.ring_offset();
        // The newest position written to this slot: the greatest p <= newest with p mod capacity = slot.
        int64_t position = -1;
        if (slot >= 0 && newest >= 0) {
            const int64_t back = ((newest - slot) % capacity + capacity) % capacity;
            position = newest - back;
        }
        const bool in_context = slot >= 0 && position >= begin && position < cursor;
        for (int64_t row = 0; row < n_rows_; ++row) {
            bool visible = false;
            if (column < n_rows_) {
                visible = !causal || column <= row;
            } else if (in_context) {
                visible = window == 0 || cursor + row - position < window;
            }
            host_[static_cast<size_t>(row * n_kv_ + column)] = visible ? mask_visible : mask_hidden;
        }
    }
}

void DraftMask::upload(Graph & graph, int64_t first, int64_t end) {
    const size_t row_bytes = static_cast<size_t>(n_kv_) * sizeof(uint16_t);
    const size_t offset = static_cast<size_t>(first) * sizeof(uint16_t);
    graph.write_2d(tensor_, host_.data() + first, offset, static_cast<size_t>(end - first) * sizeof(uint16_t),
                   static_cast<size_t>(n_rows_), row_bytes, row_bytes);
}

void DraftMask::refresh_positions(Graph & graph, int64_t first_position, int64_t end_position) {
    first_position = std::max<int64_t>(first_position, 0);
    if (end_position <= first_position) {
        return;
    }
    for (const RingRun & run :
         RingSpan(context_.ring_capacity(layer_), first_position, end_position - first_position)) {
        const int64_t first = context_.ring_offset() + run.row;
        const int64_t end = std::min(first + run.count, n_kv_);
        if (first < end) {
            fill_columns(first, end);
            upload(graph, first, end);
        }
    }
}

void DraftMask::update(Graph & graph) {
    const int64_t cursor = context_.cursor();
    const int64_t window = context_.model().config().windows[static_cast<size_t>(layer_)];
    const int64_t capacity = context_.ring_capacity(layer_);
    const int64_t moved = cursor - cursor_;
    if (!filled_ || epoch_ != context_.epoch() || moved < 0 || moved + n_rows_ >= capacity) {
        fill_columns(0, n_kv_);
        graph.write(tensor_, host_.data(), 0, host_.size() * sizeof(uint16_t));
    } else if (moved > 0) {
        refresh_positions(graph, cursor_, cursor);
        if (window > 0) { // rows whose distance to some block row crossed the window
            refresh_positions(graph, cursor_ - window, std::min(cursor - window + n_rows_, cursor_));
        }
    }
    filled_ = true;
    cursor_ = cursor;
    epoch_ = context_.epoch();
}

} // namespace dflash
