#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/gguf_file.hpp"
#include "model/rope_params.hpp"

namespace dflash {

/// Geometry of a Qwen3.5-family target, from GGUF keys `<architecture>.*`.
struct TargetConfig {
    std::string architecture;  // "qwen35" or "qwen35moe"
    std::string name;          // general.name, may be empty
    int32_t n_layer = 0;       // without multi-token-prediction blocks
    int32_t n_layer_nextn = 0; // multi-token-prediction blocks behind them, never run
    int32_t n_embd = 0;
    int32_t n_ff = 0; // dense feed-forward width
    int32_t n_head = 0;
    int32_t n_head_kv = 0;
    int32_t head_dim = 0;    // of the full-attention layers, keys and values alike
    int32_t n_ctx_train = 0; // 0 when the file does not say
    int32_t n_vocab = 0;     // rows of token_embd
    float rms_eps = 0.0f;
    RopeParams rope;
    int32_t rope_sections[4] = {0, 0, 0, 0};
    std::vector<bool> recurrent; // [n_layer] true: gated DeltaNet, false: full attention
    int32_t ssm_d_conv = 0;      // taps of the causal convolution
    int32_t ssm_d_state = 0;     // head dim of DeltaNet keys and values
    int32_t ssm_n_group = 0;     // DeltaNet key heads
    int32_t ssm_dt_rank = 0;     // DeltaNet value heads
    int32_t ssm_d_inner = 0;     // ssm_dt_rank * ssm_d_state
    bool is_moe = false;
    int32_t n_expert = 0;
    int32_t n_expert_used = 0;
    int32_t n_ff_exp = 0;
    int32_t n_ff_shexp = 0;         // 0: no shared expert
    int32_t expert_gating_func = 1; // 1 softmax, 2 sigmoid
    float expert_weights_scale = 1.0f;

    /// Channels of the DeltaNet convolution: queries, keys and values side by side.
    int32_t conv_channels() const { return 2 * ssm_n_group * ssm_d_state + ssm_d_inner; }
    int32_t n_full_layers(int32_t begin, int32_t end) const;
};

/// Reads and checks every key. Throws Status::format naming the key, Status::unsupported for another architecture.
TargetConfig read_target_config(const GgufFile & file);

/// Token ids that end a turn: eos, eot, eom of the file plus well-known end markers in its vocabulary. Sorted.
/// An empty set is legal and logged as a warning.
std::vector<int32_t> read_stop_ids(const GgufFile & file);

/// Layers whose outputs a drafter of n_taps features reads when nothing else says so: 1 + k * floor((n_layer - 2) /
/// (n_taps - 1)), cut to distinct layers of small models. Throws Status::invalid unless 1 <= n_taps <= n_layer.
std::vector<int32_t> default_capture_layers(int32_t n_layer, int32_t n_taps);

/// Throws Status::invalid unless the ids are strictly increasing and inside [0, n_layer).
void check_capture_layers(const std::vector<int32_t> & ids, int32_t n_layer);

} // namespace dflash
