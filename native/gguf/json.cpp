#include "gguf/json.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <locale>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "gguf/quoted.hpp"
#include "gguf/utf8.hpp"

namespace dflash {

class JsonParser {
  public:
    JsonParser(std::string_view text, const char * what) : text_(text), what_(what) {}

    Json document() {
        Json value = parse_value(0);
        skip_space();
        if (at_ < text_.size()) {
            refuse("nothing after the value");
        }
        return value;
    }

  private:
    [[noreturn]] void refuse(const char * wanted) const {
        const std::string found = at_ < text_.size() ? quoted(text_.substr(at_, 1)) : "the end of the text";
        fail(Status::format, "%s: JSON at byte %zu: found %s, want %s", what_, at_, found.c_str(), wanted);
    }

    bool next_is(char c) const { return at_ < text_.size() && text_[at_] == c; }

    void skip_space() {
        while (next_is(' ') || next_is('\t') || next_is('\n') || next_is('\r')) {
            ++at_;
        }
    }

    void expect(char c, const char * wanted) {
        if (!next_is(c)) {
            refuse(wanted);
        }
        ++at_;
    }

    Json parse_value(int depth) {
        check(++n_values_ <= Json::max_values, Status::format, "%s: JSON at byte %zu: more than %zu values", what_, at_,
              Json::max_values);
        skip_space();
        Json value;
        if (next_is('{')) {
            value.value_ = parse_object(depth + 1);
        } else if (next_is('[')) {
            value.value_ = parse_array(depth + 1);
        } else if (next_is('"')) {
            value.value_ = parse_string();
        } else if (take_word("true")) {
            value.value_ = true;
        } else if (take_word("false")) {
            value.value_ = false;
        } else if (!take_word("null")) {
            value.value_ = parse_number();
        }
        return value;
    }

    bool take_word(std::string_view word) {
        if (text_.substr(at_, word.size()) != word) {
            return false;
        }
        at_ += word.size();
        return true;
    }

    void check_depth(int depth) const {
        check(depth <= Json::max_depth, Status::format, "%s: JSON at byte %zu: nested deeper than %d", what_, at_,
              Json::max_depth);
    }

    Json::Array parse_array(int depth) {
        check_depth(depth);
        ++at_;
        Json::Array items;
        skip_space();
        if (next_is(']')) {
            ++at_;
            return items;
        }
        while (true) {
            items.push_back(parse_value(depth));
            skip_space();
            if (next_is(']')) {
                ++at_;
                return items;
            }
            expect(',', "\",\" or \"]\"");
        }
    }

    Json::Object parse_object(int depth) {
        check_depth(depth);
        ++at_;
        Json::Object members;
        skip_space();
        if (next_is('}')) {
            ++at_;
            return members;
        }
        while (true) {
            skip_space();
            if (!next_is('"')) {
                refuse("a key in double quotes");
            }
            std::string key = parse_string();
            skip_space();
            expect(':', "\":\"");
            members.push_back({std::move(key), parse_value(depth)});
            skip_space();
            if (next_is('}')) {
                ++at_;
                check_keys_differ(members);
                return members;
            }
            expect(',', "\",\" or \"}\"");
        }
    }

