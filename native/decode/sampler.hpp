#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "decode/logits_row.hpp"
#include "decode/sampling_params.hpp"
#include "decode/token_history.hpp"

namespace dflash {

struct TokenLogprob {
    int32_t token = -1;
    float logprob = 0.0f;
};

/// One drawn token. Log-probabilities are natural logarithms under the plain softmax of the row as the model gave it:
/// temperature 1, before bias, penalties and truncation. So they compare across sampling parameters, and a token that
/// only a bias made likely shows a low one.
struct Draw {
    int32_t token = -1;
    float logprob = std::numeric_limits<float>::quiet_NaN(); // NaN unless SamplingParams::logprobs
    std::vector<TokenLogprob> top;                           // min(n_logprobs, n_vocab) likeliest, likeliest first
};

/// Draws tokens from rows of logits with random numbers keyed by (seed, position): the token depends on the row, the
/// parameters, the history and the position only, never on how many rows were drawn before or with what draft.
///
/// Stages, in llama.cpp's default order:
///   1. logit bias, then forbidden tokens to -infinity;
///   2. penalties on the tokens of the history window: a logit <= 0 is multiplied by repeat_penalty, one > 0 divided
///      by it (CTRL, arXiv:1909.05858, with the sign corrected), then count * frequency_penalty + presence_penalty is
///      subtracted;
///   3. top_k;
///   4. typical_p (arXiv:2202.00666): tokens by |-ln p - entropy|, the least first, until their mass exceeds typical_p;
///   5. top_p (arXiv:1904.09751): the likeliest tokens until their mass reaches top_p;
///   6. min_p (arXiv:2407.01082): tokens with p >= min_p times the largest p;
///   7. temperature, which 4-6 do not see, and the draw: an ExponentialRace of the blocks of row_block tokens by their
///      weight, then one of the tokens of the winning block. So rows that differ by rounding give the same token but
///      for a chance of about their total variation distance.
/// Stages 4 and 5 use probabilities renormalised over the tokens that are left. Among equal values the lowest token is
/// preferred everywhere. At temperature 0 the token with the largest logit after stages 1-2 is taken; 3-6 do not apply.
/// A token whose weight relative to the likeliest one is below exp(-87.6) is never drawn.
///
/// Memory: up to 20 n_vocab bytes of scratch, allocated once. One thread at a time per object, const methods included.
class Sampler {
  public:
    /// Throws Status::invalid (SamplingParams::validate).
    Sampler(const SamplingParams & params, int32_t n_vocab);

    /// Forbids every token whose bit (id % 32 of word id / 32) is clear, from the next draw on; null lifts that. The
    /// words are read by draw() and belong to the caller.
    void set_allowed(const uint32_t * words);

    /// logits: [n_vocab] f32, read only; -infinity excludes a token. position: absolute position of the token to draw.
    /// history: every earlier token; must count a window of history_window(). Allocates nothing once `out` has grown.
    /// Throws Status::internal for a row that holds NaN or +infinity or no finite logit, Status::invalid when bias and
    /// forbidden tokens leave no token or overflow a logit, or when position or history does not fit.
    void draw(const float * logits, int64_t position, const TokenHistory & history, Draw & out) const;
    Draw draw(const float * logits, int64_t position, const TokenHistory & history) const;

    /// True when the argmax of the unprocessed row (lowest token among equals) is all that a draw would give.
    bool is_greedy_without_processing() const {
        return params_.temperature == 0.0f && !edits_rows() && !params_.logprobs;
    }

    /// The window that a TokenHistory for this sampler has to count; 0 when there are no penalties.
    int32_t history_window() const { return params_.penalises() ? params_.penalty_last_n : 0; }

    const SamplingParams & params() const { return params_; }
    int32_t n_vocab() const { return n_vocab_; }

  private:
    struct Bias {
        int32_t token = -1;
        float added = 0.0f;
    };

    struct Weighed {
        float peak = 0.0f;
        double total = 0.0;
    };

    bool edits_rows() const { return allowed_ != nullptr || !biases_.empty() || params_.penalises(); }
    bool cuts_top_k() const { return params_.top_k > 0 && params_.top_k < n_vocab_; }
    bool cuts_by_mass() const { return params_.typical_p < 1.0f || params_.top_p < 1.0f || params_.min_p > 0.0f; }

    const float * edited_row(const float * logits, const TokenHistory & history) const;
    double collect_candidates(const LogitsRow & row, const RowPeak & peak) const;
    void truncate_candidates(double row_total) const;
    void keep_typical() const;
    float lowest_for_min_p(float peak) const;
    Weighed weigh_candidates(float scale) const;
    int32_t draw_from_candidates(int64_t position) const;
    int32_t draw_from_row(const LogitsRow & row, const RowPeak & peak, int64_t position) const;
    void report_logprobs(const float * logits, Draw & out) const;
    [[noreturn]] void fail_unusable(const float * logits, int64_t position) const;

    SamplingParams params_;
    int32_t n_vocab_;
    std::vector<Bias> biases_; // by token, one entry each
    const uint32_t * allowed_ = nullptr;
    float temperature_scale_ = 1.0f;

    mutable std::vector<float> edited_;
    mutable std::vector<Candidate> candidates_;
    mutable std::vector<double> block_sums_;
};

} // namespace dflash
