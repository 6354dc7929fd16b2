#pragma once

#include <cstdint>
#include <string>

#include "base/error.hpp"

// The one way text leaves native code: a bounded queue of lines that the caller drains.
namespace dflash {

enum class LogLevel : int32_t { debug = 0, info = 1, warning = 2, error = 3 };

struct LogLine {
    LogLevel level = LogLevel::info;
    std::string text;
};

/// Appends a line; any thread. When 1,024 lines wait, the oldest is dropped and counted.
void log_line(LogLevel level, std::string text) noexcept;

/// Takes the oldest waiting line. Returns false when there is none; any thread.
bool log_take(LogLine & out) noexcept;

DFLASH_PRINTF(2, 3) inline void log(LogLevel level, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    log_line(level, std::move(text));
}

} // namespace dflash
