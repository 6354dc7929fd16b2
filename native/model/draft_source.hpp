#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/draft_config.hpp"

namespace dflash {

/// A drafter's tensors under one set of names (those of the `dflash` GGUF form), whatever file form they came from.
struct DraftSource {
    struct Tensor {
        std::string name;      // "fc.weight", "blk.0.attn_q.weight", ...
        std::string file_name; // its name in the file, for messages
        enum ggml_type type = GGML_TYPE_F32;
        std::vector<int64_t> ne; // fastest axis first
        const uint8_t * data = nullptr;
        uint64_t nbytes = 0;
    };

    DraftConfig config;
    std::string path;
    std::string digest;
    std::vector<Tensor> tensors;
    std::vector<std::shared_ptr<const void>> files; // keep the data mapped

    const Tensor * find(const std::string & name) const;
};

/// path: a folder with config.json and safetensors files, or a GGUF of either dialect. Tensors that no form of a
/// drafter has are refused with Status::unsupported naming them.
DraftSource open_draft_source(const std::string & path);

} // namespace dflash
