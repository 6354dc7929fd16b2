#include "ggmlx/hooks.hpp"

#include <mutex>
#include <string>

#include "base/log.hpp"
#include "ggml.h"

namespace dflash {
namespace {

void on_abort(const char * message) {
    log_line(LogLevel::error, message);
}

void on_log(enum ggml_log_level level, const char * text, void * /*user*/) {
    static thread_local std::string line;
    static thread_local LogLevel line_level = LogLevel::info;
    switch (level) {
    case GGML_LOG_LEVEL_CONT:
        break;
    case GGML_LOG_LEVEL_ERROR:
        line_level = LogLevel::error;
        break;
    case GGML_LOG_LEVEL_WARN:
        line_level = LogLevel::warning;
        break;
    case GGML_LOG_LEVEL_INFO:
        line_level = LogLevel::info;
        break;
    default:
        line_level = LogLevel::debug;
        break;
    }
    line += text;
    size_t at = 0;
    while ((at = line.find('\n')) != std::string::npos) {
        if (at > 0) {
            log_line(line_level, line.substr(0, at));
        }
        line.erase(0, at + 1);
    }
}

} // namespace

void install_hooks() {
    static std::once_flag once;
    std::call_once(once, [] {
        ggml_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
    });
}

} // namespace dflash
