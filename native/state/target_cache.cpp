#include "state/target_cache.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "state/kv_rotation.hpp"

namespace dflash {
namespace {

constexpr enum ggml_type kv_types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                                       GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0};
constexpr enum ggml_type feature_types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};

enum ggml_type kv_type(const std::string & name, const char * field) {
    return type_from_name(name, field, kv_types, std::size(kv_types));
}

void check_options(const TargetModel & model, TargetCacheOptions & o) {
    const TargetConfig & c = model.config();
    check(o.capacity >= 1 && o.capacity <= (int64_t{1} << 24), Status::invalid, "capacity %lld, want 1 to %lld",
          static_cast<long long>(o.capacity), static_cast<long long>(int64_t{1} << 24));
    check(o.max_verify >= 1 && o.max_verify <= 1024, Status::invalid, "max_verify %d, want 1 to 1024", o.max_verify);
    check(o.fa_window >= 0, Status::invalid, "fa_window %lld, want >= 0", static_cast<long long>(o.fa_window));
    if (o.layer_end < 0) {
        o.layer_end = model.layer_end();
    }
    check(o.layer_begin >= 0, Status::invalid, "layer_begin %d, want >= 0", o.layer_begin);
    o.layer_begin = std::max(o.layer_begin, model.layer_begin());
    check(o.layer_begin < o.layer_end && o.layer_end <= model.layer_end(), Status::invalid,
          "layers [%d, %d), want a part of the loaded [%d, %d)", o.layer_begin, o.layer_end, model.layer_begin(),
          model.layer_end());
    for (const auto & [name, field] : {std::pair{o.k_type, "k_type"}, std::pair{o.v_type, "v_type"}}) {
        const enum ggml_type type = kv_type(name, field);
        check(c.head_dim % ggml_blck_size(type) == 0, Status::unsupported,
              "%s %s stores blocks of %lld values, the heads have %d", field, name.c_str(),
              static_cast<long long>(ggml_blck_size(type)), c.head_dim);
    }
    check_capture_layers(o.capture_layers, c.n_layer);
    for (const int32_t id : o.capture_layers) {
        check(id >= o.layer_begin && id < o.layer_end, Status::invalid, "feature layer %d lies outside layers [%d, %d)",
              id, o.layer_begin, o.layer_end);
    }
    if (o.feature_capacity == 0) {
        o.feature_capacity = std::min<int64_t>(round_up(o.capacity, 256), 4096);
    }
    check(o.feature_capacity >= o.max_verify && o.feature_capacity <= (int64_t{1} << 24), Status::invalid,
          "feature_capacity %lld, want at least max_verify %d", static_cast<long long>(o.feature_capacity),
          o.max_verify);
    type_from_name(o.feature_type, "feature_type", feature_types, std::size(feature_types));
}

} // namespace

TargetCache::TargetCache(std::shared_ptr<const TargetModel> model, TargetCacheOptions options)
    : model_(std::move(model)), options_(std::move(options)) {
    check_options(*model_, options_);
    plan_.physical_capacity = round_up(options_.capacity, 256);
    const size_t n = static_cast<size_t>(model_->config().n_layer);
    for (auto * list : {&attn_k_, &attn_v_, &ssm_state_, &conv_state_, &ssm_state_snap_, &conv_state_snap_}) {
        list->assign(n, nullptr);
    }
}

