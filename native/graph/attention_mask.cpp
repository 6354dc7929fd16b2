#include "graph/attention_mask.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace dflash {

AttentionMask::AttentionMask(Graph & graph, int64_t n_kv, int64_t n_rows, int64_t window)
    : tensor_(graph.input(GGML_TYPE_F16, "mask", n_kv, n_rows)), host_(static_cast<size_t>(n_kv * n_rows)), n_kv_(n_kv),
      n_rows_(n_rows), window_(window) {
}

void AttentionMask::fill(int64_t first_column, int64_t end_column, int64_t base) {
    for (int64_t i = 0; i < n_rows_; ++i) {
        uint16_t * row = host_.data() + i * n_kv_;
        const int64_t last = base + i; // newest visible key
        const int64_t first = window_ > 0 ? std::max<int64_t>(0, last - window_ + 1) : 0;
        for (int64_t j = first_column; j < end_column; ++j) {
            row[j] = j >= first && j <= last ? mask_visible : mask_hidden;
        }
    }
}

void AttentionMask::update(Graph & graph, int64_t base) {
    check(base >= 0 && base + n_rows_ <= n_kv_, Status::internal, "mask of %lld keys for rows [%lld, +%lld)",
          static_cast<long long>(n_kv_), static_cast<long long>(base), static_cast<long long>(n_rows_));
    if (base == base_) {
        return;
    }
    if (base_ < 0 || base < base_ || window_ > 0) {
        fill(0, n_kv_, base);
        graph.write(tensor_, host_.data(), 0, host_.size() * sizeof(uint16_t));
    } else {
        const int64_t end = base + n_rows_;
        fill(base_, end, base);
        upload(graph, base_, end);
    }
    base_ = base;
}

void AttentionMask::upload(Graph & graph, int64_t first_column, int64_t end_column) {
    const size_t row_bytes = static_cast<size_t>(n_kv_) * sizeof(uint16_t);
    const size_t offset = static_cast<size_t>(first_column) * sizeof(uint16_t);
    graph.write_2d(tensor_, host_.data() + first_column, offset,
                   static_cast<size_t>(end_column - first_column) * sizeof(uint16_t), static_cast<size_t>(n_rows_),
                   row_bytes, row_bytes);
}

void AttentionMask::update_tree(Graph & graph, int64_t base, const std::vector<int32_t> & parents,
                                const std::vector<int32_t> & depth) {
    check(base >= 0 && base + n_rows_ <= n_kv_ && static_cast<int64_t>(parents.size()) == n_rows_, Status::internal,
          "mask of %lld keys for rows [%lld, +%lld)", static_cast<long long>(n_kv_), static_cast<long long>(base),
          static_cast<long long>(n_rows_));
    const bool all = base_ < 0 || base < base_ || window_ > 0;
    const int64_t begin = all ? 0 : base_;
    const int64_t end = all ? n_kv_ : base + n_rows_;
    for (int64_t i = 0; i < n_rows_; ++i) {
        uint16_t * row = host_.data() + i * n_kv_;
        const int64_t position = base + depth[static_cast<size_t>(i)];
        const int64_t first = window_ > 0 ? std::max<int64_t>(0, position - window_ + 1) : 0;
        for (int64_t j = begin; j < end; ++j) {
            row[j] = j >= first && j < base ? mask_visible : mask_hidden;
        }
        for (int64_t node = i; node >= 0 && base + depth[static_cast<size_t>(node)] >= first;
             node = parents[static_cast<size_t>(node)]) {
            row[base + node] = mask_visible;
        }
    }
    upload(graph, begin, end);
    base_ = base;
}

} // namespace dflash
