#include "model/draft_config.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/log.hpp"

namespace dflash {
namespace {

constexpr int32_t max_block = 64;
constexpr int32_t qwen3_head_dim = 128;

/// Sliding layers are causal inside the block and full layers are not, unless the file has an explicit key.
void set_causality(DraftConfig & c, int explicit_causal) {
    c.causal.resize(static_cast<size_t>(c.n_layer));
    for (size_t i = 0; i < c.causal.size(); ++i) {
        c.causal[i] = explicit_causal >= 0 ? explicit_causal == 1 : c.windows[i] > 0;
    }
}

void check_common(const DraftConfig & c, const std::string & path) {
    check(c.n_head % c.n_head_kv == 0, Status::format, "%s: %d attention heads, want a multiple of the %d K/V heads",
          path.c_str(), c.n_head, c.n_head_kv);
    check(c.head_dim % 2 == 0, Status::format, "%s: head size %d, want an even number", path.c_str(), c.head_dim);
    check(c.block_size >= 2 && c.block_size <= max_block, Status::format, "%s: block size %d, want 2 to %d",
          path.c_str(), c.block_size, max_block);
    check(!c.target_layer_ids.empty() && c.target_layer_ids.size() <= 64, Status::format,
          "%s: %zu feature layers, want 1 to 64", path.c_str(), c.target_layer_ids.size());
    for (size_t i = 0; i < c.target_layer_ids.size(); ++i) {
        check(c.target_layer_ids[i] >= 0 && (i == 0 || c.target_layer_ids[i] > c.target_layer_ids[i - 1]),
              Status::format, "%s: feature layers are not strictly increasing from 0 on: %d", path.c_str(),
              c.target_layer_ids[i]);
    }
    check(c.mask_token_id >= 0, Status::format, "%s: no mask token id; a drafter cannot work without one",
          path.c_str());
    check(std::isfinite(c.rope.theta) && c.rope.theta > 1.0f, Status::format, "%s: rope base %g, want above 1",
          path.c_str(), static_cast<double>(c.rope.theta));
}

std::vector<int32_t> narrow(const std::vector<int64_t> & wide) {
    return {wide.begin(), wide.end()};
}

/// 1 + i (n - 4) / (n_draft - 1) rounded half to even; the layer in the middle for one tap.
std::vector<int32_t> hf_default_taps(int64_t n_target, int64_t n_draft) {
    if (n_draft == 1) {
        return {static_cast<int32_t>(n_target / 2)};
    }
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n_draft; ++i) {
        ids.push_back(static_cast<int32_t>(
            std::nearbyint(1.0 + static_cast<double>(i * (n_target - 4)) / static_cast<double>(n_draft - 1))));
    }
    return ids;
}

void read_hf_rope(const HfConfig & f, DraftConfig & c) {
    c.rope.n_dims = c.head_dim;
    c.rope.theta = static_cast<float>(
        f.require_float({"rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"}, 1.0 + 1e-6, 1e12));
    const std::string type = f.string_or(
        {"rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.type"},
        "default");
    if (type == "default") {
        return;
    }
    check(type == "yarn" || type == "linear", Status::unsupported, "%s: rope type \"%s\", want default, linear or yarn",
          f.path().c_str(), type.c_str());
    const double factor = f.require_float({"rope_parameters.factor", "rope_scaling.factor"}, 1.0, 1e6);
    c.rope.freq_scale = static_cast<float>(1.0 / factor);
    if (type == "yarn") {
        c.rope.ext_factor = 1.0f;
        c.rope.n_ctx_orig =
            static_cast<int32_t>(f.int_or({"rope_parameters.original_max_position_embeddings",
                                           "rope_scaling.original_max_position_embeddings", "max_position_embeddings"},
                                          0, 1, INT32_MAX));
        check(c.rope.n_ctx_orig > 0, Status::format, "%s: yarn without original_max_position_embeddings",
              f.path().c_str());
        c.rope.beta_fast =
            static_cast<float>(f.float_or({"rope_parameters.beta_fast", "rope_scaling.beta_fast"}, 32.0, 1e-3, 1e6));
        c.rope.beta_slow =
            static_cast<float>(f.float_or({"rope_parameters.beta_slow", "rope_scaling.beta_slow"}, 1.0, 1e-6, 1e6));
        // The operator multiplies by 1 + 0.1 ln(factor) itself; an explicit factor replaces that.
        const double built_in = 1.0 + 0.1 * std::log(factor);
        const double wanted =
            f.float_or({"rope_parameters.attention_factor", "rope_scaling.attention_factor"}, built_in, 1e-3, 1e3);
        c.rope.attn_factor = static_cast<float>(wanted / built_in);
    }
}

void read_hf_windows(const HfConfig & f, DraftConfig & c) {
    c.windows.assign(static_cast<size_t>(c.n_layer), 0);
    const std::vector<std::string> types = f.strings_or({"layer_types"}, {}, 4096);
    if (types.empty()) {
        return;
    }
    check(types.size() == c.windows.size(), Status::format, "%s: layer_types has %zu entries, want %d",
          f.path().c_str(), types.size(), c.n_layer);
    for (size_t i = 0; i < types.size(); ++i) {
        if (types[i] == "sliding_attention") {
            c.windows[i] = static_cast<int32_t>(f.require_int({"sliding_window"}, 1, INT32_MAX));
        } else {
            check(types[i] == "full_attention", Status::unsupported,
                  "%s: layer type \"%s\", want full_attention or sliding_attention", f.path().c_str(),
                  types[i].c_str());
        }
    }
}

void read_gguf_geometry(const GgufFile & f, const std::string & p, DraftConfig & c) {
    c.n_layer = static_cast<int32_t>(f.require_int(p + "block_count", 1, 1024));
    c.n_embd = static_cast<int32_t>(f.require_int(p + "embedding_length", 1, 131072));
    c.n_ff = static_cast<int32_t>(f.require_int(p + "feed_forward_length", 1, 524288));
    c.n_head = static_cast<int32_t>(f.require_int(p + "attention.head_count", 1, 1024));
    c.n_head_kv = static_cast<int32_t>(f.int_or(p + "attention.head_count_kv", c.n_head, 1, c.n_head));
    c.head_dim = static_cast<int32_t>(f.int_or(p + "attention.key_length", std::max(1, c.n_embd / c.n_head), 2, 1024));
    const int64_t value = f.int_or(p + "attention.value_length", c.head_dim, 1, 1024);
    check(value == c.head_dim, Status::unsupported, "%s: key length %d and value length %lld differ", f.path().c_str(),
          c.head_dim, static_cast<long long>(value));
    c.rms_eps = static_cast<float>(f.float_or(p + "attention.layer_norm_rms_epsilon", 1e-6, 1e-12, 1.0));
    c.rope.n_dims = static_cast<int32_t>(f.int_or(p + "rope.dimension_count", c.head_dim, 2, c.head_dim));
    check(c.rope.n_dims == c.head_dim, Status::unsupported, "%s: %d of %d head dimensions are rotated, want all",
          f.path().c_str(), c.rope.n_dims, c.head_dim);
    c.rope.theta = static_cast<float>(f.require_float(p + "rope.freq_base", 1.0 + 1e-6, 1e12));
    const std::string scaling = f.string_or(p + "rope.scaling.type", "none");
    if (scaling == "yarn" || scaling == "linear") {
        const double factor = f.require_float(p + "rope.scaling.factor", 1.0, 1e6);
        c.rope.freq_scale = static_cast<float>(1.0 / factor);
        if (scaling == "yarn") {
            c.rope.ext_factor = 1.0f;
            c.rope.n_ctx_orig =
                static_cast<int32_t>(f.require_int(p + "rope.scaling.original_context_length", 1, INT32_MAX));
            c.rope.beta_fast = static_cast<float>(f.float_or(p + "rope.scaling.yarn_beta_fast", 32.0, 1e-3, 1e6));
            c.rope.beta_slow = static_cast<float>(f.float_or(p + "rope.scaling.yarn_beta_slow", 1.0, 1e-6, 1e6));
            c.rope.attn_factor = static_cast<float>(f.float_or(p + "rope.scaling.attn_factor", 1.0, 1e-3, 1e3));
        }
    } else {
        check(scaling == "none", Status::unsupported, "%s: rope scaling type \"%s\", want none, linear or yarn",
              f.path().c_str(), scaling.c_str());
    }
    c.windows.assign(static_cast<size_t>(c.n_layer), 0);
    const int64_t window = f.int_or(p + "attention.sliding_window", 0, 0, INT32_MAX);
    const std::vector<bool> pattern = f.bools_or(p + "attention.sliding_window_pattern", {}, 4096);
    check(pattern.empty() || pattern.size() == c.windows.size(), Status::format,
          "%s: key %sattention.sliding_window_pattern has %zu entries, want %d", f.path().c_str(), p.c_str(),
          pattern.size(), c.n_layer);
    const bool any = std::find(pattern.begin(), pattern.end(), true) != pattern.end();
    check(!any || window > 0, Status::format, "%s: sliding layers without %sattention.sliding_window", f.path().c_str(),
          p.c_str());
    check(window == 0 || !pattern.empty(), Status::format,
          "%s: %sattention.sliding_window without %sattention.sliding_window_pattern", f.path().c_str(), p.c_str(),
          p.c_str());
    for (size_t i = 0; i < pattern.size(); ++i) {
        c.windows[i] = pattern[i] ? static_cast<int32_t>(window) : 0;
    }
}

void refuse_keys(const GgufFile & f, std::initializer_list<std::pair<std::string, const char *>> keys) {
    for (const auto & [key, what] : keys) {
        check(f.find(key) == nullptr, Status::unsupported, "%s: key %s: drafters with %s are not supported",
              f.path().c_str(), key.c_str(), what);
    }
}

} // namespace

