#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dflash {

/// Index of the first byte that is not part of well-formed UTF-8 (Unicode 15, table 3-7: no overlong forms, no
/// surrogates, nothing above U+10FFFF), or text.size() when all of it is well formed. Any thread.
inline size_t utf8_valid_bytes(std::string_view text) {
    const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    size_t i = 0;
    while (i < text.size()) {
        const unsigned lead = at(i);
        if (lead < 0x80) {
            ++i;
            continue;
        }
        const size_t n = lead >= 0xc2 && lead <= 0xdf   ? 2
                         : (lead & 0xf0) == 0xe0        ? 3
                         : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                        : 0;
        if (n == 0 || text.size() - i < n) {
            return i;
        }
        const unsigned second_min = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        const unsigned second_max = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (at(i + 1) < second_min || at(i + 1) > second_max) {
            return i;
        }
        for (size_t k = 2; k < n; ++k) {
            if ((at(i + k) & 0xc0) != 0x80) {
                return i;
            }
        }
        i += n;
    }
    return i;
}

inline bool is_utf8(std::string_view text) {
    return utf8_valid_bytes(text) == text.size();
}

} // namespace dflash
