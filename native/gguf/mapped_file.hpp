#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace dflash {

/// A regular file mapped read-only as a whole. Move-only; any thread may read.
/// The file must not shrink while it is mapped: the system ends a process that reads past its new end.
class MappedFile {
  public:
    /// Throws Status::not_found when the path is missing, unreadable or not a regular file, Status::format when
    /// the file is empty, Status::out_of_memory when the address space has no room for it.
    static std::shared_ptr<const MappedFile> open(const std::string & path);

    ~MappedFile();
    MappedFile(MappedFile && other) noexcept;
    MappedFile & operator=(MappedFile && other) noexcept;
    MappedFile(const MappedFile &) = delete;
    MappedFile & operator=(const MappedFile &) = delete;

    /// First byte, page-aligned; null only after a move.
    const uint8_t * data() const noexcept { return data_; }
    /// Size in bytes.
    uint64_t size() const noexcept { return size_; }
    /// The path as it was given to open().
    const std::string & path() const noexcept { return path_; }

  private:
    MappedFile(std::string path, const uint8_t * data, uint64_t size) noexcept;

    std::string path_;
    const uint8_t * data_ = nullptr;
    uint64_t size_ = 0;
};

} // namespace dflash
