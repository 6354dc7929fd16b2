#pragma once

#include <cstdint>
#include <mutex>

#include "ggml.h"
#include "ggmlx/device.hpp"

namespace dflash {

/// Holds two devices, always in the same order, so that two threads cannot wait for each other. A caller that holds one
/// of them already must have taken both in this way.
class DeviceLocks {
  public:
    DeviceLocks(Device & a, Device & b);

  private:
    std::unique_lock<std::recursive_mutex> first_;
    std::unique_lock<std::recursive_mutex> second_;
};

/// How bytes went from one tensor to another.
enum class CopyPath {
    none,   // nothing to copy
    local,  // inside one device
    direct, // one transfer between two devices, or between a device and host memory
    staged, // in pieces through host memory
};

enum class CopyRoute {
    shortest, // host memory between two devices only when their drivers differ
    host,     // through host memory always: for machines whose transfers between devices cannot be trusted
};

/// Host memory that a staged copy takes at most, in bytes.
constexpr uint64_t copy_staging_bytes = uint64_t{4} << 20;

/// Copies n_bytes of `src`, src_offset bytes in, to dst_offset bytes into `dst`, whatever their types and shapes. Waits
/// for what is queued on both devices before, and returns when the bytes are there. Locks both devices.
/// Zero bytes copy nothing; the arguments are checked all the same. Throws before the first byte moves:
/// Status::invalid for no tensor, one without memory, a range outside it or ranges that overlap; Status::mismatch when
/// a tensor does not lie on the device named; Status::unsupported for a tensor that spans devices;
/// Status::out_of_memory when there is no host memory to go through.
CopyPath copy_between_devices(Device & src_device, const ggml_tensor * src, uint64_t src_offset, Device & dst_device,
                              ggml_tensor * dst, uint64_t dst_offset, uint64_t n_bytes,
                              CopyRoute route = CopyRoute::shortest);

} // namespace dflash
