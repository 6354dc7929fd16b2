#include "state/target_cache.hpp"

#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"
#include "engine/inspect.hpp"

using namespace dflash;
using namespace dflash::capi;

namespace {

TargetCacheOptions cache_options(const dflash_target_cache_options * given) {
    dflash_target_cache_options defaults;
    dflash_target_cache_options_init(&defaults);
    const dflash_target_cache_options o = read_options(given, defaults, sizeof(defaults), "options");
    TargetCacheOptions options;
    options.capacity = o.capacity;
    options.k_type = text_or(o.k_type, "f16");
    options.v_type = text_or(o.v_type, "f16");
    options.max_verify = o.max_verify;
    check(o.n_capture_layers >= 0 && o.n_capture_layers <= 64, Status::invalid, "%lld capture layers, want 0 to 64",
          static_cast<long long>(o.n_capture_layers));
    if (o.n_capture_layers > 0) {
        const int32_t * ids = required(o.capture_layers, "capture_layers");
        options.capture_layers.assign(ids, ids + o.n_capture_layers);
    }
    options.feature_capacity = o.feature_capacity;
    options.feature_type = text_or(o.feature_type, "f32");
    options.layer_begin = o.layer_begin;
    options.layer_end = o.layer_end;
    options.prefill_only = o.prefill_only != 0;
    options.keep_states = o.keep_states != 0;
    options.fa_window = o.fa_window;
    return options;
}

dflash_target_cache_plan plan_of(const TargetCachePlan & p) {
    return {p.k_bytes,        p.v_bytes,        p.recurrent_bytes, p.conv_bytes,       p.feature_bytes,
            p.rotation_bytes, p.rollback_bytes, p.total_bytes,     p.physical_capacity};
}

/// Copies exactly n_values floats. Throws Status::invalid naming the size that was wanted.
void copy_values(const std::vector<float> & from, float * to, int64_t n_values) {
    check(n_values == static_cast<int64_t>(from.size()), Status::invalid, "room for %lld values, want %zu",
          static_cast<long long>(n_values), from.size());
    std::copy(from.begin(), from.end(), required(to, "out"));
}

/// The list of a caller, which may be NULL when it is empty.
void read_outcome(dflash_target_cache & handle, float * logits, int32_t * argmax) {
    const int64_t n_vocab = handle.cache->model().config().n_vocab;
    for (int32_t i = 0; logits != nullptr && i < handle.outcome.n_rows; ++i) {
        const float * row = handle.forward->verify_logits(handle.outcome, i);
        std::copy(row, row + n_vocab, logits + i * n_vocab);
    }
    if (argmax != nullptr) {
        const std::vector<int32_t> best = handle.forward->verify_argmax(handle.outcome);
        std::copy(best.begin(), best.end(), argmax);
    }
    handle.forward->wait();
}

template <class T> std::vector<T> list_of(const T * values, int64_t n, const char * name) {
    check(n >= 0, Status::invalid, "n_%s is %lld, want >= 0", name, static_cast<long long>(n));
    return n == 0 ? std::vector<T>() : std::vector<T>(required(values, name), values + n);
}

} // namespace

void dflash_target_cache_options_init(dflash_target_cache_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
        options->max_verify = 16;
        options->capacity = 4096;
        options->layer_end = -1;
    }
}

void dflash_forward_options_init(dflash_forward_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
        options->layer_begin = -1;
        options->layer_end = -1;
    }
}

dflash_status dflash_target_cache_plan_bytes(const dflash_target_model * model,
                                             const dflash_target_cache_options * options,
                                             dflash_target_cache_plan * plan, dflash_error * err) {
    return guard(err, [&] {
        output(plan, "plan");
        *plan = plan_of(TargetCache::plan(*borrow(model)->model, cache_options(options)));
    });
}

dflash_status dflash_target_cache_new(dflash_target_cache ** out, const dflash_target_model * model,
                                      const dflash_target_cache_options * options, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        auto handle = std::make_shared<dflash_target_cache>();
        handle->cache = TargetCache::create(borrow(model)->model, cache_options(options));
        handle->forward = std::make_unique<TargetForward>(*handle->cache);
        publish(out, std::move(handle));
    });
}

void dflash_target_cache_free(dflash_target_cache * cache) {
    release(cache);
}

dflash_status dflash_target_cache_state_get(dflash_target_cache * cache, dflash_target_cache_state * out,
                                            dflash_error * err) {
    return guard(err, [&] {
        dflash_target_cache_state & s = output(out, "out");
        const Use<dflash_target_cache> use(cache);
        const TargetCache & c = *use->cache;
        const PositionRange features = c.feature_range();
        s.position = c.position();
        s.capacity = c.capacity();
        s.feature_begin = features.begin;
        s.feature_end = features.end;
        s.n_taps = c.n_taps();
        s.max_verify = c.options().max_verify;
        s.can_verify = c.can_verify() ? 1 : 0;
        s.poisoned = use->forward->poisoned() ? 1 : 0;
        s.physical_capacity = c.physical_capacity();
        s.graph_bytes = use->forward->graph_bytes();
        s.memory_bytes = c.memory().total_bytes + c.memory().rollback_bytes;
    });
}

dflash_status dflash_target_cache_reset(dflash_target_cache * cache, int32_t kv, int32_t recurrent, int32_t features,
                                        dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        use->forward->forget_outcome();
        use->cache->reset(kv != 0, recurrent != 0, features != 0);
        if (recurrent != 0) {
            use->forward->clear_poison();
        }
    });
}

dflash_status dflash_target_cache_migrate(dflash_target_cache * cache, int32_t max_verify, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        migrate_prefill_cache(*use->cache, max_verify);
    });
}

