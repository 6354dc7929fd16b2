#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/mapped_file.hpp"

namespace dflash {

/// One open .safetensors file. Immutable: any thread may read.
/// Layout: 8 bytes header length (little-endian), a JSON header, then the payloads without gap up to the file's end.
class SafetensorsFile {
  public:
    static constexpr uint64_t max_header_bytes = 16u << 20;

    struct Tensor {
        std::string name;
        std::string dtype;              // as in the file: "BF16", "F16", "F32", ...
        std::vector<int64_t> shape;     // slowest axis first, each >= 0; empty for a scalar
        uint64_t offset = 0;            // bytes from the start of the file
        uint64_t nbytes = 0;            // shape times the size of dtype; 0 when an axis is 0
        const uint8_t * data = nullptr; // any alignment; valid while the SafetensorsFile lives
    };

    /// Throws Status::not_found (missing or unreadable), Status::unsupported (a dtype that is not known),
    /// Status::format (everything else: lengths, JSON, names that occur twice, spans that overlap, leave a gap or do
    /// not match shape and dtype).
    static std::shared_ptr<const SafetensorsFile> open(const std::string & path);

    const std::string & path() const noexcept { return file_->path(); }
    const std::shared_ptr<const MappedFile> & file() const noexcept { return file_; }
    /// In header order.
    const std::vector<Tensor> & tensors() const noexcept { return tensors_; }
    /// Null when absent. O(log n).
    const Tensor * find(std::string_view name) const noexcept;
    /// The header's __metadata__.
    const std::map<std::string, std::string> & metadata() const noexcept { return metadata_; }
    /// 32 hexadecimal digits over header and the first and last 4 KiB of every tensor; see GgufFile::digest.
    std::string digest() const;

  private:
    explicit SafetensorsFile(std::shared_ptr<const MappedFile> file);
    void check_spans(uint64_t data_start) const;

    std::shared_ptr<const MappedFile> file_;
    std::string_view header_;
    std::vector<Tensor> tensors_;
    std::map<std::string, std::string> metadata_;
    std::vector<uint32_t> by_name_;
};

} // namespace dflash
