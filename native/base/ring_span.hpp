#pragma once

#include <array>
#include <cstdint>

#include "base/error.hpp"

// A ring of `capacity` rows keeps absolute position p in row p % capacity.
namespace dflash {

struct RingRun {
    int64_t row = 0;   // first row in the ring
    int64_t first = 0; // index of that row within the span, 0-based
    int64_t count = 0;
};

/// The rows of positions [base, base + n) as at most two contiguous runs.
class RingSpan {
  public:
    /// Throws Status::invalid unless capacity > 0, base >= 0 and 0 <= n <= capacity.
    RingSpan(int64_t capacity, int64_t base, int64_t n) {
        check(capacity > 0, Status::invalid, "ring capacity %lld, want > 0", static_cast<long long>(capacity));
        check(base >= 0, Status::invalid, "position %lld, want >= 0", static_cast<long long>(base));
        check(n >= 0 && n <= capacity, Status::invalid, "%lld rows in a ring of %lld", static_cast<long long>(n),
              static_cast<long long>(capacity));
        const int64_t row = base % capacity;
        const int64_t head = n < capacity - row ? n : capacity - row;
        if (head > 0) {
            runs_[size_++] = {row, 0, head};
        }
        if (n > head) {
            runs_[size_++] = {0, head, n - head};
        }
    }

    const RingRun * begin() const { return runs_.data(); }
    const RingRun * end() const { return runs_.data() + size_; }

  private:
    std::array<RingRun, 2> runs_{};
    size_t size_ = 0;
};

} // namespace dflash
