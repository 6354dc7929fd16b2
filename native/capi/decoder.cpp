#include "engine/decoder.hpp"

#include <limits>
#include <optional>

#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"

using namespace dflash;
using namespace dflash::capi;

namespace {

constexpr size_t max_tokens = 64;

/// Exclusive use of a decoder and of all that it works on.
class UseAll {
  public:
    explicit UseAll(dflash_decoder * raw) : decoder_(raw), cache_(decoder_->cache) {
        if (decoder_->context) {
            context_.emplace(decoder_->context);
        }
        if (decoder_->mirror) {
            mirror_.emplace(decoder_->mirror);
        }
    }
    dflash_decoder * operator->() const { return &*decoder_; }
    dflash_decoder & operator*() const { return *decoder_; }

  private:
    Use<dflash_decoder> decoder_;
    Use<dflash_target_cache> cache_;
    std::optional<Use<dflash_draft_context>> context_;
    std::optional<Use<dflash_draft_feature_mirror>> mirror_;
};

void fill_result(dflash_decoder & handle, StepResult && step, dflash_step_result & r) {
    check(step.tokens.size() <= max_tokens, Status::internal, "a step of %zu tokens", step.tokens.size());
    r.n_tokens = static_cast<int32_t>(step.tokens.size());
    for (size_t i = 0; i < step.tokens.size(); ++i) {
        r.tokens[i] = step.tokens[i];
        r.logprobs[i] = i < step.draws.size() ? step.draws[i].logprob : std::numeric_limits<float>::quiet_NaN();
    }
    r.n_proposed = step.n_proposed;
    r.n_accepted = step.n_accepted;
    r.width = step.width;
    r.reason = static_cast<int32_t>(step.reason);
    r.draft_ms = step.draft_ms;
    r.verify_ms = step.verify_ms;
    r.accept_ms = step.accept_ms;
    r.commit_ms = step.commit_ms;
    r.append_ms = step.append_ms;
    r.tree = step.tree;
    r.depth = step.depth;
    r.n_chain = step.n_chain;
    r.n_chain_accepted = step.n_chain_accepted;
    handle.draws = std::move(step.draws);
}

std::function<bool(int64_t, int64_t)> report_to(dflash_progress_fn progress, void * user) {
    if (progress == nullptr) {
        return {};
    }
    return [progress, user](int64_t done, int64_t total) { return progress(done, total, user) == 0; };
}

/// The mask of one call: it is gone when the call returns.
class MaskScope {
  public:
    MaskScope(Decoder & decoder, dflash_mask_fn mask, void * user) : decoder_(decoder) {
        required(mask, "mask");
        decoder.set_mask([mask, user](const int32_t * emitted, int64_t n, std::vector<uint32_t> & allowed) {
            check(mask(emitted, n, allowed.data(), static_cast<int64_t>(allowed.size()), user) == 0, Status::cancelled,
                  "the mask function stopped the call");
        });
    }
    ~MaskScope() { decoder_.set_mask({}); }
    MaskScope(const MaskScope &) = delete;
    MaskScope & operator=(const MaskScope &) = delete;

  private:
    Decoder & decoder_;
};

} // namespace

void dflash_sampling_options_init(dflash_sampling_options * options) {
    if (options != nullptr) {
        const SamplingParams p;
        *options = {};
        options->struct_size = sizeof(*options);
        options->temperature = p.temperature;
        options->top_k = p.top_k;
        options->top_p = p.top_p;
        options->min_p = p.min_p;
        options->typical_p = p.typical_p;
        options->repeat_penalty = p.repeat_penalty;
        options->penalty_last_n = p.penalty_last_n;
    }
}

void dflash_decoder_options_init(dflash_decoder_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
    }
}

dflash_status dflash_decoder_new(dflash_decoder ** out, dflash_target_cache * cache, dflash_draft_context * context,
                                 dflash_draft_feature_mirror * mirror, const dflash_decoder_options * options,
                                 dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        dflash_decoder_options defaults;
        dflash_decoder_options_init(&defaults);
        const dflash_decoder_options o = read_options(options, defaults, sizeof(defaults), "options");
        auto handle = std::make_shared<dflash_decoder>();
        handle->cache = borrow(cache);
        if (context != nullptr) {
            handle->context = borrow(context);
        }
        if (mirror != nullptr) {
            handle->mirror = borrow(mirror);
        }
        DecoderOptions decoder_options;
        decoder_options.prefill_chunk = o.prefill_chunk == 0 ? 512 : o.prefill_chunk;
        decoder_options.autoregressive_on_draft_failure = o.autoregressive_on_draft_failure != 0;
        handle->decoder = std::make_unique<Decoder>(
            *handle->cache->cache, *handle->cache->forward, handle->context ? handle->context->context.get() : nullptr,
            handle->context ? handle->context->forward.get() : nullptr,
            handle->mirror ? handle->mirror->mirror.get() : nullptr, decoder_options);
        publish(out, std::move(handle));
    });
}

