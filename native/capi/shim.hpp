#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "capi/dflash.h"
#include "capi/handle.hpp"

// What every function of the C interface is made of: guard() around its body, and checks of what callers pass.
namespace dflash::capi {

static_assert(sizeof(dflash_error) == 1024 && offsetof(dflash_error, message) == 8, "layout of ABI version 1");
static_assert(static_cast<int32_t>(Status::invalid) == DFLASH_STATUS_INVALID, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::out_of_memory) == DFLASH_STATUS_OOM, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::cancelled) == DFLASH_STATUS_CANCELLED, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::not_found) == DFLASH_STATUS_NOT_FOUND, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::format) == DFLASH_STATUS_FORMAT, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::unsupported) == DFLASH_STATUS_UNSUPPORTED, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::mismatch) == DFLASH_STATUS_MISMATCH, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::capacity) == DFLASH_STATUS_CAPACITY, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::busy) == DFLASH_STATUS_BUSY, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::poisoned) == DFLASH_STATUS_POISONED, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::device) == DFLASH_STATUS_DEVICE, "same numbers on both sides");
static_assert(static_cast<int32_t>(Status::internal) == DFLASH_STATUS_INTERNAL, "same numbers on both sides");

/// Bytes of `text` (`length` of them) that fit into `limit` without cutting a UTF-8 character in two.
inline size_t utf8_prefix(const char * text, size_t length, size_t limit) noexcept {
    if (length <= limit) {
        return length;
    }
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80U) {
        --limit;
    }
    return limit;
}

/// Fills the caller's error as far as its struct_size allows and returns the status.
inline dflash_status fill_error(dflash_error * err, Status status, const char * message) noexcept {
    if (err != nullptr) {
        const size_t size =
            err->struct_size == 0 ? sizeof(dflash_error) : std::min<size_t>(err->struct_size, sizeof(dflash_error));
        if (size > offsetof(dflash_error, message)) {
            const size_t room = size - offsetof(dflash_error, message) - 1;
            const size_t length = utf8_prefix(message, std::strlen(message), room);
            err->status = static_cast<int32_t>(status);
            std::memcpy(err->message, message, length);
            err->message[length] = '\0';
        }
    }
    return static_cast<dflash_status>(status);
}

/// Runs the body of a C function. Nothing is thrown across it: an exception becomes a status and fills *err.
template <class Body> dflash_status guard(dflash_error * err, Body && body) noexcept {
    static_assert(std::is_void_v<decltype(body())>, "results go through output arguments");
    try {
        std::forward<Body>(body)();
        return DFLASH_STATUS_OK;
    } catch (const Error & error) {
        return fill_error(err, error.status(), error.what());
    } catch (const std::bad_alloc &) {
        return fill_error(err, Status::out_of_memory, "host memory could not be allocated");
    } catch (const std::exception & error) {
        return fill_error(err, Status::internal, error.what());
    } catch (...) {
        return fill_error(err, Status::internal, "an exception of an unknown type");
    }
}

/// The output argument `out`, cleared; `name` is its name in the header. Throws Status::invalid for NULL.
template <class T> T & output(T * out, const char * name) {
    check(out != nullptr, Status::invalid, "%s is NULL", name);
    *out = T{};
    return *out;
}

/// An input pointer that must not be NULL. Throws Status::invalid.
template <class T> T * required(T * value, const char * name) {
    check(value != nullptr, Status::invalid, "%s is NULL", name);
    return value;
}

/// Options as this library knows them, from a struct that a caller of another ABI version may have filled. T begins
/// with `uint32_t struct_size`; `defaults` fills what the caller's version does not have; `first_size` is the size of
/// the first released version. NULL gives the defaults. Throws Status::invalid for a size below first_size, and
/// Status::unsupported when fields that this library does not know are not zero.
template <class T> T read_options(const T * given, const T & defaults, size_t first_size, const char * name) {
    static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0, "a plain options struct");
    T options = defaults;
    if (given != nullptr) {
        const size_t size = given->struct_size;
        check(size >= first_size, Status::invalid, "%s.struct_size is %zu, want >= %zu", name, size, first_size);
        const unsigned char * const bytes = reinterpret_cast<const unsigned char *>(given);
        for (size_t i = sizeof(T); i < size; ++i) {
            check(bytes[i] == 0, Status::unsupported, "%s has a field at byte %zu that this version does not know",
                  name, i);
        }
        std::memcpy(&options, given, std::min(size, sizeof(T)));
    }
    options.struct_size = sizeof(T);
    return options;
}

} // namespace dflash::capi