bool is_lucebox_architecture(const std::string & a) {
    return a == "qwen35-dflash-draft" || a == "dflash-draft" || a == "gemma4-dflash-draft";
}

bool DraftConfig::operator==(const DraftConfig & o) const {
    return n_layer == o.n_layer && n_embd == o.n_embd && n_ff == o.n_ff && n_head == o.n_head &&
           n_head_kv == o.n_head_kv && head_dim == o.head_dim && rms_eps == o.rms_eps && rope.theta == o.rope.theta &&
           rope.freq_scale == o.rope.freq_scale && rope.ext_factor == o.rope.ext_factor &&
           rope.attn_factor == o.rope.attn_factor && rope.n_ctx_orig == o.rope.n_ctx_orig &&
           block_size == o.block_size && mask_token_id == o.mask_token_id && target_layer_ids == o.target_layer_ids &&
           windows == o.windows && causal == o.causal && embedding_scale == o.embedding_scale &&
           logit_scale == o.logit_scale && final_logit_softcapping == o.final_logit_softcapping &&
           sample_from_anchor == o.sample_from_anchor && n_vocab_draft == o.n_vocab_draft &&
           conv_kernel == o.conv_kernel && conv_group == o.conv_group && selector_rank == o.selector_rank &&
           selector_top_k == o.selector_top_k && markov_rank == o.markov_rank && has_confidence == o.has_confidence &&
           confidence_sees_previous == o.confidence_sees_previous;
}

