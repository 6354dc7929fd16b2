#include <cstring>

#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"

using namespace dflash;
using namespace dflash::capi;

namespace {

template <class List> const auto & at(const List & list, int64_t i, const char * what) {
    check(i >= 0 && i < static_cast<int64_t>(list.size()), Status::invalid, "%s %lld, want 0 to %lld", what,
          static_cast<long long>(i), static_cast<long long>(list.size()) - 1);
    return list[static_cast<size_t>(i)];
}

} // namespace

dflash_status dflash_gguf_open(dflash_gguf ** out, const char * path, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        auto handle = std::make_shared<dflash_gguf>();
        handle->file = GgufFile::open(required(path, "path"));
        publish(out, std::move(handle));
    });
}

void dflash_gguf_free(dflash_gguf * gguf) {
    release(gguf);
}

dflash_status dflash_gguf_value_count(const dflash_gguf * gguf, int64_t * n, dflash_error * err) {
    return guard(err, [&] {
        output(n, "n");
        *n = static_cast<int64_t>(borrow(gguf)->file->values().size());
    });
}

dflash_status dflash_gguf_value_at(const dflash_gguf * gguf, int64_t i, dflash_gguf_value * value, char * key,
                                   uint64_t size, uint64_t * needed, dflash_error * err) {
    return guard(err, [&] {
        const auto handle = borrow(gguf);
        const GgufValue & v = at(handle->file->values(), i, "key");
        check(key != nullptr || size == 0, Status::invalid, "key is NULL with a size of %llu",
              static_cast<unsigned long long>(size));
        const uint64_t n = v.key.size() + 1;
        if (needed != nullptr) {
            *needed = n;
        }
        if (value != nullptr) {
            *value = {static_cast<int32_t>(v.type), static_cast<int32_t>(v.element_type), v.count, v.payload_bytes};
        }
        if (size > 0) {
            check(size >= n, Status::capacity, "key of %llu bytes, the buffer has %llu",
                  static_cast<unsigned long long>(n), static_cast<unsigned long long>(size));
            std::memcpy(key, v.key.c_str(), n);
        }
    });
}

dflash_status dflash_gguf_value_read(const dflash_gguf * gguf, int64_t i, void * buffer, uint64_t size,
                                     dflash_error * err) {
    return guard(err, [&] {
        const auto handle = borrow(gguf);
        const GgufValue & v = at(handle->file->values(), i, "key");
        check(size == v.payload_bytes, Status::invalid, "buffer of %llu bytes, want %llu",
              static_cast<unsigned long long>(size), static_cast<unsigned long long>(v.payload_bytes));
        if (size > 0) {
            std::memcpy(required(buffer, "buffer"), v.payload, size);
        }
    });
}

dflash_status dflash_gguf_tensor_count(const dflash_gguf * gguf, int64_t * n, dflash_error * err) {
    return guard(err, [&] {
        output(n, "n");
        *n = static_cast<int64_t>(borrow(gguf)->file->tensors().size());
    });
}

dflash_status dflash_gguf_tensor_at(const dflash_gguf * gguf, int64_t i, dflash_gguf_tensor * out, dflash_error * err) {
    return guard(err, [&] {
        dflash_gguf_tensor & t = output(out, "out");
        const auto handle = borrow(gguf);
        const GgufTensorInfo & info = at(handle->file->tensors(), i, "tensor");
        copy_text(t.name, info.name);
        copy_text(t.type, ggml_type_name(info.type));
        t.n_dims = info.n_dims;
        t.split_index = info.split_index;
        std::copy(info.ne, info.ne + 4, t.ne);
        t.n_bytes = info.nbytes;
    });
}

dflash_status dflash_gguf_tensor_read(const dflash_gguf * gguf, int64_t i, void * buffer, uint64_t size,
                                      dflash_error * err) {
    return guard(err, [&] {
        const auto handle = borrow(gguf);
        const GgufTensorInfo & info = at(handle->file->tensors(), i, "tensor");
        check(size == info.nbytes, Status::invalid, "buffer of %llu bytes, want %llu",
              static_cast<unsigned long long>(size), static_cast<unsigned long long>(info.nbytes));
        std::memcpy(required(buffer, "buffer"), info.data, size);
    });
}
