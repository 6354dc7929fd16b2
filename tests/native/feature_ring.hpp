#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "state/draft_feature_mirror.hpp"

// Feature rings with known content for the tests of DraftFeatureMirror.
namespace dflash::testing {

constexpr int32_t hidden = 32;
constexpr int32_t layers = 3;
constexpr int64_t width = int64_t{1} * hidden * layers;

/// Two backends of the CPU: a different Device object counts as another device.
inline const std::shared_ptr<Device> & here() {
    static const std::shared_ptr<Device> device = Device::open("cpu", 1);
    return device;
}

inline const std::shared_ptr<Device> & elsewhere() {
    static const std::shared_ptr<Device> device = Device::open("cpu", 1);
    return device;
}

inline DraftFeatureMirrorOptions mirror_options(const std::string & type, int64_t capacity) {
    DraftFeatureMirrorOptions options;
    options.capacity = capacity;
    options.n_target_layers = layers;
    options.hidden_size = hidden;
    options.type = type;
    return options;
}

/// transfer_rows: whole rows in flight; 0: as many as there are.
inline std::unique_ptr<DraftFeatureMirror> make_mirror(const std::string & type, int64_t capacity,
                                                       int64_t transfer_rows = 0) {
    DraftFeatureMirrorOptions options = mirror_options(type, capacity);
    if (transfer_rows > 0) {
        options.transfer_bytes = static_cast<uint64_t>(transfer_rows * width) * sizeof(float);
    }
    return DraftFeatureMirror::create(here(), options);
}

/// A value near N(0, 1), |x| < 4, fixed by position and column.
inline float feature_value(int64_t position, int64_t column) {
    uint64_t x = static_cast<uint64_t>(position) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(column) + 1;
    double sum = 0.0;
    for (int i = 0; i < 12; ++i) {
        x ^= x >> 30;
        x *= 0xbf58476d1ce4e5b9ull;
        x ^= x >> 27;
        x *= 0x94d049bb133111ebull;
        x ^= x >> 31;
        sum += static_cast<double>(x >> 11) * 0x1p-53;
    }
    return static_cast<float>(std::clamp(sum - 6.0, -3.99, 3.99));
}

inline std::vector<float> feature_rows(int64_t begin, int64_t n, int64_t columns) {
    std::vector<float> values;
    for (int64_t p = begin; p < begin + n; ++p) {
        for (int64_t c = 0; c < columns; ++c) {
            values.push_back(feature_value(p, c));
        }
    }
    return values;
}

/// The bytes of float rows in f32, f16 or bf16.
inline std::vector<uint8_t> encode(enum ggml_type type, const std::vector<float> & values) {
    const int64_t n = static_cast<int64_t>(values.size());
    std::vector<uint8_t> bytes(ggml_row_size(type, n));
    if (type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t *>(bytes.data()), n);
    } else if (type == GGML_TYPE_BF16) {
        ggml_fp32_to_bf16_row(values.data(), reinterpret_cast<ggml_bf16_t *>(bytes.data()), n);
    } else {
        std::memcpy(bytes.data(), values.data(), bytes.size());
    }
    return bytes;
}

