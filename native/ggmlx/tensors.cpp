#include "ggmlx/tensors.hpp"

#include <atomic>

#include "base/error.hpp"
#include "ggml-alloc.h"

namespace dflash {
namespace {

void check_span(const ggml_tensor * tensor, uint64_t offset, uint64_t n_bytes, const char * what) {
    check(tensor != nullptr, Status::internal, "%s of no tensor", what);
    const ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    check(buffer != nullptr && tensor->data != nullptr, Status::internal, "%s of %s before it has memory", what,
          tensor->name);
    const uint64_t size = ggml_nbytes(tensor);
    check(offset <= size && n_bytes <= size - offset, Status::internal, "%s of %s: bytes [%llu, +%llu) of %llu", what,
          tensor->name, static_cast<unsigned long long>(offset), static_cast<unsigned long long>(n_bytes),
          static_cast<unsigned long long>(size));
}

void check_span_2d(const ggml_tensor * tensor, uint64_t offset, uint64_t n_bytes, uint64_t n_rows, uint64_t stride,
                   const char * what) {
    check_span(tensor, offset, n_rows == 0 ? 0 : (n_rows - 1) * stride + n_bytes, what);
}

} // namespace

TensorGroup::TensorGroup(std::shared_ptr<Device> device, size_t n_tensors) : device_(std::move(device)) {
    static std::atomic<uint64_t> n_groups{0};
    serial_ = n_groups.fetch_add(1, std::memory_order_relaxed) + 1;
    ggml_init_params params{};
    params.mem_size = ggml_tensor_overhead() * (n_tensors + 1);
    params.no_alloc = true;
    ctx_.reset(ggml_init(params));
    check(ctx_ != nullptr, Status::out_of_memory, "no host memory for %zu tensor descriptors", n_tensors);
}

ggml_tensor * TensorGroup::add(enum ggml_type type, const std::string & name, int64_t ne0, int64_t ne1, int64_t ne2,
                               int64_t ne3) {
    ggml_tensor * tensor = ggml_new_tensor_4d(ctx_.get(), type, ne0, ne1, ne2, ne3);
    check(tensor != nullptr, Status::internal, "too many tensors in the group of %s", name.c_str());
    ggml_set_name(tensor, name.c_str());
    return tensor;
}

uint64_t TensorGroup::required_bytes(ggml_backend_buffer_type_t kind) const {
    return ggml_backend_alloc_ctx_tensors_from_buft_size(ctx_.get(), kind);
}

void TensorGroup::allocate(const char * what, ggml_backend_buffer_type_t kind) {
    const uint64_t needed = required_bytes(kind);
    if (needed == 0) {
        return;
    }
    const auto guard = device_->lock();
    const DeviceInfo info = device_->info();
    // A GPU reports what is free; asking for more makes some drivers page to host memory instead of failing.
    if (!device_->is_cpu() && info.memory_free > 0 && needed > info.memory_free) {
        fail(Status::out_of_memory, "%s needs %llu bytes on %s, %llu are free", what,
             static_cast<unsigned long long>(needed), device_->name().c_str(),
             static_cast<unsigned long long>(info.memory_free));
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), kind));
    check(buffer_ != nullptr, Status::out_of_memory, "%s needs %llu bytes on %s, %llu are free", what,
          static_cast<unsigned long long>(needed), device_->name().c_str(),
          static_cast<unsigned long long>(info.memory_free));
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

void TensorGroup::clear(uint8_t value) {
    if (buffer_) {
        const auto guard = device_->lock();
        device_->synchronize();
        ggml_backend_buffer_clear(buffer_.get(), value);
    }
}

void view_follow(ggml_tensor * view) {
    if (view->data != nullptr) {
        return; // allocated with its group
    }
    check(view->view_src != nullptr && view->view_src->buffer != nullptr, Status::internal, "%s looks into no memory",
          view->name);
    const enum ggml_status status = ggml_backend_view_init(view);
    check(status == GGML_STATUS_SUCCESS, Status::device, "%s could not be placed", view->name);
}

void tensor_place(ggml_tensor * tensor, const ggml_tensor * owner, uint64_t offset) {
    check(tensor->view_src == nullptr && !spans_devices(owner), Status::internal, "%s cannot be placed on %s",
          tensor->name, owner->name);
    check_span(owner, offset, ggml_nbytes(tensor), "placement");
    tensor->buffer = nullptr;
    tensor->data = nullptr;
    const enum ggml_status status =
        ggml_backend_tensor_alloc(tensor_buffer(owner), tensor, static_cast<uint8_t *>(owner->data) + offset);
    check(status == GGML_STATUS_SUCCESS, Status::device, "%s could not be placed", tensor->name);
}

HostPlacement::HostPlacement(std::shared_ptr<Device> device, const void * data, uint64_t n_bytes)
    : device_(std::move(device)), begin_(static_cast<const uint8_t *>(data)), n_bytes_(n_bytes) {
    buffer_.reset(ggml_backend_dev_buffer_from_host_ptr(ggml_backend_get_device(device_->backend()),
                                                        const_cast<void *>(data), n_bytes, n_bytes));
    check(buffer_ != nullptr, Status::device, "device %s cannot use host memory in place", device_->name().c_str());
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
}

