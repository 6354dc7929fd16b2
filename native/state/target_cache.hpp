#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "ggmlx/tensors.hpp"
#include "model/target_model.hpp"

namespace dflash {

struct TargetCacheOptions {
    int64_t capacity = 4096;    // most tokens the cache can hold
    std::string k_type = "f16"; // f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0
    std::string v_type = "f16";
    int32_t max_verify = 16;             // most rows of one verify forward
    std::vector<int32_t> capture_layers; // layer outputs kept as features; empty: none
    int64_t feature_capacity = 0;        // rows of the feature ring; 0: min(capacity, 4096), at least max_verify
    std::string feature_type = "f32";    // f32 f16 bf16
    int32_t layer_begin = 0;             // layer range, inside the model's loaded range
    int32_t layer_end = -1;              // negative: the model's last loaded layer
    bool prefill_only = false;           // verify is refused until migrate_prefill_cache()
    bool keep_states = false;            // verify also keeps the recurrent state after every row
    int64_t fa_window = 0;               // full-attention layers see the last fa_window keys; 0: all
};

/// Bytes of each part of a cache before it is made.
struct TargetCachePlan {
    uint64_t k_bytes = 0;
    uint64_t v_bytes = 0;
    uint64_t recurrent_bytes = 0; // DeltaNet states
    uint64_t conv_bytes = 0;
    uint64_t feature_bytes = 0;
    uint64_t rotation_bytes = 0;   // Hadamard matrices of quantised K/V
    uint64_t rollback_bytes = 0;   // copies for snapshot_ssm_state and per-row states
    uint64_t total_bytes = 0;      // as allocated, with alignment
    int64_t physical_capacity = 0; // rows of K and V, a multiple of 256
};

/// Everything a sequence leaves behind in the target: K/V of the full-attention layers, recurrent and convolution
/// state of the DeltaNet layers, the ring of captured features, and how many tokens are committed.
/// Not thread-safe: one user at a time.
class TargetCache {
  public:
    /// Throws Status::invalid naming the option and its limit, Status::unsupported when a type does not divide a head,
    /// Status::out_of_memory with bytes needed and free.
    static std::unique_ptr<TargetCache> create(std::shared_ptr<const TargetModel> model, TargetCacheOptions options);
    static TargetCachePlan plan(const TargetModel & model, TargetCacheOptions options);

    const TargetModel & model() const { return *model_; }
    const std::shared_ptr<const TargetModel> & model_handle() const { return model_; }
    const TargetCacheOptions & options() const { return options_; }
    int64_t capacity() const { return options_.capacity; }
    int64_t physical_capacity() const { return plan_.physical_capacity; }
    const TargetCachePlan & memory() const { return plan_; }
    int32_t layer_begin() const { return options_.layer_begin; }
    int32_t layer_end() const { return options_.layer_end; }

    /// Committed tokens; the next token stands at this position.
    int64_t position() const { return position_; }
    /// Positions whose feature rows are in the ring and belong to committed tokens.
    PositionRange feature_range() const;

    // Indexed by layer; null for layers of the other kind or outside the range.
    // K and V: [head_dim * n_head_kv, physical_capacity]; recurrent state: f32 [S, S, Hv]; convolution: f32 [C, d_conv
    // - 1].
    ggml_tensor * attn_k(int32_t layer) const { return attn_k_[static_cast<size_t>(layer)]; }
    ggml_tensor * attn_v(int32_t layer) const { return attn_v_[static_cast<size_t>(layer)]; }
    ggml_tensor * ssm_state(int32_t layer) const { return ssm_state_[static_cast<size_t>(layer)]; }
    ggml_tensor * conv_state(int32_t layer) const { return conv_state_[static_cast<size_t>(layer)]; }
    ggml_tensor * target_feat() const { return target_feat_; } // [n_taps * n_embd, feature_capacity] or null
    /// Identifies this cache's memory in this process; see TensorGroup::serial.
    uint64_t memory_serial() const { return base_->serial(); }
    int64_t feature_capacity() const { return target_feat_ != nullptr ? target_feat_->ne[1] : 0; }
    int32_t n_taps() const { return static_cast<int32_t>(options_.capture_layers.size()); }
    ggml_tensor * k_rotation() const { return k_rotation_; } // f32 [n, n] or null
    ggml_tensor * v_rotation() const { return v_rotation_; }
    bool can_verify() const { return !options_.prefill_only; }

