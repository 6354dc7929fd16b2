#pragma once

#include <array>
#include <cstdint>
#include <limits>

// Random numbers that are a pure function of (seed, position): no state to carry, copy or rewind.
namespace dflash {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

/// The Philox4x32-10 block function: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
/// SC'11, section 3.3 (also std::philox4x32 of C++26). Any thread.
PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) noexcept;

/// A uniform number in [0, 1) with 53 random bits, equal on every platform: Philox4x32-10 with the seed as its key and
/// the position (low word first), index and stream as its counter; words 1:0 give the bits. Any thread.
double keyed_uniform(uint64_t seed, int64_t position, uint32_t index = 0, uint32_t stream = 0) noexcept;

/// Draws one of many by an exponential race: entrant i arrives after a time of rate weight_i, so it is the first with
/// probability weight_i / total (the Gumbel-max trick in another form). Each time has a random number of its own, so
/// weights that differ by rounding seldom change the winner: about as often as their distributions differ at all. A
/// draw by the inverse of the cumulative sum would change whenever any boundary moves past the one number it uses.
class ExponentialRace {
  public:
    ExponentialRace(uint64_t seed, int64_t position, uint32_t stream) noexcept
        : seed_(seed), position_(position), stream_(stream) {}

    /// weight >= 0 and finite; 0 never wins.
    void enter(uint32_t index, double weight) noexcept;
    /// Index of the first to arrive, -1 without one.
    int64_t winner() const noexcept { return winner_; }

  private:
    uint64_t seed_;
    int64_t position_;
    uint32_t stream_;
    int64_t winner_ = -1;
    double first_ = std::numeric_limits<double>::infinity();
};

} // namespace dflash
