#include "ggmlx/device_copy.hpp"

#include <algorithm>
#include <functional>

#include "base/error.hpp"
#include "ggmlx/host_memory.hpp"
#include "ggmlx/tensors.hpp"

namespace dflash {
namespace {

void check_side(const Device & device, const ggml_tensor * tensor, uint64_t offset, uint64_t n_bytes,
                const char * side) {
    check(tensor != nullptr, Status::invalid, "no %s tensor to copy", side);
    const ggml_backend_buffer_t buffer = tensor_buffer(tensor);
    check(buffer != nullptr, Status::invalid, "the %s %s has no memory yet", side, tensor->name);
    check(!spans_devices(tensor), Status::unsupported, "the %s %s spans devices", side, tensor->name);
    check(tensor->data != nullptr, Status::invalid, "the %s %s has no memory yet", side, tensor->name);
    const ggml_backend_buffer_type_t kind = ggml_backend_buffer_get_type(buffer);
    check(ggml_backend_supports_buft(device.backend(), kind), Status::mismatch, "the %s %s lies in %s, not on %s", side,
          tensor->name, ggml_backend_buft_name(kind), device.name().c_str());
    const uint64_t size = ggml_nbytes(tensor);
    check(offset <= size && n_bytes <= size - offset, Status::invalid, "%s bytes [%llu, +%llu) of %s, which has %llu",
          side, static_cast<unsigned long long>(offset), static_cast<unsigned long long>(n_bytes), tensor->name,
          static_cast<unsigned long long>(size));
}

void check_apart(const ggml_tensor * src, uint64_t src_offset, const ggml_tensor * dst, uint64_t dst_offset,
                 uint64_t n_bytes) {
    if (tensor_buffer(src) != tensor_buffer(dst)) {
        return; // addresses of different devices mean nothing to each other
    }
    const uint64_t from = reinterpret_cast<uint64_t>(src->data) + src_offset;
    const uint64_t to = reinterpret_cast<uint64_t>(dst->data) + dst_offset;
    const uint64_t gap = from < to ? to - from : from - to;
    check(gap >= n_bytes, Status::invalid, "copy of %llu bytes from %s to %s: the ranges overlap, %llu bytes apart",
          static_cast<unsigned long long>(n_bytes), src->name, dst->name, static_cast<unsigned long long>(gap));
}

CopyPath shortest_path(const Device & src_device, const ggml_tensor * src, const Device & dst_device,
                       const ggml_tensor * dst) {
    const ggml_backend_dev_t from = ggml_backend_get_device(src_device.backend());
    const ggml_backend_dev_t to = ggml_backend_get_device(dst_device.backend());
    if (from == to) {
        return CopyPath::local;
    }
    const bool one_driver = ggml_backend_dev_backend_reg(from) == ggml_backend_dev_backend_reg(to);
    return one_driver || host_data(src) != nullptr || host_data(dst) != nullptr ? CopyPath::direct : CopyPath::staged;
}

} // namespace

DeviceLocks::DeviceLocks(Device & a, Device & b)
    : first_((std::less<>()(&a, &b) ? a : b).lock()), second_((std::less<>()(&a, &b) ? b : a).lock()) {
}

CopyPath copy_between_devices(Device & src_device, const ggml_tensor * src, uint64_t src_offset, Device & dst_device,
                              ggml_tensor * dst, uint64_t dst_offset, uint64_t n_bytes, CopyRoute route) {
    check_side(src_device, src, src_offset, n_bytes, "source");
    check_side(dst_device, dst, dst_offset, n_bytes, "destination");
    if (n_bytes == 0) {
        return CopyPath::none;
    }
    check_apart(src, src_offset, dst, dst_offset, n_bytes);
    const DeviceLocks guard(src_device, dst_device);
    const CopyPath path = route == CopyRoute::host ? CopyPath::staged : shortest_path(src_device, src, dst_device, dst);
    const uint64_t piece = std::min(n_bytes, copy_staging_bytes);
    HostBlock staging;
    if (path == CopyPath::staged) {
        staging = HostBlock(src_device, piece);
        check(staging.data() != nullptr, Status::out_of_memory, "no %llu bytes of host memory to copy %s through",
              static_cast<unsigned long long>(piece), src->name);
    }
    src_device.synchronize();
    dst_device.synchronize();
    if (path != CopyPath::staged) {
        tensor_copy_range(src, src_offset, dst, dst_offset, n_bytes);
    } else {
        for (uint64_t at = 0; at < n_bytes; at += piece) {
            const uint64_t n = std::min(piece, n_bytes - at);
            tensor_read(src, staging.data(), src_offset + at, n);
            tensor_write(dst, staging.data(), dst_offset + at, n);
        }
    }
    dst_device.synchronize();
    return path;
}

} // namespace dflash
