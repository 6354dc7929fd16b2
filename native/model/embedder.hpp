#pragma once

#include <cstdint>
#include <memory>

#include "ggml.h"
#include "gguf/gguf_file.hpp"

namespace dflash {

/// Row look-up in a (quantised) embedding table that stays in the mapped file: no device memory, and no need for the
/// device to have the table's type. Move-only; const calls from any thread.
class CpuEmbedder {
  public:
    CpuEmbedder() = default;
    /// table: [n_embd, n_vocab] of F32, F16, BF16 or any quantised type. Throws Status::format on another layout.
    explicit CpuEmbedder(const GgufTensorInfo & table);
    CpuEmbedder(CpuEmbedder &&) = default;
    CpuEmbedder & operator=(CpuEmbedder &&) = default;
    CpuEmbedder(const CpuEmbedder &) = delete;
    CpuEmbedder & operator=(const CpuEmbedder &) = delete;

    int64_t n_embd() const { return n_embd_; }
    int64_t n_vocab() const { return n_vocab_; }
    enum ggml_type type() const { return type_; }

    /// out: float32 [n, n_embd], row after row. Every id is checked before the first row is written:
    /// Status::invalid names the id and the vocabulary.
    void embed(const int32_t * ids, int64_t n, float * out) const;

  private:
    std::shared_ptr<const MappedFile> file_;
    const uint8_t * rows_ = nullptr;
    uint64_t row_bytes_ = 0;
    enum ggml_type type_ = GGML_TYPE_COUNT;
    int64_t n_embd_ = 0;
    int64_t n_vocab_ = 0;
};

} // namespace dflash
