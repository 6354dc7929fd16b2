#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

class HostMemoryPool;

struct DeviceInfo {
    std::string name;        // "CPU", "CUDA0", ...
    std::string description; // as the backend reports it
    std::string kind;        // "cpu", "gpu", "igpu", "accel", "meta"
    uint64_t memory_free = 0;
    uint64_t memory_total = 0;
};

/// One ggml backend (one stream) on one device. Shared by every object that lives on it.
/// ggml backends are not thread-safe: hold `lock()` around anything that computes or transfers.
class Device {
  public:
    /// name: "cpu", "auto" (first GPU, else CPU), "gpu", "cuda", "cuda:1", or a registry name such as "CUDA0".
    /// n_threads: CPU worker threads; 0 takes one per hardware thread up to 16. Ignored on a GPU.
    /// Throws Status::not_found listing the devices there are, Status::device when it cannot be started.
    static std::shared_ptr<Device> open(const std::string & name, int32_t n_threads);
    static std::vector<DeviceInfo> list();

    ~Device();
    Device(const Device &) = delete;
    Device & operator=(const Device &) = delete;

    ggml_backend_t backend() const { return backend_.get(); }
    ggml_backend_buffer_type_t buffer_type() const { return ggml_backend_get_default_buffer_type(backend_.get()); }
    const std::string & name() const { return name_; }
    bool is_cpu() const { return is_cpu_; }
    int32_t n_threads() const { return n_threads_; }
    DeviceInfo info() const;
    bool supports(const ggml_tensor * op) const { return ggml_backend_supports_op(backend_.get(), op); }
    std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock<std::recursive_mutex>(mutex_); }
    /// Waits until everything queued on this device is done.
    void synchronize() { ggml_backend_synchronize(backend_.get()); }
    HostMemoryPool & host_memory() { return *host_memory_; }

  private:
    Device();

    ggml_backend_ptr backend_;
    std::unique_ptr<HostMemoryPool> host_memory_;
    std::string name_;
    bool is_cpu_ = false;
    int32_t n_threads_ = 0;
    std::recursive_mutex mutex_;
};

} // namespace dflash
