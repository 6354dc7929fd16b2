#include <algorithm>

#include "base/error.hpp"
#include "model/draft_config.hpp"

// What a drafter has beyond a plain DFlash network: DFlash2's convolutions and selector, DSpark's Markov and confidence
// heads, a vocabulary of its own. Ranks of the DSpark heads come from the tensors, see open_draft_source().
namespace dflash {
namespace {

constexpr int64_t max_rank = 65536;
constexpr int64_t max_kernel = 16;
constexpr int64_t max_candidates = 64;

int32_t number(int64_t value) {
    return static_cast<int32_t>(value);
}

void refuse(bool wrong, const std::string & path, const char * what) {
    check(!wrong, Status::unsupported, "%s: %s", path.c_str(), what);
}

} // namespace

void read_draft_heads_hf(const HfConfig & f, DraftConfig & c) {
    const std::vector<std::string> architectures = f.strings_or({"architectures"}, {}, 16);
    const std::string arch = architectures.empty() ? "" : architectures.front();
    const bool second = arch == "DFlash2DraftModel";
    const bool dspark = arch == "Qwen3DSparkModel" || arch == "DSparkDraftModel" || arch == "DSparkSpeculator";
    check(second || dspark || arch == "DFlashDraftModel" || arch == "DFlashSpeculator", Status::unsupported,
          "%s: architecture \"%s\", want DFlashDraftModel, DFlashSpeculator, DFlash2DraftModel, Qwen3DSparkModel, "
          "DSparkDraftModel or DSparkSpeculator",
          f.path().c_str(), arch.c_str());
    if (second) {
        c.conv_kernel = number(f.require_int({"dflash_config.conv_kernel_size", "conv_kernel_size"}, 1, max_kernel));
        c.conv_group = number(f.require_int({"dflash_config.conv_group_size", "conv_group_size"}, 1, c.n_embd));
        c.selector_rank = number(f.require_int({"dflash_config.selector_rank", "selector_rank"}, 1, max_rank));
        c.selector_top_k = number(f.require_int({"dflash_config.selector_top_k", "selector_top_k"}, 1, max_candidates));
    }
    if (dspark) {
        const std::string type = f.string_or({"markov_head_type", "dflash_config.markov_head_type"}, "vanilla");
        check(type == "vanilla", Status::unsupported, "%s: markov_head_type \"%s\", want vanilla", f.path().c_str(),
              type.c_str());
        c.markov_rank = number(f.int_or({"markov_rank", "dflash_config.markov_rank"}, 0, 0, max_rank));
        c.confidence_sees_previous =
            f.bool_or({"confidence_head_with_markov", "dflash_config.confidence_head_with_markov"}, true);
    }
    // Checkpoints of the DSpark line propose from the anchor on; those written in speculators' form say so themselves.
    const bool speculators = f.find({"transformer_layer_config", "aux_hidden_state_layer_ids"}) != nullptr;
    c.sample_from_anchor =
        f.bool_or({"dflash_config.sample_from_anchor", "sample_from_anchor"}, dspark && !speculators);
    c.n_vocab_draft = number(f.int_or({"draft_vocab_size", "dflash_config.draft_vocab_size"}, 0, 0, INT32_MAX));
    const std::string & path = f.path();
    refuse(f.bool_or({"dflash_config.use_swa"}, false), path,
           "dflash_config.use_swa is not supported; layer_types and sliding_window say which layers slide");
    refuse(!f.bool_or({"rope_is_neox_style"}, true), path, "interleaved rotary pairs are not supported");
    refuse(f.float_or({"dflash_config.attention_value_scale"}, 1.0, -1e6, 1e6) != 1.0, path,
           "an attention value scale is not supported");
    refuse(f.float_or({"rope_parameters.partial_rotary_factor", "partial_rotary_factor"}, 1.0, 0.0, 1.0) != 1.0, path,
           "a partial rotary embedding is not supported");
}

void read_draft_heads_llamacpp(const GgufFile & f, DraftConfig & c) {
    const std::string p = "dflash.";
    if (f.find_tensor("selector_hidden.weight") != nullptr || f.find(p + "selector_rank") != nullptr) {
        c.conv_kernel = number(f.require_int(p + "conv_kernel_size", 1, max_kernel));
        c.conv_group = number(f.require_int(p + "conv_group_size", 1, c.n_embd));
        c.selector_rank = number(f.require_int(p + "selector_rank", 1, max_rank));
        c.selector_top_k = number(f.require_int(p + "selector_top_k", 1, max_candidates));
    }
    c.sample_from_anchor = f.bool_or(p + "sample_from_anchor", f.find_tensor("markov_w1.weight") != nullptr);
    const bool announced = f.bool_or(p + "has_confidence_head", false);
    check(!announced || f.find_tensor("conf_proj.weight") != nullptr, Status::format,
          "%s: %shas_confidence_head is true and tensor conf_proj.weight is missing", f.path().c_str(), p.c_str());
    refuse(f.float_or(p + "attention.scale", 0.0, -1e6, 1e6) != 0.0, f.path(), "an attention scale is not supported");
    const double value_scale = f.float_or(p + "attention.value_scale", 0.0, -1e6, 1e6);
    refuse(value_scale != 0.0 && value_scale != 1.0, f.path(), "an attention value scale is not supported");
}

void check_draft_heads(const DraftConfig & c, const std::string & path) {
    check(c.conv_group == 0 || c.n_embd % c.conv_group == 0, Status::format,
          "%s: conv_group_size %d does not divide the width %d", path.c_str(), c.conv_group, c.n_embd);
    refuse(c.selector_rank > 0 && c.markov_rank > 0, path,
           "a candidate selector together with a Markov head is not supported");
    refuse(c.selector_rank > 0 && c.sample_from_anchor, path,
           "a candidate selector with sample_from_anchor is not supported");
    refuse(c.markov_rank > 0 && c.logit_scale <= 0.0f, path,
           "a Markov head with a logit scale that is not positive is not supported");
    refuse(c.has_confidence && c.markov_rank == 0, path, "a confidence head without a Markov head is not supported");
    check(c.n_vocab == 0 || c.n_vocab_draft <= c.n_vocab, Status::format,
          "%s: draft_vocab_size %d, want at most vocab_size %d", path.c_str(), c.n_vocab_draft, c.n_vocab);
}

} // namespace dflash
