#pragma once

#include <string>
#include <string_view>

namespace dflash {

/// Text out of a file, made fit for one line of a message: in double quotes, every byte outside printable ASCII
/// (and the quote and backslash) as \xNN, cut after 96 bytes. Any thread.
inline std::string quoted(std::string_view text) {
    constexpr size_t shown_bytes = 96;
    static const char digits[] = "0123456789abcdef";
    std::string out = "\"";
    for (const char c : text.substr(0, shown_bytes)) {
        const unsigned byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7f && c != '"' && c != '\\') {
            out += c;
        } else {
            out += "\\x";
            out += digits[byte >> 4];
            out += digits[byte & 15];
        }
    }
    out += '"';
    if (text.size() > shown_bytes) {
        out += "... (" + std::to_string(text.size()) + " bytes)";
    }
    return out;
}

} // namespace dflash