    /// Zeroes the chosen parts and sets the position to 0. Clearing K/V is a matter of hygiene: rows at or beyond the
    /// position are never visible.
    void reset(bool kv, bool recurrent, bool features);

    // Moves made by a forward pass, a commit, a restore. `n_written` rows from `base` went to the feature ring, of
    // which only those below the position count.
    void note_rows_written(int64_t base, int64_t n_written);
    void set_position(int64_t position) { position_ = position; }
    void drop_features() { feature_begin_ = position_; }
    void set_feature_begin(int64_t begin) { feature_begin_ = begin; }
    /// K/V, recurrent states and feature rows [feature_begin, position) were put in place by a restore.
    void note_restored(int64_t position, int64_t feature_begin) {
        position_ = position;
        feature_begin_ = feature_begin;
        snap_position_ = -1;
    }
    void zero_recurrent() { clear_recurrent(); }

    /// Logits of the newest committed token, float32 [n_vocab]; empty when they were not asked for.
    std::vector<float> last_logits;

  private:
    friend void snapshot_ssm_state(TargetCache &);
    friend void restore_ssm_state(TargetCache &);
    friend void migrate_prefill_cache(TargetCache &, int32_t);
    friend void reset_recurrent_state(TargetCache &);
    TargetCache(std::shared_ptr<const TargetModel> model, TargetCacheOptions options);
    void declare(TensorGroup & base);
    void allocate_rollback();
    void clear_recurrent();

    std::shared_ptr<const TargetModel> model_;
    TargetCacheOptions options_;
    TargetCachePlan plan_;
    std::unique_ptr<TensorGroup> base_;
    std::unique_ptr<TensorGroup> rollback_;
    std::vector<ggml_tensor *> attn_k_, attn_v_, ssm_state_, conv_state_;
    std::vector<ggml_tensor *> ssm_state_snap_, conv_state_snap_;
    ggml_tensor * target_feat_ = nullptr;
    ggml_tensor * k_rotation_ = nullptr;
    ggml_tensor * v_rotation_ = nullptr;
    int64_t position_ = 0;
    int64_t feature_begin_ = 0;
    int64_t snap_position_ = -1;
};

/// Cache over all loaded layers.
std::unique_ptr<TargetCache> create_target_cache(std::shared_ptr<const TargetModel> model, int64_t max_ctx,
                                                 int32_t max_verify_tokens, bool prefill_only = false);
/// Cache over a layer range, with or without a feature ring (the default capture layers inside the range).
std::unique_ptr<TargetCache> create_target_cache_partial(std::shared_ptr<const TargetModel> model, int64_t max_ctx,
                                                         int32_t max_verify_tokens, bool prefill_only,
                                                         int32_t layer_begin, int32_t layer_end,
                                                         bool allocate_target_feat);
void free_target_cache(std::unique_ptr<TargetCache> & cache);
/// Zeroes everything, position 0, memory kept.
void reset_target_cache(TargetCache & cache);
/// Zeroes recurrent and convolution state only. K/V, features and position stay.
void reset_recurrent_state(TargetCache & cache);
/// Lets a prefill-only cache verify up to max_verify_tokens rows. All live state stays where it is.
void migrate_prefill_cache(TargetCache & cache, int32_t max_verify_tokens);
/// Copies recurrent and convolution state aside, with the position. The memory is allocated on first use.
void snapshot_ssm_state(TargetCache & cache);
/// Puts it back, position included. K/V rows beyond that position become invisible, feature rows stay where they are.
/// Throws Status::invalid when no snapshot was taken since the last reset.
void restore_ssm_state(TargetCache & cache);

} // namespace dflash
