#include "state/draft_context.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "state/kv_rotation.hpp"

namespace dflash {
namespace {

constexpr enum ggml_type draft_kv_types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};

} // namespace

DraftContext::DraftContext(std::shared_ptr<const DraftModel> model, DraftContextOptions options)
    : model_(std::move(model)), options_(std::move(options)) {
    const DraftConfig & c = model_->config();
    check(options_.full_rows >= 1 && options_.full_rows <= (int64_t{1} << 24), Status::invalid,
          "full_rows %lld, want 1 to %lld", static_cast<long long>(options_.full_rows),
          static_cast<long long>(int64_t{1} << 24));
    check(options_.slack >= 0 && options_.slack <= 65536, Status::invalid, "slack %d, want 0 to 65536", options_.slack);
    const enum ggml_type k = type_from_name(options_.k_type, "draft k_type", draft_kv_types, std::size(draft_kv_types));
    const enum ggml_type v = type_from_name(options_.v_type, "draft v_type", draft_kv_types, std::size(draft_kv_types));
    for (const enum ggml_type type : {k, v}) {
        check(c.head_dim % ggml_blck_size(type) == 0, Status::unsupported,
              "draft K/V type %s stores blocks of %lld values, the heads have %d", ggml_type_name(type),
              static_cast<long long>(ggml_blck_size(type)), c.head_dim);
    }
    ring_offset_ = round_up(c.block_size + 1, 32);
    group_ = std::make_unique<TensorGroup>(model_->device(), 2 * static_cast<size_t>(c.n_layer) + 2);
    const int64_t width = int64_t{1} * c.head_dim * c.n_head_kv;
    for (int32_t i = 0; i < c.n_layer; ++i) {
        const int64_t window = c.windows[static_cast<size_t>(i)];
        const int64_t wanted = window > 0 ? window + c.block_size + options_.slack : options_.full_rows;
        const int64_t rows = round_up(ring_offset_ + wanted, 256);
        ring_capacity_.push_back(rows - ring_offset_);
        k_.push_back(group_->add(k, "draft_k_" + std::to_string(i), width, rows));
        v_.push_back(group_->add(v, "draft_v_" + std::to_string(i), width, rows));
    }
    if (const int64_t n = rotation_size(k, c.head_dim); n > 0) {
        k_rotation_ = group_->add(GGML_TYPE_F32, "draft_k_rotation", n, n);
    }
    if (const int64_t n = rotation_size(v, c.head_dim); n > 0) {
        v_rotation_ = group_->add(GGML_TYPE_F32, "draft_v_rotation", n, n);
    }
}

std::unique_ptr<DraftContext> DraftContext::create(std::shared_ptr<const DraftModel> model,
                                                   DraftContextOptions options) {
    std::unique_ptr<DraftContext> context(new DraftContext(std::move(model), std::move(options)));
    context->group_->allocate("draft context");
    const auto guard = context->model_->device()->lock();
    for (ggml_tensor * r : {context->k_rotation_, context->v_rotation_}) {
        if (r != nullptr) {
            const std::vector<float> h = hadamard(r->ne[0]);
            tensor_write(r, h.data(), 0, h.size() * sizeof(float));
        }
    }
    return context;
}

int64_t DraftContext::ring_row(int32_t layer, int64_t position, int64_t end) const {
    const int64_t capacity = ring_capacity(layer);
    return position < end - capacity ? trash_row() : ring_offset_ + position % capacity;
}

int64_t DraftContext::layer_begin(int32_t layer) const {
    return std::max(begin_, high_ - ring_capacity(layer));
}

void DraftContext::check_append(int64_t base, int64_t n) const {
    check(base >= 0 && n >= 0, Status::invalid, "%lld draft context rows at position %lld", static_cast<long long>(n),
          static_cast<long long>(base));
    check(base <= cursor_, Status::invalid, "draft context rows at position %lld leave a gap behind the cursor %lld",
          static_cast<long long>(base), static_cast<long long>(cursor_));
    check(base + n >= cursor_, Status::invalid,
          "draft context rows [%lld, %lld) would move the cursor backward from %lld", static_cast<long long>(base),
          static_cast<long long>(base + n), static_cast<long long>(cursor_));
}

void DraftContext::note_appended(int64_t base, int64_t n) {
    if (base < cursor_) {
        begin_ = std::min(begin_, base);
        ++epoch_;
    }
    cursor_ = base + n;
    high_ = std::max(high_, cursor_);
}

void DraftContext::invalidate(int64_t position) {
    reset(position);
}

void DraftContext::rewind(int64_t position) {
    check(position >= begin_ && position <= cursor_, Status::invalid, "rewind to %lld, want %lld to %lld",
          static_cast<long long>(position), static_cast<long long>(begin_), static_cast<long long>(cursor_));
    if (position < cursor_) {
        cursor_ = position;
        ++epoch_;
    }
}

void DraftContext::note_restored(int64_t begin, int64_t cursor, int64_t high) {
    begin_ = begin;
    cursor_ = cursor;
    high_ = high;
    ++epoch_;
}

void DraftContext::reset(int64_t position) {
    check(position >= 0, Status::invalid, "position %lld, want >= 0", static_cast<long long>(position));
    begin_ = cursor_ = high_ = position;
    ++epoch_;
}

} // namespace dflash
