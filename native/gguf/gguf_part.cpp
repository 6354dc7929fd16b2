#include "gguf/gguf_part.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.hpp"
#include "gguf/quoted.hpp"
#include "gguf/utf8.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF files are read in place; only little-endian machines are supported"
#endif

namespace dflash {
namespace {

// The fewest bytes that a key or a tensor can take up in its table.
constexpr uint64_t min_key_entry = 8 + 1 + 4 + 1;
constexpr uint64_t min_tensor_entry = 8 + 1 + 4 + 8 + 4 + 8;
constexpr uint64_t default_alignment = 32;
constexpr uint64_t min_alignment = 8;
constexpr uint64_t max_alignment = 1u << 30;

unsigned long long shown(uint64_t n) {
    return static_cast<unsigned long long>(n);
}

/// Reads forward through a mapped file; throws instead of reading past its end.
class Cursor {
  public:
    explicit Cursor(const MappedFile & file) : file_(file) {}

    uint64_t position() const { return position_; }
    uint64_t remaining() const { return file_.size() - position_; }
    const char * path() const { return file_.path().c_str(); }
    /// Names what is being read, for messages.
    void set_subject(std::string subject) { subject_ = std::move(subject); }
    const char * subject() const { return subject_.c_str(); }

    const uint8_t * take(uint64_t n, const char * what) {
        check(n <= remaining(), Status::format, "%s: %s: %s at byte %llu needs %llu bytes, the file has %llu left",
              path(), subject(), what, shown(position_), shown(n), shown(remaining()));
        const uint8_t * at = file_.data() + position_;
        position_ += n;
        return at;
    }

    template <typename T> T number(const char * what) {
        T value;
        std::memcpy(&value, take(sizeof(T), what), sizeof(T));
        return value;
    }

    std::string_view text(const char * what, uint64_t max_bytes) {
        const uint64_t n = number<uint64_t>(what);
        check(n <= max_bytes, Status::format, "%s: %s: %s is %llu bytes long, want at most %llu", path(), subject(),
              what, shown(n), shown(max_bytes));
        return {reinterpret_cast<const char *>(take(n, what)), static_cast<size_t>(n)};
    }

