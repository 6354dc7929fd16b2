#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/json.hpp"

namespace dflash {

/// A Hugging Face config.json with typed look-ups. Immutable: any thread may read.
///
/// A look-up takes one or several keys and uses the first one that is there and not null. A dot steps into an object:
/// {"dflash_config.block_size", "block_size"}. require_* throw Status::format when none is there, the others return
/// the fallback; all throw Status::format on another kind or a value outside [min, max], naming file, key, found and
/// wanted.
class HfConfig {
  public:
    using Keys = std::initializer_list<std::string_view>;
    static constexpr uint64_t max_bytes = 4u << 20;

    /// Throws Status::not_found (missing or unreadable), Status::format (no JSON object, or above max_bytes).
    static HfConfig open(const std::string & path);
    /// The same for a text in memory; `name` stands for the path in messages.
    static HfConfig parse(std::string_view text, std::string name);

    /// Keys that are not there are looked for inside this object too, where it is one.
    void look_in(std::string key) { inner_key_ = std::move(key); }

    const std::string & path() const noexcept { return path_; }
    const Json & root() const noexcept { return root_; }

    /// Null pointer when none of the keys is there or all are null.
    const Json * find(Keys keys) const noexcept;

    int64_t require_int(Keys keys, int64_t min, int64_t max) const;
    int64_t int_or(Keys keys, int64_t fallback, int64_t min, int64_t max) const;
    /// Integers too.
    double require_float(Keys keys, double min, double max) const;
    double float_or(Keys keys, double fallback, double min, double max) const;
    bool bool_or(Keys keys, bool fallback) const;
    std::string require_string(Keys keys) const;
    std::string string_or(Keys keys, std::string fallback) const;
    /// Arrays of at most max_count elements, each integer in [min, max].
    std::vector<int64_t> ints_or(Keys keys, std::vector<int64_t> fallback, uint64_t max_count, int64_t min,
                                 int64_t max) const;
    std::vector<std::string> strings_or(Keys keys, std::vector<std::string> fallback, uint64_t max_count) const;

  private:
    struct Found {
        const Json * value = nullptr;
        std::string subject; // file and key, for messages
    };

    HfConfig(std::string path, Json root);
    const Json * find_one(std::string_view dotted_key) const noexcept;
    Found look_up(Keys keys) const;
    Found require(Keys keys, const char * wanted) const;
    const Json::Array & items(const Found & found, uint64_t max_count) const;

    std::string path_;
    Json root_;
    std::string inner_key_; // empty: none
};

} // namespace dflash