DraftConfig read_draft_config_hf(const HfConfig & f) {
    DraftConfig c;
    c.form = "huggingface";
    check(!f.bool_or({"attention_bias"}, false), Status::unsupported, "%s: attention_bias is not supported",
          f.path().c_str());
    const std::string act = f.string_or({"hidden_act"}, "silu");
    check(act == "silu", Status::unsupported, "%s: hidden_act \"%s\", want silu", f.path().c_str(), act.c_str());
    const bool nested = f.find({"transformer_layer_config"}) != nullptr; // it leaves out what is a default of its class
    c.n_layer = static_cast<int32_t>(f.require_int({"num_hidden_layers"}, 1, 1024));
    c.n_embd = static_cast<int32_t>(f.require_int({"hidden_size"}, 1, 131072));
    c.n_ff = static_cast<int32_t>(f.require_int({"intermediate_size"}, 1, 524288));
    c.n_head = static_cast<int32_t>(f.require_int({"num_attention_heads"}, 1, 1024));
    c.n_head_kv = static_cast<int32_t>(f.int_or({"num_key_value_heads"}, c.n_head, 1, c.n_head));
    c.head_dim = static_cast<int32_t>(
        f.int_or({"head_dim"}, nested ? qwen3_head_dim : std::max(1, c.n_embd / c.n_head), 2, 1024));
    c.n_vocab = static_cast<int32_t>(f.int_or({"vocab_size"}, 0, 0, INT32_MAX));
    c.rms_eps = static_cast<float>(f.float_or({"rms_norm_eps"}, 1e-6, 1e-12, 1.0));
    read_hf_rope(f, c);
    read_hf_windows(f, c);
    c.block_size = static_cast<int32_t>(f.int_or({"dflash_config.block_size", "block_size"}, 16, 2, max_block));
    c.mask_token_id =
        static_cast<int32_t>(f.int_or({"dflash_config.mask_token_id", "mask_token_id"}, -1, 0, INT32_MAX));
    std::vector<int64_t> taps = f.ints_or({"dflash_config.target_layer_ids", "target_layer_ids"}, {}, 64, 0, 65535);
    // The other spelling counts layer inputs.
    for (const int64_t input : f.ints_or({"aux_hidden_state_layer_ids"}, {}, 64, 1, 65536)) {
        if (f.find({"dflash_config.target_layer_ids", "target_layer_ids"}) == nullptr) {
            taps.push_back(input - 1);
        }
    }
    if (taps.empty()) {
        const int64_t n_target = f.require_int({"num_target_layers", "dflash_config.num_target_layers"}, 1, 65535);
        c.target_layer_ids = hf_default_taps(n_target, c.n_layer);
        log(LogLevel::warning, "%s: no target_layer_ids; %zu feature layers by the default formula", f.path().c_str(),
            c.target_layer_ids.size());
    } else {
        c.target_layer_ids = narrow(taps);
    }
    c.embedding_scale = static_cast<float>(
        f.float_or({"dflash_config.input_embedding_scale", "input_embedding_scale"}, 1.0, -1e6, 1e6));
    c.logit_scale =
        static_cast<float>(f.float_or({"dflash_config.output_multiplier", "output_multiplier"}, 1.0, -1e6, 1e6));
    c.final_logit_softcapping = static_cast<float>(
        f.float_or({"dflash_config.final_logit_softcapping", "final_logit_softcapping"}, 0.0, 0.0, 1e6));
    read_draft_heads_hf(f, c);
    int causal = -1;
    if (f.find({"is_causal", "dflash_config.is_causal", "dflash_config.causal"}) != nullptr) {
        causal = f.bool_or({"is_causal", "dflash_config.is_causal", "dflash_config.causal"}, false) ? 1 : 0;
    } else if (f.bool_or({"sliding_window_non_causal"}, false)) {
        causal = 0;
    }
    set_causality(c, causal);
    check_common(c, f.path());
    return c;
}

