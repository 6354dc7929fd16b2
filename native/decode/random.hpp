#pragma once

#include <array>
#include <cstdint>

// Random numbers that are a pure function of (seed, position): no state to carry, copy or rewind.
namespace dflash {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

/// The Philox4x32-10 block function: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
/// SC'11, section 3.3 (also std::philox4x32 of C++26). Any thread.
PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) noexcept;

/// A uniform number in [0, 1) with 53 random bits, equal on every platform: Philox4x32-10 with the seed as its key and
/// the position as its counter (low word first), of which words 1:0 give the bits. Any thread.
double keyed_uniform(uint64_t seed, int64_t position) noexcept;

} // namespace dflash
