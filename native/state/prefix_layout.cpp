#include "state/prefix_layout.hpp"

#include <algorithm>
#include <iterator>

#include "base/error.hpp"
#include "gguf/content_digest.hpp"
#include "state/kv_rotation.hpp"

namespace dflash {
namespace {

constexpr enum ggml_type known_types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                                          GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0};
constexpr int64_t max_position = int64_t{1} << 24;

enum ggml_type type_of(const std::string & name, const char * field) {
    return type_from_name(name, field, known_types, std::size(known_types));
}

std::string text_of(const std::string & value) {
    return value.empty() ? "none" : value;
}

std::string text_of(int64_t value) {
    return std::to_string(value);
}

std::string text_of(int32_t value) {
    return std::to_string(value);
}

std::string text_of(float value) {
    return format("%g", static_cast<double>(value));
}

std::string text_of(const std::vector<int32_t> & values) {
    std::string out;
    for (const int32_t value : values) {
        out += (out.empty() ? "" : ",") + std::to_string(value);
    }
    return "[" + out + "]";
}

template <class T> void check_equal(const char * field, const T & x, const char * a, const T & y, const char * b) {
    check(x == y, Status::mismatch, "%s: %s has %s, %s has %s", field, a, text_of(x).c_str(), b, text_of(y).c_str());
}

int64_t rotation_of(const ggml_tensor * matrix) {
    return matrix != nullptr ? matrix->ne[0] : 0;
}

void check_ranges(const SnapshotHeader & h, int32_t n_draft_layer) {
    const auto say = [](int64_t v) { return static_cast<long long>(v); };
    check(h.position >= 1 && h.position <= max_position, Status::format, "position %lld, want 1 to %lld",
          say(h.position), say(max_position));
    check(h.kv_begin >= 0 && h.kv_begin < h.position && (h.kind != SnapshotKind::full || h.kv_begin == 0),
          Status::format, "K/V rows from %lld of a snapshot at %lld", say(h.kv_begin), say(h.position));
    check(h.features.begin >= 0 && h.features.begin <= h.features.end && h.features.end <= h.position &&
              (h.features.size() == 0 || h.features.end == h.position),
          Status::format, "feature rows [%lld, %lld) of a snapshot at %lld", say(h.features.begin), say(h.features.end),
          say(h.position));
    if (!h.has_draft()) {
        check(h.draft_held.empty() && h.draft_rows.empty(), Status::format, "draft rows without a drafter");
        return;
    }
    check(h.draft_held.size() == static_cast<size_t>(n_draft_layer) && h.draft_rows.size() == h.draft_held.size(),
          Status::format, "draft rows of %zu layers, want %d", h.draft_rows.size(), n_draft_layer);
    check(0 <= h.draft_begin && h.draft_begin <= h.draft_cursor && h.draft_cursor <= h.position &&
              h.draft_cursor <= h.draft_high && h.draft_high <= max_position,
          Status::format, "draft rows [%lld, %lld) of a snapshot at %lld", say(h.draft_begin), say(h.draft_cursor),
          say(h.position));
    for (size_t i = 0; i < h.draft_rows.size(); ++i) {
        const bool ordered =
            h.draft_begin <= h.draft_held[i] && h.draft_held[i] <= h.draft_rows[i] && h.draft_rows[i] <= h.draft_cursor;
        check(ordered && (h.kind == SnapshotKind::delta || h.draft_held[i] == h.draft_rows[i]), Status::format,
              "draft rows from %lld of %lld in layer %zu", say(h.draft_rows[i]), say(h.draft_held[i]), i);
    }
}

} // namespace

SnapshotHeader header_of(const TargetCache & cache, const DraftContext * context) {
    const TargetConfig & c = cache.model().config();
    SnapshotHeader h;
    h.architecture = c.architecture;
    h.target_digest = cache.model().digest();
    h.k_type = cache.options().k_type;
    h.v_type = cache.options().v_type;
    h.k_rotation = rotation_of(cache.k_rotation());
    h.v_rotation = rotation_of(cache.v_rotation());
    h.rope_theta = c.rope.theta;
    h.rope_dims = c.rope.n_dims;
    h.fa_window = cache.options().fa_window;
    h.layer_begin = cache.layer_begin();
    h.layer_end = cache.layer_end();
    h.capture_layers = cache.options().capture_layers;
    h.feature_type = h.capture_layers.empty() ? "" : cache.options().feature_type;
    if (context != nullptr) {
        h.draft_digest = context->model().digest();
        h.draft_k_type = context->options().k_type;
        h.draft_v_type = context->options().v_type;
        h.draft_k_rotation = rotation_of(context->k_rotation());
        h.draft_v_rotation = rotation_of(context->v_rotation());
    }
    return h;
}

