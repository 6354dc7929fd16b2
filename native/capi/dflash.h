/*
 * dflash.h: the C interface of pydflash's native engine (C99, usable from C++).
 *
 * Conventions
 *   Status      A function that can fail returns a dflash_status and takes a dflash_error as its last argument. On
 *               failure outputs are NULL or 0 and the object is unchanged, unless the function says that it poisons it.
 *   Errors      dflash_error belongs to the caller and may be NULL. It is filled on failure and untouched on success.
 *   Text        UTF-8 and NUL-terminated. Input text is copied if it is kept; output text goes to the caller's buffer.
 *   Integers    Token ids are int32_t; positions and counts are int64_t, ranges are half-open [begin, end); sizes of
 *               memory are uint64_t bytes.
 *   Threads     Each function is marked "any thread" or "one thread at a time per handle". A second thread that enters
 *               a busy handle gets DFLASH_STATUS_BUSY. A handle used in the child after fork() gives
 *               DFLASH_STATUS_INVALID.
 *   Versions    Each declaration says since which ABI version it exists. Nothing is removed or renumbered.
 */
#ifndef DFLASH_H
#define DFLASH_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#if defined(DFLASH_BUILD)
#define DFLASH_API __declspec(dllexport)
#else
#define DFLASH_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define DFLASH_API __attribute__((visibility("default")))
#else
#define DFLASH_API
#endif

/* Initialiser of a dflash_error: `dflash_error err = DFLASH_ERROR_INIT;` */
#define DFLASH_ERROR_INIT {sizeof(dflash_error), 0, {0}}

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin. Between the two marks: no macros but DFLASH_API and integer constants. The Python binding reads it. */

/* Version of this interface. Compare with dflash_abi_version() before any other call. */
#define DFLASH_ABI_VERSION 1

/* ---- Status and errors -------------------------------------------------------------------------------- since: 1 */

typedef enum dflash_status {
    DFLASH_STATUS_OK = 0,
    DFLASH_STATUS_INVALID = -1,     /* a bad argument: NULL, out of range, a closed or foreign handle */
    DFLASH_STATUS_OOM = -2,         /* host or device memory could not be allocated */
    DFLASH_STATUS_CANCELLED = -3,   /* a cancel request or a callback stopped the call */
    DFLASH_STATUS_NOT_FOUND = -4,   /* no such file, device, key or item */
    DFLASH_STATUS_FORMAT = -5,      /* a file is damaged or not what its type says */
    DFLASH_STATUS_UNSUPPORTED = -6, /* well-formed, but not something this build can run */
    DFLASH_STATUS_MISMATCH = -7,    /* belongs to another model, cache or shape */
    DFLASH_STATUS_CAPACITY = -8,    /* the context, ring or buffer is too small */
    DFLASH_STATUS_BUSY = -9,        /* another thread is inside this handle, or its memory is pinned */
    DFLASH_STATUS_POISONED = -10,   /* an earlier failure left the handle unusable: only free it */
    DFLASH_STATUS_DEVICE = -11,     /* the device or its driver failed */
    DFLASH_STATUS_INTERNAL = -99    /* a defect of this library */
} dflash_status;

/* Filled by a failing call. Set struct_size to sizeof(dflash_error) first (0 counts as the size of ABI version 1). */
typedef struct dflash_error {
    uint32_t struct_size;
    int32_t status;     /* a dflash_status */
    char message[1016]; /* one line; names the value and the limit; cut at a character boundary if too long */
} dflash_error;

/* The name of a status without its prefix, e.g. "CAPACITY"; "UNKNOWN" for any other number. Static text. Any thread. */
DFLASH_API const char * dflash_status_name(int32_t status);

/* ---- Versions ----------------------------------------------------------------------------------------- since: 1 */

/* The DFLASH_ABI_VERSION that the library was compiled with. Any thread. */
DFLASH_API int32_t dflash_abi_version(void);

/* The release of the library, "major.minor.patch". Static text. Any thread. */
DFLASH_API const char * dflash_version(void);

/* ---- Log ---------------------------------------------------------------------------------------------- since: 1 */

typedef enum dflash_log_level {
    DFLASH_LOG_DEBUG = 0,
    DFLASH_LOG_INFO = 1,
    DFLASH_LOG_WARNING = 2,
    DFLASH_LOG_ERROR = 3
} dflash_log_level;

/*
 * Takes the oldest waiting log line. The library never writes to standard output or standard error: lines wait in a
 * queue of 1,024 until they are taken; when it is full the oldest is dropped, and a line tells how many were.
 *   level   its dflash_log_level; may be NULL
 *   buffer  receives the text and a terminating NUL; may be NULL when size is 0
 *   size    bytes in buffer
 *   needed  bytes the line needs, NUL included; 0 when none waits; may be NULL
 * OK: the line was copied and removed. NOT_FOUND: none waits. CAPACITY: the buffer is too small, the line still waits.
 * INVALID: buffer is NULL and size is not 0. Any thread.
 */
DFLASH_API dflash_status dflash_log_take(int32_t * level, char * buffer, uint64_t size, uint64_t * needed);

/* cdef: end. */

#ifdef __cplusplus
}
#endif

#endif /* DFLASH_H */
