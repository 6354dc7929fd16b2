#include "gguf/mapped_file.hpp"

#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.hpp"
#include "gguf/quoted.hpp"

namespace dflash {
namespace {

std::string system_text(int code) {
    return std::generic_category().message(code);
}

class Descriptor {
  public:
    explicit Descriptor(const std::string & path) {
        // O_NONBLOCK: opening a pipe must not wait for its writer.
        do {
            fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        } while (fd_ < 0 && errno == EINTR);
        check(fd_ >= 0, Status::not_found, "%s: cannot be opened: %s", path.c_str(), system_text(errno).c_str());
    }
    ~Descriptor() { ::close(fd_); }
    Descriptor(const Descriptor &) = delete;
    Descriptor & operator=(const Descriptor &) = delete;

    int get() const { return fd_; }

  private:
    int fd_ = -1;
};

} // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string & path) {
    check(path.find('\0') == std::string::npos, Status::invalid, "path %s holds a zero byte", quoted(path).c_str());
    const Descriptor file(path);
    struct stat about{};
    check(::fstat(file.get(), &about) == 0, Status::not_found, "%s: cannot be examined: %s", path.c_str(),
          system_text(errno).c_str());
    check(S_ISREG(about.st_mode), Status::not_found, "%s: not a regular file", path.c_str());
    check(about.st_size > 0, Status::format, "%s: the file is empty", path.c_str());
    const uint64_t size = static_cast<uint64_t>(about.st_size);
    check(size <= std::numeric_limits<size_t>::max() / 2, Status::out_of_memory,
          "%s: %llu bytes do not fit the address space", path.c_str(), static_cast<unsigned long long>(size));
    void * const at = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (at == MAP_FAILED) {
        const int code = errno;
        fail(code == ENOMEM ? Status::out_of_memory : Status::not_found, "%s: %llu bytes cannot be mapped: %s",
             path.c_str(), static_cast<unsigned long long>(size), system_text(code).c_str());
    }
    MappedFile mapped(path, static_cast<const uint8_t *>(at), size);
    return std::make_shared<const MappedFile>(std::move(mapped));
}

MappedFile::MappedFile(std::string path, const uint8_t * data, uint64_t size) noexcept
    : path_(std::move(path)), data_(data), size_(size) {
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        ::munmap(const_cast<uint8_t *>(data_), static_cast<size_t>(size_));
    }
}

MappedFile::MappedFile(MappedFile && other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {
}

MappedFile & MappedFile::operator=(MappedFile && other) noexcept {
    if (this != &other) {
        std::swap(path_, other.path_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }
    return *this;
}

} // namespace dflash
