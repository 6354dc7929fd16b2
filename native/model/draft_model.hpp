#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ggmlx/packed_weights.hpp"
#include "ggmlx/tensors.hpp"
#include "model/draft_config.hpp"
#include "model/target_model.hpp"

namespace dflash {

struct DraftLayer {
    ggml_tensor * attn_norm = nullptr; // [n_embd]
    ggml_tensor * ffn_norm = nullptr;  // [n_embd]
    Linear wq, wk, wv, wo;
    ggml_tensor * q_norm = nullptr; // [head_dim]
    ggml_tensor * k_norm = nullptr; // [head_dim]
    Linear w_gate, w_up, w_down;
    // DFlash2, null elsewhere: a convolution in front of and behind attention and feed-forward.
    ggml_tensor * attn_conv_base = nullptr; // f32 [n_embd, conv_kernel, 2]
    ggml_tensor * ffn_conv_base = nullptr;
    Linear attn_conv_proj, ffn_conv_proj; // [n_embd, 2 * conv_kernel * n_embd / conv_group]
};

/// What makes a proposal depend on the one before it: a table of previous tokens and one of next tokens, whose product
/// is added to the logits. Rows are looked up. All null in a plain drafter.
struct DraftChain {
    ggml_tensor * previous = nullptr; // [rank, target vocabulary]
    Linear next;                      // [rank, target vocabulary], of a Markov head [rank, draft vocabulary]
    Linear gate;       // [n_embd, rank], of a selector only: the previous token's row is multiplied by it
    Linear confidence; // [n_embd (+ rank), 1] or null
};

/// Weights and configuration of a DFlash drafter on one device, bound to the target that it was made for: it borrows
/// the target's embedding and head unless the file has its own. Read-only after loading; any thread may read.
class DraftModel {
  public:
    /// path: a Hugging Face folder (config.json + *.safetensors), a `dflash` GGUF or a Lucebox-dialect GGUF.
    /// A drafter on another device than the target gets copies of the target's embedding and head there.
    /// weight_type: "file" keeps matrices as they are; "f32", "f16", "bf16" and "q8_0" store float matrices as that
    /// type (rows that its blocks do not divide stay as they are; matrices that are quantised in the file always do).
    /// Values beyond what f16 holds are refused with Status::unsupported rather than stored as infinities.
    /// Throws Status::not_found, Status::format, Status::unsupported (variant or unknown tensor, named),
    /// Status::mismatch (does not fit the target), Status::out_of_memory.
    static std::shared_ptr<const DraftModel> load(const std::string & path, std::shared_ptr<Device> device,
                                                  std::shared_ptr<const TargetModel> target,
                                                  const std::string & weight_type = "file");

    const DraftConfig & config() const { return config_; }
    const std::shared_ptr<Device> & device() const { return device_; }
    const std::shared_ptr<const TargetModel> & target() const { return target_; }
    const std::string & path() const { return path_; }
    const std::string & digest() const { return digest_; }
    uint64_t weight_bytes() const { return weights_->bytes() + (packed_ ? packed_->bytes() : 0); }

    const Linear & fc() const { return fc_; }                  // [n_taps * n_embd, n_embd]
    ggml_tensor * hidden_norm() const { return hidden_norm_; } // [n_embd], after fc
    ggml_tensor * out_norm() const { return out_norm_; }       // [n_embd]
    const DraftLayer & layer(int32_t i) const { return layers_[static_cast<size_t>(i)]; }
    ggml_tensor * tok_embd() const { return tok_embd_; }     // [n_embd, target vocabulary]; null: host look-up
    const Linear & output() const { return output_; }        // [n_embd, draft vocabulary]
    ggml_tensor * rope_freqs() const { return rope_freqs_; } // f32 [head_dim / 2] or null
    ggml_tensor * d2t() const { return d2t_; }               // i32 [1, draft vocabulary] target ids, or null
    int32_t n_vocab_draft() const { return static_cast<int32_t>(output_.w->ne[1]); }
    const DraftChain & chain() const { return chain_; }
    bool has_own_head() const { return own_head_; }

  private:
    friend class DraftLoader;
    DraftModel() = default;

    DraftConfig config_;
    std::shared_ptr<Device> device_;
    std::shared_ptr<const TargetModel> target_;
    std::string path_;
    std::string digest_;
    std::unique_ptr<TensorGroup> weights_;
    std::unique_ptr<PackedWeights> packed_; // null: the target does not pack either
    Linear fc_;
    ggml_tensor * hidden_norm_ = nullptr;
    ggml_tensor * out_norm_ = nullptr;
    std::vector<DraftLayer> layers_;
    ggml_tensor * tok_embd_ = nullptr;
    Linear output_;
    ggml_tensor * rope_freqs_ = nullptr;
    ggml_tensor * d2t_ = nullptr;
    DraftChain chain_;
    bool own_head_ = false;
};

std::shared_ptr<const DraftModel> load_draft_safetensors(const std::string & folder, std::shared_ptr<Device> device,
                                                         std::shared_ptr<const TargetModel> target);
std::shared_ptr<const DraftModel> load_draft_gguf(const std::string & path, std::shared_ptr<Device> device,
                                                  std::shared_ptr<const TargetModel> target);

} // namespace dflash
