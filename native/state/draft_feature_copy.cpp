#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "ggmlx/device_copy.hpp"
#include "state/draft_feature_mirror.hpp"

namespace dflash {
namespace {

void check_open(const DraftFeatureMirror & mirror) {
    check(mirror.is_open(), Status::invalid, "the feature mirror is closed");
}

void check_positions(const DraftFeatureMirror & mirror, int64_t start, int64_t n) {
    check_open(mirror);
    check(start >= 0, Status::invalid, "position %lld, want >= 0", static_cast<long long>(start));
    check(n >= 0, Status::invalid, "%lld rows, want >= 0", static_cast<long long>(n));
    check(start <= std::numeric_limits<int64_t>::max() - n, Status::invalid, "position %lld + %lld rows overflows",
          static_cast<long long>(start), static_cast<long long>(n));
    check(n <= mirror.capacity(), Status::capacity, "%lld rows, the feature mirror has %lld", static_cast<long long>(n),
          static_cast<long long>(mirror.capacity()));
}

void check_held(const DraftFeatureMirror & mirror, int64_t start, int64_t n) {
    check_positions(mirror, start, n);
    if (!mirror.holds(start, n)) {
        const PositionRange have = mirror.valid_range();
        fail(Status::invalid, "positions [%lld, %lld) are not all in the feature mirror, its newest are [%lld, %lld)",
             static_cast<long long>(start), static_cast<long long>(start + n), static_cast<long long>(have.begin),
             static_cast<long long>(have.end));
    }
}

void check_layer(const DraftFeatureMirror & mirror, int32_t layer) {
    check(layer >= 0 && layer < mirror.n_target_layers(), Status::invalid, "captured layer %d, want 0 to %d", layer,
          mirror.n_target_layers() - 1);
}

/// A 2-D tensor with memory on that device, outside the mirror's ring, with rows of `width` values.
void check_tensor(const DraftFeatureMirror & mirror, const ggml_tensor * tensor, const std::shared_ptr<Device> & device,
                  int64_t width, const char * what) {
    check(tensor != nullptr, Status::invalid, "no %s", what);
    check(device != nullptr, Status::invalid, "no device for the %s", what);
    const ggml_backend_buffer_t buffer = tensor_buffer(tensor);
    check(buffer != nullptr && tensor->data != nullptr, Status::invalid, "the %s has no memory", what);
    check(buffer != tensor_buffer(mirror.target_feat()), Status::invalid, "the %s is the feature mirror itself", what);
    check(tensor->ne[0] == width, Status::mismatch, "the %s has rows of %lld values, want %lld", what,
          static_cast<long long>(tensor->ne[0]), static_cast<long long>(width));
    check(tensor->ne[2] == 1 && tensor->ne[3] == 1, Status::mismatch, "the %s has more than two dimensions", what);
    check(tensor->ne[1] <= std::numeric_limits<int32_t>::max(), Status::mismatch, "the %s has %lld rows, want < 2^31",
          what, static_cast<long long>(tensor->ne[1]));
    check(spans_devices(tensor) || ggml_backend_supports_buft(device->backend(), ggml_backend_buffer_get_type(buffer)),
          Status::mismatch, "the %s lies in %s, which device %s cannot use", what, ggml_backend_buffer_name(buffer),
          device->name().c_str());
}

void check_readable(const DraftFeatureMirror & mirror, const ggml_tensor * tensor,
                    const std::shared_ptr<Device> & device, int64_t width, const char * what) {
    check_tensor(mirror, tensor, device, width, what);
    check(tensor->type == GGML_TYPE_F32 || tensor->type == GGML_TYPE_F16 || tensor->type == GGML_TYPE_BF16,
          Status::unsupported, "the %s is %s, want f32, f16 or bf16", what, ggml_type_name(tensor->type));
    const size_t size = ggml_type_size(tensor->type);
    check(tensor->nb[0] == size && tensor->nb[1] >= size * static_cast<size_t>(width) && tensor->nb[1] % size == 0,
          Status::mismatch, "the values of a row of the %s are not adjacent", what);
    check(!spans_devices(tensor) || ggml_is_contiguous(tensor), Status::mismatch,
          "the %s spans devices and its rows are not adjacent", what);
}

void check_source(const FeatureSource & source, const DraftFeatureMirror & mirror) {
    check_open(mirror);
    check_readable(mirror, source.rows, source.device, mirror.width(), "feature source");
    check(source.capacity >= 1 && source.capacity <= source.rows->ne[1], Status::invalid,
          "feature source capacity %lld, its tensor has %lld rows", static_cast<long long>(source.capacity),
          static_cast<long long>(source.rows->ne[1]));
    check(source.valid.begin >= 0 && source.valid.begin <= source.valid.end && source.valid.size() <= source.capacity,
          Status::invalid, "feature source positions [%lld, %lld) in %lld rows",
          static_cast<long long>(source.valid.begin), static_cast<long long>(source.valid.end),
          static_cast<long long>(source.capacity));
}

} // namespace

int64_t draft_feature_mirror_sync_range(const FeatureSource & source, DraftFeatureMirror & mirror, int64_t start_pos,
                                        int64_t n_tokens) {
    check_source(source, mirror);
    check_positions(mirror, start_pos, n_tokens);
    check(n_tokens <= source.capacity, Status::capacity, "%lld rows, the feature source has %lld",
          static_cast<long long>(n_tokens), static_cast<long long>(source.capacity));
    if (n_tokens == 0) {
        return 0;
    }
    check(source.valid.contains(start_pos, start_pos + n_tokens), Status::invalid,
          "positions [%lld, %lld) are not all in the feature source, it has [%lld, %lld)",
          static_cast<long long>(start_pos), static_cast<long long>(start_pos + n_tokens),
          static_cast<long long>(source.valid.begin), static_cast<long long>(source.valid.end));
    const DeviceLocks guard(*source.device, *mirror.device_);
    const int64_t n_rows = mirror.local().rows_per_pass(mirror.width(), n_tokens);
    const auto pass = mirror.from_tensor(source.rows, {source.capacity, start_pos}, source.device, mirror.target_feat_,
                                         {mirror.capacity(), start_pos}, n_rows);
    mirror.write_all(0, mirror.n_target_layers(), start_pos, n_tokens, n_rows, pass);
    return n_tokens;
}

int64_t draft_feature_mirror_sync_tail(const FeatureSource & source, DraftFeatureMirror & mirror, int64_t committed) {
    check_source(source, mirror);
    check(committed >= 0, Status::invalid, "%lld committed tokens, want >= 0", static_cast<long long>(committed));
    if (committed == 0) {
        return 0;
    }
    check(source.valid.contains(committed - 1, committed), Status::invalid,
          "position %lld is not in the feature source, it has [%lld, %lld)", static_cast<long long>(committed - 1),
          static_cast<long long>(source.valid.begin), static_cast<long long>(source.valid.end));
    const int64_t most = std::min(mirror.capacity(), source.capacity);
    const int64_t start = std::max(source.valid.begin, committed - most);
    return draft_feature_mirror_sync_range(source, mirror, start, committed - start);
}

int64_t copy_capture_slice_to_draft_ring(DraftFeatureMirror & mirror, int32_t capture_idx, const ggml_tensor * act_out,
                                         const std::shared_ptr<Device> & src_device, int64_t chunk_start,
                                         int64_t start_pos, int64_t n_tokens) {
    check_positions(mirror, start_pos, n_tokens);
    check_layer(mirror, capture_idx);
    check_readable(mirror, act_out, src_device, mirror.hidden_size(), "captured layer output");
    check(chunk_start >= 0 && chunk_start <= act_out->ne[1] && n_tokens <= act_out->ne[1] - chunk_start,
          Status::mismatch, "rows [%lld, +%lld) of a captured layer output of %lld rows",
          static_cast<long long>(chunk_start), static_cast<long long>(n_tokens),
          static_cast<long long>(act_out->ne[1]));
    if (n_tokens == 0) {
        return 0;
    }
    const DeviceLocks guard(*src_device, *mirror.device_);
    ggml_tensor * slice = mirror.slices_[static_cast<size_t>(capture_idx)];
    const int64_t n_rows = mirror.local().rows_per_pass(mirror.hidden_size(), n_tokens);
    const auto pass = mirror.from_tensor(act_out, {act_out->ne[1], chunk_start}, src_device, slice,
                                         {mirror.capacity(), start_pos}, n_rows);
    mirror.write_all(capture_idx, 1, start_pos, n_tokens, n_rows, pass);
    return n_tokens;
}

int64_t copy_host_capture_slice_to_draft_ring(DraftFeatureMirror & mirror, int32_t capture_idx, int64_t start_pos,
                                              int64_t n_tokens, const float * host, uint64_t host_elems) {
    check_positions(mirror, start_pos, n_tokens);
    check_layer(mirror, capture_idx);
    const uint64_t want = static_cast<uint64_t>(n_tokens) * static_cast<uint64_t>(mirror.hidden_size());
    check(host_elems == want, Status::mismatch, "%llu values for %lld rows of %d",
          static_cast<unsigned long long>(host_elems), static_cast<long long>(n_tokens), mirror.hidden_size());
    if (n_tokens == 0) {
        return 0;
    }
    check(host != nullptr, Status::invalid, "no values for %lld rows", static_cast<long long>(n_tokens));
    const auto guard = mirror.device_->lock();
    ggml_tensor * slice = mirror.slices_[static_cast<size_t>(capture_idx)];
    const int64_t n_rows = mirror.local().rows_per_pass(mirror.hidden_size(), n_tokens);
    const auto pass = mirror.from_host(host, slice, {mirror.capacity(), start_pos}, n_rows);
    mirror.write_all(capture_idx, 1, start_pos, n_tokens, n_rows, pass);
    return n_tokens;
}

int64_t copy_feature_ring_range_to_tensor(DraftFeatureMirror & mirror, ggml_tensor * dst,
                                          const std::shared_ptr<Device> & dst_device, int64_t start_pos,
                                          int64_t n_tokens) {
    check_positions(mirror, start_pos, n_tokens);
    check_tensor(mirror, dst, dst_device, mirror.width(), "feature destination");
    check(!spans_devices(dst), Status::unsupported, "the feature destination spans devices");
    check(dst->type == GGML_TYPE_F32, Status::mismatch, "the feature destination is %s, want f32",
          ggml_type_name(dst->type));
    check(ggml_is_contiguous(dst), Status::mismatch, "the feature destination is not contiguous");
    check(n_tokens <= dst->ne[1], Status::mismatch, "the feature destination has %lld rows, want %lld",
          static_cast<long long>(dst->ne[1]), static_cast<long long>(n_tokens));
    if (n_tokens == 0) {
        return 0;
    }
    check_held(mirror, start_pos, n_tokens);
    const DeviceLocks guard(*dst_device, *mirror.device_);
    dst_device->synchronize(); // what is queued there may still read dst
    mirror.read_all(start_pos, n_tokens, [&](DraftFeatureTransfer::Pass & pass, int64_t first) {
        copy_between_devices(*mirror.device_, mirror.local().staging(), 0, *dst_device, dst,
                             static_cast<uint64_t>(first) * dst->nb[1], ggml_nbytes(pass.staged));
    });
    return n_tokens;
}

int64_t copy_feature_ring_range_to_host_f32(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            float * out, uint64_t out_elems) {
    check_positions(mirror, start_pos, n_tokens);
    check(out_elems == static_cast<uint64_t>(n_tokens) * static_cast<uint64_t>(mirror.width()), Status::mismatch,
          "%llu values for %lld rows of %lld", static_cast<unsigned long long>(out_elems),
          static_cast<long long>(n_tokens), static_cast<long long>(mirror.width()));
    if (n_tokens == 0) {
        return 0;
    }
    check(out != nullptr, Status::invalid, "no memory for %lld rows", static_cast<long long>(n_tokens));
    check_held(mirror, start_pos, n_tokens);
    const auto guard = mirror.device_->lock();
    mirror.read_all(start_pos, n_tokens, [&](DraftFeatureTransfer::Pass & pass, int64_t first) {
        pass.graph.read(pass.staged, out + first * mirror.width(), 0, ggml_nbytes(pass.staged));
    });
    return n_tokens;
}

int64_t copy_feature_ring_range_to_host_f32(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            std::vector<float> & out) {
    check_held(mirror, start_pos, n_tokens); // before `out` changes
    out.resize(static_cast<size_t>(n_tokens * mirror.width()));
    return copy_feature_ring_range_to_host_f32(mirror, start_pos, n_tokens, out.data(), out.size());
}

int64_t copy_host_f32_to_feature_ring_range(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            const float * src, uint64_t src_elems) {
    check_positions(mirror, start_pos, n_tokens);
    check(src_elems >= static_cast<uint64_t>(n_tokens) * static_cast<uint64_t>(mirror.width()), Status::mismatch,
          "%llu values for %lld rows of %lld", static_cast<unsigned long long>(src_elems),
          static_cast<long long>(n_tokens), static_cast<long long>(mirror.width()));
    if (n_tokens == 0) {
        return 0;
    }
    check(src != nullptr, Status::invalid, "no values for %lld rows", static_cast<long long>(n_tokens));
    const auto guard = mirror.device_->lock();
    const int64_t n_rows = mirror.local().rows_per_pass(mirror.width(), n_tokens);
    const auto pass = mirror.from_host(src, mirror.target_feat_, {mirror.capacity(), start_pos}, n_rows);
    mirror.write_all(0, mirror.n_target_layers(), start_pos, n_tokens, n_rows, pass);
    return n_tokens;
}

int64_t copy_host_f32_to_feature_ring_range(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            const std::vector<float> & src) {
    return copy_host_f32_to_feature_ring_range(mirror, start_pos, n_tokens, src.data(), src.size());
}

} // namespace dflash