  private:
    const MappedFile & file_;
    uint64_t position_ = 0;
    std::string subject_;
};

/// A key or tensor name: not empty, no zero byte (C callers could not name it), UTF-8.
void check_name(const Cursor & in, std::string_view name, const char * what) {
    check(!name.empty(), Status::format, "%s: %s: the %s is empty", in.path(), in.subject(), what);
    check(name.find('\0') == std::string_view::npos && is_utf8(name), Status::format,
          "%s: %s: %s %s is not UTF-8 text without zero bytes", in.path(), in.subject(), what, quoted(name).c_str());
}

struct Header {
    uint32_t version = 0;
    uint64_t n_tensors = 0;
    uint64_t n_keys = 0;
};

Header read_header(Cursor & in) {
    in.set_subject("header");
    const uint8_t * magic = in.take(4, "magic");
    check(std::memcmp(magic, "GGUF", 4) == 0, Status::format, "%s: the file begins with %s, want \"GGUF\"", in.path(),
          quoted({reinterpret_cast<const char *>(magic), 4}).c_str());
    Header h;
    h.version = in.number<uint32_t>("version");
    check((h.version & 0xffffu) != 0 || h.version == 0, Status::unsupported,
          "%s: this is a big-endian GGUF file; only little-endian files are supported", in.path());
    check(h.version != 1, Status::unsupported,
          "%s: GGUF version 1 is not supported, want 2 or 3: convert the model again with a current converter",
          in.path());
    check(h.version == 2 || h.version == 3, Status::unsupported, "%s: GGUF version %u is not supported, want 2 or 3",
          in.path(), h.version);
    h.n_tensors = in.number<uint64_t>("tensor count");
    h.n_keys = in.number<uint64_t>("key count");
    check(h.n_keys <= GgufFile::max_keys && h.n_keys <= in.remaining() / min_key_entry, Status::format,
          "%s: the header claims %llu keys; %llu bytes follow it and at most %llu keys are accepted", in.path(),
          shown(h.n_keys), shown(in.remaining()), shown(GgufFile::max_keys));
    check(h.n_tensors <= GgufFile::max_tensors && h.n_tensors <= in.remaining() / min_tensor_entry, Status::format,
          "%s: the header claims %llu tensors; %llu bytes follow it and at most %llu tensors are accepted", in.path(),
          shown(h.n_tensors), shown(in.remaining()), shown(GgufFile::max_tensors));
    return h;
}

GgufType read_type(Cursor & in, const char * what) {
    const uint32_t id = in.number<uint32_t>(what);
    check(id <= static_cast<uint32_t>(GgufType::f64), Status::format, "%s: %s: %s is %u, want 0 to 12", in.path(),
          in.subject(), what, id);
    return static_cast<GgufType>(id);
}

void read_strings(Cursor & in, GgufValue & value) {
    const uint64_t start = in.position();
    check(value.count <= in.remaining() / 8, Status::format,
          "%s: %s: %llu strings need at least 8 bytes each, the file has %llu left", in.path(), in.subject(),
          shown(value.count), shown(in.remaining()));
    if (value.type == GgufType::array) {
        value.string_marks.reserve(static_cast<size_t>(value.count / GgufValue::strings_per_mark + 1));
    }
    for (uint64_t i = 0; i < value.count; ++i) {
        if (value.type == GgufType::array && i % GgufValue::strings_per_mark == 0) {
            value.string_marks.push_back(in.position() - start);
        }
        in.text("string", std::numeric_limits<uint64_t>::max());
    }
    value.payload_bytes = in.position() - start;
}

void read_payload(Cursor & in, const uint8_t * file_data, GgufValue & value) {
    value.payload = file_data + in.position();
    if (value.element_type == GgufType::string) {
        read_strings(in, value);
        return;
    }
    const uint64_t width = gguf_element_bytes(value.element_type);
    check(value.count <= in.remaining() / width, Status::format,
          "%s: %s: %llu elements of type %s do not fit the %llu bytes left in the file", in.path(), in.subject(),
          shown(value.count), gguf_type_name(value.element_type), shown(in.remaining()));
    value.payload_bytes = value.count * width;
    in.take(value.payload_bytes, "value");
    if (value.element_type == GgufType::boolean) {
        const uint8_t * end = value.payload + value.payload_bytes;
        const uint8_t * bad = std::find_if(value.payload, end, [](uint8_t byte) { return byte > 1; });
        check(bad == end, Status::format, "%s: %s: a bool is stored as %u, want 0 or 1", in.path(), in.subject(),
              bad == end ? 0u : static_cast<unsigned>(*bad));
    }
}

std::vector<GgufValue> read_values(Cursor & in, const uint8_t * file_data, uint64_t n_keys) {
    std::vector<GgufValue> values;
    values.reserve(static_cast<size_t>(n_keys));
    uint64_t key_bytes = 0;
    for (uint64_t i = 0; i < n_keys; ++i) {
        in.set_subject(format("key %llu of %llu", shown(i + 1), shown(n_keys)));
        const std::string_view key = in.text("key name", GgufFile::max_key_bytes);
        check_name(in, key, "key name");
        key_bytes += key.size();
        check(key_bytes <= GgufFile::max_total_key_bytes, Status::format,
              "%s: %s: the key names add up to more than %llu bytes", in.path(), in.subject(),
              shown(GgufFile::max_total_key_bytes));
        in.set_subject("key " + quoted(key));
        GgufValue value;
        value.key = std::string(key);
        value.type = read_type(in, "value type");
        value.element_type = value.type;
        if (value.type == GgufType::array) {
            value.element_type = read_type(in, "array element type");
            check(value.element_type != GgufType::array, Status::format, "%s: %s: arrays of arrays are not accepted",
                  in.path(), in.subject());
            value.count = in.number<uint64_t>("array length");
        }
        read_payload(in, file_data, value);
        values.push_back(std::move(value));
    }
    return values;
}

uint64_t find_alignment(const Cursor & in, const std::vector<GgufValue> & values) {
    for (const GgufValue & value : values) {
        if (value.key != "general.alignment") {
            continue;
        }
        check(value.type == GgufType::u32, Status::format, "%s: key general.alignment has type %s, want u32", in.path(),
              gguf_type_name(value.type));
        uint32_t alignment = 0;
        std::memcpy(&alignment, value.payload, sizeof(alignment));
        check(alignment >= min_alignment && alignment <= max_alignment && (alignment & (alignment - 1)) == 0,
              Status::format, "%s: key general.alignment is %u, want a power of two from %llu to %llu", in.path(),
              alignment, shown(min_alignment), shown(max_alignment));
        return alignment;
    }
    return default_alignment;
}

void read_shape(Cursor & in, GgufTensorInfo & tensor) {
    const uint32_t n_dims = in.number<uint32_t>("number of dimensions");
    check(n_dims >= 1 && n_dims <= 4, Status::format, "%s: %s has %u dimensions, want 1 to 4", in.path(), in.subject(),
          n_dims);
    tensor.n_dims = static_cast<int>(n_dims);
    uint64_t elements = 1;
    for (uint32_t d = 0; d < n_dims; ++d) {
        const uint64_t ne = in.number<uint64_t>("dimension");
        constexpr uint64_t limit = std::numeric_limits<int64_t>::max();
        check(ne >= 1 && ne <= limit, Status::format, "%s: %s: dimension %u is %llu, want 1 to %llu", in.path(),
              in.subject(), d, shown(ne), shown(limit));
        check(elements <= limit / ne, Status::format, "%s: %s: the product of its dimensions exceeds %llu", in.path(),
              in.subject(), shown(limit));
        elements *= ne;
        tensor.ne[d] = static_cast<int64_t>(ne);
    }
}

void read_tensor_type(Cursor & in, GgufTensorInfo & tensor) {
    const uint32_t id = in.number<uint32_t>("tensor type");
    // The range is tested before ggml is asked: it indexes its tables with the number as it is.
    const bool known = id < static_cast<uint32_t>(GGML_TYPE_COUNT) && ggml_blck_size(static_cast<ggml_type>(id)) > 0 &&
                       ggml_type_size(static_cast<ggml_type>(id)) > 0;
    check(known, Status::unsupported, "%s: %s has type number %u, which this ggml does not have or no longer has",
          in.path(), in.subject(), id);
    tensor.type = static_cast<ggml_type>(id);
    const int64_t block = ggml_blck_size(tensor.type);
    check(tensor.ne[0] % block == 0, Status::format, "%s: %s: rows of %lld elements, want a multiple of %lld for %s",
          in.path(), in.subject(), static_cast<long long>(tensor.ne[0]), static_cast<long long>(block),
          ggml_type_name(tensor.type));
    uint64_t blocks = static_cast<uint64_t>(tensor.ne[0] / block);
    for (int d = 1; d < 4; ++d) {
        blocks *= static_cast<uint64_t>(tensor.ne[d]); // cannot overflow: the element count did not
    }
    const uint64_t block_bytes = ggml_type_size(tensor.type);
    check(blocks <= std::numeric_limits<uint64_t>::max() / block_bytes, Status::format,
          "%s: %s: %llu blocks of %llu bytes overflow 64 bits", in.path(), in.subject(), shown(blocks),
          shown(block_bytes));
    tensor.nbytes = blocks * block_bytes;
}

std::vector<GgufTensorInfo> read_tensors(Cursor & in, uint64_t n_tensors, uint64_t alignment) {
    std::vector<GgufTensorInfo> tensors;
    tensors.reserve(static_cast<size_t>(n_tensors));
    for (uint64_t i = 0; i < n_tensors; ++i) {
        in.set_subject(format("tensor %llu of %llu", shown(i + 1), shown(n_tensors)));
        const std::string_view name = in.text("tensor name", GgufFile::max_tensor_name_bytes);
        check_name(in, name, "tensor name");
        in.set_subject("tensor " + quoted(name));
        GgufTensorInfo tensor;
        tensor.name = std::string(name);
        read_shape(in, tensor);
        read_tensor_type(in, tensor);
        tensor.offset = in.number<uint64_t>("data offset");
        check(tensor.offset % alignment == 0, Status::format, "%s: %s: data offset %llu, want a multiple of %llu",
              in.path(), in.subject(), shown(tensor.offset), shown(alignment));
        tensors.push_back(std::move(tensor));
    }
    return tensors;
}

/// Turns offsets that count from the data section into offsets and pointers within the file.
void place_tensors(const std::shared_ptr<const MappedFile> & file, uint64_t data_start,
                   std::vector<GgufTensorInfo> & tensors) {
    const char * path = file->path().c_str();
    for (GgufTensorInfo & tensor : tensors) {
        const bool fits = data_start <= file->size() && tensor.offset <= file->size() - data_start &&
                          tensor.nbytes <= file->size() - data_start - tensor.offset;
        check(fits, Status::format,
              "%s: tensor %s: %llu bytes at offset %llu of the data section, which starts at byte %llu, do not fit the "
              "file of %llu bytes",
              path, quoted(tensor.name).c_str(), shown(tensor.nbytes), shown(tensor.offset), shown(data_start),
              shown(file->size()));
        tensor.offset += data_start;
        tensor.data = file->data() + tensor.offset;
        tensor.file = file;
    }
    std::vector<uint32_t> order(tensors.size());
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<uint32_t>(i);
    }
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return tensors[a].offset < tensors[b].offset; });
    for (size_t i = 1; i < order.size(); ++i) {
        const GgufTensorInfo & before = tensors[order[i - 1]];
        const GgufTensorInfo & after = tensors[order[i]];
        check(before.offset + before.nbytes <= after.offset, Status::format,
              "%s: tensors %s and %s overlap: the first ends at byte %llu, the second starts at byte %llu", path,
              quoted(before.name).c_str(), quoted(after.name).c_str(), shown(before.offset + before.nbytes),
              shown(after.offset));
    }
}

} // namespace

const char * gguf_type_name(GgufType type) noexcept {
    static const char * const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                         "bool", "string", "array", "u64", "i64", "f64"};
    const uint32_t id = static_cast<uint32_t>(type);
    return id <= static_cast<uint32_t>(GgufType::f64) ? names[id] : "unknown";
}

uint64_t gguf_element_bytes(GgufType type) noexcept {
    switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean:
        return 1;
    case GgufType::u16:
    case GgufType::i16:
        return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32:
        return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64:
        return 8;
    case GgufType::string:
    case GgufType::array:
        break;
    }
    return 0;
}

GgufPart read_gguf_part(const std::shared_ptr<const MappedFile> & file) {
    Cursor in(*file);
    const Header header = read_header(in);
    GgufPart part;
    part.version = header.version;
    part.values = read_values(in, file->data(), header.n_keys);
    const uint64_t alignment = find_alignment(in, part.values);
    part.tensors = read_tensors(in, header.n_tensors, alignment);
    const uint64_t data_start = (in.position() + alignment - 1) / alignment * alignment;
    place_tensors(file, data_start, part.tensors);
    return part;
}

} // namespace dflash
