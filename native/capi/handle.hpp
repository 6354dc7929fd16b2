#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "base/error.hpp"

// Opaque handles of the C interface. A pointer that comes from a caller is looked up in a table of open handles and
// never dereferenced before that, so a closed, foreign or inherited (fork) handle is an error and not a crash.
namespace dflash::capi {

/// Base of every opaque struct of dflash.h. A derived struct names itself for messages:
/// `struct dflash_engine : dflash::capi::Handle { static constexpr const char * noun = "engine"; ... };`
class Handle {
  public:
    Handle() = default;
    Handle(const Handle &) = delete;
    Handle & operator=(const Handle &) = delete;
    virtual ~Handle() = default;

  private:
    template <class T> friend class Use;
    std::atomic<bool> busy_{false};
};

/// Enters a handle in the table of this process under the address that callers hold. Any thread.
void publish_handle(const void * address, std::shared_ptr<Handle> handle);

/// The open handle at this address, or null. Any thread.
std::shared_ptr<Handle> find_handle(const void * address) noexcept;

/// Takes a handle out of the table. The object dies when the last call that uses it returns. Any thread.
std::shared_ptr<Handle> retire_handle(const void * address) noexcept;

/// Opens a new handle and writes its address to *out.
template <class T> void publish(T ** out, std::shared_ptr<T> handle) {
    T * const raw = handle.get();
    publish_handle(raw, std::move(handle));
    *out = raw;
}

/// Shares an open handle of type T; for functions marked "any thread".
/// Throws Status::invalid for NULL, a closed handle, one of another type, or one made before a fork.
template <class T> std::shared_ptr<T> borrow(const T * raw) {
    check(raw != nullptr, Status::invalid, "%s handle is NULL", T::noun);
    const std::shared_ptr<Handle> found = find_handle(raw);
    check(found != nullptr, Status::invalid, "%s handle is closed, or was not made by this process", T::noun);
    std::shared_ptr<T> typed = std::dynamic_pointer_cast<T>(found);
    check(typed != nullptr, Status::invalid, "handle is not of type %s", T::noun);
    return typed;
}

/// Exclusive use of an open handle for the length of one call; for "one thread at a time per handle".
/// Throws as borrow(), and Status::busy while another call, also one further up on this thread, is inside.
template <class T> class Use {
  public:
    explicit Use(const T * raw) : Use(borrow(raw)) {}
    /// The same for an object that another handle keeps alive, whether its own handle is still open or not.
    explicit Use(std::shared_ptr<T> handle) : handle_(std::move(handle)) {
        check(!busy().exchange(true, std::memory_order_acquire), Status::busy, "%s is in use by another call", T::noun);
    }
    Use(const Use &) = delete;
    Use & operator=(const Use &) = delete;
    ~Use() { busy().store(false, std::memory_order_release); }

    T * operator->() const noexcept { return handle_.get(); }
    T & operator*() const noexcept { return *handle_; }
    /// For children that keep their parent alive.
    const std::shared_ptr<T> & shared() const noexcept { return handle_; }

  private:
    std::atomic<bool> & busy() const noexcept { return static_cast<Handle &>(*handle_).busy_; }

    std::shared_ptr<T> handle_;
};

/// Body of a `..._free` function: NULL and handles that are not open are ignored.
template <class T> void release(T * raw) noexcept {
    if (raw != nullptr && std::dynamic_pointer_cast<T>(find_handle(raw)) != nullptr) {
        retire_handle(raw);
    }
}

} // namespace dflash::capi
