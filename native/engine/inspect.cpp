#include "engine/inspect.hpp"

#include <cstring>

#include "base/error.hpp"
#include "base/ring_span.hpp"
#include "ggmlx/tensors.hpp"

namespace dflash {
namespace {

/// Appends n rows from `row` on as float32.
void append_rows(const ggml_tensor * t, int64_t row, int64_t n, std::vector<float> & out) {
    const size_t row_bytes = t->nb[1];
    std::vector<uint8_t> bytes(static_cast<size_t>(n) * row_bytes);
    tensor_read(t, bytes.data(), static_cast<size_t>(row) * row_bytes, bytes.size());
    const size_t width = static_cast<size_t>(t->ne[0]);
    const size_t at = out.size();
    out.resize(at + static_cast<size_t>(n) * width);
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        float * to = out.data() + at + i * width;
        if (t->type == GGML_TYPE_F32) {
            std::memcpy(to, bytes.data() + i * row_bytes, width * sizeof(float));
        } else {
            ggml_get_type_traits(t->type)->to_float(bytes.data() + i * row_bytes, to, static_cast<int64_t>(width));
        }
    }
}

void check_range(int64_t begin, int64_t end, int64_t first, int64_t last, const char * what) {
    check(begin >= first && begin <= end && end <= last, Status::invalid,
          "%s of positions [%lld, %lld), there are [%lld, %lld)", what, static_cast<long long>(begin),
          static_cast<long long>(end), static_cast<long long>(first), static_cast<long long>(last));
}

} // namespace

std::vector<float> read_features(const TargetCache & cache, int64_t begin, int64_t end) {
    check(cache.target_feat() != nullptr, Status::invalid, "this cache captures no features");
    const PositionRange have = cache.feature_range();
    check_range(begin, end, have.begin, have.end, "features");
    std::vector<float> out;
    const auto guard = cache.model().device()->lock();
    cache.model().device()->synchronize();
    for (const RingRun & run : RingSpan(cache.feature_capacity(), begin, end - begin)) {
        append_rows(cache.target_feat(), run.row, run.count, out);
    }
    return out;
}

std::vector<float> read_cache_tensor(const TargetCache & cache, int32_t layer, const std::string & what, int64_t begin,
                                     int64_t end) {
    check(layer >= cache.layer_begin() && layer < cache.layer_end(), Status::invalid, "layer %d, want %d to %d", layer,
          cache.layer_begin(), cache.layer_end() - 1);
    const ggml_tensor * tensor = nullptr;
    bool rows = false;
    if (what == "k" || what == "v") {
        tensor = what == "k" ? cache.attn_k(layer) : cache.attn_v(layer);
        rows = true;
    } else if (what == "recurrent" || what == "conv") {
        tensor = what == "recurrent" ? cache.ssm_state(layer) : cache.conv_state(layer);
    } else {
        fail(Status::invalid, "\"%s\", want k, v, recurrent or conv", what.c_str());
    }
    check(tensor != nullptr, Status::invalid, "layer %d has no \"%s\"", layer, what.c_str());
    std::vector<float> out;
    const auto guard = cache.model().device()->lock();
    cache.model().device()->synchronize();
    if (rows) {
        check_range(begin, end, 0, cache.position(), what.c_str());
        append_rows(tensor, begin, end - begin, out);
    } else {
        out.resize(static_cast<size_t>(ggml_nelements(tensor)));
        tensor_read(tensor, out.data(), 0, out.size() * sizeof(float));
    }
    return out;
}

std::vector<float> read_draft_rows(const DraftContext & context, int32_t layer, const std::string & what, int64_t begin,
                                   int64_t end) {
    const int32_t n_layer = context.model().config().n_layer;
    check(layer >= 0 && layer < n_layer, Status::invalid, "layer %d, want 0 to %d", layer, n_layer - 1);
    check(what == "k" || what == "v", Status::invalid, "\"%s\", want k or v", what.c_str());
    check_range(begin, end, context.layer_begin(layer), context.cursor(), what.c_str());
    const ggml_tensor * tensor = what == "k" ? context.k(layer) : context.v(layer);
    std::vector<float> out;
    const auto guard = context.model().device()->lock();
    context.model().device()->synchronize();
    for (const RingRun & run : RingSpan(context.ring_capacity(layer), begin, end - begin)) {
        append_rows(tensor, context.ring_offset() + run.row, run.count, out);
    }
    return out;
}

} // namespace dflash