std::vector<SnapshotPart> snapshot_parts(const SnapshotHeader & h, const TargetModel & target,
                                         const DraftModel * draft) {
    const TargetConfig & c = target.config();
    check(h.version == SnapshotHeader::current_version, Status::mismatch, "snapshot version %d, this one reads %d",
          h.version, SnapshotHeader::current_version);
    check(h.kind == SnapshotKind::full || h.kind == SnapshotKind::delta || h.kind == SnapshotKind::thin, Status::format,
          "snapshot kind %d", static_cast<int>(h.kind));
    check_equal("model", h.target_digest, "the snapshot", target.digest(), "the model");
    check_equal("architecture", h.architecture, "the snapshot", c.architecture, "the model");
    check_equal("rope base", h.rope_theta, "the snapshot", c.rope.theta, "the model");
    check_equal("rope dimensions", h.rope_dims, "the snapshot", c.rope.n_dims, "the model");
    check(h.layer_begin >= target.layer_begin() && h.layer_begin < h.layer_end && h.layer_end <= target.layer_end(),
          Status::mismatch, "layers [%d, %d), the model has [%d, %d) loaded", h.layer_begin, h.layer_end,
          target.layer_begin(), target.layer_end());
    check_capture_layers(h.capture_layers, c.n_layer);
    if (h.has_draft()) {
        check(draft != nullptr, Status::mismatch, "drafter: the snapshot has state of %s, there is no drafter",
              h.draft_digest.c_str());
        check_equal("drafter", h.draft_digest, "the snapshot", draft->digest(), "the drafter");
    }
    check_ranges(h, h.has_draft() ? draft->config().n_layer : 0);

    std::vector<SnapshotPart> parts;
    const auto add = [&](const std::string & name, SnapshotPart::Source source, int32_t layer, enum ggml_type type,
                         int64_t width, int64_t rows, int64_t begin) {
        check(width % ggml_blck_size(type) == 0, Status::mismatch, "%s: rows of %lld values do not fit type %s",
              name.c_str(), static_cast<long long>(width), ggml_type_name(type));
        SnapshotPart part;
        part.name = name;
        part.source = source;
        part.layer = layer;
        part.type = type;
        part.width = width;
        part.rows = rows;
        part.begin = begin;
        part.offset = parts.empty() ? 0 : parts.back().offset + ((parts.back().n_bytes + 63) & ~uint64_t{63});
        part.n_bytes = static_cast<uint64_t>(rows) * ggml_row_size(type, width);
        parts.push_back(std::move(part));
    };
    const enum ggml_type k = type_of(h.k_type, "k_type");
    const enum ggml_type v = type_of(h.v_type, "v_type");
    check_equal("rotation of K", h.k_rotation, "the snapshot", rotation_size(k, c.head_dim), "this version");
    check_equal("rotation of V", h.v_rotation, "the snapshot", rotation_size(v, c.head_dim), "this version");
    const int64_t kv_width = int64_t{1} * c.head_dim * c.n_head_kv;
    const std::string prefix = h.kind == SnapshotKind::thin ? "snap_thin_" : "snap_cache_";
    using Source = SnapshotPart::Source;
    for (int32_t i = h.layer_begin; i < h.layer_end; ++i) {
        const std::string suffix = std::to_string(i);
        if (!c.recurrent[static_cast<size_t>(i)]) {
            add(prefix + "k_" + suffix, Source::k, i, k, kv_width, h.position - h.kv_begin, h.kv_begin);
            add(prefix + "v_" + suffix, Source::v, i, v, kv_width, h.position - h.kv_begin, h.kv_begin);
        } else if (h.kind != SnapshotKind::thin) {
            add("snap_ssm_state_" + suffix, Source::recurrent, i, GGML_TYPE_F32, c.ssm_d_state,
                int64_t{1} * c.ssm_d_state * c.ssm_dt_rank, 0);
            add("snap_conv_state_" + suffix, Source::conv, i, GGML_TYPE_F32, c.conv_channels(), c.ssm_d_conv - 1, 0);
        }
    }
    if (h.features.size() > 0) {
        check(!h.capture_layers.empty(), Status::format, "feature rows without captured layers");
        add("snap_target_feat", Source::features, 0, type_of(h.feature_type, "feature_type"),
            static_cast<int64_t>(h.capture_layers.size()) * c.n_embd, h.features.size(), h.features.begin);
    }
    if (h.has_draft()) {
        const DraftConfig & d = draft->config();
        const int64_t width = int64_t{1} * d.head_dim * d.n_head_kv;
        for (int32_t i = 0; i < d.n_layer; ++i) {
            const int64_t begin = h.draft_rows[static_cast<size_t>(i)];
            const std::string suffix = std::to_string(i);
            add("snap_draft_k_" + suffix, Source::draft_k, i, type_of(h.draft_k_type, "draft k_type"), width,
                h.draft_cursor - begin, begin);
            add("snap_draft_v_" + suffix, Source::draft_v, i, type_of(h.draft_v_type, "draft v_type"), width,
                h.draft_cursor - begin, begin);
        }
    }
    return parts;
}

