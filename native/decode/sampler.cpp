#include "decode/sampler.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "decode/random.hpp"

namespace dflash {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Random numbers of the two races of a draw.
constexpr uint32_t block_stream = 1;
constexpr uint32_t token_stream = 2;

bool likelier_to_keep(const Candidate & a, const Candidate & b) {
    return a.score != b.score ? a.score < b.score : a.token < b.token;
}

/// Cuts `candidates` after the first one, in the order of `before`, at which `enough(mass so far)` holds. Sorts only as
/// many as it needs.
template <class Before, class Enough>
void keep_mass(std::vector<Candidate> & candidates, Before before, Enough enough) {
    double mass = 0.0;
    size_t step = 64;
    for (size_t done = 0; done < candidates.size(); step *= 4) {
        const size_t end = std::min(candidates.size(), done + step);
        const auto first = candidates.begin() + static_cast<std::ptrdiff_t>(done);
        const auto last = candidates.begin() + static_cast<std::ptrdiff_t>(end);
        if (last != candidates.end()) {
            std::nth_element(first, last, candidates.end(), before);
        }
        std::sort(first, last, before);
        for (; done < end; ++done) {
            mass += static_cast<double>(candidates[done].weight);
            if (enough(mass)) {
                candidates.resize(done + 1);
                return;
            }
        }
    }
}

} // namespace

Sampler::Sampler(const SamplingParams & params, int32_t n_vocab) : params_(params), n_vocab_(n_vocab) {
    params.validate(n_vocab);

    for (const auto & [token, bias] : params.logit_bias) {
        biases_.push_back({token, bias});
    }
    if (params.ignore_eos) {
        for (const int32_t token : params.eos_ids) {
            biases_.push_back({token, minus_infinity});
        }
    }
    std::stable_sort(biases_.begin(), biases_.end(), [](const Bias & a, const Bias & b) { return a.token < b.token; });
    size_t n_merged = 0;
    for (const Bias & bias : biases_) {
        if (n_merged > 0 && biases_[n_merged - 1].token == bias.token) {
            biases_[n_merged - 1].added += bias.added;
        } else {
            biases_[n_merged++] = bias;
        }
    }
    biases_.resize(n_merged);

    const bool sampled = params.temperature > 0.0f;
    if (sampled) {
        temperature_scale_ = std::min(1.0f / params.temperature, std::numeric_limits<float>::max());
    }
    size_t n_candidates = 0;
    if (sampled && cuts_top_k()) {
        n_candidates = top_capacity(params.top_k);
    } else if (sampled && cuts_by_mass()) {
        n_candidates = static_cast<size_t>(n_vocab);
    }
    if (params.logprobs) {
        n_candidates = std::max(n_candidates, top_capacity(std::max(params.n_logprobs, 1)));
    }
    candidates_.reserve(n_candidates);
    if ((sampled && !cuts_top_k()) || params.logprobs) {
        block_sums_.reserve(static_cast<size_t>(n_vocab / row_block + 1));
    }
    if (edits_rows()) {
        edited_.resize(static_cast<size_t>(n_vocab));
    }
}

void Sampler::set_allowed(const uint32_t * words) {
    allowed_ = words;
    if (words != nullptr) {
        edited_.resize(static_cast<size_t>(n_vocab_));
    }
}

Draw Sampler::draw(const float * logits, int64_t position, const TokenHistory & history) const {
    Draw out;
    draw(logits, position, history, out);
    return out;
}

void Sampler::draw(const float * logits, int64_t position, const TokenHistory & history, Draw & out) const {
    check(position >= 0, Status::invalid, "draw at position %lld, want >= 0", static_cast<long long>(position));
    check(history.n_vocab() == n_vocab_, Status::invalid, "history of a vocabulary of %d, want %d", history.n_vocab(),
          n_vocab_);
    check(!params_.penalises() || history.window() == params_.penalty_last_n, Status::invalid,
          "history counts a window of %d tokens, want penalty_last_n = %d", history.window(), params_.penalty_last_n);

    const LogitsRow row(edits_rows() ? edited_row(logits, history) : logits, n_vocab_);
    if (params_.temperature > 0.0f && cuts_top_k()) {
        if (!collect_top(row, params_.top_k, candidates_) || candidates_.empty()) {
            fail_unusable(logits, position);
        }
        truncate_candidates(0.0);
        out.token = draw_from_candidates(position);
    } else {
        RowPeak peak;
        if (!find_peak(row, peak) || peak.token < 0) {
            fail_unusable(logits, position);
        }
        if (params_.temperature == 0.0f) {
            out.token = peak.token;
        } else if (!cuts_by_mass()) {
            out.token = draw_from_row(row, peak, position);
        } else {
            truncate_candidates(collect_candidates(row, peak));
            out.token = draw_from_candidates(position);
        }
    }

    out.logprob = std::numeric_limits<float>::quiet_NaN();
    out.top.clear();
    if (params_.logprobs) {
        report_logprobs(logits, out);
    }
}

