#include "base/log.hpp"

#include <deque>
#include <mutex>
#include <utility>

namespace dflash {
namespace {

constexpr size_t max_waiting = 1024;

struct Queue {
    std::mutex mutex;
    std::deque<LogLine> lines;
    uint64_t dropped = 0;
};

Queue & queue() {
    static Queue * const instance = new Queue; // never destroyed: device threads may log during exit
    return *instance;
}

} // namespace

void log_line(LogLevel level, std::string text) noexcept {
    try {
        Queue & q = queue();
        std::lock_guard<std::mutex> lock(q.mutex);
        if (q.lines.size() >= max_waiting) {
            q.lines.pop_front();
            ++q.dropped;
        }
        q.lines.push_back({level, std::move(text)});
    } catch (...) {
        // A log line that cannot be stored is lost; logging never fails its caller.
    }
}

bool log_take(LogLine & out) noexcept {
    try {
        Queue & q = queue();
        std::lock_guard<std::mutex> lock(q.mutex);
        if (q.dropped > 0) {
            out = {LogLevel::warning,
                   format("%llu log lines were dropped", static_cast<unsigned long long>(q.dropped))};
            q.dropped = 0;
            return true;
        }
        if (q.lines.empty()) {
            return false;
        }
        out = std::move(q.lines.front());
        q.lines.pop_front();
        return true;
    } catch (...) {
        return false;
    }
}

} // namespace dflash
