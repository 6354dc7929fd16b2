#include <cstring>
#include <mutex>
#include <string>

#include "base/log.hpp"
#include "capi/shim.hpp"

namespace {

/// The line at the front of the queue, kept here while callers ask how much room it needs.
struct Front {
    std::mutex mutex;
    dflash::LogLine line;
    bool waiting = false;
};

Front & front() {
    static Front * const instance = new Front; // never destroyed: lines may be taken while the process exits
    return *instance;
}

} // namespace

dflash_status dflash_log_take(int32_t * level, char * buffer, uint64_t size, uint64_t * needed) {
    using namespace dflash;
    // An empty queue is the usual answer and asked for after every call: it must not cost an exception.
    dflash_status status = DFLASH_STATUS_OK;
    const dflash_status failed = capi::guard(nullptr, [&] {
        if (level != nullptr) {
            *level = 0;
        }
        if (needed != nullptr) {
            *needed = 0;
        }
        check(buffer != nullptr || size == 0, Status::invalid, "buffer is NULL");
        Front & f = front();
        std::lock_guard<std::mutex> lock(f.mutex);
        f.waiting = f.waiting || log_take(f.line);
        if (!f.waiting) {
            status = DFLASH_STATUS_NOT_FOUND;
            return;
        }
        const uint64_t bytes = f.line.text.size() + 1;
        if (needed != nullptr) {
            *needed = bytes;
        }
        if (bytes > size) {
            status = DFLASH_STATUS_CAPACITY;
            return;
        }
        std::memcpy(buffer, f.line.text.c_str(), bytes);
        if (level != nullptr) {
            *level = static_cast<int32_t>(f.line.level);
        }
        f.waiting = false;
    });
    return failed != DFLASH_STATUS_OK ? failed : status;
}
