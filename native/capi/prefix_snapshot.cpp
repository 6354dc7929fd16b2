#include "state/prefix_snapshot.hpp"

#include <optional>

#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"

using namespace dflash;
using namespace dflash::capi;

namespace {

constexpr size_t max_layers = 64;

std::vector<int32_t> token_list(const int32_t * tokens, int64_t n) {
    check(n >= 0, Status::invalid, "n_tokens is %lld, want >= 0", static_cast<long long>(n));
    return n == 0 ? std::vector<int32_t>() : std::vector<int32_t>(required(tokens, "tokens"), tokens + n);
}

template <size_t N> std::string text(const char (&field)[N]) {
    const char * const end = std::find(field, field + N, '\0');
    check(end != field + N, Status::format, "a text of the snapshot has no end");
    return std::string(field, end);
}

SnapshotPtr parent_of(const dflash_prefix_snapshot * parent) {
    return parent != nullptr ? borrow(parent)->snapshot : nullptr;
}

void publish_snapshot(dflash_prefix_snapshot ** out, SnapshotPtr snapshot) {
    auto handle = std::make_shared<dflash_prefix_snapshot>();
    handle->snapshot = std::move(snapshot);
    publish(out, std::move(handle));
}

SnapshotHeader header_from(const dflash_prefix_snapshot_info & i) {
    SnapshotHeader h;
    h.version = i.version;
    h.kind = static_cast<SnapshotKind>(i.kind);
    h.architecture = text(i.architecture);
    h.target_digest = text(i.target_digest);
    h.draft_digest = text(i.draft_digest);
    h.k_type = text(i.k_type);
    h.v_type = text(i.v_type);
    h.feature_type = text(i.feature_type);
    h.draft_k_type = text(i.draft_k_type);
    h.draft_v_type = text(i.draft_v_type);
    h.k_rotation = i.k_rotation;
    h.v_rotation = i.v_rotation;
    h.draft_k_rotation = i.draft_k_rotation;
    h.draft_v_rotation = i.draft_v_rotation;
    h.rope_theta = i.rope_theta;
    h.rope_dims = i.rope_dims;
    h.layer_begin = i.layer_begin;
    h.layer_end = i.layer_end;
    check(i.n_capture_layers >= 0 && i.n_capture_layers <= static_cast<int32_t>(max_layers) && i.n_draft_layers >= 0 &&
              i.n_draft_layers <= static_cast<int32_t>(max_layers),
          Status::format, "%d captured and %d draft layers, want 0 to 64", i.n_capture_layers, i.n_draft_layers);
    h.capture_layers.assign(i.capture_layers, i.capture_layers + i.n_capture_layers);
    h.fa_window = i.fa_window;
    h.position = i.position;
    h.kv_begin = i.kv_begin;
    h.features = {i.feature_begin, i.feature_end};
    h.draft_begin = i.draft_begin;
    h.draft_cursor = i.draft_cursor;
    h.draft_high = i.draft_high;
    h.draft_held.assign(i.draft_held, i.draft_held + i.n_draft_layers);
    h.draft_rows.assign(i.draft_rows, i.draft_rows + i.n_draft_layers);
    return h;
}

} // namespace

void dflash_prefix_snapshot_options_init(dflash_prefix_snapshot_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
    }
}

dflash_status dflash_prefix_snapshot_take(dflash_prefix_snapshot ** out, dflash_target_cache * cache,
                                          dflash_draft_context * context,
                                          const dflash_prefix_snapshot_options * options, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        dflash_prefix_snapshot_options defaults;
        dflash_prefix_snapshot_options_init(&defaults);
        const dflash_prefix_snapshot_options o = read_options(options, defaults, sizeof(defaults), "options");
        check(o.features >= 0 && o.features <= 2, Status::invalid, "features %d, want 0 to 2", o.features);
        SnapshotOptions chosen;
        chosen.tokens = token_list(o.tokens, o.n_tokens);
        chosen.parent = parent_of(o.parent);
        chosen.features = static_cast<SnapshotFeatures>(o.features);
        chosen.on_device = o.on_device != 0;
        const Use<dflash_target_cache> use(cache);
        std::optional<Use<dflash_draft_context>> draft;
        if (context != nullptr) {
            draft.emplace(context);
        }
        check(!use->forward->poisoned(), Status::poisoned, "the cache was left unusable by an earlier failure");
        publish_snapshot(
            out, snapshot_target_cache(*use->cache, draft ? (*draft)->context.get() : nullptr, std::move(chosen)));
    });
}

