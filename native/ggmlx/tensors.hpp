#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ggml-cpp.h"
#include "ggml.h"
#include "ggmlx/device.hpp"

namespace dflash {

/// A group of tensors that live together in one device buffer. Declare tensors through `ctx()`, then `allocate()`.
class TensorGroup {
  public:
    /// n_tensors: the most tensors (views included) that will be declared.
    TensorGroup(std::shared_ptr<Device> device, size_t n_tensors);

    ggml_context * ctx() const { return ctx_.get(); }
    const std::shared_ptr<Device> & device() const { return device_; }

    ggml_tensor * add(enum ggml_type type, const std::string & name, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1,
                      int64_t ne3 = 1);
    /// Bytes that allocate() will ask the device for.
    uint64_t required_bytes() const { return required_bytes(device_->buffer_type()); }
    /// One buffer for all declared tensors, cleared to zero. Throws Status::out_of_memory with the bytes needed and
    /// the bytes free; `what` names the owner in that message.
    void allocate(const char * what) { allocate(what, device_->buffer_type()); }
    /// The same in another kind of memory that the device can use.
    void allocate(const char * what, ggml_backend_buffer_type_t kind);
    /// Sets every byte of the buffer.
    void clear(uint8_t value = 0);
    uint64_t bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }
    ggml_backend_buffer_t buffer() const { return buffer_.get(); }
    /// Never used for another group of this process: addresses of tensors are, once a group is gone.
    uint64_t serial() const { return serial_; }

  private:
    uint64_t required_bytes(ggml_backend_buffer_type_t kind) const;

    std::shared_ptr<Device> device_;
    ggml_context_ptr ctx_;
    ggml_backend_buffer_ptr buffer_;
    uint64_t serial_ = 0;
};

/// Gives a view its address after the tensor that it looks into got memory.
void view_follow(ggml_tensor * view);

/// Points a descriptor that owns no memory and is no view at the memory of `owner`, `offset` bytes in. May be repeated
/// with another owner; the owner's memory must outlive the use. Throws Status::internal when it does not fit.
void tensor_place(ggml_tensor * tensor, const ggml_tensor * owner, uint64_t offset);

/// Host memory (a mapped file) that tensors are placed in without a copy. For devices that compute from host memory.
class HostPlacement {
  public:
    /// The memory must outlive this object and the tensors. Throws Status::device when the device cannot do it.
    HostPlacement(std::shared_ptr<Device> device, const void * data, uint64_t n_bytes);
    /// data must lie inside the memory given above.
    void place(ggml_tensor * tensor, const void * data);

  private:
    std::shared_ptr<Device> device_;
    ggml_backend_buffer_ptr buffer_;
    const uint8_t * begin_ = nullptr;
    uint64_t n_bytes_ = 0;
};

/// Bounds- and layout-checked transfers. They return when the data is there. Throw Status::internal on misuse.
void tensor_write(ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes);
void tensor_read(const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes);
void tensor_fill(ggml_tensor * tensor, uint8_t value, uint64_t offset, uint64_t n_bytes);
/// Rows of n_bytes each, `stride_tensor` apart in the tensor and `stride_data` apart in host memory.
void tensor_write_2d(ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes, uint64_t n_rows,
                     uint64_t stride_tensor, uint64_t stride_data);
void tensor_read_2d(const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes, uint64_t n_rows,
                    uint64_t stride_tensor, uint64_t stride_data);
/// Between tensors of equal type and shape on any two devices.
void tensor_copy(const ggml_tensor * src, ggml_tensor * dst);
/// n_bytes between places in two tensors on any two devices, whatever their types.
void tensor_copy_range(const ggml_tensor * src, uint64_t src_offset, ggml_tensor * dst, uint64_t dst_offset,
                       uint64_t n_bytes);

/// Queued on the device's stream; the host memory must stay until Device::synchronize().
void tensor_write_async(Device & device, ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes);
void tensor_read_async(Device & device, const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes);
void tensor_write_2d_async(Device & device, ggml_tensor * tensor, const void * data, uint64_t offset, uint64_t n_bytes,
                           uint64_t n_rows, uint64_t stride_tensor, uint64_t stride_data);

/// The tensor's bytes when they can be read directly by the host, else nullptr.
const void * host_data(const ggml_tensor * tensor);

/// The buffer that holds the tensor's bytes; null before it has memory.
ggml_backend_buffer_t tensor_buffer(const ggml_tensor * tensor);
/// True for a tensor whose parts lie on several devices (ggml's tensor-parallel "meta" device): it has no address, and
/// only whole-tensor or whole-row transfers reach it.
bool spans_devices(const ggml_tensor * tensor);

/// ggml type from its lower-case name ("f16", "q8_0", ...); Status::invalid naming it and the accepted ones.
enum ggml_type type_from_name(const std::string & name, const char * field, const enum ggml_type * accepted,
                              size_t n_accepted);

} // namespace dflash
