#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gguf/gguf_file.hpp"

// GGUF bytes made in code, every number free to be wrong.
namespace dflash::testing {

template <class T> std::string bytes_of(T value) {
    std::string out(sizeof(T), '\0');
    std::memcpy(&out[0], &value, sizeof(T));
    return out;
}

inline std::string gguf_text(const std::string & text) {
    return bytes_of<uint64_t>(text.size()) + text;
}

inline std::string gguf_key(const std::string & key, GgufType type, const std::string & payload) {
    return gguf_text(key) + bytes_of(static_cast<uint32_t>(type)) + payload;
}

inline std::string gguf_array(const std::string & key, GgufType element, uint64_t count, const std::string & payload) {
    return gguf_key(key, GgufType::array, bytes_of(static_cast<uint32_t>(element)) + bytes_of(count) + payload);
}

inline std::string gguf_u32(const std::string & key, uint32_t value) {
    return gguf_key(key, GgufType::u32, bytes_of(value));
}

inline std::string gguf_u16(const std::string & key, uint16_t value) {
    return gguf_key(key, GgufType::u16, bytes_of(value));
}

inline std::string gguf_string(const std::string & key, const std::string & value) {
    return gguf_key(key, GgufType::string, gguf_text(value));
}

struct TensorEntry {
    std::string name;
    std::vector<uint64_t> ne;
    uint32_t type = GGML_TYPE_F32;
    uint64_t offset = 0;

    std::string bytes() const {
        std::string out = gguf_text(name) + bytes_of(static_cast<uint32_t>(ne.size()));
        for (const uint64_t n : ne) {
            out += bytes_of(n);
        }
        return out + bytes_of(type) + bytes_of(offset);
    }
};

struct GgufBytes {
    std::string magic = "GGUF";
    uint32_t version = 3;
    std::vector<std::string> keys;
    std::vector<TensorEntry> tensors;
    std::string data;
    uint64_t alignment = 32;
    int64_t extra_keys = 0; // what the counts claim beyond what is there
    int64_t extra_tensors = 0;

    std::string bytes() const {
        std::string out = magic + bytes_of(version) + bytes_of(tensors.size() + static_cast<uint64_t>(extra_tensors)) +
                          bytes_of(keys.size() + static_cast<uint64_t>(extra_keys));
        for (const std::string & key : keys) {
            out += key;
        }
        for (const TensorEntry & tensor : tensors) {
            out += tensor.bytes();
        }
        if (alignment > 0) {
            out.resize((out.size() + alignment - 1) / alignment * alignment);
        }
        return out + data;
    }
};

/// "token 0", "token 1", "", ...: different lengths, every third one empty.
inline std::string sample_token(int i) {
    return i % 3 == 2 ? "" : "token " + std::to_string(i);
}

/// One key of every type and four tensors; its last tensor ends at the last byte.
inline GgufBytes sample_gguf() {
    GgufBytes file;
    std::string tokens;
    for (int i = 0; i < 100; ++i) {
        tokens += gguf_text(sample_token(i));
    }
    file.keys = {
        gguf_string("general.architecture", "sample"),
        gguf_u32("general.alignment", 32),
        gguf_key("n.u8", GgufType::u8, bytes_of<uint8_t>(200)),
        gguf_key("n.i8", GgufType::i8, bytes_of<int8_t>(-100)),
        gguf_key("n.u16", GgufType::u16, bytes_of<uint16_t>(60000)),
        gguf_key("n.i16", GgufType::i16, bytes_of<int16_t>(-30000)),
        gguf_u32("n.u32", 4000000000u),
        gguf_key("n.i32", GgufType::i32, bytes_of<int32_t>(-2000000000)),
        gguf_key("n.u64", GgufType::u64, bytes_of<uint64_t>(1ull << 63)),
        gguf_key("n.i64", GgufType::i64, bytes_of<int64_t>(-(1ll << 62))),
        gguf_key("x.f32", GgufType::f32, bytes_of<float>(1.5f)),
        gguf_key("x.f64", GgufType::f64, bytes_of<double>(-2.25)),
        gguf_key("flag", GgufType::boolean, bytes_of<uint8_t>(1)),
        gguf_array("ints", GgufType::i32, 3, bytes_of<int32_t>(3) + bytes_of<int32_t>(-4) + bytes_of<int32_t>(5)),
        gguf_array("bits", GgufType::u8, 3, std::string("\1\0\1", 3)),
        gguf_array("bools", GgufType::boolean, 4, std::string("\1\1\0\1", 4)),
        gguf_array("floats", GgufType::f32, 2, bytes_of<float>(0.5f) + bytes_of<float>(-8.0f)),
        gguf_array("tokens", GgufType::string, 100, tokens),
        gguf_array("none", GgufType::string, 0, ""),
    };
    file.tensors = {
        {"a.weight", {4, 3}, GGML_TYPE_F32, 0},
        {"b.weight", {8}, GGML_TYPE_BF16, 64},
        {"c.weight", {32, 2}, GGML_TYPE_Q8_0, 96},
        {"d.weight", {256, 1, 1, 1}, GGML_TYPE_Q4_K, 192},
    };
    file.data.resize(192 + 144);
    for (size_t i = 0; i < file.data.size(); ++i) {
        file.data[i] = static_cast<char>(i * 7 + 1);
    }
    return file;
}

} // namespace dflash::testing
