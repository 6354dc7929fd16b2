#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dflash {

/// 128-bit FNV-1a over the bytes added so far (offset basis and prime as published by its authors, also in
/// RFC 9923). Tells files apart; it does not withstand someone who looks for a collision.
/// One thread at a time.
class ContentDigest {
  public:
    void add(const void * data, uint64_t n) {
        const auto * bytes = static_cast<const uint8_t *>(data);
        for (uint64_t i = 0; i < n; ++i) {
            low_ ^= bytes[i];
            multiply_by_prime();
        }
    }

    /// Eight bytes, least significant first.
    void add_number(uint64_t value) {
        for (int shift = 0; shift < 64; shift += 8) {
            const uint8_t byte = static_cast<uint8_t>(value >> shift);
            add(&byte, 1);
        }
    }

    /// Length, then bytes: so that neighbouring texts cannot trade characters unseen.
    void add_text(std::string_view text) {
        add_number(text.size());
        add(text.data(), text.size());
    }

    /// The first and the last 4 KiB of a tensor's payload; all of it when it has at most 8 KiB.
    void add_sample(const uint8_t * data, uint64_t n) {
        constexpr uint64_t edge = 4096;
        if (n <= 2 * edge) {
            add(data, n);
            return;
        }
        add(data, edge);
        add(data + n - edge, edge);
    }

    /// 32 lower-case hexadecimal digits, most significant first.
    std::string hex() const {
        static const char digits[] = "0123456789abcdef";
        std::string out;
        for (const uint64_t half : {high_, low_}) {
            for (int shift = 60; shift >= 0; shift -= 4) {
                out += digits[(half >> shift) & 15];
            }
        }
        return out;
    }

  private:
    // The prime is 2^88 + 0x13b.
    void multiply_by_prime() {
        constexpr uint64_t small = 0x13b;
        const uint64_t upper_product = (low_ >> 32) * small + (((low_ & 0xffffffffu) * small) >> 32);
        high_ = high_ * small + (upper_product >> 32) + (low_ << 24);
        low_ *= small;
    }

    uint64_t high_ = 0x6c62272e07bb0142u;
    uint64_t low_ = 0x62b821756295c58du;
};

} // namespace dflash