const float * Sampler::edited_row(const float * logits, const TokenHistory & history) const {
    std::copy(logits, logits + n_vocab_, edited_.begin());
    for (const Bias & bias : biases_) {
        edited_[static_cast<size_t>(bias.token)] += bias.added;
    }
    if (params_.penalises()) {
        for (const TokenHistory::Count & seen : history.counts()) {
            float & logit = edited_[static_cast<size_t>(seen.token)];
            logit = logit <= 0.0f ? logit * params_.repeat_penalty : logit / params_.repeat_penalty;
            logit -= static_cast<float>(seen.count) * params_.frequency_penalty + params_.presence_penalty;
        }
    }
    if (allowed_ != nullptr) {
        for (int32_t token = 0; token < n_vocab_; ++token) {
            if ((allowed_[token / 32] >> (token % 32) & 1u) == 0) {
                edited_[static_cast<size_t>(token)] = minus_infinity;
            }
        }
    }
    return edited_.data();
}

/// Gathers every token that can survive the first active stage of 4-6. Returns the row's total weight when that stage
/// is top_p, else 0.
double Sampler::collect_candidates(const LogitsRow & row, const RowPeak & peak) const {
    if (params_.typical_p < 1.0f) {
        collect_above(row, minus_infinity, candidates_);
        return 0.0;
    }
    if (params_.top_p < 1.0f) {
        // All tokens with p < (1 - top_p) / n_vocab together weigh less than 1 - top_p, so the likelier ones reach
        // top_p.
        constexpr double rounding_margin = 1e-3;
        const double total = sum_weights(row, peak.logit, 1.0f, block_sums_);
        const double share = (1.0 - static_cast<double>(params_.top_p)) / n_vocab_;
        collect_above(row, static_cast<float>(peak.logit + std::log(total * share) - rounding_margin), candidates_);
        return total;
    }
    collect_above(row, std::nextafter(lowest_for_min_p(peak.logit), minus_infinity), candidates_);
    return 0.0;
}

/// Stages 4-6. row_total: the total weight of the row where candidates_ lacks its tail, else 0.
void Sampler::truncate_candidates(double row_total) const {
    if (params_.typical_p < 1.0f) {
        keep_typical();
    }
    if (params_.top_p < 1.0f) {
        const double total = weigh_candidates(1.0f).total;
        const double limit = static_cast<double>(params_.top_p) * (row_total > 0.0 ? row_total : total);
        keep_mass(candidates_, likelier, [limit](double mass) { return mass >= limit; });
    }
    if (params_.min_p > 0.0f) {
        const float lowest =
            lowest_for_min_p(std::min_element(candidates_.begin(), candidates_.end(), likelier)->logit);
        const auto unlikely = [lowest](const Candidate & c) { return c.logit < lowest; };
        candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), unlikely), candidates_.end());
    }
}

void Sampler::keep_typical() const {
    const Weighed weighed = weigh_candidates(1.0f);
    double mean = 0.0;
    for (const Candidate & c : candidates_) {
        mean += static_cast<double>(c.weight) * (static_cast<double>(c.logit) - weighed.peak);
    }
    // -ln p - entropy = (ln total - (logit - peak)) - (ln total - mean / total): ln total cancels.
    const double pivot = weighed.peak + mean / weighed.total;
    for (Candidate & c : candidates_) {
        c.score = static_cast<float>(std::fabs(pivot - static_cast<double>(c.logit)));
    }
    const double limit = static_cast<double>(params_.typical_p) * weighed.total;
    keep_mass(candidates_, likelier_to_keep, [limit](double mass) { return mass > limit; });
}