void dflash_decoder_free(dflash_decoder * decoder) {
    release(decoder);
}

dflash_status dflash_decoder_begin(dflash_decoder * decoder, const dflash_sampling_options * sampling,
                                   dflash_error * err) {
    return guard(err, [&] {
        dflash_sampling_options defaults;
        dflash_sampling_options_init(&defaults);
        const dflash_sampling_options o = read_options(sampling, defaults, sizeof(defaults), "sampling");
        const UseAll use(decoder);
        SamplingParams p;
        p.temperature = o.temperature;
        p.top_k = o.top_k;
        p.top_p = o.top_p;
        p.min_p = o.min_p;
        p.typical_p = o.typical_p;
        p.repeat_penalty = o.repeat_penalty;
        p.presence_penalty = o.presence_penalty;
        p.frequency_penalty = o.frequency_penalty;
        p.penalty_last_n = o.penalty_last_n;
        p.seed = o.seed;
        p.ignore_eos = o.ignore_eos != 0;
        p.logprobs = o.logprobs != 0;
        p.n_logprobs = o.n_logprobs;
        check(o.n_bias >= 0, Status::invalid, "n_bias is %lld, want >= 0", static_cast<long long>(o.n_bias));
        for (int64_t i = 0; i < o.n_bias; ++i) {
            p.logit_bias.emplace_back(required(o.bias_ids, "bias_ids")[i], required(o.bias_values, "bias_values")[i]);
        }
        std::vector<int32_t> stop = use->cache->cache->model().stop_ids();
        if (o.stop_ids != nullptr) {
            check(o.n_stop_ids >= 0, Status::invalid, "n_stop_ids is %lld, want >= 0",
                  static_cast<long long>(o.n_stop_ids));
            stop.assign(o.stop_ids, o.stop_ids + o.n_stop_ids);
        }
        if (p.ignore_eos) {
            p.eos_ids = stop;
            stop.clear();
        }
        use->decoder->begin(p, std::move(stop));
    });
}

dflash_status dflash_decoder_feed(dflash_decoder * decoder, const int32_t * ids, int64_t n, dflash_progress_fn progress,
                                  void * user, dflash_error * err) {
    return guard(err, [&] {
        const UseAll use(decoder);
        check(n >= 1, Status::invalid, "%lld tokens, want >= 1", static_cast<long long>(n));
        std::function<bool(int64_t, int64_t)> report;
        if (progress != nullptr) {
            report = [&](int64_t done, int64_t total) { return progress(done, total, user) == 0; };
        }
        use->decoder->feed(required(ids, "ids"), n, report);
    });
}

dflash_status dflash_decoder_drop_anchor(dflash_decoder * decoder, dflash_error * err) {
    return guard(err, [&] {
        const UseAll use(decoder);
        use->decoder->drop_anchor();
    });
}

dflash_status dflash_decoder_catch_up(dflash_decoder * decoder, dflash_error * err) {
    return guard(err, [&] {
        const UseAll use(decoder);
        use->decoder->catch_up();
    });
}

dflash_status dflash_decoder_restore(dflash_decoder * decoder, const dflash_prefix_snapshot * snapshot,
                                     dflash_error * err) {
    return guard(err, [&] {
        const auto source = borrow(snapshot);
        const UseAll use(decoder);
        use->decoder->restore(*source->snapshot);
    });
}

dflash_status dflash_decoder_prefill(dflash_decoder * decoder, const int32_t * ids, int64_t n, int64_t budget,
                                     dflash_progress_fn progress, void * user, dflash_step_result * result,
                                     dflash_error * err) {
    return guard(err, [&] {
        dflash_step_result & r = output(result, "result");
        const UseAll use(decoder);
        check(n >= 0, Status::invalid, "%lld tokens, want >= 0", static_cast<long long>(n));
        if (n > 0) {
            required(ids, "ids");
        }
        fill_result(*use, use->decoder->prefill(ids, n, budget, report_to(progress, user)), r);
    });
}

dflash_status dflash_decoder_step(dflash_decoder * decoder, int32_t width, int64_t budget, dflash_step_result * result,
                                  dflash_error * err) {
    return guard(err, [&] {
        dflash_step_result & r = output(result, "result");
        const UseAll use(decoder);
        fill_result(*use, use->decoder->step(width, budget), r);
    });
}

