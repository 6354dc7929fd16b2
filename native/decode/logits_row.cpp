#include "decode/logits_row.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#ifdef __FAST_MATH__
#error "NaN and infinity are told from numbers by comparison here: compile without -ffast-math"
#endif

namespace dflash {
namespace {

constexpr float plus_infinity = std::numeric_limits<float>::infinity();
constexpr float minus_infinity = -plus_infinity;

constexpr float lowest_exponent = -88.0f;

/// exp(x) for lowest_exponent <= x <= 0 to about 2e-7 relative; 0 below -87.68. exp(x) = 2^n exp(r) with n the integer
/// nearest x / ln 2 and a Taylor polynomial for |r| <= ln(2) / 2.
float exp_in_range(float x) {
    constexpr float round_magic = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    constexpr float ln2_high = 0.693359375f;   // 9 bits, so that n * ln2_high is exact
    constexpr float ln2_low = -2.12194440e-4f;
    const float n = (x * 1.44269504f + round_magic) - round_magic;
    const float r = (x - n * ln2_high) - n * ln2_low;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) * (1 << 23); // +0 for n = -127
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

/// True when the block holds a logit above the limit, +infinity or NaN. limit: not NaN, below +infinity.
bool block_exceeds(const float * x, float limit) {
    int32_t any = 0;
    for (int i = 0; i < row_block; ++i) {
        any |= !(x[i] <= limit);
    }
    return any != 0;
}

} // namespace

float exp_nonpositive(float x) {
    return exp_in_range(x > lowest_exponent ? x : lowest_exponent);
}

LogitsRow::LogitsRow(const float * data, int32_t n) : data_(data), n_(n), n_blocks_((n + row_block - 1) / row_block) {
    const int32_t whole = n / row_block * row_block;
    std::fill(tail_, tail_ + row_block, minus_infinity);
    std::copy(data + whole, data + n, tail_);
}

bool find_peak(const LogitsRow & row, RowPeak & out) {
    out = RowPeak{};
    for (int32_t b = 0; b < row.n_blocks(); ++b) {
        const float * x = row.block(b);
        if (!block_exceeds(x, out.logit)) {
            continue;
        }
        for (int32_t i = 0; i < row_block; ++i) {
            if (!(x[i] < plus_infinity)) {
                return false;
            }
            if (x[i] > out.logit) {
                out = {b * row_block + i, x[i]};
            }
        }
    }
    return true;
}

bool collect_top(const LogitsRow & row, int32_t k, std::vector<Candidate> & out) {
    const auto keep_k = [&out, k] {
        std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), likelier);
        out.resize(static_cast<size_t>(k));
    };
    out.clear();
    float threshold = minus_infinity; // a later token that only equals the k-th loses to it
    for (int32_t b = 0; b < row.n_blocks(); ++b) {
        const float * x = row.block(b);
        if (!block_exceeds(x, threshold)) {
            continue;
        }
        for (int32_t i = 0; i < row_block; ++i) {
            if (!(x[i] < plus_infinity)) {
                return false;
            }
            if (x[i] > threshold) {
                out.push_back({b * row_block + i, x[i], 0.0f, 0.0f});
            }
        }
        if (out.size() + row_block > top_capacity(k)) {
            keep_k();
            threshold = out.back().logit;
        }
    }
    if (out.size() > static_cast<size_t>(k)) {
        keep_k();
    }
    return true;
}

void collect_above(const LogitsRow & row, float limit, std::vector<Candidate> & out) {
    out.clear();
    for (int32_t b = 0; b < row.n_blocks(); ++b) {
        const float * x = row.block(b);
        if (!block_exceeds(x, limit)) {
            continue;
        }
        for (int32_t i = 0; i < row_block; ++i) {
            if (x[i] > limit) {
                out.push_back({b * row_block + i, x[i], 0.0f, 0.0f});
            }
        }
    }
}

void block_weights(const float * x, float peak, float scale, float * weights) {
    for (int i = 0; i < row_block; ++i) {
        const float exponent = (x[i] - peak) * scale;
        weights[i] = exponent > lowest_exponent ? exponent : lowest_exponent;
    }
    for (int i = 0; i < row_block; ++i) { // a loop of its own: merged with the clamp it is not vectorised
        weights[i] = exp_in_range(weights[i]);
    }
}

double sum_weights(const LogitsRow & row, float peak, float scale, std::vector<double> & sums) {
    sums.resize(static_cast<size_t>(row.n_blocks()));
    double total = 0.0;
    for (int32_t b = 0; b < row.n_blocks(); ++b) {
        float weights[row_block];
        block_weights(row.block(b), peak, scale, weights);
        double lanes[4] = {0.0, 0.0, 0.0, 0.0};
        for (int i = 0; i < row_block; i += 4) {
            for (int j = 0; j < 4; ++j) {
                lanes[j] += static_cast<double>(weights[i + j]);
            }
        }
        sums[static_cast<size_t>(b)] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
        total += sums[static_cast<size_t>(b)];
    }
    return total;
}

} // namespace dflash
