#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

// Passes over one row of logits, in blocks of fixed length so that every compiler turns their loops into vector code.
namespace dflash {

struct Candidate {
    int32_t token = -1;
    float logit = 0.0f;
    float weight = 0.0f; // exp(logit - largest logit), not normalised
    float score = 0.0f;
};

/// Descending logit; equal logits by ascending token.
inline bool likelier(const Candidate & a, const Candidate & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

constexpr int32_t row_block = 64;

/// exp(x) for x <= 0, -infinity included, to about 2e-7 relative; 0 below -87.68.
float exp_nonpositive(float x);

/// One row as blocks of row_block logits, the last one padded with -infinity. Refers to `data`.
class LogitsRow {
  public:
    LogitsRow(const float * data, int32_t n);

    float operator[](int32_t token) const { return data_[token]; }
    int32_t n_blocks() const { return n_blocks_; }
    const float * block(int32_t b) const {
        return (b + 1) * row_block <= n_ ? data_ + static_cast<size_t>(b) * row_block : tail_;
    }

  private:
    const float * data_;
    int32_t n_;
    int32_t n_blocks_;
    float tail_[row_block];
};

/// Largest logit and the lowest token that has it (token -1 when every logit is -infinity).
struct RowPeak {
    int32_t token = -1;
    float logit = -std::numeric_limits<float>::infinity();
};

/// Returns false when the row holds NaN or +infinity.
bool find_peak(const LogitsRow & row, RowPeak & out);

/// Room that collect_top needs in its output for k candidates.
inline size_t top_capacity(int32_t k) {
    return static_cast<size_t>(k) + static_cast<size_t>(std::max(k, 4 * row_block));
}

/// The k likeliest tokens above -infinity (fewer if there are not k), in no particular order. Returns false when the
/// row holds NaN or +infinity. k >= 1.
bool collect_top(const LogitsRow & row, int32_t k, std::vector<Candidate> & out);

/// Every token with logit > limit, by ascending token. The row holds neither NaN nor +infinity.
void collect_above(const LogitsRow & row, float limit, std::vector<Candidate> & out);

/// weights[i] = exp((x[i] - peak) * scale) for one block. x <= peak, scale > 0 and finite.
void block_weights(const float * x, float peak, float scale, float * weights);

/// Fills sums[b] with the sum of each block's weights and returns the total.
double sum_weights(const LogitsRow & row, float peak, float scale, std::vector<double> & sums);

} // namespace dflash
