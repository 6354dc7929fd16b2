#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ggml.h"

#include "gguf/mapped_file.hpp"

// Reader for GGUF versions 2 and 3, little-endian, one file or a set of -0000I-of-0000N.gguf parts. Written for files
// from strangers: every count and offset is held against the bytes that are there before anything is allocated.
namespace dflash {

/// Value types with their numbers in the file.
enum class GgufType : uint32_t { u8 = 0, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

/// "u8", "string", ...; "unknown" for a number outside the enumeration.
const char * gguf_type_name(GgufType type) noexcept;

/// One metadata key. The payload stays in the mapped file; valid while the GgufFile that gave it lives.
struct GgufValue {
    std::string key;
    GgufType type = GgufType::u8;
    GgufType element_type = GgufType::u8; // == type unless type is array; never array
    uint64_t count = 1;                   // elements; 1 for scalars
    const uint8_t * payload = nullptr;    // the elements back to back, little-endian and unaligned; strings with
                                          // their 8-byte length in front
    uint64_t payload_bytes = 0;
    std::vector<uint64_t> string_marks; // arrays of strings: offset in payload of every strings_per_mark-th one

    static constexpr uint64_t strings_per_mark = 32;
};

struct GgufTensorInfo {
    std::string name;
    ggml_type type = GGML_TYPE_F32;
    int n_dims = 1;                 // 1 to 4
    int64_t ne[4] = {1, 1, 1, 1};   // elements per axis, fastest first, each > 0
    uint64_t offset = 0;            // bytes from the start of its file
    uint64_t nbytes = 0;            // > 0; offset + nbytes lies inside the file
    const uint8_t * data = nullptr; // aligned to at least 8 bytes; valid while `file` lives
    int split_index = 0;            // part that holds it, 0-based
    std::shared_ptr<const MappedFile> file;
};

/// An open GGUF model. Immutable: any thread may read.
class GgufFile {
  public:
    static constexpr uint64_t max_keys = 65536;
    static constexpr uint64_t max_key_bytes = 65535;
    static constexpr uint64_t max_total_key_bytes = 16u << 20;
    static constexpr uint64_t max_tensors = 131072;
    static constexpr uint64_t max_tensor_name_bytes = 63;
    static constexpr int max_parts = 1024;

    /// Opens one file, or, when its name ends in -0000I-of-0000N.gguf, all N parts (any of them may be named) as one
    /// model: metadata from the first part, tensors of all parts in part order.
    /// Throws Status::not_found (a file is missing), Status::unsupported (version 1 or unknown, big-endian, a
    /// tensor type that this ggml does not have), Status::format (everything else that is wrong with the content).
    static std::shared_ptr<const GgufFile> open(const std::string & path);

    /// Path of the first (or only) part.
    const std::string & path() const noexcept { return parts_.front()->path(); }
    /// Size of all parts.
    uint64_t total_bytes() const noexcept;
    /// GGUF version of the first part: 2 or 3.
    uint32_t version() const noexcept { return version_; }
    /// The mapped parts in order.
    const std::vector<std::shared_ptr<const MappedFile>> & parts() const noexcept { return parts_; }

    /// In file order.
    const std::vector<GgufValue> & values() const noexcept { return values_; }
    const std::vector<GgufTensorInfo> & tensors() const noexcept { return tensors_; }
    /// Null when absent. O(log n).
    const GgufValue * find(std::string_view key) const noexcept;
    const GgufTensorInfo * find_tensor(std::string_view name) const noexcept;

    /// Typed look-ups. require_* throw Status::format when the key is absent; the others return the fallback then.
    /// All throw Status::format when the key has another type or a value outside [min, max]; the message names the
    /// file, the key, what was found and what was wanted.

    /// Key general.architecture.
    std::string architecture() const;
    /// Scalars of type u8 to i64.
    int64_t require_int(std::string_view key, int64_t min, int64_t max) const;
    int64_t int_or(std::string_view key, int64_t fallback, int64_t min, int64_t max) const;
    /// Scalars of type f32 or f64; infinities and NaN are refused.
    double require_float(std::string_view key, double min, double max) const;
    double float_or(std::string_view key, double fallback, double min, double max) const;
    bool bool_or(std::string_view key, bool fallback) const;
    std::string require_string(std::string_view key) const;
    std::string string_or(std::string_view key, std::string fallback) const;
    /// Arrays of at most max_count integers of any width; a scalar counts as an array of one.
    std::vector<int64_t> ints_or(std::string_view key, std::vector<int64_t> fallback, uint64_t max_count) const;
    /// Arrays of bool, or of integers that are all 0 or 1.
    std::vector<bool> bools_or(std::string_view key, std::vector<bool> fallback, uint64_t max_count) const;
    /// Arrays of f32 or f64, all finite; a scalar counts as an array of one.
    std::vector<double> floats_or(std::string_view key, std::vector<double> fallback, uint64_t max_count) const;

    /// Element i of a value of this file; i = 0 for scalars. Throw Status::invalid when i >= count, Status::format
    /// when the element is not of that kind (integers: u8 to i64; numbers: those, f32, f64 and bool).
    /// string_at is O(1): it steps over fewer than GgufValue::strings_per_mark strings.
    std::string_view string_at(const GgufValue & value, uint64_t i) const;
    int64_t int_at(const GgufValue & value, uint64_t i) const;
    double number_at(const GgufValue & value, uint64_t i) const;
    /// The payload as it lies in the file; see GgufValue::payload.
    const uint8_t * raw(const GgufValue & value) const noexcept { return value.payload; }
    uint64_t raw_bytes(const GgufValue & value) const noexcept { return value.payload_bytes; }

    /// 32 hexadecimal digits that identify the content: metadata (without the split.* keys, so that splitting a file
    /// keeps its digest), names, types and shapes of all tensors, and the first and last 4 KiB of each. Not meant
    /// against deliberate collisions. Reads a few pages per tensor on every call.
    std::string digest() const;

  private:
    explicit GgufFile(const std::string & path);
    void append_part(GgufFile && part);
    void index_tensors();
    const GgufValue & require(std::string_view key, const char * wanted) const;
    [[noreturn]] void refuse_type(const GgufValue & value, const char * wanted) const;
    void check_count(const GgufValue & value, uint64_t max_count) const;
    void check_index(const GgufValue & value, uint64_t i) const;

    std::vector<std::shared_ptr<const MappedFile>> parts_;
    uint32_t version_ = 0;
    std::vector<GgufValue> values_;
    std::vector<GgufTensorInfo> tensors_;
    std::vector<uint32_t> values_by_key_; // indices, sorted by key: no hash that a file could be made to collide in
    std::vector<uint32_t> tensors_by_name_;
};

} // namespace dflash
