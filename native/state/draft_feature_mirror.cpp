#include "state/draft_feature_mirror.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/ring_span.hpp"
#include "ggmlx/device_copy.hpp"

namespace dflash {
namespace {

constexpr enum ggml_type mirror_types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                                           GGML_TYPE_Q4_0};

RingRows from_row(RingRows rows, int64_t first) {
    return {rows.capacity, rows.first + first};
}

void to_f32(enum ggml_type type, const uint8_t * source, float * values, int64_t n) {
    switch (type) {
    case GGML_TYPE_F16:
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t *>(source), values, n);
        return;
    case GGML_TYPE_BF16:
        ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t *>(source), values, n);
        return;
    default:
        std::copy_n(reinterpret_cast<const float *>(source), n, values);
    }
}

void check_options(const DraftFeatureMirrorOptions & o) {
    check(o.capacity >= 1 && o.capacity <= (int64_t{1} << 24), Status::invalid, "capacity %lld, want 1 to %lld",
          static_cast<long long>(o.capacity), static_cast<long long>(int64_t{1} << 24));
    check(o.n_target_layers >= 1 && o.n_target_layers <= 256, Status::invalid, "n_target_layers %d, want 1 to 256",
          o.n_target_layers);
    check(o.hidden_size >= 1 && o.hidden_size <= (1 << 20), Status::invalid, "hidden_size %d, want 1 to %d",
          o.hidden_size, 1 << 20);
    check(o.transfer_bytes >= 1 && o.transfer_bytes <= (uint64_t{1} << 30), Status::invalid,
          "transfer_bytes %llu, want 1 to %llu", static_cast<unsigned long long>(o.transfer_bytes),
          static_cast<unsigned long long>(uint64_t{1} << 30));
    const enum ggml_type type = feature_type_from_name(o.type);
    check(check_feature_width_compatible(type, o.hidden_size), Status::unsupported,
          "features of type %s are stored in blocks of %lld values, hidden_size is %d", o.type.c_str(),
          static_cast<long long>(ggml_blck_size(type)), o.hidden_size);
}

/// Values of staging memory: what transfer_bytes holds, but no more than the ring and no less than a row.
int64_t staging_values(const DraftFeatureMirrorOptions & o) {
    const int64_t width = int64_t{1} * o.n_target_layers * o.hidden_size;
    const int64_t rows = static_cast<int64_t>(o.transfer_bytes / sizeof(float)) / width;
    return width * std::clamp<int64_t>(rows, 1, o.capacity);
}

} // namespace

enum ggml_type feature_type_from_name(const std::string & name) {
    return type_from_name(name, "feature type", mirror_types, std::size(mirror_types));
}

bool check_feature_width_compatible(enum ggml_type type, int64_t width) {
    if (type < 0 || type >= GGML_TYPE_COUNT) {
        return false;
    }
    const int64_t block = ggml_blck_size(type); // 0 for types that ggml has retired
    return block > 0 && width > 0 && width % block == 0;
}

std::unique_ptr<DraftFeatureMirror> DraftFeatureMirror::create(std::shared_ptr<Device> device,
                                                               const DraftFeatureMirrorOptions & options) {
    auto mirror = std::make_unique<DraftFeatureMirror>();
    draft_feature_mirror_init(*mirror, std::move(device), options);
    return mirror;
}

void draft_feature_mirror_init(DraftFeatureMirror & mirror, std::shared_ptr<Device> device,
                               const DraftFeatureMirrorOptions & options) {
    check(device != nullptr, Status::invalid, "a feature mirror needs a device");
    check_options(options);
    mirror.close();
    try {
        mirror.device_ = std::move(device);
        mirror.options_ = options;
        mirror.type_ = feature_type_from_name(options.type);
        mirror.memory_ =
            std::make_unique<TensorGroup>(mirror.device_, static_cast<size_t>(options.n_target_layers) + 1);
        ggml_tensor * ring =
            mirror.memory_->add(mirror.type_, "draft_feature_mirror", mirror.width(), options.capacity);
        for (int32_t layer = 0; layer < options.n_target_layers; ++layer) {
            mirror.slices_.push_back(
                ggml_view_2d(mirror.memory_->ctx(), ring, options.hidden_size, options.capacity, ring->nb[1],
                             ggml_row_size(mirror.type_, options.hidden_size) * static_cast<size_t>(layer)));
        }
        mirror.memory_->allocate("feature mirror");
        check(!spans_devices(ring), Status::unsupported, "a feature mirror lives on one device, %s is several",
              mirror.device_->name().c_str());
        mirror.record_ = DraftFeatureRecord(options.capacity, options.n_target_layers);
        mirror.transfers_.push_back(std::make_unique<DraftFeatureTransfer>(mirror.device_, staging_values(options)));
        mirror.target_feat_ = ring;
    } catch (...) {
        mirror.close();
        throw;
    }
}

void draft_feature_mirror_free(DraftFeatureMirror & mirror) {
    mirror.close();
}

void DraftFeatureMirror::close() {
    transfers_.clear(); // their graphs wait for the devices
    if (device_ != nullptr) {
        const auto guard = device_->lock();
        device_->synchronize();
        memory_.reset();
    }
    target_feat_ = nullptr;
    slices_.clear();
    record_ = DraftFeatureRecord();
    type_ = GGML_TYPE_F32;
    options_ = DraftFeatureMirrorOptions();
    device_.reset();
}

