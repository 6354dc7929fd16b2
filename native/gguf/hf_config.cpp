#include "gguf/hf_config.hpp"

#include <utility>

#include "base/error.hpp"
#include "gguf/mapped_file.hpp"
#include "gguf/quoted.hpp"

namespace dflash {

HfConfig::HfConfig(std::string path, Json root) : path_(std::move(path)), root_(std::move(root)) {
    check(root_.is_object(), Status::format, "%s: found %s, want a JSON object", path_.c_str(), root_.kind());
}

HfConfig HfConfig::open(const std::string & path) {
    const std::shared_ptr<const MappedFile> file = MappedFile::open(path);
    return parse({reinterpret_cast<const char *>(file->data()), static_cast<size_t>(file->size())}, path);
}

HfConfig HfConfig::parse(std::string_view text, std::string name) {
    Json root = Json::parse(text, name.c_str(), max_bytes);
    return HfConfig(std::move(name), std::move(root));
}

namespace {

const Json * step_down(const Json * at, std::string_view dotted_key) noexcept {
    while (at != nullptr) {
        const size_t dot = dotted_key.find('.');
        at = at->find(dotted_key.substr(0, dot));
        if (dot == std::string_view::npos) {
            break;
        }
        dotted_key.remove_prefix(dot + 1);
    }
    return at == nullptr || at->is_null() ? nullptr : at;
}

} // namespace

const Json * HfConfig::find_one(std::string_view dotted_key) const noexcept {
    const Json * value = step_down(&root_, dotted_key);
    return value != nullptr || inner_key_.empty() ? value : step_down(root_.find(inner_key_), dotted_key);
}

const Json * HfConfig::find(Keys keys) const noexcept {
    for (const std::string_view key : keys) {
        if (const Json * value = find_one(key)) {
            return value;
        }
    }
    return nullptr;
}

HfConfig::Found HfConfig::look_up(Keys keys) const {
    for (const std::string_view key : keys) {
        if (const Json * value = find_one(key)) {
            return {value, path_ + ": key " + quoted(key)};
        }
    }
    return {};
}

HfConfig::Found HfConfig::require(Keys keys, const char * wanted) const {
    Found found = look_up(keys);
    if (found.value == nullptr) {
        std::string names;
        for (const std::string_view key : keys) {
            names += names.empty() ? quoted(key) : " or " + quoted(key);
        }
        fail(Status::format, "%s: key %s is missing, want %s", path_.c_str(), names.c_str(), wanted);
    }
    return found;
}

int64_t HfConfig::require_int(Keys keys, int64_t min, int64_t max) const {
    const Found found = require(keys, "an integer");
    return found.value->as_int(found.subject.c_str(), min, max);
}

int64_t HfConfig::int_or(Keys keys, int64_t fallback, int64_t min, int64_t max) const {
    return find(keys) == nullptr ? fallback : require_int(keys, min, max);
}

double HfConfig::require_float(Keys keys, double min, double max) const {
    const Found found = require(keys, "a number");
    return found.value->as_double(found.subject.c_str(), min, max);
}

double HfConfig::float_or(Keys keys, double fallback, double min, double max) const {
    return find(keys) == nullptr ? fallback : require_float(keys, min, max);
}

bool HfConfig::bool_or(Keys keys, bool fallback) const {
    const Found found = look_up(keys);
    return found.value == nullptr ? fallback : found.value->as_bool(found.subject.c_str());
}

std::string HfConfig::require_string(Keys keys) const {
    const Found found = require(keys, "a string");
    return found.value->as_string(found.subject.c_str());
}

std::string HfConfig::string_or(Keys keys, std::string fallback) const {
    return find(keys) == nullptr ? std::move(fallback) : require_string(keys);
}

const Json::Array & HfConfig::items(const Found & found, uint64_t max_count) const {
    const Json::Array & items = found.value->items(found.subject.c_str());
    check(items.size() <= max_count, Status::format, "%s: %zu elements, want at most %llu", found.subject.c_str(),
          items.size(), static_cast<unsigned long long>(max_count));
    return items;
}

std::vector<int64_t> HfConfig::ints_or(Keys keys, std::vector<int64_t> fallback, uint64_t max_count, int64_t min,
                                       int64_t max) const {
    const Found found = look_up(keys);
    if (found.value == nullptr) {
        return fallback;
    }
    std::vector<int64_t> out;
    for (const Json & item : items(found, max_count)) {
        out.push_back(item.as_int(found.subject.c_str(), min, max));
    }
    return out;
}

std::vector<std::string> HfConfig::strings_or(Keys keys, std::vector<std::string> fallback, uint64_t max_count) const {
    const Found found = look_up(keys);
    if (found.value == nullptr) {
        return fallback;
    }
    std::vector<std::string> out;
    for (const Json & item : items(found, max_count)) {
        out.push_back(item.as_string(found.subject.c_str()));
    }
    return out;
}

} // namespace dflash