void HostPlacement::place(ggml_tensor * tensor, const void * data) {
    const auto * at = static_cast<const uint8_t *>(data);
    const uint64_t size = ggml_nbytes(tensor);
    check(at >= begin_ && size <= n_bytes_ && static_cast<uint64_t>(at - begin_) <= n_bytes_ - size, Status::internal,
          "%s lies outside its file", tensor->name);
    const enum ggml_status status = ggml_backend_tensor_alloc(buffer_.get(), tensor, const_cast<uint8_t *>(at));
    check(status == GGML_STATUS_SUCCESS, Status::device, "%s could not be placed", tensor->name);
}

void tensor_write(ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes) {
    check_span(tensor, offset, n_bytes, "write");
    if (n_bytes > 0) {
        ggml_backend_tensor_set(tensor, data, offset, n_bytes);
    }
}

void tensor_read(const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes) {
    check_span(tensor, offset, n_bytes, "read");
    if (n_bytes > 0) {
        ggml_backend_tensor_get(tensor, data, offset, n_bytes);
    }
}

void tensor_fill(ggml_tensor * tensor, uint8_t value, uint64_t offset, uint64_t n_bytes) {
    check_span(tensor, offset, n_bytes, "fill");
    if (n_bytes > 0) {
        ggml_backend_tensor_memset(tensor, value, offset, n_bytes);
    }
}

void tensor_write_2d(ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes, uint64_t n_rows,
                     uint64_t stride_tensor, uint64_t stride_data) {
    check_span_2d(tensor, offset, n_bytes, n_rows, stride_tensor, "write");
    if (n_bytes > 0 && n_rows > 0) {
        ggml_backend_tensor_set_2d(tensor, data, offset, n_bytes, n_rows, stride_tensor, stride_data);
    }
}

void tensor_read_2d(const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes, uint64_t n_rows,
                    uint64_t stride_tensor, uint64_t stride_data) {
    check_span_2d(tensor, offset, n_bytes, n_rows, stride_tensor, "read");
    if (n_bytes > 0 && n_rows > 0) {
        ggml_backend_tensor_get_2d(tensor, data, offset, n_bytes, n_rows, stride_tensor, stride_data);
    }
}

void tensor_copy(const ggml_tensor * src, ggml_tensor * dst) {
    check_span(src, 0, ggml_nbytes(src), "copy");
    check_span(dst, 0, ggml_nbytes(dst), "copy");
    check(src->type == dst->type && ggml_are_same_shape(src, dst) && ggml_are_same_stride(src, dst), Status::internal,
          "copy of %s to %s: layouts differ", src->name, dst->name);
    ggml_backend_tensor_copy(src, dst);
}

void tensor_copy_range(const ggml_tensor * src, uint64_t src_offset, ggml_tensor * dst, uint64_t dst_offset,
                       uint64_t n_bytes) {
    check_span(src, src_offset, n_bytes, "copy");
    check_span(dst, dst_offset, n_bytes, "copy");
    if (n_bytes == 0) {
        return;
    }
    ggml_init_params params{};
    params.mem_size = 2 * ggml_tensor_overhead();
    params.no_alloc = true;
    const ggml_context_ptr ctx(ggml_init(params));
    check(ctx != nullptr, Status::out_of_memory, "no host memory for two tensor descriptors");
    ggml_tensor * from = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, static_cast<int64_t>(n_bytes));
    ggml_tensor * to = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, static_cast<int64_t>(n_bytes));
    tensor_place(from, src, src_offset);
    tensor_place(to, dst, dst_offset);
    ggml_backend_tensor_copy(from, to);
}

void tensor_write_async(Device & device, ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes) {
    check_span(tensor, offset, n_bytes, "write");
    if (n_bytes > 0) {
        ggml_backend_tensor_set_async(device.backend(), tensor, data, offset, n_bytes);
    }
}

void tensor_read_async(Device & device, const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes) {
    check_span(tensor, offset, n_bytes, "read");
    if (n_bytes > 0) {
        ggml_backend_tensor_get_async(device.backend(), tensor, data, offset, n_bytes);
    }
}

void tensor_write_2d_async(Device & device, ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes,
                           uint64_t n_rows, uint64_t stride_tensor, uint64_t stride_data) {
    check_span_2d(tensor, offset, n_bytes, n_rows, stride_tensor, "write");
    if (n_bytes > 0 && n_rows > 0) {
        ggml_backend_tensor_set_2d_async(device.backend(), tensor, data, offset, n_bytes, n_rows, stride_tensor,
                                         stride_data);
    }
}

const void * host_data(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    return buffer != nullptr && ggml_backend_buffer_is_host(buffer) ? tensor->data : nullptr;
}

ggml_backend_buffer_t tensor_buffer(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

bool spans_devices(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor_buffer(tensor);
    const ggml_backend_dev_t device =
        buffer != nullptr ? ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer)) : nullptr;
    return device != nullptr && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_META;
}

enum ggml_type type_from_name(const std::string & name, const char * field, const enum ggml_type * accepted,
                              size_t n_accepted) {
    std::string known;
    for (size_t i = 0; i < n_accepted; ++i) {
        if (name == ggml_type_name(accepted[i])) {
            return accepted[i];
        }
        known += std::string(i > 0 ? ", " : "") + ggml_type_name(accepted[i]);
    }
    fail(Status::invalid, "%s \"%s\", want one of: %s", field, name.c_str(), known.c_str());
}

} // namespace dflash
