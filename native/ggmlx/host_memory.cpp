#include "ggmlx/host_memory.hpp"

#include <utility>

#include "base/error.hpp"

namespace dflash {
namespace {

constexpr uint64_t granule = 1 << 16;

ggml_backend_buffer_type_t host_type(const Device & device) {
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(device.backend()));
    return pinned != nullptr ? pinned
                             : ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
}

} // namespace

ggml_backend_buffer_ptr HostMemoryPool::take(uint64_t n_bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        const uint64_t size = ggml_backend_buffer_get_size(it->get());
        if (size >= n_bytes && size - n_bytes <= n_bytes / 4) {
            ggml_backend_buffer_ptr found = std::move(*it);
            free_.erase(it);
            return found;
        }
    }
    return nullptr;
}

void HostMemoryPool::give(ggml_backend_buffer_ptr buffer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (free_.size() >= max_free) {
        free_.erase(free_.begin());
    }
    free_.push_back(std::move(buffer));
}

uint64_t HostMemoryPool::free_bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    uint64_t n = 0;
    for (const auto & buffer : free_) {
        n += ggml_backend_buffer_get_size(buffer.get());
    }
    return n;
}

HostMemory::HostMemory(std::shared_ptr<Device> device, uint64_t n_bytes, const char * what)
    : device_(std::move(device)) {
    if (n_bytes == 0) {
        return;
    }
    buffer_ = device_->host_memory().take(n_bytes);
    if (!buffer_) {
        const uint64_t wanted = (n_bytes + granule - 1) / granule * granule;
        buffer_.reset(ggml_backend_buft_alloc_buffer(host_type(*device_), wanted));
    }
    check(buffer_ != nullptr, Status::out_of_memory, "%s needs %llu bytes of host memory", what,
          static_cast<unsigned long long>(n_bytes));
    data_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()));
}

HostMemory::~HostMemory() {
    if (buffer_) {
        device_->host_memory().give(std::move(buffer_));
    }
}

void DeviceMark::set(Device & device) {
    if (!event_) {
        event_.reset(ggml_backend_event_new(ggml_backend_get_device(device.backend())));
    }
    if (event_) {
        ggml_backend_event_record(event_.get(), device.backend());
    } else {
        device.synchronize();
    }
}

void DeviceMark::wait() const {
    if (event_) {
        ggml_backend_event_synchronize(event_.get());
    }
}

} // namespace dflash