DraftConfig read_draft_config_llamacpp(const GgufFile & f) {
    DraftConfig c;
    c.form = "llama.cpp";
    const std::string p = "dflash.";
    refuse_keys(f, {{p + "hyper_connection.count", "hyper-connections"}});
    read_gguf_geometry(f, p, c);
    const std::string act = f.string_or(p + "hidden_activation", "silu");
    check(act == "silu", Status::unsupported, "%s: hidden_activation \"%s\", want silu", f.path().c_str(), act.c_str());
    c.block_size = static_cast<int32_t>(f.int_or(p + "block_size", 16, 2, max_block));
    const std::vector<int64_t> inputs = f.ints_or(p + "target_layers", {}, 64);
    check(!inputs.empty(), Status::format, "%s: key dflash.target_layers is missing", f.path().c_str());
    for (const int64_t input : inputs) { // layer INPUT indices: the output of the layer before
        check(input >= 1 && input <= 65535, Status::format, "%s: dflash.target_layers holds %lld, want 1 to 65535",
              f.path().c_str(), static_cast<long long>(input));
        c.target_layer_ids.push_back(static_cast<int32_t>(input - 1));
    }
    c.mask_token_id = static_cast<int32_t>(f.int_or("tokenizer.ggml.mask_token_id", -1, 0, INT32_MAX));
    c.embedding_scale = static_cast<float>(f.float_or(p + "embedding_scale", 1.0, -1e6, 1e6));
    c.logit_scale = static_cast<float>(f.float_or(p + "logit_scale", 1.0, -1e6, 1e6));
    c.final_logit_softcapping = static_cast<float>(f.float_or(p + "final_logit_softcapping", 0.0, 0.0, 1e6));
    read_draft_heads_llamacpp(f, c);
    c.n_vocab = static_cast<int32_t>(f.int_or(p + "vocab_size", 0, 0, INT32_MAX));
    int causal = -1;
    if (f.find(p + "attention.causal") != nullptr) {
        causal = f.bool_or(p + "attention.causal", false) ? 1 : 0;
    }
    set_causality(c, causal);
    check_common(c, f.path());
    return c;
}