void TargetCache::declare(TensorGroup & base) {
    const TargetConfig & c = model_->config();
    const enum ggml_type k = kv_type(options_.k_type, "k_type");
    const enum ggml_type v = kv_type(options_.v_type, "v_type");
    const int64_t kv_width = int64_t{1} * c.head_dim * c.n_head_kv;
    for (int32_t i = options_.layer_begin; i < options_.layer_end; ++i) {
        const size_t at = static_cast<size_t>(i);
        const std::string suffix = std::to_string(i);
        if (c.recurrent[at]) {
            ssm_state_[at] =
                base.add(GGML_TYPE_F32, "ssm_state_" + suffix, c.ssm_d_state, c.ssm_d_state, c.ssm_dt_rank);
            conv_state_[at] = base.add(GGML_TYPE_F32, "conv_state_" + suffix, c.conv_channels(), c.ssm_d_conv - 1);
            plan_.recurrent_bytes += ggml_nbytes(ssm_state_[at]);
            plan_.conv_bytes += ggml_nbytes(conv_state_[at]);
        } else {
            attn_k_[at] = base.add(k, "cache_k_" + suffix, kv_width, plan_.physical_capacity);
            attn_v_[at] = base.add(v, "cache_v_" + suffix, kv_width, plan_.physical_capacity);
            plan_.k_bytes += ggml_nbytes(attn_k_[at]);
            plan_.v_bytes += ggml_nbytes(attn_v_[at]);
        }
    }
    if (!options_.capture_layers.empty()) {
        const enum ggml_type type =
            type_from_name(options_.feature_type, "feature_type", feature_types, std::size(feature_types));
        target_feat_ = base.add(type, "target_feat", int64_t{1} * n_taps() * c.n_embd, options_.feature_capacity);
        plan_.feature_bytes = ggml_nbytes(target_feat_);
    }
    if (const int64_t size = rotation_size(k, c.head_dim); size > 0) {
        k_rotation_ = base.add(GGML_TYPE_F32, "k_rotation", size, size);
        plan_.rotation_bytes += ggml_nbytes(k_rotation_);
    }
    if (const int64_t size = rotation_size(v, c.head_dim); size > 0) {
        v_rotation_ = base.add(GGML_TYPE_F32, "v_rotation", size, size);
        plan_.rotation_bytes += ggml_nbytes(v_rotation_);
    }
    plan_.total_bytes = base.required_bytes();
}

std::unique_ptr<TargetCache> TargetCache::create(std::shared_ptr<const TargetModel> model, TargetCacheOptions options) {
    std::unique_ptr<TargetCache> cache(new TargetCache(std::move(model), std::move(options)));
    const size_t n = static_cast<size_t>(cache->model_->config().n_layer);
    cache->base_ = std::make_unique<TensorGroup>(cache->model_->device(), 2 * n + 4);
    cache->declare(*cache->base_);
    cache->base_->allocate("target cache");
    const auto guard = cache->model_->device()->lock();
    for (ggml_tensor * r : {cache->k_rotation_, cache->v_rotation_}) {
        if (r != nullptr) {
            const std::vector<float> h = hadamard(r->ne[0]);
            tensor_write(r, h.data(), 0, h.size() * sizeof(float));
        }
    }
    return cache;
}

TargetCachePlan TargetCache::plan(const TargetModel & model, TargetCacheOptions options) {
    // The model outlives this call; the cache below never gets memory.
    const std::shared_ptr<const TargetModel> borrowed(&model, [](const TargetModel *) {});
    TargetCache cache(borrowed, std::move(options));
    TensorGroup base(model.device(), 2 * static_cast<size_t>(model.config().n_layer) + 4);
    cache.declare(base);
    return cache.plan_;
}

PositionRange TargetCache::feature_range() const {
    return {std::min(feature_begin_, position_),
            target_feat_ != nullptr ? position_ : std::min(feature_begin_, position_)};
}

void TargetCache::note_rows_written(int64_t base, int64_t n_written) {
    if (target_feat_ == nullptr) {
        feature_begin_ = base + n_written;
        return;
    }
    feature_begin_ = std::max(feature_begin_, base + n_written - feature_capacity());
}

void TargetCache::clear_recurrent() {
    for (const auto * list : {&ssm_state_, &conv_state_}) {
        for (ggml_tensor * t : *list) {
            if (t != nullptr) {
                tensor_fill(t, 0, 0, ggml_nbytes(t));
            }
        }
    }
}

void TargetCache::reset(bool kv, bool recurrent, bool features) {
    const auto guard = model_->device()->lock();
    model_->device()->synchronize();
    if (kv) {
        for (const auto * list : {&attn_k_, &attn_v_}) {
            for (ggml_tensor * t : *list) {
                if (t != nullptr) {
                    tensor_fill(t, 0, 0, ggml_nbytes(t));
                }
            }
        }
    }
    if (recurrent) {
        clear_recurrent();
    }
    if (features && target_feat_ != nullptr) {
        tensor_fill(target_feat_, 0, 0, ggml_nbytes(target_feat_));
    }
    position_ = 0;
    feature_begin_ = 0;
    snap_position_ = -1;
    last_logits.clear();
}