inline std::vector<float> decode(enum ggml_type type, const uint8_t * bytes, int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    if (type == GGML_TYPE_F32) {
        std::memcpy(values.data(), bytes, values.size() * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(bytes, values.data(), n);
    }
    return values;
}

/// A source ring on a device in which position p of `valid` holds feature_value(p, ...). `padding` further values
/// stand behind each row, filled with 77.
class SourceRing {
  public:
    SourceRing(std::shared_ptr<Device> device, enum ggml_type type, int64_t width, int64_t capacity,
               PositionRange valid, int64_t padding = 0)
        : group_(device, 2) {
        whole_ = group_.add(type, "source", width + padding, capacity);
        source_.rows = whole_;
        if (padding > 0) {
            source_.rows = ggml_view_2d(group_.ctx(), whole_, width, capacity, whole_->nb[1], 0);
        }
        source_.capacity = capacity;
        source_.valid = valid;
        source_.device = device;
        group_.allocate("source ring");
        const std::vector<uint8_t> filler =
            encode(type, std::vector<float>(static_cast<size_t>((width + padding) * capacity), 77.0f));
        tensor_write(whole_, filler.data(), 0, filler.size());
        for (int64_t p = valid.begin; p < valid.end; ++p) {
            const std::vector<uint8_t> row = encode(type, feature_rows(p, 1, width));
            tensor_write(whole_, row.data(), whole_->nb[1] * static_cast<uint64_t>(p % capacity), row.size());
        }
    }

    const FeatureSource & source() const { return source_; }
    FeatureSource with_valid(PositionRange valid) const {
        FeatureSource s = source_;
        s.valid = valid;
        return s;
    }
    ggml_tensor * tensor() { return whole_; }

  private:
    TensorGroup group_;
    ggml_tensor * whole_ = nullptr;
    FeatureSource source_;
};

/// A tensor with its own buffer.
class LoneTensor {
  public:
    LoneTensor(std::shared_ptr<Device> device, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1)
        : group_(std::move(device), 4) {
        tensor_ = group_.add(type, "lone", ne0, ne1, ne2);
        group_.allocate("lone tensor");
    }

    ggml_tensor * get() { return tensor_; }
    void set(const std::vector<float> & values) {
        const std::vector<uint8_t> bytes = encode(tensor_->type, values);
        tensor_write(tensor_, bytes.data(), 0, bytes.size());
    }
    std::vector<float> values() const {
        std::vector<uint8_t> bytes(ggml_nbytes(tensor_));
        tensor_read(tensor_, bytes.data(), 0, bytes.size());
        return decode(tensor_->type, bytes.data(), ggml_nelements(tensor_));
    }

  private:
    TensorGroup group_;
    ggml_tensor * tensor_ = nullptr;
};

inline std::vector<uint8_t> ring_bytes(const DraftFeatureMirror & mirror) {
    std::vector<uint8_t> bytes(mirror.nbytes());
    if (mirror.is_open()) {
        tensor_read(mirror.target_feat(), bytes.data(), 0, bytes.size());
    }
    return bytes;
}

/// Every byte of the ring becomes 0xa5, so that a write beside its place shows.
inline void paint(DraftFeatureMirror & mirror) {
    tensor_fill(mirror.target_feat(), 0xa5, 0, mirror.nbytes());
}

inline bool is_painted(const uint8_t * bytes, size_t n) {
    return std::all_of(bytes, bytes + n, [](uint8_t b) { return b == 0xa5; });
}

/// Largest allowed error of n values stored in `type`, per value for the float types and for q8_0 at |x| < 4; a block
/// of q4_0 has steps of an eighth of its largest value.
inline void check_close(enum ggml_type type, const float * want, const float * have, int64_t n) {
    for (int64_t block = 0; block < n; block += 32) {
        const int64_t end = std::min(block + 32, n);
        double largest = 0.0;
        for (int64_t i = block; i < end; ++i) {
            largest = std::max(largest, std::fabs(static_cast<double>(want[i])));
        }
        const double tolerance = type == GGML_TYPE_F32    ? 0.0
                                 : type == GGML_TYPE_F16  ? 1e-3
                                 : type == GGML_TYPE_BF16 ? 8e-3
                                 : type == GGML_TYPE_Q8_0 ? 1.6e-2
                                                          : largest / 8.0 * 1.01;
        double worst = 0.0;
        for (int64_t i = block; i < end; ++i) {
            const double error = std::fabs(static_cast<double>(want[i]) - static_cast<double>(have[i]));
            worst = std::isnan(error) ? INFINITY : std::max(worst, error);
        }
        CHECK_NEAR(worst, 0.0, tolerance);
    }
}

/// A mirror of 8 rows that holds positions [10, 16).
inline std::unique_ptr<DraftFeatureMirror> filled_mirror(const std::string & type) {
    auto mirror = make_mirror(type, 8);
    copy_host_f32_to_feature_ring_range(*mirror, 10, 6, feature_rows(10, 6, width));
    return mirror;
}

/// A call that must be refused: the error, and ring and record unchanged.
#define CHECK_REFUSED(mirror, status, part, ...)                                                                       \
    do {                                                                                                               \
        const std::vector<uint8_t> before = dflash::testing::ring_bytes(mirror);                                       \
        const dflash::PositionRange had = (mirror).valid_range();                                                      \
        CHECK_THROWS_WITH(status, part, __VA_ARGS__);                                                                  \
        CHECK(dflash::testing::ring_bytes(mirror) == before);                                                          \
        CHECK_EQ((mirror).valid_range().begin, had.begin);                                                             \
        CHECK_EQ((mirror).valid_range().end, had.end);                                                                 \
    } while (false)

} // namespace dflash::testing
