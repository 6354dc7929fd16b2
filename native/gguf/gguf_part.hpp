#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gguf/gguf_file.hpp"

namespace dflash {

/// What one GGUF file says, checked on its own: keys and tensors in file order, not yet checked for duplicate names.
struct GgufPart {
    uint32_t version = 0;
    std::vector<GgufValue> values;
    std::vector<GgufTensorInfo> tensors; // split_index 0
};

/// Bytes of one element; 0 for string, array and unknown types.
uint64_t gguf_element_bytes(GgufType type) noexcept;

/// Throws what GgufFile::open throws.
GgufPart read_gguf_part(const std::shared_ptr<const MappedFile> & file);

} // namespace dflash