uint64_t parts_bytes(const std::vector<SnapshotPart> & parts) {
    return parts.empty() ? 0 : parts.back().offset + parts.back().n_bytes;
}

void check_same_target(const SnapshotHeader & x, const char * a, const SnapshotHeader & y, const char * b) {
    check_equal("architecture", x.architecture, a, y.architecture, b);
    check_equal("model", x.target_digest, a, y.target_digest, b);
    check_equal("rope base", x.rope_theta, a, y.rope_theta, b);
    check_equal("rope dimensions", x.rope_dims, a, y.rope_dims, b);
    check_equal("K type", x.k_type, a, y.k_type, b);
    check_equal("V type", x.v_type, a, y.v_type, b);
    check_equal("rotation of K", x.k_rotation, a, y.k_rotation, b);
    check_equal("rotation of V", x.v_rotation, a, y.v_rotation, b);
    check_equal("attention window", x.fa_window, a, y.fa_window, b);
    check_equal("first layer", x.layer_begin, a, y.layer_begin, b);
    check_equal("layers up to", x.layer_end, a, y.layer_end, b);
    check_equal("captured layers", x.capture_layers, a, y.capture_layers, b);
    check_equal("feature type", x.feature_type, a, y.feature_type, b);
}

void check_same_drafter(const SnapshotHeader & x, const char * a, const SnapshotHeader & y, const char * b) {
    check_equal("drafter", x.draft_digest, a, y.draft_digest, b);
    check_equal("draft K type", x.draft_k_type, a, y.draft_k_type, b);
    check_equal("draft V type", x.draft_v_type, a, y.draft_v_type, b);
    check_equal("rotation of draft K", x.draft_k_rotation, a, y.draft_k_rotation, b);
    check_equal("rotation of draft V", x.draft_v_rotation, a, y.draft_v_rotation, b);
}

std::string token_digest(const std::vector<int32_t> & tokens) {
    ContentDigest digest;
    for (const int32_t token : tokens) {
        const auto value = static_cast<uint32_t>(token);
        const uint8_t bytes[4] = {static_cast<uint8_t>(value), static_cast<uint8_t>(value >> 8),
                                  static_cast<uint8_t>(value >> 16), static_cast<uint8_t>(value >> 24)};
        digest.add(bytes, sizeof(bytes));
    }
    return digest.hex();
}

ggml_tensor * tensor_of(const SnapshotPart & part, const TargetCache & cache, const DraftContext * context) {
    switch (part.source) {
    case SnapshotPart::Source::k:
        return cache.attn_k(part.layer);
    case SnapshotPart::Source::v:
        return cache.attn_v(part.layer);
    case SnapshotPart::Source::recurrent:
        return cache.ssm_state(part.layer);
    case SnapshotPart::Source::conv:
        return cache.conv_state(part.layer);
    case SnapshotPart::Source::features:
        return cache.target_feat();
    case SnapshotPart::Source::draft_k:
        return context->k(part.layer);
    case SnapshotPart::Source::draft_v:
        return context->v(part.layer);
    }
    fail(Status::internal, "a part without a tensor");
}

} // namespace dflash
