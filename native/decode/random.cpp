#include "decode/random.hpp"

#include <cmath>

namespace dflash {

PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) noexcept {
    constexpr uint64_t multiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
    constexpr uint32_t weyl[2] = {0x9E3779B9u, 0xBB67AE85u};
    for (int round = 0; round < 10; ++round) {
        const uint64_t even = multiplier[0] * counter[0];
        const uint64_t odd = multiplier[1] * counter[2];
        counter = {static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(odd),
                   static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(even)};
        key = {key[0] + weyl[0], key[1] + weyl[1]};
    }
    return counter;
}

double keyed_uniform(uint64_t seed, int64_t position, uint32_t index, uint32_t stream) noexcept {
    const uint64_t at = static_cast<uint64_t>(position);
    const PhiloxCounter words =
        philox4x32_10({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), index, stream},
                      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const uint64_t bits = static_cast<uint64_t>(words[1]) << 32 | words[0];
    return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

void ExponentialRace::enter(uint32_t index, double weight) noexcept {
    if (!(weight > 0.0)) {
        return;
    }
    const double u = keyed_uniform(seed_, position_, index, stream_);
    if (u >= first_ * weight) {
        return; // too late: -ln(1 - u) >= u
    }
    const double time = -std::log1p(-u) / weight;
    if (time < first_) {
        first_ = time;
        winner_ = index;
    }
}

} // namespace dflash
