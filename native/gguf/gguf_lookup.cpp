#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/gguf_part.hpp"
#include "gguf/quoted.hpp"

// The typed look-ups of GgufFile.
namespace dflash {
namespace {

std::string described(const GgufValue & value) {
    if (value.type != GgufType::array) {
        return gguf_type_name(value.type);
    }
    return format("array of %llu %s", static_cast<unsigned long long>(value.count), gguf_type_name(value.element_type));
}

bool is_integer(GgufType type) {
    switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::u16:
    case GgufType::i16:
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::u64:
    case GgufType::i64:
        return true;
    default:
        return false;
    }
}

bool is_float(GgufType type) {
    return type == GgufType::f32 || type == GgufType::f64;
}

template <typename T> T load(const GgufValue & value, uint64_t i) {
    T element;
    std::memcpy(&element, value.payload + i * sizeof(T), sizeof(T));
    return element;
}

} // namespace

void GgufFile::refuse_type(const GgufValue & value, const char * wanted) const {
    fail(Status::format, "%s: key %s has type %s, want %s", path().c_str(), quoted(value.key).c_str(),
         described(value).c_str(), wanted);
}

const GgufValue & GgufFile::require(std::string_view key, const char * wanted) const {
    const GgufValue * value = find(key);
    check(value != nullptr, Status::format, "%s: key %s is missing, want %s", path().c_str(), quoted(key).c_str(),
          wanted);
    return *value;
}

void GgufFile::check_count(const GgufValue & value, uint64_t max_count) const {
    check(value.count <= max_count, Status::format, "%s: key %s has %llu elements, want at most %llu", path().c_str(),
          quoted(value.key).c_str(), static_cast<unsigned long long>(value.count),
          static_cast<unsigned long long>(max_count));
}

void GgufFile::check_index(const GgufValue & value, uint64_t i) const {
    check(i < value.count, Status::invalid, "%s: key %s: index %llu, want below %llu", path().c_str(),
          quoted(value.key).c_str(), static_cast<unsigned long long>(i), static_cast<unsigned long long>(value.count));
}

std::string GgufFile::architecture() const {
    return require_string("general.architecture");
}

int64_t GgufFile::require_int(std::string_view key, int64_t min, int64_t max) const {
    const GgufValue & value = require(key, "an integer");
    if (!is_integer(value.type)) {
        refuse_type(value, "an integer");
    }
    const int64_t found = int_at(value, 0);
    check(found >= min && found <= max, Status::format, "%s: key %s is %lld, want %lld to %lld", path().c_str(),
          quoted(key).c_str(), static_cast<long long>(found), static_cast<long long>(min), static_cast<long long>(max));
    return found;
}

int64_t GgufFile::int_or(std::string_view key, int64_t fallback, int64_t min, int64_t max) const {
    return find(key) == nullptr ? fallback : require_int(key, min, max);
}

double GgufFile::require_float(std::string_view key, double min, double max) const {
    const GgufValue & value = require(key, "a floating-point number");
    if (!is_float(value.type)) {
        refuse_type(value, "a floating-point number");
    }
    const double found = number_at(value, 0);
    check(std::isfinite(found) && found >= min && found <= max, Status::format, "%s: key %s is %g, want %g to %g",
          path().c_str(), quoted(key).c_str(), found, min, max);
    return found;
}

double GgufFile::float_or(std::string_view key, double fallback, double min, double max) const {
    return find(key) == nullptr ? fallback : require_float(key, min, max);
}

bool GgufFile::bool_or(std::string_view key, bool fallback) const {
    const GgufValue * value = find(key);
    if (value == nullptr) {
        return fallback;
    }
    if (value->type != GgufType::boolean) {
        refuse_type(*value, "bool");
    }
    return load<uint8_t>(*value, 0) != 0;
}

std::string GgufFile::require_string(std::string_view key) const {
    const GgufValue & value = require(key, "a string");
    if (value.type != GgufType::string) {
        refuse_type(value, "a string");
    }
    return std::string(string_at(value, 0));
}

std::string GgufFile::string_or(std::string_view key, std::string fallback) const {
    return find(key) == nullptr ? std::move(fallback) : require_string(key);
}

