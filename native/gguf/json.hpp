#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace dflash {

/// One JSON value (RFC 8259, strict: no comments, no trailing commas, UTF-8 only, a key at most once per object).
/// For small files from strangers: safetensors headers and config.json. Immutable once parsed: any thread may read.
class Json {
  public:
    struct Member;
    using Array = std::vector<Json>;
    using Object = std::vector<Member>; // in file order

    static constexpr int max_depth = 64;
    static constexpr size_t max_values = 500000; // bounds the memory of a document to some ten megabytes
    static constexpr uint64_t default_max_bytes = 16u << 20;

    /// Parses a whole text. `what` names it in messages. Throws Status::format with the byte where it is wrong; also
    /// for more than max_bytes of text, max_depth nested containers, max_values values or 1,024 characters in a
    /// number, and for numbers that do not fit a double.
    static Json parse(std::string_view text, const char * what, uint64_t max_bytes = default_max_bytes);

    Json() = default; // null

    bool is_null() const noexcept { return std::holds_alternative<std::monostate>(value_); }
    bool is_bool() const noexcept { return std::holds_alternative<bool>(value_); }
    bool is_number() const noexcept { return std::holds_alternative<Number>(value_); }
    /// A number written without fraction and exponent that fits 64 signed bits.
    bool is_int() const noexcept { return is_number() && std::get<Number>(value_).integral; }
    bool is_string() const noexcept { return std::holds_alternative<std::string>(value_); }
    bool is_array() const noexcept { return std::holds_alternative<Array>(value_); }
    bool is_object() const noexcept { return std::holds_alternative<Object>(value_); }

    /// "null", "bool", "integer", "number", "string", "array" or "object".
    const char * kind() const noexcept;

    /// Member of an object; null pointer when absent or when this is no object. O(members).
    const Json * find(std::string_view key) const noexcept;

    /// The value as that kind; throw Status::format when it is of another one or outside [min, max]. `what` begins
    /// the message and should name file and key.
    bool as_bool(const char * what) const;
    int64_t as_int(const char * what, int64_t min, int64_t max) const;
    double as_double(const char * what, double min, double max) const; // integers too
    const std::string & as_string(const char * what) const;            // UTF-8; may hold zero bytes
    const Array & items(const char * what) const;
    const Object & members(const char * what) const;

  private:
    friend class JsonParser;

    struct Number {
        double real = 0.0;
        int64_t integer = 0;
        bool integral = false;
    };

    [[noreturn]] void refuse_kind(const char * what, const char * wanted) const;

    std::variant<std::monostate, bool, Number, std::string, Array, Object> value_;
};

struct Json::Member {
    std::string key;
    Json value;
};

} // namespace dflash
