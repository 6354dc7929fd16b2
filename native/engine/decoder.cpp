#include "engine/decoder.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "engine/stopwatch.hpp"

namespace dflash {
Decoder::Decoder(TargetCache & cache, TargetForward & target, DraftContext * context, DraftForward * draft,
                 DraftFeatureMirror * mirror, DecoderOptions options)
    : cache_(cache), target_(target), context_(context), draft_(draft), mirror_(mirror), options_(options),
      history_(std::make_unique<TokenHistory>(cache.model().config().n_vocab, 0)) {
    check((context == nullptr) == (draft == nullptr), Status::internal, "half a drafter");
    check(options.prefill_chunk >= 1 && options.prefill_chunk <= 65536, Status::invalid,
          "prefill_chunk %d, want 1 to 65536", options.prefill_chunk);
    if (context != nullptr) {
        check(cache.options().capture_layers == context->model().config().target_layer_ids, Status::mismatch,
              "the cache captures other layers than the drafter reads");
        check(mirror != nullptr || context->model().device() == cache.model().device(), Status::mismatch,
              "a drafter on another device needs a feature mirror");
        backlog_ = std::max<int64_t>(1, cache.feature_capacity() - cache.options().max_verify);
        if (mirror != nullptr) {
            backlog_ = std::min(backlog_, mirror->capacity());
        }
    }
}

void Decoder::begin(const SamplingParams & params, std::vector<int32_t> stop_ids) {
    const int32_t n_vocab = cache_.model().config().n_vocab;
    auto sampler = std::make_unique<Sampler>(params, n_vocab);
    for (const int32_t id : stop_ids) {
        check(id >= 0 && id < n_vocab, Status::invalid, "stop id %d, want 0 to %d", id, n_vocab - 1);
    }
    settle();
    auto history = std::make_unique<TokenHistory>(n_vocab, sampler->history_window());
    for (const int32_t token : history_->tokens()) {
        history->push(token);
    }
    sampler_ = std::move(sampler);
    history_ = std::move(history);
    stop_ids_ = std::move(stop_ids);
    const std::string disabled = std::move(stats_.draft_disabled);
    stats_ = DecoderStats{};
    stats_.draft_disabled = disabled;
    cancel_.clear();
}

int32_t Decoder::max_width() const {
    if (!has_drafter()) {
        return 1;
    }
    return std::min(cache_.options().max_verify, context_->model().config().n_proposals() + 1);
}

void Decoder::disable_draft(const Error & error) {
    if (!options_.autoregressive_on_draft_failure) {
        throw error;
    }
    stats_.draft_disabled = error.what();
    log(LogLevel::warning, "the drafter failed and is off for this sequence, decoding goes on without it: %s",
        error.what());
}

void Decoder::append_features() {
    const int64_t base = context_->cursor();
    const int64_t n = cache_.position() - base;
    if (n <= 0) {
        return;
    }
    if (mirror_ != nullptr) {
        const FeatureSource source{cache_.target_feat(), cache_.feature_capacity(), cache_.feature_range(),
                                   cache_.model().device()};
        draft_feature_mirror_sync_range(source, *mirror_, base, n);
        draft_->append_ring(mirror_->target_feat(), mirror_->memory_serial(), mirror_->capacity(), base, n);
    } else {
        draft_->append(cache_, base, n);
    }
}

ForwardResult Decoder::ingest(const int32_t * ids, int64_t n, bool logits,
                              const std::function<bool(int64_t, int64_t)> & progress) {
    // The last anchor was emitted but never consumed: it comes before the new tokens.
    std::vector<int32_t> all;
    if (has_anchor_) {
        all.push_back(history_->tokens().back());
    }
    all.insert(all.end(), ids, ids + n);
    check(!all.empty(), Status::invalid, "an empty prompt");
    ForwardRequest q;
    q.ids = all.data();
    q.n = static_cast<int64_t>(all.size());
    q.chunk = options_.prefill_chunk;
    if (logits) {
        q.logit_rows = {q.n - 1};
    }
    q.cancel = &cancel_;
    q.progress = progress;
    const int64_t start = cache_.position();
    if (has_drafter()) {
        q.after_chunk = [this](int64_t, int64_t) {
            try {
                append_features();
            } catch (const Error & error) {
                disable_draft(error);
            }
        };
    }
    const auto note_history = [&] {
        const int64_t done = cache_.position() - start;
        const int64_t skip = has_anchor_ ? 1 : 0;
        for (int64_t i = skip; i < done; ++i) {
            history_->push(all[static_cast<size_t>(i)]);
        }
        if (done > 0) {
            has_anchor_ = false;
        }
    };
    ForwardResult forward;
    try {
        forward = target_.forward(q);
    } catch (...) {
        note_history();
        throw;
    }
    note_history();
    stats_.prompt_tokens += n;
    return forward;
}

void Decoder::feed(const int32_t * ids, int64_t n, const std::function<bool(int64_t, int64_t)> & progress) {
    settle();
    Stopwatch watch;
    ingest(ids, n, false, progress);
    stats_.prefill_ms += watch.lap_ms();
}

StepResult Decoder::prefill(const int32_t * ids, int64_t n, int64_t budget,
                            const std::function<bool(int64_t, int64_t)> & progress) {
    check(sampler_ != nullptr, Status::invalid, "no request was begun");
    check(budget >= 1, Status::invalid, "budget %lld, want at least 1", static_cast<long long>(budget));
    settle();
    Stopwatch watch;
    ForwardResult forward;
    const bool knows_all = static_cast<int64_t>(history_->tokens().size()) == cache_.position();
    if (n == 0 && !has_anchor_ && knows_all && !cache_.last_logits.empty()) {
        forward.logits = cache_.last_logits;
    } else {
        forward = ingest(ids, n, true, progress);
    }
    stats_.prefill_ms += watch.lap_ms();
    const StopRule rule{stop_ids_, 1};
    const RowLogits row = masked([&](int32_t) { return forward.logits.data(); });
    AcceptResult accepted = accept_chain({}, row, cache_.position() - 1, *sampler_, *history_, rule);
    StepResult result;
    result.tokens = std::move(accepted.emitted);
    result.draws = std::move(accepted.draws);
    result.reason = accepted.reason == StopReason::stop_token ? StopReason::stop_token
                    : budget == 1                             ? StopReason::budget
                                                              : StopReason::none;
    result.accept_ms = watch.lap_ms();
    has_anchor_ = true;
    stats_.emitted += 1;
    stats_.accept_ms += result.accept_ms;
    return result;
}

RowLogits Decoder::masked(RowLogits row) {
    if (!mask_) {
        return row;
    }
    const int64_t before = history_->size();
    return [this, before, row = std::move(row)](int32_t i) {
        const std::vector<int32_t> & tokens = history_->tokens();
        allowed_.assign(static_cast<size_t>((sampler_->n_vocab() + 31) / 32), 0);
        mask_(tokens.data() + before, static_cast<int64_t>(tokens.size()) - before, allowed_);
        sampler_->set_allowed(allowed_.data());
        return row(i);
    };
}

void Decoder::set_mask(RowMask mask) {
    mask_ = std::move(mask);
    if (!mask_ && sampler_ != nullptr) {
        sampler_->set_allowed(nullptr);
    }
}

void Decoder::settle(int64_t n_keep) {
    if (pending_rows_ == 0) {
        return;
    }
    const int64_t rows = n_keep < 0 ? pending_rows_ : n_keep;
    check(rows >= 1 && rows <= pending_rows_, Status::invalid, "keep %lld of the last step, want 1 to %lld",
          static_cast<long long>(n_keep), static_cast<long long>(pending_rows_));
    Stopwatch watch;
    if (pending_path_.empty()) {
        target_.commit_async(pending_, static_cast<int32_t>(rows));
    } else {
        pending_path_.resize(static_cast<size_t>(rows));
        target_.commit_path_async(pending_, pending_path_);
        pending_path_.clear();
    }
    // The history ends with the emitted tokens of the step, the last kept one is the anchor.
    history_->truncate(cache_.position() + 1);
    pending_rows_ = 0;
    carried_commit_ms_ += watch.lap_ms();
    if (has_drafter()) {
        try {
            append_features();
        } catch (const Error & error) {
            disable_draft(error);
        }
    }
    carried_append_ms_ += watch.lap_ms();
}

void Decoder::begin_step(int64_t budget) {
    check(sampler_ != nullptr && has_anchor_, Status::invalid, "a step needs a prefill first");
    check(budget >= 1, Status::invalid, "budget %lld, want at least 1", static_cast<long long>(budget));
    cancel_.check_not_raised();
    settle();
    check(room() >= 1, Status::capacity, "the context of %lld tokens is full",
          static_cast<long long>(cache_.capacity()));
}

StepResult Decoder::step(int32_t width, int64_t budget) {
    begin_step(budget);
    width = static_cast<int32_t>(
        std::min<int64_t>({width, max_width(), budget, room(), static_cast<int64_t>(max_draft_slots)}));
    return end_step(width > 1 ? step_drafted(width, budget) : step_alone(budget));
}

StepResult Decoder::end_step(StepResult result) {
    result.commit_ms += carried_commit_ms_;
    result.append_ms += carried_append_ms_;
    carried_commit_ms_ = carried_append_ms_ = 0;
    count(result);
    return result;
}

StepResult Decoder::step_alone(int64_t budget) {
    Stopwatch watch;
    StepResult result;
    result.width = 1;
    if (has_drafter() && cache_.position() - context_->cursor() >= backlog_) {
        try {
            append_features();
        } catch (const Error & error) {
            disable_draft(error);
        }
        result.append_ms = watch.lap_ms();
    }
    const VerifyOutcome outcome = target_.advance(history_->tokens().back());
    const StopRule rule{stop_ids_, budget};
    AcceptResult accepted;
    if (draws_on_device()) {
        const std::vector<int32_t> argmax = target_.verify_argmax(outcome);
        result.verify_ms = watch.lap_ms();
        accepted = accept_chain_greedy({}, argmax, *history_, rule);
    } else {
        const float * logits = target_.verify_logits(outcome, 0);
        result.verify_ms = watch.lap_ms();
        const RowLogits row = masked([&](int32_t) { return logits; });
        accepted = accept_chain({}, row, outcome.base, *sampler_, *history_, rule);
    }
    result.tokens = std::move(accepted.emitted);
    result.draws = std::move(accepted.draws);
    result.reason = accepted.reason;
    result.accept_ms = watch.lap_ms();
    return result;
}

void Decoder::set_min_chance(float min_chance) {
    check(min_chance >= 0.0f && min_chance < 1.0f, Status::invalid, "min_chance %g, want 0 to below 1",
          static_cast<double>(min_chance));
    min_chance_ = min_chance;
}

int32_t Decoder::worthy_width(int32_t width) {
    if (min_chance_ <= 0.0f || !context_->model().config().is_chained()) {
        return width;
    }
    const int32_t wanted = 1 + n_worth_verifying(draft_->chances(), min_chance_);
    int32_t rows = 2;
    while (rows < wanted) {
        rows *= 2;
    }
    return std::min(rows, width);
}

StepResult Decoder::step_drafted(int32_t width, int64_t budget) {
    Stopwatch watch;
    StepResult result;
    std::vector<int32_t> proposals;
    const int32_t anchor = history_->tokens().back();
    const bool shared_ids =
        context_->model().device() == cache_.model().device() && cache_.model().tok_embd() != nullptr;
    try {
        append_features();
        result.append_ms = watch.lap_ms();
        draft_->propose(anchor, width - 1);
        width = worthy_width(width);
        if (!shared_ids) {
            proposals = draft_->proposals();
            proposals.resize(static_cast<size_t>(width - 1));
        }
    } catch (const Error & error) {
        disable_draft(error);
        return step_alone(budget);
    }
    result.draft_ms = watch.lap_ms();
    result.width = width;
    result.n_proposed = width - 1;
    result.depth = result.n_chain = width - 1;
    if (shared_ids) {
        pending_ = target_.verify(nullptr, width, {draft_->verify_ids(), draft_->ids_serial()});
        try {
            proposals = draft_->proposals();
            proposals.resize(static_cast<size_t>(width - 1));
        } catch (const Error & error) {
            target_.forget_outcome();
            disable_draft(error);
            return step_alone(budget);
        }
    } else {
        std::vector<int32_t> block{anchor};
        block.insert(block.end(), proposals.begin(), proposals.begin() + (width - 1));
        pending_ = target_.verify(block.data(), width);
    }
    const StopRule rule{stop_ids_, budget};
    AcceptResult accepted;
    if (draws_on_device()) {
        const std::vector<int32_t> argmax = target_.verify_argmax(pending_);
        result.verify_ms = watch.lap_ms();
        accepted = accept_chain_greedy(proposals, argmax, *history_, rule);
    } else {
        target_.wait();
        result.verify_ms = watch.lap_ms();
        const RowLogits row = masked([&](int32_t i) { return target_.verify_logits(pending_, i); });
        accepted = accept_chain(proposals, row, pending_.base, *sampler_, *history_, rule);
    }
    pending_rows_ = static_cast<int64_t>(accepted.emitted.size());
    result.n_accepted = result.n_chain_accepted = accepted.n_accepted;
    result.tokens = std::move(accepted.emitted);
    result.draws = std::move(accepted.draws);
    result.reason = accepted.reason;
    result.accept_ms = watch.lap_ms();
    return result;
}

void Decoder::count(const StepResult & r) {
    stats_.steps += 1;
    stats_.emitted += static_cast<int64_t>(r.tokens.size());
    stats_.draft_ms += r.draft_ms;
    stats_.verify_ms += r.verify_ms;
    stats_.accept_ms += r.accept_ms;
    stats_.commit_ms += r.commit_ms;
    stats_.append_ms += r.append_ms;
    if (r.n_proposed > 0) {
        stats_.draft_steps += 1;
        stats_.proposed += r.n_proposed;
        stats_.accepted += r.n_accepted;
        for (int32_t i = 0; i < r.depth; ++i) {
            stats_.proposed_by_slot[static_cast<size_t>(i)] += 1;
            stats_.accepted_by_slot[static_cast<size_t>(i)] += i < r.n_accepted ? 1 : 0;
        }
    }
}

void Decoder::drop_anchor() {
    settle();
    if (has_anchor_) {
        history_->truncate(cache_.position());
        has_anchor_ = false;
    }
}

void Decoder::catch_up() {
    if (has_drafter()) {
        try {
            append_features();
        } catch (const Error & error) {
            disable_draft(error);
        }
    }
}

void Decoder::reset() {
    target_.forget_outcome();
    target_.clear_poison();
    pending_rows_ = 0;
    pending_path_.clear();
    cache_.reset(false, true, false);
    if (context_ != nullptr) {
        context_->reset();
    }
    if (mirror_ != nullptr) {
        mirror_->clear();
    }
    history_->truncate(0);
    has_anchor_ = false;
    carried_commit_ms_ = carried_append_ms_ = 0;
    stats_ = DecoderStats{};
}

void Decoder::adopt(std::vector<int32_t> tokens, int64_t draft_from) {
    check(static_cast<int64_t>(tokens.size()) == cache_.position(), Status::invalid,
          "%zu tokens for a cache at position %lld", tokens.size(), static_cast<long long>(cache_.position()));
    target_.forget_outcome();
    pending_rows_ = 0;
    pending_path_.clear();
    history_->truncate(0);
    for (const int32_t token : tokens) {
        history_->push(token);
    }
    has_anchor_ = false;
    if (context_ != nullptr && draft_from >= 0) {
        context_->reset(draft_from);
    }
    if (mirror_ != nullptr) {
        mirror_->clear();
    }
}

void Decoder::restore(const PrefixSnapshot & snapshot) {
    check(!snapshot.tokens().empty(), Status::invalid, "the snapshot does not know its tokens");
    target_.restore(snapshot, context_);
    adopt(snapshot.tokens(), -1);
    stats_.draft_disabled.clear();
    carried_commit_ms_ = carried_append_ms_ = 0;
}

} // namespace dflash
