#include "ggmlx/host_memory.hpp"

#include <new>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define DFLASH_HAS_MMAP 1
#endif

#include "base/error.hpp"

namespace dflash {
namespace {

constexpr uint64_t granule = 1 << 16;

uint8_t * new_pages(uint64_t n_bytes) {
#ifdef DFLASH_HAS_MMAP
    void * const pages = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? nullptr : static_cast<uint8_t *>(pages);
#else
    return static_cast<uint8_t *>(::operator new(n_bytes, std::align_val_t{64}, std::nothrow));
#endif
}

void free_pages(uint8_t * pages, uint64_t n_bytes) {
#ifdef DFLASH_HAS_MMAP
    munmap(pages, n_bytes);
#else
    (void)n_bytes;
    ::operator delete(pages, std::align_val_t{64});
#endif
}

} // namespace

HostBlock::HostBlock(const Device & device, uint64_t n_bytes) {
    const uint64_t wanted = (n_bytes + granule - 1) / granule * granule;
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(device.backend()));
    if (pinned != nullptr) {
        buffer_.reset(ggml_backend_buft_alloc_buffer(pinned, wanted));
        if (buffer_) {
            data_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()));
            size_ = ggml_backend_buffer_get_size(buffer_.get());
        }
        return;
    }
    data_ = new_pages(wanted);
    size_ = data_ != nullptr ? wanted : 0;
}

HostBlock::HostBlock(HostBlock && other) noexcept
    : buffer_(std::move(other.buffer_)), data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {
}

HostBlock & HostBlock::operator=(HostBlock && other) noexcept {
    std::swap(buffer_, other.buffer_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

HostBlock::~HostBlock() {
    if (!buffer_ && data_ != nullptr) {
        free_pages(data_, size_);
    }
}

HostBlock HostMemoryPool::take(uint64_t n_bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        if (it->size() >= n_bytes && it->size() - n_bytes <= n_bytes / 4) {
            HostBlock found = std::move(*it);
            free_.erase(it);
            return found;
        }
    }
    return {};
}

void HostMemoryPool::give(HostBlock block) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (free_.size() >= max_free) {
        free_.erase(free_.begin());
    }
    free_.push_back(std::move(block));
}

uint64_t HostMemoryPool::free_bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    uint64_t n = 0;
    for (const HostBlock & block : free_) {
        n += block.size();
    }
    return n;
}

HostMemory::HostMemory(std::shared_ptr<Device> device, uint64_t n_bytes, const char * what)
    : device_(std::move(device)) {
    if (n_bytes == 0) {
        return;
    }
    block_ = device_->host_memory().take(n_bytes);
    if (block_.data() == nullptr) {
        block_ = HostBlock(*device_, n_bytes);
    }
    check(block_.data() != nullptr, Status::out_of_memory, "%s needs %llu bytes of host memory", what,
          static_cast<unsigned long long>(n_bytes));
}

HostMemory::~HostMemory() {
    if (block_.data() != nullptr) {
        device_->host_memory().give(std::move(block_));
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
