#include "model/embedder.hpp"

#include <cstring>

#include "base/error.hpp"

namespace dflash {

CpuEmbedder::CpuEmbedder(const GgufTensorInfo & table)
    : file_(table.file), rows_(table.data), type_(table.type), n_embd_(table.ne[0]), n_vocab_(table.ne[1]) {
    row_bytes_ = ggml_row_size(type_, n_embd_);
    check(table.nbytes == row_bytes_ * static_cast<uint64_t>(n_vocab_), Status::format,
          "tensor %s has %llu bytes, want %lld rows of %llu", table.name.c_str(),
          static_cast<unsigned long long>(table.nbytes), static_cast<long long>(n_vocab_),
          static_cast<unsigned long long>(row_bytes_));
    check(type_ == GGML_TYPE_F32 || ggml_get_type_traits(type_)->to_float != nullptr, Status::unsupported,
          "tensor %s has type %s, which has no float form", table.name.c_str(), ggml_type_name(type_));
}

void CpuEmbedder::embed(const int32_t * ids, int64_t n, float * out) const {
    check(rows_ != nullptr, Status::internal, "embedding look-up without a table");
    for (int64_t i = 0; i < n; ++i) {
        check(ids[i] >= 0 && ids[i] < n_vocab_, Status::invalid, "token id %d at index %lld, want 0 to %lld", ids[i],
              static_cast<long long>(i), static_cast<long long>(n_vocab_ - 1));
    }
    const auto to_float = type_ == GGML_TYPE_F32 ? nullptr : ggml_get_type_traits(type_)->to_float;
    for (int64_t i = 0; i < n; ++i) {
        const uint8_t * row = rows_ + static_cast<uint64_t>(ids[i]) * row_bytes_;
        float * to = out + i * n_embd_;
        if (to_float == nullptr) {
            std::memcpy(to, row, row_bytes_);
        } else {
            to_float(row, to, n_embd_);
        }
    }
}

} // namespace dflash
