#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

// Errors below the C boundary are exceptions of one type. The numeric values are those of
// dflash_status in capi/dflash.h and never change.
namespace dflash {

enum class Status : int32_t {
    ok = 0,
    invalid = -1,
    out_of_memory = -2,
    cancelled = -3,
    not_found = -4,
    format = -5,
    unsupported = -6,
    mismatch = -7,
    capacity = -8,
    busy = -9,
    poisoned = -10,
    device = -11,
    internal = -99,
};

class Error : public std::exception {
  public:
    Error(Status status, std::string message) : status_(status), message_(std::move(message)) {}

    Status status() const noexcept { return status_; }
    const char * what() const noexcept override { return message_.c_str(); }

  private:
    Status status_;
    std::string message_;
};

#if defined(__GNUC__) || defined(__clang__)
#define DFLASH_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define DFLASH_PRINTF(fmt, args)
#endif

/// printf into a string of any length.
inline std::string vformat(const char * fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    const int n = std::vsnprintf(nullptr, 0, fmt, args);
    std::string text(n > 0 ? static_cast<size_t>(n) : 0, '\0');
    if (n > 0) {
        std::vsnprintf(&text[0], text.size() + 1, fmt, again);
    }
    va_end(again);
    return text;
}

DFLASH_PRINTF(1, 2) inline std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    return text;
}

DFLASH_PRINTF(2, 3) [[noreturn]] inline void fail(Status status, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    throw Error(status, std::move(text));
}

/// Throws Error{status, message} unless ok. The message names the value and the limit.
DFLASH_PRINTF(3, 4) inline void check(bool ok, Status status, const char * fmt, ...) {
    if (ok) {
        return;
    }
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    throw Error(status, std::move(text));
}

} // namespace dflash