dflash_status dflash_target_cache_forward(dflash_target_cache * cache, const int32_t * ids, int64_t n,
                                          const dflash_forward_options * options, dflash_error * err) {
    return guard(err, [&] {
        dflash_forward_options defaults;
        dflash_forward_options_init(&defaults);
        const dflash_forward_options o = read_options(options, defaults, sizeof(defaults), "options");
        const Use<dflash_target_cache> use(cache);
        ForwardRequest q;
        q.ids = o.hidden_in == nullptr ? required(ids, "ids") : nullptr;
        q.hidden = o.hidden_in;
        q.n = n;
        q.chunk = o.chunk == 0 ? 512 : o.chunk;
        q.layer_begin = o.layer_begin;
        q.layer_end = o.layer_end;
        q.logit_rows = list_of(o.logit_rows, o.n_logit_rows, "logit_rows");
        q.hidden_layers = list_of(o.hidden_layers, o.n_hidden_layers, "hidden_layers");
        check(std::is_sorted(q.hidden_layers.begin(), q.hidden_layers.end()), Status::invalid,
              "hidden_layers are not increasing");
        q.want_hidden = o.hidden_out != nullptr;
        check(q.logit_rows.empty() || o.logits != nullptr, Status::invalid, "logits is NULL");
        check(q.hidden_layers.empty() || o.hidden != nullptr, Status::invalid, "hidden is NULL");
        use->cancel.clear();
        q.cancel = &use->cancel;
        if (o.progress != nullptr) {
            q.progress = [&o](int64_t done, int64_t total) { return o.progress(done, total, o.user) == 0; };
        }
        const ForwardResult result = use->forward->forward(q);
        std::copy(result.logits.begin(), result.logits.end(), o.logits);
        const size_t per_layer = q.hidden_layers.empty() && !q.want_hidden
                                     ? 0
                                     : result.hidden.size() / (q.hidden_layers.size() + (q.want_hidden ? 1 : 0));
        const auto inspected_end =
            result.hidden.begin() + static_cast<std::ptrdiff_t>(per_layer * q.hidden_layers.size());
        std::copy(result.hidden.begin(), inspected_end, o.hidden);
        if (q.want_hidden) {
            std::copy(inspected_end, result.hidden.end(), o.hidden_out);
        }
    });
}

dflash_status dflash_target_cache_cancel(dflash_target_cache * cache, dflash_error * err) {
    return guard(err, [&] { borrow(cache)->cancel.raise(); });
}

dflash_status dflash_target_cache_last_logits(dflash_target_cache * cache, float * logits, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        const std::vector<float> & last = use->cache->last_logits;
        check(!last.empty(), Status::not_found, "the last call did not compute logits of the newest token");
        std::copy(last.begin(), last.end(), required(logits, "logits"));
    });
}

dflash_status dflash_target_cache_features(dflash_target_cache * cache, int64_t begin, int64_t end, float * out,
                                           dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        const std::vector<float> rows = read_features(*use->cache, begin, end);
        if (!rows.empty()) {
            std::copy(rows.begin(), rows.end(), required(out, "out"));
        }
    });
}

dflash_status dflash_target_cache_read(dflash_target_cache * cache, int32_t layer, const char * what, int64_t begin,
                                       int64_t end, float * out, int64_t n_values, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        copy_values(read_cache_tensor(*use->cache, layer, required(what, "what"), begin, end), out, n_values);
    });
}

dflash_status dflash_target_cache_moe_selected(dflash_target_cache * cache, int32_t layer, int32_t * out,
                                               int64_t capacity, int64_t * n, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        copy_list(use->forward->moe_selected(layer), out, capacity, n);
    });
}

dflash_status dflash_target_cache_verify(dflash_target_cache * cache, const int32_t * ids, int32_t n, float * logits,
                                         int32_t * argmax, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        use->outcome = use->forward->verify(required(ids, "ids"), n);
        read_outcome(*use, logits, argmax);
    });
}

dflash_status dflash_target_cache_verify_tree(dflash_target_cache * cache, const int32_t * ids, const int32_t * parents,
                                              int32_t n, float * logits, int32_t * argmax, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        use->outcome = use->forward->verify_tree(required(ids, "ids"), required(parents, "parents"), n);
        read_outcome(*use, logits, argmax);
    });
}

dflash_status dflash_target_cache_commit_path(dflash_target_cache * cache, const int32_t * path, int32_t n,
                                              dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        check(n >= 0, Status::invalid, "a path of %d rows, want >= 0", n);
        use->forward->commit_path(use->outcome, list_of(path, n, "path"));
    });
}

dflash_status dflash_target_cache_commit(dflash_target_cache * cache, int32_t n, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        use->forward->commit(use->outcome, n);
    });
}

dflash_status dflash_target_cache_verify_state(dflash_target_cache * cache, int32_t layer, int32_t row, float * out,
                                               int64_t n_values, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        copy_values(use->forward->verify_state(use->outcome, layer, row), out, n_values);
    });
}

dflash_status dflash_target_cache_verify_conv(dflash_target_cache * cache, int32_t layer, float * out, int64_t n_values,
                                              dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        copy_values(use->forward->verify_conv_input(use->outcome, layer), out, n_values);
    });
}

dflash_status dflash_target_cache_snapshot_state(dflash_target_cache * cache, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        snapshot_ssm_state(*use->cache);
    });
}

dflash_status dflash_target_cache_restore_state(dflash_target_cache * cache, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_target_cache> use(cache);
        use->forward->forget_outcome();
        restore_ssm_state(*use->cache);
    });
}
