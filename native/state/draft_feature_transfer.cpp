#include "state/draft_feature_transfer.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/ring_span.hpp"

namespace dflash {
namespace {

constexpr size_t max_passes = 128;

/// Lets the stand-in look at `source`. Repeated only when something changed, so that a backend may replay the pass.
void bind(ggml_tensor * stand_in, const ggml_tensor * source) {
    if (stand_in->data == source->data && stand_in->buffer == tensor_buffer(source) &&
        stand_in->ne[1] == source->ne[1] && stand_in->nb[1] == source->nb[1]) {
        return;
    }
    stand_in->ne[1] = source->ne[1];
    stand_in->nb[1] = source->nb[1];
    stand_in->nb[2] = stand_in->nb[3] = source->nb[1] * static_cast<size_t>(source->ne[1]);
    tensor_place(stand_in, source, 0);
}

std::vector<int32_t> row_numbers(RingRows rows, int64_t n) {
    std::vector<int32_t> numbers(static_cast<size_t>(n));
    for (const RingRun & run : RingSpan(rows.capacity, rows.first, n)) {
        for (int64_t i = 0; i < run.count; ++i) {
            numbers[static_cast<size_t>(run.first + i)] = static_cast<int32_t>(run.row + i);
        }
    }
    return numbers;
}

} // namespace

DraftFeatureTransfer::DraftFeatureTransfer(std::shared_ptr<Device> device, int64_t n_values)
    : device_(std::move(device)), memory_(device_, 1) {
    staging_ = memory_.add(GGML_TYPE_F32, "feature_staging", n_values);
    memory_.allocate("feature staging");
}

int64_t DraftFeatureTransfer::rows_per_pass(int64_t width, int64_t n) const {
    const int64_t most = std::min(n, staging_->ne[0] / width);
    int64_t rows = 1;
    while (rows <= most / 2) {
        rows *= 2;
    }
    return rows;
}

DraftFeatureTransfer::Pass & DraftFeatureTransfer::gather(const ggml_tensor * source, int64_t n_rows) {
    return build(source, nullptr, n_rows);
}

DraftFeatureTransfer::Pass & DraftFeatureTransfer::scatter(ggml_tensor * target, int64_t n_rows) {
    return build(nullptr, target, n_rows);
}

DraftFeatureTransfer::Pass & DraftFeatureTransfer::move(const ggml_tensor * source, ggml_tensor * target,
                                                        int64_t n_rows) {
    return build(source, target, n_rows);
}

DraftFeatureTransfer::Pass & DraftFeatureTransfer::build(const ggml_tensor * source, ggml_tensor * target,
                                                         int64_t n_rows) {
    const int64_t width = source != nullptr ? source->ne[0] : target->ne[0];
    const Shape shape(source != nullptr ? source->type : GGML_TYPE_COUNT, width, target, n_rows);
    if (const auto found = passes_.find(shape); found != passes_.end()) {
        return *found->second;
    }
    auto pass = std::make_unique<Pass>(device_);
    ggml_context * ctx = pass->graph.ctx();
    pass->n_rows = n_rows;
    if (source != nullptr) {
        pass->source = ggml_new_tensor_2d(ctx, source->type, width, source->ne[1]);
        ggml_set_name(pass->source, "feature_source");
        pass->source_rows = pass->graph.input(GGML_TYPE_I32, "feature_source_rows", n_rows);
        bind(pass->source, source);
        pass->staged = ggml_get_rows(ctx, pass->source, pass->source_rows);
    } else {
        pass->staged = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, n_rows);
    }
    ggml_set_name(pass->staged, "feature_rows");
    tensor_place(pass->staged, staging_, 0);
    if (target != nullptr) {
        pass->target_rows = pass->graph.input(GGML_TYPE_I32, "feature_target_rows", n_rows);
        pass->graph.expand(ggml_set_rows(ctx, target, pass->staged, pass->target_rows));
    } else {
        pass->graph.expand(pass->staged);
    }
    pass->graph.finish("feature transfer");
    if (passes_.size() >= max_passes) {
        passes_.clear();
    }
    return *(passes_[shape] = std::move(pass));
}

void DraftFeatureTransfer::run(Pass & pass, const ggml_tensor * source, RingRows source_rows, RingRows target_rows) {
    std::vector<int32_t> from;
    std::vector<int32_t> to;
    const uint64_t bytes = static_cast<uint64_t>(pass.n_rows) * sizeof(int32_t);
    if (pass.source != nullptr) {
        bind(pass.source, source);
        from = row_numbers(source_rows, pass.n_rows);
        pass.graph.write(pass.source_rows, from.data(), 0, bytes);
    }
    if (pass.target_rows != nullptr) {
        to = row_numbers(target_rows, pass.n_rows);
        pass.graph.write(pass.target_rows, to.data(), 0, bytes);
    }
    pass.graph.compute();
}

} // namespace dflash
