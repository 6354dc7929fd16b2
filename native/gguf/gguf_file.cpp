#include "gguf/gguf_file.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "gguf/content_digest.hpp"
#include "gguf/gguf_part.hpp"
#include "gguf/quoted.hpp"

namespace dflash {
namespace {

/// "<stem>-0000I-of-0000N.gguf", taken apart.
struct PartName {
    std::string stem;
    int number = 0;
    int count = 0;

    std::string path_of(int part) const { return stem + format("-%05d-of-%05d.gguf", part, count); }
};

std::optional<int> five_digits(std::string_view text) {
    int value = 0;
    for (const char c : text) {
        if (c < '0' || c > '9') {
            return std::nullopt;
        }
        value = value * 10 + (c - '0');
    }
    return value;
}

std::optional<PartName> part_name(const std::string & path) {
    constexpr size_t tail_bytes = sizeof("-00001-of-00001.gguf") - 1;
    if (path.size() < tail_bytes) {
        return std::nullopt;
    }
    const std::string_view tail = std::string_view(path).substr(path.size() - tail_bytes);
    if (tail.substr(0, 1) != "-" || tail.substr(6, 4) != "-of-" || tail.substr(15) != ".gguf") {
        return std::nullopt;
    }
    const std::optional<int> number = five_digits(tail.substr(1, 5));
    const std::optional<int> count = five_digits(tail.substr(10, 5));
    if (!number || !count) {
        return std::nullopt;
    }
    return PartName{path.substr(0, path.size() - tail_bytes), *number, *count};
}

/// Indices of items sorted by the text that `text_of` gives; throws Status::format naming a text that occurs twice.
template <typename Item, typename TextOf>
std::vector<uint32_t> sorted_index(const std::vector<Item> & items, TextOf text_of, const std::string & path,
                                   const char * what) {
    std::vector<uint32_t> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<uint32_t>(i);
    }
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return text_of(items[a]) < text_of(items[b]); });
    for (size_t i = 1; i < order.size(); ++i) {
        const std::string_view text = text_of(items[order[i]]);
        check(text != text_of(items[order[i - 1]]), Status::format, "%s: %s %s occurs twice", path.c_str(), what,
              quoted(text).c_str());
    }
    return order;
}

template <typename Item, typename TextOf>
const Item * find_sorted(const std::vector<Item> & items, const std::vector<uint32_t> & order, TextOf text_of,
                         std::string_view wanted) noexcept {
    const auto at = std::lower_bound(order.begin(), order.end(), wanted,
                                     [&](uint32_t i, std::string_view text) { return text_of(items[i]) < text; });
    return at != order.end() && text_of(items[*at]) == wanted ? &items[*at] : nullptr;
}

std::string_view key_of(const GgufValue & value) {
    return value.key;
}

std::string_view name_of(const GgufTensorInfo & tensor) {
    return tensor.name;
}

void check_equal(const std::string & path, const char * key, int64_t found, int64_t wanted) {
    check(found == wanted, Status::format, "%s: key %s is %lld, want %lld", path.c_str(), key,
          static_cast<long long>(found), static_cast<long long>(wanted));
}

} // namespace

GgufFile::GgufFile(const std::string & path) {
    std::shared_ptr<const MappedFile> file = MappedFile::open(path);
    GgufPart part = read_gguf_part(file);
    parts_.push_back(std::move(file));
    version_ = part.version;
    values_ = std::move(part.values);
    tensors_ = std::move(part.tensors);
    values_by_key_ = sorted_index(values_, key_of, path, "key");
}

std::shared_ptr<const GgufFile> GgufFile::open(const std::string & path) {
    const std::optional<PartName> name = part_name(path);
    const int count = name ? name->count : 1;
    check(!name || (count >= 1 && count <= max_parts && name->number >= 1 && name->number <= count), Status::format,
          "%s: the name says part %d of %d, want part 1 to N of at most %d", path.c_str(), name ? name->number : 0,
          count, max_parts);
    const std::shared_ptr<GgufFile> model(new GgufFile(name ? name->path_of(1) : path));
    const int64_t declared = model->int_or("split.count", 1, 0, 65535);
    // Files that were never split may carry a count of 0.
    check(std::max<int64_t>(declared, 1) == count, Status::format,
          "%s: key split.count is %lld, but the name says %d part(s), want a name that ends in "
          "-0000I-of-0000N.gguf with that count",
          model->path().c_str(), static_cast<long long>(declared), count);
    if (count > 1) {
        check_equal(model->path(), "split.no", model->require_int("split.no", 0, 65535), 0);
        for (int part = 2; part <= count; ++part) {
            model->append_part(GgufFile(name->path_of(part)));
        }
        check_equal(model->path(), "split.tensors.count", model->require_int("split.tensors.count", 0, INT32_MAX),
                    static_cast<int64_t>(model->tensors_.size()));
    }
    model->index_tensors();
    return model;
}

void GgufFile::append_part(GgufFile && part) {
    const int index = static_cast<int>(parts_.size());
    check_equal(part.path(), "split.count", part.require_int("split.count", 0, 65535),
                require_int("split.count", 0, 65535));
    check_equal(part.path(), "split.no", part.require_int("split.no", 0, 65535), index);
    check(tensors_.size() + part.tensors_.size() <= max_tensors, Status::format,
          "%s: the parts up to this one hold %zu tensors, want at most %llu", part.path().c_str(),
          tensors_.size() + part.tensors_.size(), static_cast<unsigned long long>(max_tensors));
    for (GgufTensorInfo & tensor : part.tensors_) {
        tensor.split_index = index;
        tensors_.push_back(std::move(tensor));
    }
    parts_.push_back(std::move(part.parts_.front()));
}

void GgufFile::index_tensors() {
    tensors_by_name_ = sorted_index(tensors_, name_of, path(), "tensor");
}

uint64_t GgufFile::total_bytes() const noexcept {
    uint64_t total = 0;
    for (const auto & part : parts_) {
        total += part->size();
    }
    return total;
}

const GgufValue * GgufFile::find(std::string_view key) const noexcept {
    return find_sorted(values_, values_by_key_, key_of, key);
}

const GgufTensorInfo * GgufFile::find_tensor(std::string_view name) const noexcept {
    return find_sorted(tensors_, tensors_by_name_, name_of, name);
}

std::string GgufFile::digest() const {
    ContentDigest digest;
    for (const GgufValue & value : values_) {
        if (std::string_view(value.key).substr(0, 6) == "split.") {
            continue;
        }
        digest.add_text(value.key);
        digest.add_number(static_cast<uint64_t>(value.type));
        digest.add_number(static_cast<uint64_t>(value.element_type));
        digest.add_number(value.count);
        digest.add(value.payload, value.payload_bytes);
    }
    for (const GgufTensorInfo & tensor : tensors_) {
        digest.add_text(tensor.name);
        digest.add_number(static_cast<uint64_t>(tensor.type));
        for (const int64_t ne : tensor.ne) {
            digest.add_number(static_cast<uint64_t>(ne));
        }
        digest.add_sample(tensor.data, tensor.nbytes);
    }
    return digest.hex();
}

} // namespace dflash