DraftConfig read_draft_config_lucebox(const GgufFile & f) {
    DraftConfig c;
    c.form = "lucebox";
    const std::string p = f.architecture() + ".";
    refuse_keys(f, {{p + "dflash.domino.enabled", "a Domino head"}, {p + "dflash.dspark.enabled", "a DSpark head"}});
    check(!f.bool_or(p + "dflash.context_kv_layer_norm", false), Status::unsupported,
          "%s: dflash.context_kv_layer_norm is not supported", f.path().c_str());
    read_gguf_geometry(f, p, c);
    c.block_size = static_cast<int32_t>(f.require_int(p + "dflash.block_size", 2, max_block));
    c.mask_token_id = static_cast<int32_t>(f.int_or(p + "dflash.mask_token_id", -1, 0, INT32_MAX));
    c.n_vocab = static_cast<int32_t>(f.int_or(p + "vocab_size", 0, 0, INT32_MAX));
    c.target_layer_ids = narrow(f.ints_or(p + "dflash.target_layer_ids", {}, 64));
    check(!c.target_layer_ids.empty(), Status::format,
          "%s: key %sdflash.target_layer_ids is missing; without it the features cannot be told", f.path().c_str(),
          p.c_str());
    set_causality(c, -1);
    check_common(c, f.path());
    return c;
}

void check_draft_fits_target(const DraftConfig & d, const TargetConfig & t, const std::string & path) {
    check(d.n_embd == t.n_embd, Status::mismatch, "%s: drafter width %d, the target has %d", path.c_str(), d.n_embd,
          t.n_embd);
    check(d.target_layer_ids.back() < t.n_layer, Status::mismatch,
          "%s: the drafter reads features of layer %d, the target has layers 0 to %d", path.c_str(),
          d.target_layer_ids.back(), t.n_layer - 1);
    check(d.mask_token_id < t.n_vocab, Status::mismatch, "%s: mask token id %d, the target's vocabulary has %d",
          path.c_str(), d.mask_token_id, t.n_vocab);
    check(d.n_vocab == 0 || d.n_vocab == t.n_vocab, Status::mismatch, "%s: drafter vocabulary %d, the target has %d",
          path.c_str(), d.n_vocab, t.n_vocab);
    const double ratio = static_cast<double>(d.rope.theta) / static_cast<double>(t.rope.theta);
    if (ratio < 0.999 || ratio > 1.001) {
        log(LogLevel::warning, "%s: rope base %g differs from the target's %g; a wrong base lowers acceptance",
            path.c_str(), static_cast<double>(d.rope.theta), static_cast<double>(t.rope.theta));
    }
}

} // namespace dflash
