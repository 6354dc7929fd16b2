#include "gguf/safetensors_file.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "gguf/content_digest.hpp"
#include "gguf/json.hpp"
#include "gguf/quoted.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are read in place; only little-endian machines are supported"
#endif

namespace dflash {
namespace {

constexpr uint64_t length_bytes = 8;

struct DtypeBits {
    std::string_view name;
    uint64_t bits;
};

constexpr DtypeBits known_dtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16}, {"BF16", 16}, {"I32", 32},
    {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64}, {"U64", 64},
};

unsigned long long shown(uint64_t n) {
    return static_cast<unsigned long long>(n);
}

const Json & require(const Json & entry, const char * key, const std::string & subject) {
    const Json * value = entry.find(key);
    check(value != nullptr, Status::format, "%s: %s is missing", subject.c_str(), key);
    return *value;
}

uint64_t dtype_bits(const std::string & dtype, const std::string & subject) {
    for (const DtypeBits & known : known_dtypes) {
        if (known.name == dtype) {
            return known.bits;
        }
    }
    fail(Status::unsupported, "%s: dtype %s is not known", subject.c_str(), quoted(dtype).c_str());
}

SafetensorsFile::Tensor read_tensor(const Json::Member & member, const MappedFile & file, uint64_t data_start) {
    constexpr int64_t any = std::numeric_limits<int64_t>::max();
    const std::string subject = file.path() + ": tensor " + quoted(member.key);
    check(!member.key.empty() && member.key.find('\0') == std::string::npos, Status::format,
          "%s: a name must not be empty and must not hold zero bytes", subject.c_str());
    check(member.value.is_object(), Status::format, "%s: the entry is %s, want an object", subject.c_str(),
          member.value.kind());
    SafetensorsFile::Tensor tensor;
    tensor.name = member.key;
    tensor.dtype = require(member.value, "dtype", subject).as_string((subject + ": dtype").c_str());
    const uint64_t bits_each = dtype_bits(tensor.dtype, subject);

    const std::string shape_subject = subject + ": shape";
    uint64_t elements = 1;
    for (const Json & axis : require(member.value, "shape", subject).items(shape_subject.c_str())) {
        tensor.shape.push_back(axis.as_int(shape_subject.c_str(), 0, any));
        elements = checked_mul(elements, static_cast<uint64_t>(tensor.shape.back()), shape_subject.c_str());
    }
    const uint64_t bits = checked_mul(elements, bits_each, shape_subject.c_str());
    check(bits % 8 == 0, Status::format, "%s: %llu bits, want a whole number of bytes", shape_subject.c_str(),
          shown(bits));
    tensor.nbytes = bits / 8;

    const std::string span_subject = subject + ": data_offsets";
    const Json::Array & span = require(member.value, "data_offsets", subject).items(span_subject.c_str());
    check(span.size() == 2, Status::format, "%s: %zu numbers, want 2", span_subject.c_str(), span.size());
    const int64_t data_bytes = static_cast<int64_t>(file.size() - data_start);
    const int64_t begin = span[0].as_int(span_subject.c_str(), 0, data_bytes);
    const int64_t end = span[1].as_int(span_subject.c_str(), begin, data_bytes);
    check(static_cast<uint64_t>(end - begin) == tensor.nbytes, Status::format,
          "%s: a span of %lld bytes, want %llu for its shape and dtype %s", span_subject.c_str(),
          static_cast<long long>(end - begin), shown(tensor.nbytes), tensor.dtype.c_str());
    tensor.offset = data_start + static_cast<uint64_t>(begin);
    tensor.data = file.data() + tensor.offset;
    return tensor;
}

} // namespace

SafetensorsFile::SafetensorsFile(std::shared_ptr<const MappedFile> file) : file_(std::move(file)) {
    const char * const name = path().c_str();
    check(file_->size() >= length_bytes, Status::format, "%s: the file has %llu bytes, want at least %llu", name,
          shown(file_->size()), shown(length_bytes));
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, file_->data(), length_bytes);
    check(header_bytes <= file_->size() - length_bytes, Status::format,
          "%s: the header claims %llu bytes, the file has %llu left", name, shown(header_bytes),
          shown(file_->size() - length_bytes));
    header_ = {reinterpret_cast<const char *>(file_->data() + length_bytes), static_cast<size_t>(header_bytes)};
    check(!header_.empty() && header_.front() == '{', Status::format, "%s: the header does not begin with \"{\"", name);
    const uint64_t data_start = length_bytes + header_bytes;

    const std::string subject = path() + ": header";
    const Json header = Json::parse(header_, subject.c_str(), max_header_bytes);
    for (const Json::Member & member : header.members(subject.c_str())) {
        if (member.key != "__metadata__") {
            tensors_.push_back(read_tensor(member, *file_, data_start));
            continue;
        }
        const std::string metadata_subject = subject + ": __metadata__";
        for (const Json::Member & entry : member.value.members(metadata_subject.c_str())) {
            metadata_[entry.key] = entry.value.as_string(metadata_subject.c_str());
        }
    }
    check_spans(data_start);
    by_name_.resize(tensors_.size());
    std::iota(by_name_.begin(), by_name_.end(), 0u);
    std::sort(by_name_.begin(), by_name_.end(),
              [&](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
}

void SafetensorsFile::check_spans(uint64_t data_start) const {
    std::vector<uint32_t> order(tensors_.size());
    std::iota(order.begin(), order.end(), 0u);
    // Empty tensors come before the one that starts at the same byte.
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        return std::pair(tensors_[a].offset, tensors_[a].nbytes) < std::pair(tensors_[b].offset, tensors_[b].nbytes);
    });
    uint64_t expected = data_start;
    for (const uint32_t i : order) {
        const Tensor & tensor = tensors_[i];
        check(tensor.offset == expected, Status::format,
              "%s: tensor %s starts at byte %llu, want byte %llu: the payloads overlap or leave a gap", path().c_str(),
              quoted(tensor.name).c_str(), shown(tensor.offset), shown(expected));
        expected += tensor.nbytes;
    }
    check(expected == file_->size(), Status::format, "%s: the payloads end at byte %llu, the file at byte %llu",
          path().c_str(), shown(expected), shown(file_->size()));
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::string & path) {
    return std::shared_ptr<const SafetensorsFile>(new SafetensorsFile(MappedFile::open(path)));
}

const SafetensorsFile::Tensor * SafetensorsFile::find(std::string_view name) const noexcept {
    const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                     [&](uint32_t i, std::string_view text) { return tensors_[i].name < text; });
    return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
}

std::string SafetensorsFile::digest() const {
    ContentDigest digest;
    digest.add_text(header_);
    for (const Tensor & tensor : tensors_) {
        digest.add_sample(tensor.data, tensor.nbytes);
    }
    return digest.hex();
}

} // namespace dflash
