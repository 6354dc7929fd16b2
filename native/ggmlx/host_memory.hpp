#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ggml-cpp.h"
#include "ggmlx/device.hpp"

namespace dflash {

/// A piece of host memory: pinned by a device's driver, or pages of its own, which go back to the system when freed.
class HostBlock {
  public:
    HostBlock() = default;
    /// Empty when there is no memory.
    HostBlock(const Device & device, uint64_t n_bytes);
    HostBlock(HostBlock && other) noexcept;
    HostBlock & operator=(HostBlock && other) noexcept;
    ~HostBlock();

    uint8_t * data() const { return data_; }
    uint64_t size() const { return size_; }

  private:
    ggml_backend_buffer_ptr buffer_; // null: pages of our own
    uint8_t * data_ = nullptr;
    uint64_t size_ = 0;
};

/// Keeps a few freed blocks for the next ones of about the same size: pinning memory takes as long as copying it.
/// Any thread.
class HostMemoryPool {
  public:
    static constexpr size_t max_free = 2;

    /// A free block of at least n_bytes and at most a quarter more, or an empty one.
    HostBlock take(uint64_t n_bytes);
    void give(HostBlock block);
    uint64_t free_bytes();

  private:
    std::mutex mutex_;
    std::vector<HostBlock> free_; // oldest first
};

/// Host memory that a device copies to and from: pinned where its driver can pin memory, else ordinary.
class HostMemory {
  public:
    /// Throws Status::out_of_memory; `what` names the owner in that message.
    HostMemory(std::shared_ptr<Device> device, uint64_t n_bytes, const char * what);
    HostMemory(const HostMemory &) = delete;
    HostMemory & operator=(const HostMemory &) = delete;
    ~HostMemory();

    uint8_t * data() const { return block_.data(); }
    /// Bytes held, at least as many as were asked for.
    uint64_t size() const { return block_.size(); }

  private:
    std::shared_ptr<Device> device_;
    HostBlock block_;
};

/// A point in a device's queue. On a device without events, marking it waits.
class DeviceMark {
  public:
    /// Everything queued on the device so far. The caller holds the device's lock.
    void set(Device & device);
    /// Returns when the device has got there. Any thread; no lock is needed.
    void wait() const;

  private:
    ggml_backend_event_ptr event_;
};

} // namespace dflash