dflash_status dflash_decoder_prefill_masked(dflash_decoder * decoder, const int32_t * ids, int64_t n, int64_t budget,
                                            dflash_mask_fn mask, void * user, dflash_step_result * result,
                                            dflash_error * err) {
    return guard(err, [&] {
        dflash_step_result & r = output(result, "result");
        const UseAll use(decoder);
        check(n >= 0, Status::invalid, "%lld tokens, want >= 0", static_cast<long long>(n));
        if (n > 0) {
            required(ids, "ids");
        }
        const MaskScope scope(*use->decoder, mask, user);
        fill_result(*use, use->decoder->prefill(ids, n, budget, {}), r);
    });
}

dflash_status dflash_decoder_step_masked(dflash_decoder * decoder, int32_t width, int64_t budget, dflash_mask_fn mask,
                                         void * user, dflash_step_result * result, dflash_error * err) {
    return guard(err, [&] {
        dflash_step_result & r = output(result, "result");
        const UseAll use(decoder);
        const MaskScope scope(*use->decoder, mask, user);
        fill_result(*use, use->decoder->step(width, budget), r);
    });
}

dflash_status dflash_decoder_step_tree(dflash_decoder * decoder, int32_t n_nodes, int64_t budget,
                                       dflash_step_result * result, dflash_error * err) {
    return guard(err, [&] {
        dflash_step_result & r = output(result, "result");
        const UseAll use(decoder);
        fill_result(*use, use->decoder->step_tree(n_nodes, budget), r);
    });
}

dflash_status dflash_decoder_min_chance_set(dflash_decoder * decoder, float min_chance, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_decoder> use(decoder);
        use->decoder->set_min_chance(min_chance);
    });
}

dflash_status dflash_decoder_settle(dflash_decoder * decoder, int64_t n_keep, dflash_error * err) {
    return guard(err, [&] {
        const UseAll use(decoder);
        use->decoder->settle(n_keep);
        use->cache->forward->wait();
    });
}

dflash_status dflash_decoder_top_logprobs(dflash_decoder * decoder, int32_t i, int32_t * ids, float * logprobs,
                                          int64_t capacity, int64_t * n, dflash_error * err) {
    return guard(err, [&] {
        output(n, "n");
        const UseAll use(decoder);
        check(i >= 0 && i < static_cast<int32_t>(use->draws.size()), Status::invalid,
              "token %d, the last call has log-probabilities of %zu", i, use->draws.size());
        const std::vector<TokenLogprob> & top = use->draws[static_cast<size_t>(i)].top;
        check(capacity >= 0 && (capacity == 0 || (ids != nullptr && logprobs != nullptr)), Status::invalid,
              "capacity %lld of a NULL array", static_cast<long long>(capacity));
        *n = static_cast<int64_t>(top.size());
        for (int64_t k = 0; k < capacity && k < *n; ++k) {
            ids[k] = top[static_cast<size_t>(k)].token;
            logprobs[k] = top[static_cast<size_t>(k)].logprob;
        }
    });
}

dflash_status dflash_decoder_state_get(dflash_decoder * decoder, dflash_decoder_state * out, dflash_error * err) {
    return guard(err, [&] {
        dflash_decoder_state & s = output(out, "out");
        const UseAll use(decoder);
        const Decoder & d = *use->decoder;
        const DecoderStats & t = d.stats();
        s.position = d.position();
        s.room = d.room();
        s.prompt_tokens = t.prompt_tokens;
        s.emitted = t.emitted;
        s.steps = t.steps;
        s.draft_steps = t.draft_steps;
        s.proposed = t.proposed;
        s.accepted = t.accepted;
        std::copy(t.proposed_by_slot.begin(), t.proposed_by_slot.end(), s.proposed_by_slot);
        std::copy(t.accepted_by_slot.begin(), t.accepted_by_slot.end(), s.accepted_by_slot);
        s.prefill_ms = t.prefill_ms;
        s.draft_ms = t.draft_ms;
        s.verify_ms = t.verify_ms;
        s.accept_ms = t.accept_ms;
        s.commit_ms = t.commit_ms;
        s.append_ms = t.append_ms;
        s.has_drafter = d.has_drafter() ? 1 : 0;
        s.max_width = d.max_width();
        s.max_tree = d.max_tree();
        copy_text(s.draft_disabled, t.draft_disabled);
    });
}

dflash_status dflash_decoder_tokens(dflash_decoder * decoder, int32_t * ids, int64_t capacity, int64_t * n,
                                    dflash_error * err) {
    return guard(err, [&] {
        const UseAll use(decoder);
        copy_list(use->decoder->tokens(), ids, capacity, n);
    });
}

dflash_status dflash_decoder_reset(dflash_decoder * decoder, dflash_error * err) {
    return guard(err, [&] {
        const UseAll use(decoder);
        use->decoder->reset();
    });
}

dflash_status dflash_decoder_cancel(dflash_decoder * decoder, dflash_error * err) {
    return guard(err, [&] { borrow(decoder)->decoder->cancel(); });
}
