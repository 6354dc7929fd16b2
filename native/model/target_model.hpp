#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ggmlx/device.hpp"
#include "ggmlx/packed_weights.hpp"
#include "ggmlx/tensors.hpp"
#include "gguf/gguf_file.hpp"
#include "model/embedder.hpp"
#include "model/target_config.hpp"

namespace dflash {

/// A matrix [n_in, n_out] with what belongs to it: y = (w x) * scale + bias.
struct Linear {
    ggml_tensor * w = nullptr;
    ggml_tensor * bias = nullptr;         // float32 [n_out] or null
    float scale = 1.0f;                   // NVFP4 files keep a per-tensor scale beside the weight
    ggml_tensor * expert_scale = nullptr; // float32 [n_expert] for expert stacks, or null
};

struct TargetLayer {
    ggml_tensor * attn_norm = nullptr;      // [n_embd]
    ggml_tensor * attn_post_norm = nullptr; // [n_embd], the norm in front of the feed-forward part
    // full attention
    Linear wq, wk, wv, wo;          // wq rows: per head [query | gate]
    ggml_tensor * q_norm = nullptr; // [head_dim]
    ggml_tensor * k_norm = nullptr; // [head_dim]
    // gated DeltaNet
    Linear wqkv, wqkv_gate;             // rows: queries, keys, values; and the output gate z
    ggml_tensor * ssm_conv1d = nullptr; // [ssm_d_conv, conv_channels]
    Linear ssm_beta, ssm_alpha, ssm_out;
    ggml_tensor * ssm_a = nullptr;       // [ssm_dt_rank], already -exp(A_log)
    ggml_tensor * ssm_dt_bias = nullptr; // [ssm_dt_rank]
    ggml_tensor * ssm_norm = nullptr;    // [ssm_d_state]
    // dense feed-forward
    Linear w_gate, w_up, w_down;
    // mixture of experts
    Linear ffn_gate_inp; // router [n_embd, n_expert]
    Linear ffn_gate_exps, ffn_up_exps, ffn_down_exps, ffn_gate_up_exps;
    ggml_tensor * ffn_gate_inp_shexp = nullptr; // [n_embd]
    float ffn_gate_inp_shexp_scale = 1.0f;
    Linear ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp;
};

/// Which part of a file to load.
struct TargetLoadPlan {
    int32_t layer_begin = 0;         // inclusive
    int32_t layer_end = -1;          // exclusive; negative: all layers
    bool load_output = true;         // output norm and head
    bool embedding_on_device = true; // also keep token_embd where the layers are
    bool pack = true;                // on a CPU: copy matrices into the layout it multiplies by fastest
    /// Called with 0..1 while weights are copied; returning false cancels.
    std::function<bool(double)> progress;
};

/// Weights of a layer range on one device, the embedding table in host memory, and the configuration.
/// Read-only after loading: any thread may read, many caches may share it.
class TargetModel {
  public:
    static std::shared_ptr<const TargetModel> load(const std::string & path, std::shared_ptr<Device> device,
                                                   const TargetLoadPlan & plan);

    const TargetConfig & config() const { return config_; }
    const std::shared_ptr<Device> & device() const { return device_; }
    const std::shared_ptr<const GgufFile> & file() const { return file_; }
    const CpuEmbedder & embedder() const { return embedder_; }
    int32_t layer_begin() const { return layer_begin_; }
    int32_t layer_end() const { return layer_end_; }
    /// Layers outside the loaded range hold null tensors.
    const TargetLayer & layer(int32_t i) const { return layers_[static_cast<size_t>(i)]; }
    ggml_tensor * tok_embd() const { return tok_embd_; } // [n_embd, n_vocab] or null when only the host has it
    ggml_tensor * out_norm() const { return out_norm_; } // [n_embd] or null
    const Linear & output() const { return output_; }    // [n_embd, n_vocab]; w null when not loaded
    bool has_output() const { return output_.w != nullptr; }
    const std::vector<int32_t> & stop_ids() const { return stop_ids_; }
    int32_t mask_token_id() const { return mask_token_id_; } // -1: the file names none
    uint64_t weight_bytes() const { return weight_bytes_; }
    const std::string & digest() const { return digest_; }
    bool packs() const { return packed_ != nullptr; } // as the plan said

  private:
    friend class TargetLoader;
    TargetModel() = default;

    std::shared_ptr<const GgufFile> file_;
    std::shared_ptr<Device> device_;
    TargetConfig config_;
    CpuEmbedder embedder_;
    std::vector<TargetLayer> layers_;
    ggml_tensor * tok_embd_ = nullptr;
    ggml_tensor * out_norm_ = nullptr;
    Linear output_;
    std::vector<int32_t> stop_ids_;
    int32_t mask_token_id_ = -1;
    int32_t layer_begin_ = 0;
    int32_t layer_end_ = 0;
    uint64_t weight_bytes_ = 0;
    std::string digest_;
    std::unique_ptr<TensorGroup> weights_;
    std::vector<std::unique_ptr<HostPlacement>> placements_;
    std::unique_ptr<PackedWeights> packed_;
};

/// All layers with the head. Same as TargetModel::load with a default plan.
std::shared_ptr<const TargetModel> load_target_gguf(const std::string & path, std::shared_ptr<Device> device);
/// A part of the file. Throws Status::invalid when the range is empty or outside the model.
std::shared_ptr<const TargetModel> load_target_gguf_partial(const std::string & path, std::shared_ptr<Device> device,
                                                            const TargetLoadPlan & plan);
/// True for ids in the model's stop set; negative ids never are.
bool is_eos_tok(int32_t token, const TargetModel & model);

} // namespace dflash
