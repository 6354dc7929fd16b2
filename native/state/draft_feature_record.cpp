#include "state/draft_feature_record.hpp"

#include <algorithm>

#include "base/ring_span.hpp"

namespace dflash {

DraftFeatureRecord::DraftFeatureRecord(int64_t capacity, int32_t n_layers)
    : capacity_(capacity), n_layers_(n_layers), held_(static_cast<size_t>(capacity * n_layers), -1) {
}

bool DraftFeatureRecord::holds(int64_t begin, int64_t n) const {
    if (n == 0) {
        return true;
    }
    if (begin < 0 || n > capacity_) {
        return false;
    }
    for (const RingRun & run : RingSpan(capacity_, begin, n)) {
        for (int32_t layer = 0; layer < n_layers_; ++layer) {
            const int64_t * row = held_.data() + layer * capacity_ + run.row;
            for (int64_t i = 0; i < run.count; ++i) {
                if (row[i] != begin + run.first + i) {
                    return false;
                }
            }
        }
    }
    return true;
}

PositionRange DraftFeatureRecord::newest() const {
    int64_t last = -1;
    for (int64_t row = 0; row < capacity_; ++row) {
        const int64_t position = held_[static_cast<size_t>(row)];
        if (position > last && holds(position, 1)) {
            last = position;
        }
    }
    if (last < 0) {
        return {0, 0};
    }
    int64_t begin = last;
    while (begin > 0 && last - begin + 1 < capacity_ && holds(begin - 1, 1)) {
        --begin;
    }
    return {begin, last + 1};
}

template <class Visit>
void DraftFeatureRecord::visit(int32_t layer, int32_t n_layers, int64_t begin, int64_t n, Visit && visit) {
    for (const RingRun & run : RingSpan(capacity_, begin, n)) {
        for (int32_t l = layer; l < layer + n_layers; ++l) {
            int64_t * row = held_.data() + l * capacity_ + run.row;
            for (int64_t i = 0; i < run.count; ++i) {
                visit(row[i], begin + run.first + i);
            }
        }
    }
}

void DraftFeatureRecord::begin_write(int32_t layer, int32_t n_layers, int64_t begin, int64_t n) {
    bool taken_back = false;
    visit(layer, n_layers, begin, n, [&](int64_t & held, int64_t position) {
        taken_back = taken_back || held >= position;
        held = -1;
    });
    if (taken_back) {
        drop_from(begin);
    }
}

void DraftFeatureRecord::end_write(int32_t layer, int32_t n_layers, int64_t begin, int64_t n) {
    visit(layer, n_layers, begin, n, [](int64_t & held, int64_t position) { held = position; });
}

void DraftFeatureRecord::drop_from(int64_t position) {
    for (int64_t & held : held_) {
        if (held >= position) {
            held = -1;
        }
    }
}

void DraftFeatureRecord::clear() {
    std::fill(held_.begin(), held_.end(), -1);
}

} // namespace dflash