dflash_status dflash_prefix_snapshot_take_thin(dflash_prefix_snapshot ** out, dflash_target_cache * cache,
                                               int64_t begin, int64_t end, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        const Use<dflash_target_cache> use(cache);
        check(!use->forward->poisoned(), Status::poisoned, "the cache was left unusable by an earlier failure");
        publish_snapshot(out, snapshot_target_cache_thin(*use->cache, begin, end));
    });
}

dflash_status dflash_prefix_snapshot_import(dflash_prefix_snapshot ** out, const dflash_target_model * model,
                                            const dflash_draft_model * draft, const dflash_prefix_snapshot * parent,
                                            const dflash_prefix_snapshot_info * info, const int32_t * tokens,
                                            int64_t n_tokens, const float * logits, int64_t n_logits,
                                            const void * const * data, const uint64_t * n_bytes, int64_t n_parts,
                                            dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        const auto target = borrow(model)->model;
        const auto drafter = draft != nullptr ? borrow(draft)->model : nullptr;
        const SnapshotHeader header = header_from(*required(info, "info"));
        check(n_logits == 0 || n_logits == target->config().n_vocab, Status::format, "%lld logits, the model has %d",
              static_cast<long long>(n_logits), target->config().n_vocab);
        check(n_tokens == 0 || n_tokens == header.position, Status::format, "%lld tokens of a snapshot at %lld",
              static_cast<long long>(n_tokens), static_cast<long long>(header.position));
        check(n_parts >= 0 && n_parts <= 4096, Status::format, "%lld parts", static_cast<long long>(n_parts));
        std::vector<float> last;
        if (n_logits > 0) {
            last.assign(required(logits, "logits"), logits + n_logits);
        }
        std::vector<const void *> from;
        std::vector<uint64_t> sizes;
        if (n_parts > 0) {
            from.assign(required(data, "data"), data + n_parts);
            sizes.assign(required(n_bytes, "n_bytes"), n_bytes + n_parts);
        }
        publish_snapshot(out, import_snapshot(header, target, drafter, parent_of(parent), token_list(tokens, n_tokens),
                                              std::move(last), from, sizes));
    });
}

void dflash_prefix_snapshot_free(dflash_prefix_snapshot * snapshot) {
    release(snapshot);
}

dflash_status dflash_prefix_snapshot_info_get(const dflash_prefix_snapshot * snapshot,
                                              dflash_prefix_snapshot_info * info, dflash_error * err) {
    return guard(err, [&] {
        dflash_prefix_snapshot_info & i = output(info, "info");
        const auto handle = borrow(snapshot);
        const PrefixSnapshot & s = *handle->snapshot;
        const SnapshotHeader & h = s.header();
        check(h.capture_layers.size() <= max_layers && h.draft_held.size() <= max_layers, Status::unsupported,
              "%zu captured and %zu draft layers, want at most 64", h.capture_layers.size(), h.draft_held.size());
        i.version = h.version;
        i.kind = static_cast<int32_t>(h.kind);
        copy_text(i.architecture, h.architecture);
        copy_text(i.target_digest, h.target_digest);
        copy_text(i.draft_digest, h.draft_digest);
        copy_text(i.token_digest, s.digest_of_tokens());
        copy_text(i.k_type, h.k_type);
        copy_text(i.v_type, h.v_type);
        copy_text(i.feature_type, h.feature_type);
        copy_text(i.draft_k_type, h.draft_k_type);
        copy_text(i.draft_v_type, h.draft_v_type);
        i.k_rotation = static_cast<int32_t>(h.k_rotation);
        i.v_rotation = static_cast<int32_t>(h.v_rotation);
        i.draft_k_rotation = static_cast<int32_t>(h.draft_k_rotation);
        i.draft_v_rotation = static_cast<int32_t>(h.draft_v_rotation);
        i.rope_theta = h.rope_theta;
        i.rope_dims = h.rope_dims;
        i.layer_begin = h.layer_begin;
        i.layer_end = h.layer_end;
        i.n_capture_layers = static_cast<int32_t>(h.capture_layers.size());
        i.n_draft_layers = static_cast<int32_t>(h.draft_held.size());
        std::copy(h.capture_layers.begin(), h.capture_layers.end(), i.capture_layers);
        i.on_device = s.on_device() ? 1 : 0;
        i.depth = s.depth();
        i.fa_window = h.fa_window;
        i.position = h.position;
        i.kv_begin = h.kv_begin;
        i.feature_begin = h.features.begin;
        i.feature_end = h.features.end;
        i.draft_begin = h.draft_begin;
        i.draft_cursor = h.draft_cursor;
        i.draft_high = h.draft_high;
        std::copy(h.draft_held.begin(), h.draft_held.end(), i.draft_held);
        std::copy(h.draft_rows.begin(), h.draft_rows.end(), i.draft_rows);
        i.n_tokens = static_cast<int64_t>(s.tokens().size());
        i.n_logits = static_cast<int64_t>(s.logits().size());
        i.n_parts = static_cast<int64_t>(s.parts().size());
        i.n_bytes = s.bytes();
        i.allocated_bytes = s.allocated_bytes();
    });
}

