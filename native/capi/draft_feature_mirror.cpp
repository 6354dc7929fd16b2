#include "state/draft_feature_mirror.hpp"

#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"

using namespace dflash;
using namespace dflash::capi;

namespace {

FeatureSource source_of(const TargetCache & cache) {
    check(cache.target_feat() != nullptr, Status::invalid, "this cache captures no features");
    return {cache.target_feat(), cache.feature_capacity(), cache.feature_range(), cache.model().device()};
}

} // namespace

void dflash_draft_feature_mirror_options_init(dflash_draft_feature_mirror_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
        options->capacity = 4096;
    }
}

dflash_status dflash_draft_feature_mirror_new(dflash_draft_feature_mirror ** out,
                                              const dflash_draft_feature_mirror_options * options, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        dflash_draft_feature_mirror_options defaults;
        dflash_draft_feature_mirror_options_init(&defaults);
        const dflash_draft_feature_mirror_options o = read_options(options, defaults, sizeof(defaults), "options");
        DraftFeatureMirrorOptions mirror;
        mirror.capacity = o.capacity;
        mirror.type = text_or(o.type, "f32");
        std::shared_ptr<Device> device;
        if (o.draft != nullptr) {
            const auto draft = borrow(o.draft)->model;
            device = draft->device();
            mirror.n_target_layers = draft->config().n_taps();
            mirror.hidden_size = draft->config().n_embd;
        } else {
            device = Device::open(text_or(o.device, "cpu"), o.n_threads);
            mirror.n_target_layers = o.n_target_layers;
            mirror.hidden_size = o.hidden_size;
        }
        auto handle = std::make_shared<dflash_draft_feature_mirror>();
        handle->mirror = DraftFeatureMirror::create(device, mirror);
        publish(out, std::move(handle));
    });
}

void dflash_draft_feature_mirror_free(dflash_draft_feature_mirror * mirror) {
    release(mirror);
}

dflash_status dflash_draft_feature_mirror_state_get(dflash_draft_feature_mirror * mirror,
                                                    dflash_draft_feature_mirror_state * out, dflash_error * err) {
    return guard(err, [&] {
        dflash_draft_feature_mirror_state & s = output(out, "out");
        const Use<dflash_draft_feature_mirror> use(mirror);
        const DraftFeatureMirror & m = *use->mirror;
        const PositionRange range = m.valid_range();
        s.begin = range.begin;
        s.end = range.end;
        s.capacity = m.capacity();
        s.n_target_layers = m.n_target_layers();
        s.hidden_size = m.hidden_size();
        s.n_bytes = m.nbytes();
        s.staging_bytes = m.staging_bytes();
        copy_text(s.type, ggml_type_name(m.type()));
        copy_text(s.device, m.device()->name());
    });
}

dflash_status dflash_draft_feature_mirror_can_view(dflash_draft_feature_mirror * mirror, int64_t committed,
                                                   int64_t ctx_len, int64_t * slot0, dflash_error * err) {
    return guard(err, [&] {
        output(slot0, "slot0");
        const Use<dflash_draft_feature_mirror> use(mirror);
        *slot0 = -1;
        draft_feature_mirror_can_view(*use->mirror, committed, ctx_len, *slot0);
    });
}

dflash_status dflash_draft_feature_mirror_sync_range(dflash_draft_feature_mirror * mirror, dflash_target_cache * cache,
                                                     int64_t start_pos, int64_t n_tokens, int64_t * rows,
                                                     dflash_error * err) {
    return guard(err, [&] {
        output(rows, "rows");
        const Use<dflash_draft_feature_mirror> use(mirror);
        const Use<dflash_target_cache> source(cache);
        *rows = draft_feature_mirror_sync_range(source_of(*source->cache), *use->mirror, start_pos, n_tokens);
    });
}

dflash_status dflash_draft_feature_mirror_sync_tail(dflash_draft_feature_mirror * mirror, dflash_target_cache * cache,
                                                    int64_t * rows, dflash_error * err) {
    return guard(err, [&] {
        output(rows, "rows");
        const Use<dflash_draft_feature_mirror> use(mirror);
        const Use<dflash_target_cache> source(cache);
        *rows = draft_feature_mirror_sync_tail(source_of(*source->cache), *use->mirror, source->cache->position());
    });
}

dflash_status dflash_draft_feature_mirror_write_slice(dflash_draft_feature_mirror * mirror, int32_t capture_idx,
                                                      int64_t start_pos, int64_t n_tokens, const float * host,
                                                      int64_t n_values, int64_t * rows, dflash_error * err) {
    return guard(err, [&] {
        output(rows, "rows");
        const Use<dflash_draft_feature_mirror> use(mirror);
        check(n_values >= 0, Status::invalid, "%lld values, want >= 0", static_cast<long long>(n_values));
        *rows = copy_host_capture_slice_to_draft_ring(*use->mirror, capture_idx, start_pos, n_tokens, host,
                                                      static_cast<uint64_t>(n_values));
    });
}

dflash_status dflash_draft_feature_mirror_write_rows(dflash_draft_feature_mirror * mirror, int64_t start_pos,
                                                     int64_t n_tokens, const float * host, int64_t n_values,
                                                     int64_t * rows, dflash_error * err) {
    return guard(err, [&] {
        output(rows, "rows");
        const Use<dflash_draft_feature_mirror> use(mirror);
        check(n_values >= 0, Status::invalid, "%lld values, want >= 0", static_cast<long long>(n_values));
        *rows = copy_host_f32_to_feature_ring_range(*use->mirror, start_pos, n_tokens, host,
                                                    static_cast<uint64_t>(n_values));
    });
}

dflash_status dflash_draft_feature_mirror_read_rows(dflash_draft_feature_mirror * mirror, int64_t start_pos,
                                                    int64_t n_tokens, float * out, int64_t n_values, int64_t * rows,
                                                    dflash_error * err) {
    return guard(err, [&] {
        output(rows, "rows");
        const Use<dflash_draft_feature_mirror> use(mirror);
        check(n_values >= 0, Status::invalid, "%lld values, want >= 0", static_cast<long long>(n_values));
        *rows = copy_feature_ring_range_to_host_f32(*use->mirror, start_pos, n_tokens, out,
                                                    static_cast<uint64_t>(n_values));
    });
}

dflash_status dflash_draft_feature_mirror_clear(dflash_draft_feature_mirror * mirror, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_feature_mirror> use(mirror);
        use->mirror->clear();
    });
}
