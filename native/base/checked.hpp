#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/error.hpp"

// Integer arithmetic on numbers that come from files or callers.
namespace dflash {

/// a + b, or Status::format when the sum does not fit 64 bits. `what` names the quantity.
inline uint64_t checked_add(uint64_t a, uint64_t b, const char * what) {
    check(a <= std::numeric_limits<uint64_t>::max() - b, Status::format, "%s: %llu + %llu overflows 64 bits", what,
          static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
    return a + b;
}

/// a * b, or Status::format when the product does not fit 64 bits.
inline uint64_t checked_mul(uint64_t a, uint64_t b, const char * what) {
    check(b == 0 || a <= std::numeric_limits<uint64_t>::max() / b, Status::format, "%s: %llu * %llu overflows 64 bits",
          what, static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
    return a * b;
}

/// n rounded up to a multiple of step (step > 0, n >= 0).
inline int64_t round_up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}

/// Half-open range of absolute positions.
struct PositionRange {
    int64_t begin = 0;
    int64_t end = 0;

    int64_t size() const { return end - begin; }
    bool contains(int64_t b, int64_t e) const { return b >= begin && e <= end && b <= e; }
};

} // namespace dflash