void TargetCache::allocate_rollback() {
    if (rollback_) {
        return;
    }
    const TargetConfig & c = model_->config();
    auto group = std::make_unique<TensorGroup>(model_->device(), 2 * ssm_state_.size() + 1);
    std::vector<ggml_tensor *> ssm(ssm_state_.size(), nullptr);
    std::vector<ggml_tensor *> conv(ssm_state_.size(), nullptr);
    for (size_t i = 0; i < ssm_state_.size(); ++i) {
        if (ssm_state_[i] != nullptr) {
            const std::string suffix = std::to_string(i);
            ssm[i] = group->add(GGML_TYPE_F32, "ssm_state_snap_" + suffix, c.ssm_d_state, c.ssm_d_state, c.ssm_dt_rank);
            conv[i] = group->add(GGML_TYPE_F32, "conv_state_snap_" + suffix, c.conv_channels(), c.ssm_d_conv - 1);
        }
    }
    group->allocate("recurrent state snapshot");
    plan_.rollback_bytes = group->bytes();
    rollback_ = std::move(group);
    ssm_state_snap_ = std::move(ssm);
    conv_state_snap_ = std::move(conv);
}

std::unique_ptr<TargetCache> create_target_cache(std::shared_ptr<const TargetModel> model, int64_t max_ctx,
                                                 int32_t max_verify_tokens, bool prefill_only) {
    const int32_t begin = model->layer_begin();
    const int32_t end = model->layer_end();
    return create_target_cache_partial(std::move(model), max_ctx, max_verify_tokens, prefill_only, begin, end, true);
}

std::unique_ptr<TargetCache> create_target_cache_partial(std::shared_ptr<const TargetModel> model, int64_t max_ctx,
                                                         int32_t max_verify_tokens, bool prefill_only,
                                                         int32_t layer_begin, int32_t layer_end,
                                                         bool allocate_target_feat) {
    TargetCacheOptions options;
    options.capacity = max_ctx;
    options.max_verify = max_verify_tokens > 0 ? max_verify_tokens : 16;
    options.prefill_only = prefill_only;
    options.layer_begin = layer_begin;
    options.layer_end = layer_end;
    if (allocate_target_feat) {
        const int32_t last = layer_end < 0 ? model->layer_end() : layer_end;
        const int32_t n = model->config().n_layer;
        for (const int32_t id : default_capture_layers(n, std::min(5, n))) {
            if (id >= layer_begin && id < last) {
                options.capture_layers.push_back(id);
            }
        }
    }
    return TargetCache::create(std::move(model), std::move(options));
}

void free_target_cache(std::unique_ptr<TargetCache> & cache) {
    cache.reset();
}

void reset_target_cache(TargetCache & cache) {
    cache.reset(true, true, true);
}

void reset_recurrent_state(TargetCache & cache) {
    const auto guard = cache.model_->device()->lock();
    cache.model_->device()->synchronize();
    cache.clear_recurrent();
}

void migrate_prefill_cache(TargetCache & cache, int32_t max_verify_tokens) {
    check(max_verify_tokens >= 1 && max_verify_tokens <= 1024, Status::invalid, "max_verify %d, want 1 to 1024",
          max_verify_tokens);
    check(cache.target_feat_ == nullptr || cache.feature_capacity() >= max_verify_tokens, Status::invalid,
          "max_verify %d, the feature ring holds %lld rows", max_verify_tokens,
          static_cast<long long>(cache.feature_capacity()));
    cache.options_.max_verify = max_verify_tokens;
    cache.options_.prefill_only = false;
}

void snapshot_ssm_state(TargetCache & cache) {
    const auto guard = cache.model_->device()->lock();
    cache.allocate_rollback();
    cache.model_->device()->synchronize();
    for (size_t i = 0; i < cache.ssm_state_.size(); ++i) {
        if (cache.ssm_state_[i] != nullptr) {
            tensor_copy(cache.ssm_state_[i], cache.ssm_state_snap_[i]);
            tensor_copy(cache.conv_state_[i], cache.conv_state_snap_[i]);
        }
    }
    cache.snap_position_ = cache.position_;
}

void restore_ssm_state(TargetCache & cache) {
    check(cache.snap_position_ >= 0, Status::invalid, "no recurrent state was saved since the last reset");
    const auto guard = cache.model_->device()->lock();
    cache.model_->device()->synchronize();
    for (size_t i = 0; i < cache.ssm_state_.size(); ++i) {
        if (cache.ssm_state_[i] != nullptr) {
            tensor_copy(cache.ssm_state_snap_[i], cache.ssm_state_[i]);
            tensor_copy(cache.conv_state_snap_[i], cache.conv_state_[i]);
        }
    }
    cache.position_ = cache.snap_position_;
    cache.last_logits.clear();
}

} // namespace dflash