std::vector<int64_t> GgufFile::ints_or(std::string_view key, std::vector<int64_t> fallback, uint64_t max_count) const {
    const GgufValue * value = find(key);
    if (value == nullptr) {
        return fallback;
    }
    if (!is_integer(value->element_type)) {
        refuse_type(*value, "an array of integers");
    }
    check_count(*value, max_count);
    std::vector<int64_t> out(static_cast<size_t>(value->count));
    for (size_t i = 0; i < out.size(); ++i) {
        out[i] = int_at(*value, i);
    }
    return out;
}

std::vector<bool> GgufFile::bools_or(std::string_view key, std::vector<bool> fallback, uint64_t max_count) const {
    const GgufValue * value = find(key);
    if (value == nullptr) {
        return fallback;
    }
    const bool is_bool = value->element_type == GgufType::boolean;
    if (value->type != GgufType::array || (!is_bool && !is_integer(value->element_type))) {
        refuse_type(*value, "an array of bool");
    }
    check_count(*value, max_count);
    std::vector<bool> out(static_cast<size_t>(value->count));
    for (size_t i = 0; i < out.size(); ++i) {
        const int64_t found = is_bool ? load<uint8_t>(*value, i) : int_at(*value, i);
        check(found == 0 || found == 1, Status::format, "%s: key %s holds %lld at index %zu, want 0 or 1",
              path().c_str(), quoted(key).c_str(), static_cast<long long>(found), i);
        out[i] = found == 1;
    }
    return out;
}

std::vector<double> GgufFile::floats_or(std::string_view key, std::vector<double> fallback, uint64_t max_count) const {
    const GgufValue * value = find(key);
    if (value == nullptr) {
        return fallback;
    }
    if (!is_float(value->element_type)) {
        refuse_type(*value, "an array of floating-point numbers");
    }
    check_count(*value, max_count);
    std::vector<double> out(static_cast<size_t>(value->count));
    for (size_t i = 0; i < out.size(); ++i) {
        out[i] = number_at(*value, i);
        check(std::isfinite(out[i]), Status::format, "%s: key %s holds %g at index %zu, want a finite number",
              path().c_str(), quoted(key).c_str(), out[i], i);
    }
    return out;
}

std::string_view GgufFile::string_at(const GgufValue & value, uint64_t i) const {
    if (value.element_type != GgufType::string) {
        refuse_type(value, "strings");
    }
    check_index(value, i);
    const uint8_t * at = value.payload;
    uint64_t to_skip = 0;
    if (value.type == GgufType::array) {
        at += value.string_marks[static_cast<size_t>(i / GgufValue::strings_per_mark)];
        to_skip = i % GgufValue::strings_per_mark;
    }
    uint64_t length = 0;
    std::memcpy(&length, at, sizeof(length));
    for (; to_skip > 0; --to_skip) {
        at += sizeof(length) + length;
        std::memcpy(&length, at, sizeof(length));
    }
    return {reinterpret_cast<const char *>(at + sizeof(length)), static_cast<size_t>(length)};
}

int64_t GgufFile::int_at(const GgufValue & value, uint64_t i) const {
    check_index(value, i);
    switch (value.element_type) {
    case GgufType::u8:
        return load<uint8_t>(value, i);
    case GgufType::i8:
        return load<int8_t>(value, i);
    case GgufType::u16:
        return load<uint16_t>(value, i);
    case GgufType::i16:
        return load<int16_t>(value, i);
    case GgufType::u32:
        return load<uint32_t>(value, i);
    case GgufType::i32:
        return load<int32_t>(value, i);
    case GgufType::i64:
        return load<int64_t>(value, i);
    case GgufType::u64: {
        const uint64_t found = load<uint64_t>(value, i);
        check(found <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), Status::format,
              "%s: key %s holds %llu, want at most %lld", path().c_str(), quoted(value.key).c_str(),
              static_cast<unsigned long long>(found), static_cast<long long>(std::numeric_limits<int64_t>::max()));
        return static_cast<int64_t>(found);
    }
    default:
        refuse_type(value, "integers");
    }
}

double GgufFile::number_at(const GgufValue & value, uint64_t i) const {
    check_index(value, i);
    switch (value.element_type) {
    case GgufType::f32:
        return static_cast<double>(load<float>(value, i));
    case GgufType::f64:
        return load<double>(value, i);
    case GgufType::boolean:
        return load<uint8_t>(value, i);
    case GgufType::u64:
        return static_cast<double>(load<uint64_t>(value, i));
    case GgufType::string:
    case GgufType::array:
        refuse_type(value, "numbers");
    default:
        return static_cast<double>(int_at(value, i));
    }
}

} // namespace dflash