dflash_status dflash_prefix_snapshot_wait(const dflash_prefix_snapshot * snapshot, dflash_error * err) {
    return guard(err, [&] { borrow(snapshot)->snapshot->wait(); });
}

dflash_status dflash_prefix_snapshot_tokens(const dflash_prefix_snapshot * snapshot, int32_t * ids, int64_t capacity,
                                            int64_t * n, dflash_error * err) {
    return guard(err, [&] { copy_list(borrow(snapshot)->snapshot->tokens(), ids, capacity, n); });
}

dflash_status dflash_prefix_snapshot_logits(const dflash_prefix_snapshot * snapshot, float * logits, int64_t capacity,
                                            int64_t * n, dflash_error * err) {
    return guard(err, [&] { copy_list(borrow(snapshot)->snapshot->logits(), logits, capacity, n); });
}

dflash_status dflash_prefix_snapshot_part_at(const dflash_prefix_snapshot * snapshot, int64_t i,
                                             dflash_prefix_snapshot_part * part, dflash_error * err) {
    return guard(err, [&] {
        dflash_prefix_snapshot_part & out = output(part, "part");
        const auto handle = borrow(snapshot);
        const auto & parts = handle->snapshot->parts();
        check(i >= 0 && i < static_cast<int64_t>(parts.size()), Status::invalid, "part %lld, want 0 to %lld",
              static_cast<long long>(i), static_cast<long long>(parts.size()) - 1);
        const SnapshotPart & p = parts[static_cast<size_t>(i)];
        copy_text(out.name, p.name);
        copy_text(out.type, p.type_name());
        out.width = p.width;
        out.rows = p.rows;
        out.begin = p.begin;
        out.n_bytes = p.n_bytes;
    });
}

dflash_status dflash_prefix_snapshot_part_read(const dflash_prefix_snapshot * snapshot, int64_t i, void * buffer,
                                               uint64_t size, dflash_error * err) {
    return guard(err, [&] {
        const auto handle = borrow(snapshot);
        const auto & parts = handle->snapshot->parts();
        check(i >= 0 && i < static_cast<int64_t>(parts.size()), Status::invalid, "part %lld, want 0 to %lld",
              static_cast<long long>(i), static_cast<long long>(parts.size()) - 1);
        const SnapshotPart & p = parts[static_cast<size_t>(i)];
        check(size == p.n_bytes, Status::invalid, "buffer of %llu bytes, want %llu",
              static_cast<unsigned long long>(size), static_cast<unsigned long long>(p.n_bytes));
        if (size > 0) {
            handle->snapshot->read(p, required(buffer, "buffer"));
        }
    });
}

dflash_status dflash_prefix_snapshot_restore(const dflash_prefix_snapshot * snapshot, dflash_target_cache * cache,
                                             dflash_draft_context * context, dflash_error * err) {
    return guard(err, [&] {
        const auto source = borrow(snapshot);
        const Use<dflash_target_cache> use(cache);
        std::optional<Use<dflash_draft_context>> draft;
        if (context != nullptr) {
            draft.emplace(context);
        }
        use->forward->restore(*source->snapshot, draft ? (*draft)->context.get() : nullptr);
    });
}

dflash_status dflash_prefix_snapshot_restore_chain(const dflash_prefix_snapshot * thick,
                                                   const dflash_prefix_snapshot * const * thins, int64_t n_thins,
                                                   dflash_target_cache * cache, dflash_error * err) {
    return guard(err, [&] {
        check(n_thins >= 0 && n_thins <= 65536, Status::invalid, "%lld thin snapshots, want 0 to 65536",
              static_cast<long long>(n_thins));
        const auto base = thick != nullptr ? borrow(thick) : nullptr;
        std::vector<std::shared_ptr<dflash_prefix_snapshot>> held;
        std::vector<const PrefixSnapshot *> chain;
        for (int64_t i = 0; i < n_thins; ++i) {
            held.push_back(borrow(required(thins, "thins")[i]));
            chain.push_back(held.back()->snapshot.get());
        }
        const Use<dflash_target_cache> use(cache);
        check(!use->forward->poisoned() || base, Status::poisoned, "the cache was left unusable by an earlier failure");
        use->forward->restore_chain(base ? base->snapshot.get() : nullptr, chain);
    });
}
