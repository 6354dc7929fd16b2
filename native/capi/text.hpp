#pragma once

#include <cstring>
#include <string>

#include "base/error.hpp"

namespace dflash::capi {

/// Copies text into a fixed field of a C struct, cut to fit, with its terminating NUL.
template <size_t N> void copy_text(char (&field)[N], const std::string & text) {
    const size_t n = text.size() < N ? text.size() : N - 1;
    std::memcpy(field, text.data(), n);
    field[n] = '\0';
}

/// Copies up to capacity values to `to` and sets *n to how many there are. `to` may be null when capacity is 0.
template <class T, class List> void copy_list(const List & list, T * to, int64_t capacity, int64_t * n) {
    check(capacity >= 0 && (to != nullptr || capacity == 0), Status::invalid, "capacity %lld of a NULL array",
          static_cast<long long>(capacity));
    check(n != nullptr, Status::invalid, "n is NULL");
    *n = static_cast<int64_t>(list.size());
    for (int64_t i = 0; i < capacity && i < *n; ++i) {
        to[i] = static_cast<T>(list[static_cast<size_t>(i)]);
    }
}

inline std::string text_or(const char * text, const char * fallback) {
    return text != nullptr ? text : fallback;
}

} // namespace dflash::capi
