#include "capi/handle.hpp"

#include <mutex>
#include <unordered_map>

#if defined(_WIN32)
#include <process.h>
#define DFLASH_GETPID _getpid
#else
#include <unistd.h>
#define DFLASH_GETPID getpid
#endif

namespace dflash::capi {
namespace {

struct Table {
    explicit Table(long owner) : pid(owner) {}

    const long pid;
    std::mutex mutex;
    std::unordered_map<const void *, std::shared_ptr<Handle>> open;
};

/// The table of this process. A child made by fork() starts with an empty one: the parent's handles belong to device
/// state and threads that the child does not have, and the parent's mutex may have been locked at the fork. Tables
/// are never destroyed, since handles may be freed while the process exits.
Table & table() {
    static std::atomic<Table *> current{nullptr};
    const long pid = static_cast<long>(DFLASH_GETPID());
    Table * known = current.load(std::memory_order_acquire);
    while (known == nullptr || known->pid != pid) {
        Table * const fresh = new Table(pid);
        if (current.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) {
            return *fresh;
        }
        delete fresh;
    }
    return *known;
}

} // namespace

void publish_handle(const void * address, std::shared_ptr<Handle> handle) {
    Table & t = table();
    std::lock_guard<std::mutex> lock(t.mutex);
    t.open.emplace(address, std::move(handle));
}

std::shared_ptr<Handle> find_handle(const void * address) noexcept {
    try {
        Table & t = table();
        std::lock_guard<std::mutex> lock(t.mutex);
        const auto found = t.open.find(address);
        return found == t.open.end() ? nullptr : found->second;
    } catch (...) {
        return nullptr; // only a fresh table allocates, and a fresh table holds no handle
    }
}

std::shared_ptr<Handle> retire_handle(const void * address) noexcept {
    std::shared_ptr<Handle> taken; // released by the caller, outside the lock
    try {
        Table & t = table();
        std::lock_guard<std::mutex> lock(t.mutex);
        const auto found = t.open.find(address);
        if (found != t.open.end()) {
            taken = std::move(found->second);
            t.open.erase(found);
        }
    } catch (...) {
        return nullptr;
    }
    return taken;
}

} // namespace dflash::capi
