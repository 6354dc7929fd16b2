#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/gguf_file.hpp"
#include "gguf/hf_config.hpp"
#include "model/rope_params.hpp"
#include "model/target_config.hpp"

namespace dflash {

/// Geometry and rules of a DFlash drafter, the same whatever file form it came from.
struct DraftConfig {
    std::string form; // "huggingface", "llama.cpp" or "lucebox"
    int32_t n_layer = 0;
    int32_t n_embd = 0; // equal to the target's
    int32_t n_ff = 0;
    int32_t n_head = 0;
    int32_t n_head_kv = 0;
    int32_t head_dim = 0;
    int32_t n_vocab = 0; // 0: the file does not say
    float rms_eps = 1e-6f;
    RopeParams rope;
    int32_t block_size = 16; // anchor and proposals
    int32_t mask_token_id = -1;
    std::vector<int32_t> target_layer_ids; // target layers whose OUTPUTS are the features, in concatenation order
    std::vector<int32_t> windows;          // [n_layer] sliding window, 0: the whole context
    std::vector<bool> causal;              // [n_layer] rows of the block see only earlier rows of the block
    float embedding_scale = 1.0f;          // times the embedding of a block token
    float logit_scale = 1.0f;
    float final_logit_softcapping = 0.0f; // 0: none; cap * tanh(logits / cap)
    bool sample_from_anchor = false;      // row k proposes position c + k + 1 instead of c + k
    int32_t n_vocab_draft = 0;            // tokens of the file's own head; 0: the file does not say
    int32_t conv_kernel = 0;              // DFlash2: taps of the convolutions along the block; 0: none
    int32_t conv_group = 0;               // channels that share a dynamic tap
    int32_t selector_rank = 0;            // DFlash2: width of the selector's codebooks; 0: no selector
    int32_t selector_top_k = 0;           // candidates of a slot that the selector chooses from
    int32_t markov_rank = 0;              // DSpark: width of the Markov head; 0: none
    bool has_confidence = false;          // DSpark: a head that predicts acceptance, slot by slot
    bool confidence_sees_previous = true; // its input holds the Markov embedding of the token before

    /// A proposal depends on the one before it.
    bool is_chained() const { return selector_rank > 0 || markov_rank > 0; }

    int32_t n_taps() const { return static_cast<int32_t>(target_layer_ids.size()); }
    /// Proposals of one block.
    int32_t n_proposals() const { return sample_from_anchor ? block_size : block_size - 1; }
    bool operator==(const DraftConfig & o) const;
};

/// The three file forms. Throw Status::format naming key, found and wanted; Status::unsupported for drafter variants
/// that this version does not run, naming them.
DraftConfig read_draft_config_hf(const HfConfig & config);
DraftConfig read_draft_config_llamacpp(const GgufFile & file);
/// The parts of it that say which heads there are. They read what comes before from c.
void read_draft_heads_hf(const HfConfig & config, DraftConfig & c);
void read_draft_heads_llamacpp(const GgufFile & file, DraftConfig & c);
/// Rules between the heads' numbers. Throws Status::format or Status::unsupported.
void check_draft_heads(const DraftConfig & c, const std::string & path);
DraftConfig read_draft_config_lucebox(const GgufFile & file);
bool is_lucebox_architecture(const std::string & architecture);

/// Rules between a drafter and its target: equal width, features inside the target, mask id inside its vocabulary,
/// rope base as plausible as the target's. Throws Status::mismatch naming both values.
void check_draft_fits_target(const DraftConfig & draft, const TargetConfig & target, const std::string & draft_path);

} // namespace dflash