    // Sorting, not hashing: keys chosen to collide must not cost quadratic time.
    void check_keys_differ(const Json::Object & members) const {
        std::vector<uint32_t> order(members.size());
        std::iota(order.begin(), order.end(), 0u);
        std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return members[a].key < members[b].key; });
        for (size_t i = 1; i < order.size(); ++i) {
            const std::string & key = members[order[i]].key;
            check(key != members[order[i - 1]].key, Status::format,
                  "%s: JSON object that ends at byte %zu: key %s occurs twice", what_, at_, quoted(key).c_str());
        }
    }

    std::string parse_string() {
        const size_t start = ++at_;
        std::string out;
        while (true) {
            const size_t run = at_;
            while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
                   static_cast<unsigned char>(text_[at_]) >= 0x20) {
                ++at_;
            }
            out.append(text_.substr(run, at_ - run));
            if (next_is('"')) {
                break;
            }
            if (!next_is('\\')) {
                refuse("a character of a string or its closing quote");
            }
            parse_escape(out);
        }
        // Escapes are ASCII and cannot repair a broken sequence around them.
        const size_t valid = utf8_valid_bytes(text_.substr(start, at_ - start));
        check(valid == at_ - start, Status::format, "%s: JSON at byte %zu: not UTF-8", what_, start + valid);
        ++at_;
        return out;
    }

    void parse_escape(std::string & out) {
        static constexpr std::string_view letters = "\"\\/bfnrt";
        static constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
        ++at_;
        if (next_is('u')) {
            ++at_;
            append_code_point(out);
            return;
        }
        const size_t which = at_ < text_.size() ? letters.find(text_[at_]) : std::string_view::npos;
        if (which == std::string_view::npos) {
            refuse("one of \" \\ / b f n r t u after a backslash");
        }
        out += meanings[which];
        ++at_;
    }

    uint32_t parse_hex4() {
        uint32_t unit = 0;
        for (int i = 0; i < 4; ++i, ++at_) {
            const char c = at_ < text_.size() ? text_[at_] : '\0';
            const uint32_t digit = c >= '0' && c <= '9'   ? static_cast<uint32_t>(c - '0')
                                   : c >= 'a' && c <= 'f' ? static_cast<uint32_t>(c - 'a') + 10
                                   : c >= 'A' && c <= 'F' ? static_cast<uint32_t>(c - 'A') + 10
                                                          : 16;
            if (digit == 16) {
                refuse("four hexadecimal digits after \\u");
            }
            unit = unit * 16 + digit;
        }
        return unit;
    }

    void append_code_point(std::string & out) {
        uint32_t code = parse_hex4();
        if (code >= 0xd800 && code <= 0xdfff) {
            uint32_t low = 0;
            if (code <= 0xdbff && take_word("\\u")) {
                low = parse_hex4();
            }
            if (low < 0xdc00 || low > 0xdfff) {
                refuse("a pair of \\u surrogates");
            }
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        const auto put = [&](uint32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
        if (code < 0x80) {
            put(code);
        } else if (code < 0x800) {
            put(0xc0 | code >> 6);
            put(0x80 | (code & 0x3f));
        } else if (code < 0x10000) {
            put(0xe0 | code >> 12);
            put(0x80 | (code >> 6 & 0x3f));
            put(0x80 | (code & 0x3f));
        } else {
            put(0xf0 | code >> 18);
            put(0x80 | (code >> 12 & 0x3f));
            put(0x80 | (code >> 6 & 0x3f));
            put(0x80 | (code & 0x3f));
        }
    }

    size_t skip_digits() {
        const size_t start = at_;
        while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
            ++at_;
        }
        return at_ - start;
    }

    Json::Number parse_number() {
        const size_t start = at_;
        if (next_is('-')) {
            ++at_;
        }
        const bool zero_first = next_is('0');
        const size_t digits = skip_digits();
        if (digits == 0) {
            refuse(at_ == start ? "a value" : "a digit");
        }
        if (zero_first && digits > 1) {
            at_ = start;
            refuse("a number without leading zeros");
        }
        Json::Number number;
        number.integral = true;
        if (next_is('.')) {
            ++at_;
            number.integral = false;
            if (skip_digits() == 0) {
                refuse("a digit");
            }
        }
        if (next_is('e') || next_is('E')) {
            ++at_;
            number.integral = false;
            if (next_is('+') || next_is('-')) {
                ++at_;
            }
            if (skip_digits() == 0) {
                refuse("a digit");
            }
        }
        check(at_ - start <= max_number_bytes, Status::format,
              "%s: JSON at byte %zu: a number of %zu characters, want at most %zu", what_, start, at_ - start,
              max_number_bytes);
        const std::string_view token = text_.substr(start, at_ - start);
        if (number.integral) {
            const auto parsed = std::from_chars(token.data(), token.data() + token.size(), number.integer);
            number.integral = parsed.ec == std::errc();
            number.real = static_cast<double>(number.integer);
        }
        if (!number.integral) {
            // A stream, since strtod reads the decimal point of the process's locale and not every standard library
            // has from_chars for floating point.
            std::istringstream in{std::string(token)};
            in.imbue(std::locale::classic());
            in >> number.real;
            check(!in.fail() && std::isfinite(number.real), Status::format,
                  "%s: JSON at byte %zu: number %s does not fit a double", what_, start, quoted(token).c_str());
        }
        return number;
    }

    static constexpr size_t max_number_bytes = 1024;

    std::string_view text_;
    const char * what_;
    size_t at_ = 0;
    size_t n_values_ = 0;
};

Json Json::parse(std::string_view text, const char * what, uint64_t max_bytes) {
    check(text.size() <= max_bytes, Status::format, "%s: %zu bytes of JSON, want at most %llu", what, text.size(),
          static_cast<unsigned long long>(max_bytes));
    return JsonParser(text, what).document();
}

const char * Json::kind() const noexcept {
    if (is_int()) {
        return "integer";
    }
    static const char * const kinds[] = {"null", "bool", "number", "string", "array", "object"};
    return kinds[value_.index()];
}

const Json * Json::find(std::string_view key) const noexcept {
    if (const Object * object = std::get_if<Object>(&value_)) {
        for (const Member & member : *object) {
            if (member.key == key) {
                return &member.value;
            }
        }
    }
    return nullptr;
}

void Json::refuse_kind(const char * what, const char * wanted) const {
    fail(Status::format, "%s: found %s, want %s", what, kind(), wanted);
}

bool Json::as_bool(const char * what) const {
    if (!is_bool()) {
        refuse_kind(what, "bool");
    }
    return std::get<bool>(value_);
}

int64_t Json::as_int(const char * what, int64_t min, int64_t max) const {
    if (!is_int()) {
        refuse_kind(what, "an integer of 64 signed bits");
    }
    const int64_t found = std::get<Number>(value_).integer;
    check(found >= min && found <= max, Status::format, "%s: found %lld, want %lld to %lld", what,
          static_cast<long long>(found), static_cast<long long>(min), static_cast<long long>(max));
    return found;
}

double Json::as_double(const char * what, double min, double max) const {
    if (!is_number()) {
        refuse_kind(what, "a number");
    }
    const double found = std::get<Number>(value_).real;
    check(found >= min && found <= max, Status::format, "%s: found %g, want %g to %g", what, found, min, max);
    return found;
}

const std::string & Json::as_string(const char * what) const {
    if (!is_string()) {
        refuse_kind(what, "a string");
    }
    return std::get<std::string>(value_);
}

const Json::Array & Json::items(const char * what) const {
    if (!is_array()) {
        refuse_kind(what, "an array");
    }
    return std::get<Array>(value_);
}

const Json::Object & Json::members(const char * what) const {
    if (!is_object()) {
        refuse_kind(what, "an object");
    }
    return std::get<Object>(value_);
}

} // namespace dflash