uint64_t DraftFeatureMirror::staging_bytes() const {
    uint64_t bytes = 0;
    for (const auto & transfer : transfers_) {
        bytes += transfer->bytes();
    }
    return bytes;
}

void DraftFeatureMirror::rewind(int64_t position) {
    check(position >= 0, Status::invalid, "position %lld, want >= 0", static_cast<long long>(position));
    record_.drop_from(position);
}

bool draft_feature_mirror_can_view(const DraftFeatureMirror & mirror, int64_t committed, int64_t ctx_len,
                                   int64_t & slot0) {
    if (!mirror.is_open() || mirror.type() != GGML_TYPE_F32 || ctx_len <= 0 || ctx_len > mirror.capacity() ||
        committed < ctx_len || !mirror.holds(committed - ctx_len, ctx_len)) {
        return false;
    }
    const RingRun first = *RingSpan(mirror.capacity(), committed - ctx_len, ctx_len).begin();
    if (first.count < ctx_len) {
        return false;
    }
    slot0 = first.row;
    return true;
}

DraftFeatureTransfer & DraftFeatureMirror::transfer_on(const std::shared_ptr<Device> & device) {
    for (const auto & transfer : transfers_) {
        if (transfer->device() == device) {
            return *transfer;
        }
    }
    transfers_.push_back(std::make_unique<DraftFeatureTransfer>(device, staging_values(options_)));
    return *transfers_.back();
}

DraftFeatureMirror::Pass DraftFeatureMirror::from_tensor(const ggml_tensor * source, RingRows source_rows,
                                                         const std::shared_ptr<Device> & device, ggml_tensor * target,
                                                         RingRows target_rows, int64_t n_rows) {
    if (spans_devices(source)) {
        device->synchronize();
        return from_parts(source, source_rows, target, target_rows, n_rows);
    }
    if (device == device_) {
        DraftFeatureTransfer & here = local();
        DraftFeatureTransfer::Pass & pass = here.move(source, target, n_rows);
        return [=, &here, &pass](int64_t first) {
            here.run(pass, source, from_row(source_rows, first), from_row(target_rows, first));
        };
    }
    DraftFeatureTransfer & there = transfer_on(device);
    DraftFeatureTransfer & here = local();
    DraftFeatureTransfer::Pass & out = there.gather(source, n_rows);
    DraftFeatureTransfer::Pass & in = here.scatter(target, n_rows);
    return [=, &here, &there, &out, &in](int64_t first) {
        there.run(out, source, from_row(source_rows, first), {});
        copy_between_devices(*there.device(), there.staging(), 0, *here.device(), here.staging(), 0,
                             ggml_nbytes(in.staged));
        here.run(in, nullptr, {}, from_row(target_rows, first));
    };
}

DraftFeatureMirror::Pass DraftFeatureMirror::from_parts(const ggml_tensor * source, RingRows source_rows,
                                                        ggml_tensor * target, RingRows target_rows, int64_t n_rows) {
    DraftFeatureTransfer & here = local();
    DraftFeatureTransfer::Pass & in = here.scatter(target, n_rows);
    const uint64_t row_bytes = source->nb[1];
    std::vector<uint8_t> bytes(row_bytes * static_cast<size_t>(n_rows));
    std::vector<float> values(static_cast<size_t>(source->ne[0] * n_rows));
    return [=, &here, &in](int64_t first) mutable {
        // One read of a whole run lets every part answer with one transfer.
        for (const RingRun & run : RingSpan(source_rows.capacity, source_rows.first + first, n_rows)) {
            tensor_read(source, bytes.data() + row_bytes * static_cast<size_t>(run.first),
                        row_bytes * static_cast<size_t>(run.row), row_bytes * static_cast<size_t>(run.count));
        }
        to_f32(source->type, bytes.data(), values.data(), source->ne[0] * n_rows);
        in.graph.write(in.staged, values.data(), 0, ggml_nbytes(in.staged));
        here.run(in, nullptr, {}, from_row(target_rows, first));
    };
}

DraftFeatureMirror::Pass DraftFeatureMirror::from_host(const float * source, ggml_tensor * target, RingRows target_rows,
                                                       int64_t n_rows) {
    DraftFeatureTransfer & here = local();
    DraftFeatureTransfer::Pass & in = here.scatter(target, n_rows);
    const int64_t width = target->ne[0];
    return [=, &here, &in](int64_t first) {
        in.graph.write(in.staged, source + first * width, 0, ggml_nbytes(in.staged));
        here.run(in, nullptr, {}, from_row(target_rows, first));
    };
}

void DraftFeatureMirror::write_all(int32_t layer, int32_t n_layers, int64_t start, int64_t n, int64_t n_rows,
                                   const Pass & pass) {
    record_.begin_write(layer, n_layers, start, n);
    for_each_pass(n, n_rows, pass);
    record_.end_write(layer, n_layers, start, n);
}

void DraftFeatureMirror::read_all(int64_t start, int64_t n,
                                  const std::function<void(DraftFeatureTransfer::Pass &, int64_t)> & take) {
    const int64_t n_rows = local().rows_per_pass(width(), n);
    DraftFeatureTransfer::Pass & pass = local().gather(target_feat_, n_rows);
    for_each_pass(n, n_rows, [&](int64_t first) {
        local().run(pass, target_feat_, {capacity(), start + first}, {});
        take(pass, first);
    });
}

} // namespace dflash