float Sampler::lowest_for_min_p(float peak) const {
    return static_cast<float>(peak + std::log(static_cast<double>(params_.min_p)));
}

Sampler::Weighed Sampler::weigh_candidates(float scale) const {
    const float peak = std::min_element(candidates_.begin(), candidates_.end(), likelier)->logit;
    double total = 0.0;
    for (Candidate & c : candidates_) {
        c.weight = exp_nonpositive((c.logit - peak) * scale);
        total += static_cast<double>(c.weight);
    }
    return {peak, total};
}

int32_t Sampler::draw_from_candidates(int64_t position) const {
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate & a, const Candidate & b) { return a.token < b.token; });
    weigh_candidates(temperature_scale_);
    ExponentialRace blocks(params_.seed, position, block_stream);
    const auto end = candidates_.end();
    for (auto it = candidates_.begin(); it != end;) {
        const int32_t block = it->token / row_block;
        double mass = 0.0;
        for (; it != end && it->token / row_block == block; ++it) {
            mass += static_cast<double>(it->weight);
        }
        blocks.enter(static_cast<uint32_t>(block), mass);
    }
    ExponentialRace tokens(params_.seed, position, token_stream);
    for (const Candidate & c : candidates_) {
        if (c.token / row_block == blocks.winner()) {
            tokens.enter(static_cast<uint32_t>(c.token), static_cast<double>(c.weight));
        }
    }
    return static_cast<int32_t>(tokens.winner());
}

int32_t Sampler::draw_from_row(const LogitsRow & row, const RowPeak & peak, int64_t position) const {
    sum_weights(row, peak.logit, temperature_scale_, block_sums_);
    ExponentialRace blocks(params_.seed, position, block_stream);
    for (int32_t b = 0; b < row.n_blocks(); ++b) {
        blocks.enter(static_cast<uint32_t>(b), block_sums_[static_cast<size_t>(b)]);
    }
    const auto block = static_cast<int32_t>(blocks.winner());
    float weights[row_block];
    block_weights(row.block(block), peak.logit, temperature_scale_, weights);
    ExponentialRace tokens(params_.seed, position, token_stream);
    for (int32_t i = 0; i < row_block; ++i) {
        tokens.enter(static_cast<uint32_t>(block * row_block + i), static_cast<double>(weights[i]));
    }
    return static_cast<int32_t>(tokens.winner());
}

void Sampler::report_logprobs(const float * logits, Draw & out) const {
    const LogitsRow row(logits, n_vocab_);
    collect_top(row, std::max(params_.n_logprobs, 1), candidates_);
    std::sort(candidates_.begin(), candidates_.end(), likelier);
    const float peak = candidates_.front().logit;
    const double log_total = std::log(sum_weights(row, peak, 1.0f, block_sums_));
    const auto logprob = [peak, log_total](float logit) {
        return static_cast<float>(static_cast<double>(logit) - peak - log_total);
    };
    out.logprob = logprob(row[out.token]);
    for (const Candidate & c : candidates_) {
        if (out.top.size() < static_cast<size_t>(params_.n_logprobs)) {
            out.top.push_back({c.token, logprob(c.logit)});
        }
    }
}

void Sampler::fail_unusable(const float * logits, int64_t position) const {
    const auto at = static_cast<long long>(position);
    bool any_finite = false;
    for (int32_t token = 0; token < n_vocab_; ++token) {
        check(logits[token] < INFINITY, Status::internal, "logits for position %lld hold %g at token %d", at,
              static_cast<double>(logits[token]), token);
        any_finite = any_finite || logits[token] > minus_infinity;
    }
    check(any_finite, Status::internal, "logits for position %lld hold no finite value", at);
    for (int32_t token = 0; token < n_vocab_; ++token) {
        const float edited = edited_[static_cast<size_t>(token)];
        check(edited < INFINITY, Status::invalid,
              "bias and penalties turn logit %g of token %d at position %lld into %g",
              static_cast<double>(logits[token]), token, at, static_cast<double>(edited));
    }
    fail(Status::invalid, "logit_bias, ignore_eos or a mask forbid every token at position %lld", at);
}

} // namespace dflash
