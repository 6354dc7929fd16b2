#pragma once

#include <atomic>

#include "base/error.hpp"

namespace dflash {

/// A flag that any thread may raise; long native calls look at it between graphs.
class CancelToken {
  public:
    void raise() noexcept { flag_.store(true, std::memory_order_relaxed); }
    void clear() noexcept { flag_.store(false, std::memory_order_relaxed); }
    bool raised() const noexcept { return flag_.load(std::memory_order_relaxed); }

    /// Throws Status::cancelled when the flag is up.
    void check_not_raised() const {
        if (raised()) {
            throw Error(Status::cancelled, "cancelled by the caller");
        }
    }

  private:
    std::atomic<bool> flag_{false};
};

} // namespace dflash
