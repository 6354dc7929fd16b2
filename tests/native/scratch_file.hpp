#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.hpp"

// Files that a test writes, and a fence around a call that must neither die nor take much memory or time.
namespace dflash::testing {

/// A file in a folder of its own under the system's temporary folder; both go when the object does.
class ScratchFile {
  public:
    explicit ScratchFile(const std::string & bytes, const std::string & name = "file") {
        folder_ = (std::filesystem::temp_directory_path() / "dflash-test-XXXXXX").string();
        if (::mkdtemp(&folder_[0]) == nullptr) {
            throw std::runtime_error("no temporary folder: " + folder_);
        }
        path_ = folder_ + "/" + name;
        write(bytes);
    }
    ~ScratchFile() {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
    ScratchFile(const ScratchFile &) = delete;
    ScratchFile & operator=(const ScratchFile &) = delete;

    void write(const std::string & bytes) const { write_beside(path_, bytes); }
    /// Writes another file into the same folder and returns its path.
    std::string add(const std::string & name, const std::string & bytes) const {
        write_beside(folder_ + "/" + name, bytes);
        return folder_ + "/" + name;
    }

    const std::string & path() const { return path_; }
    const std::string & folder() const { return folder_; }

  private:
    static void write_beside(const std::string & path, const std::string & bytes) {
        // Not truncated first: some file systems wait for the disk when a file that was truncated is closed.
        std::ofstream(path, std::ios::binary | std::ios::app).flush();
        std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
        out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        if (!out.flush()) {
            throw std::runtime_error("cannot write " + path);
        }
        std::filesystem::resize_file(path, bytes.size());
    }

    std::string folder_;
    std::string path_;
};

#if defined(__SANITIZE_ADDRESS__)
constexpr bool memory_is_fenced = false; // the sanitizer reserves terabytes of addresses
constexpr double second = 10.0;          // and is slow
#elif defined(__linux__)
constexpr bool memory_is_fenced = true;
#if defined(__OPTIMIZE__)
constexpr double second = 1.0;
#else
constexpr double second = 10.0; // of code that is not optimised
#endif
#else
constexpr bool memory_is_fenced = false; // no /proc to tell what is mapped already
constexpr double second = 1.0;
#endif

/// Runs body in a child process that may map 100 MB of memory more than now plus `file_bytes`. Returns the status of
/// the dflash::Error that it throws within a second of processor time; everything else, success too, is an exception
/// here.
template <class Body> Status fenced_status(uint64_t file_bytes, Body && body) {
    constexpr int no_error = 1;
    constexpr int foreign_error = 2;
    constexpr int too_slow = 3;
    constexpr int status_base = 100;
    const pid_t child = ::fork();
    if (child == 0) {
        int code = no_error;
        ::alarm(120); // ends a child that never answers
        if (memory_is_fenced) {
#if defined(__GLIBC__)
            ::malloc_trim(0); // what earlier tests gave back must not hide what this call takes
#endif
            uint64_t pages = 0;
            std::ifstream("/proc/self/statm") >> pages;
            const uint64_t now = pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
            const rlim_t limit = static_cast<rlim_t>(now + file_bytes + 100000000u);
            const rlimit fence{limit, limit};
            ::setrlimit(RLIMIT_AS, &fence);
        }
        const std::clock_t start = std::clock(); // processor time: a busy machine is no failure
        try {
            body();
        } catch (const Error & error) {
            code = status_base - static_cast<int>(error.status());
        } catch (...) {
            code = foreign_error;
        }
        const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
        ::_exit(took < second ? code : too_slow);
    }
    int state = 0;
    if (child < 0 || ::waitpid(child, &state, 0) != child) {
        throw std::runtime_error("fork or wait failed");
    }
    if (!WIFEXITED(state)) {
        throw std::runtime_error("the child died of signal " + std::to_string(WTERMSIG(state)));
    }
    const int code = WEXITSTATUS(state);
    if (code < status_base) {
        throw std::runtime_error(code == no_error        ? "no error"
                                 : code == too_slow      ? "an answer took more than a second"
                                 : code == foreign_error ? "a foreign exception, such as out of memory"
                                                         : "the child left with code " + std::to_string(code));
    }
    return static_cast<Status>(status_base - code);
}

/// Reproducible on every platform, unlike the distributions of <random> (xorshift64*).
class TestRandom {
  public:
    explicit TestRandom(uint64_t seed) : state_(seed) {}
    /// 0 to n - 1.
    uint64_t below(uint64_t n) {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return ((state_ * 0x2545f4914f6cdd1du) >> 16) % n;
    }

  private:
    uint64_t state_;
};

/// Changes a few bytes or eight-byte words, or the length: the damage of one fuzz round.
inline std::string damaged(std::string bytes, TestRandom & random) {
    static constexpr uint64_t nasty[] = {0,          1,          7,          255,        65536, 1u << 31,  0xffffffffu,
                                         1ull << 32, 1ull << 61, 1ull << 62, 1ull << 63, ~0ull, ~0ull - 7, ~0ull - 31};
    for (uint64_t n = 1 + random.below(4); n > 0; --n) {
        const uint64_t kind = random.below(8);
        if (kind < 5) {
            bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
        } else if (kind == 5) {
            bytes[random.below(bytes.size())] ^= static_cast<char>(1u << random.below(8));
        } else if (kind == 6 && bytes.size() > 8) {
            std::memcpy(&bytes[random.below(bytes.size() - 8)], &nasty[random.below(std::size(nasty))], 8);
        } else if (kind == 7 && random.below(8) == 0) {
            bytes.resize(1 + random.below(bytes.size()));
        }
    }
    return bytes;
}

} // namespace dflash::testing
