#include "model/target_config.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>

#include "base/error.hpp"
#include "base/log.hpp"

namespace dflash {
namespace {

constexpr int64_t max_width = 1 << 20;

[[noreturn]] void refuse(const GgufFile & file, const std::string & arch) {
    if (arch == "qwen3next") {
        fail(Status::unsupported,
             "%s: architecture qwen3next is Qwen3-Next, an older hybrid whose value heads are grouped and whose "
             "recurrent state cannot be rolled back the same way; only qwen35 and qwen35moe are supported",
             file.path().c_str());
    }
    if (arch == "qwen4exp") {
        fail(Status::unsupported,
             "%s: architecture qwen4exp is Qwen3.8-Flash-Next, a different network (hyper-connections, sparse "
             "indexer, hashed n-gram embeddings); only qwen35 and qwen35moe are supported",
             file.path().c_str());
    }
    if (arch == "dflash" || arch.find("dflash-draft") != std::string::npos) {
        fail(Status::unsupported, "%s: architecture %s is a DFlash drafter, not a target model", file.path().c_str(),
             arch.c_str());
    }
    fail(Status::unsupported, "%s: architecture %s is not supported; want qwen35 or qwen35moe", file.path().c_str(),
         arch.c_str());
}

void read_layer_kinds(const GgufFile & file, const std::string & p, int64_t block_count, TargetConfig & c) {
    const std::vector<bool> listed = file.bools_or(p + "attention.recurrent_layers", {}, 4096);
    c.recurrent.resize(static_cast<size_t>(c.n_layer));
    if (!listed.empty()) {
        check(listed.size() == static_cast<size_t>(block_count), Status::format,
              "%s: key %sattention.recurrent_layers has %zu entries, want %lld", file.path().c_str(), p.c_str(),
              listed.size(), static_cast<long long>(block_count));
        for (int32_t i = 0; i < c.n_layer; ++i) {
            c.recurrent[static_cast<size_t>(i)] = listed[static_cast<size_t>(i)];
        }
        for (size_t i = static_cast<size_t>(c.n_layer); i < listed.size(); ++i) {
            check(!listed[i], Status::format, "%s: multi-token-prediction block %zu is marked recurrent",
                  file.path().c_str(), i);
        }
        return;
    }
    const int64_t interval = file.int_or(p + "full_attention_interval", 4, 1, 4096);
    for (int32_t i = 0; i < c.n_layer; ++i) {
        c.recurrent[static_cast<size_t>(i)] = (i + 1) % interval != 0;
    }
}

void read_rope(const GgufFile & file, const std::string & p, TargetConfig & c) {
    const std::string path = file.path();
    c.rope.n_dims = static_cast<int32_t>(file.int_or(p + "rope.dimension_count", c.head_dim, 2, c.head_dim));
    check(c.rope.n_dims % 2 == 0, Status::format, "%s: key %srope.dimension_count is %d, want an even number",
          path.c_str(), p.c_str(), c.rope.n_dims);
    c.rope.theta = static_cast<float>(file.float_or(p + "rope.freq_base", 1e7, 1.0 + 1e-6, 1e12));
    const std::vector<int64_t> sections = file.ints_or(p + "rope.dimension_sections", {}, 16);
    check(sections.size() == 3 || sections.size() == 4, Status::format,
          "%s: key %srope.dimension_sections has %zu entries, want 4", path.c_str(), p.c_str(), sections.size());
    int64_t sum = 0;
    for (size_t i = 0; i < sections.size(); ++i) {
        check(sections[i] >= 0 && sections[i] <= c.head_dim, Status::format,
              "%s: key %srope.dimension_sections holds %lld, want 0 to %d", path.c_str(), p.c_str(),
              static_cast<long long>(sections[i]), c.head_dim);
        c.rope_sections[i] = static_cast<int32_t>(sections[i]);
        sum += sections[i];
    }
    check(2 * sum == c.rope.n_dims, Status::format,
          "%s: key %srope.dimension_sections sums to %lld, want half of the %d rotated dimensions", path.c_str(),
          p.c_str(), static_cast<long long>(sum), c.rope.n_dims);
    const std::string scaling = file.string_or(p + "rope.scaling.type", "none");
    if (scaling == "linear" || scaling == "yarn") {
        const double factor = file.require_float(p + "rope.scaling.factor", 1.0, 1e6);
        c.rope.freq_scale = static_cast<float>(1.0 / factor);
        c.rope.ext_factor = scaling == "yarn" ? 1.0f : 0.0f;
        c.rope.n_ctx_orig =
            static_cast<int32_t>(file.int_or(p + "rope.scaling.original_context_length", c.n_ctx_train, 0, INT32_MAX));
    } else {
        check(scaling == "none", Status::unsupported, "%s: rope scaling type \"%s\", want none, linear or yarn",
              path.c_str(), scaling.c_str());
    }
}

void read_experts(const GgufFile & file, const std::string & p, TargetConfig & c) {
    c.n_expert = static_cast<int32_t>(file.require_int(p + "expert_count", 1, 4096));
    c.n_expert_used = static_cast<int32_t>(file.require_int(p + "expert_used_count", 1, c.n_expert));
    c.expert_gating_func = static_cast<int32_t>(file.int_or(p + "expert_gating_func", 1, 1, 2));
    c.expert_weights_scale = static_cast<float>(file.float_or(p + "expert_weights_scale", 1.0, 0.0, 1e6));
    check(
        file.bool_or(p + "expert_weights_norm", true), Status::unsupported,
        "%s: %sexpert_weights_norm is false, want true: the weights of the chosen experts are always made to sum to 1",
        file.path().c_str(), p.c_str());
    c.n_ff_exp = static_cast<int32_t>(file.int_or(p + "expert_feed_forward_length", 0, 0, max_width));
    c.n_ff_shexp = static_cast<int32_t>(file.int_or(p + "expert_shared_feed_forward_length", 0, 0, max_width));
}

} // namespace

int32_t TargetConfig::n_full_layers(int32_t begin, int32_t end) const {
    int32_t n = 0;
    for (int32_t i = begin; i < end; ++i) {
        n += recurrent[static_cast<size_t>(i)] ? 0 : 1;
    }
    return n;
}

TargetConfig read_target_config(const GgufFile & file) {
    TargetConfig c;
    c.architecture = file.architecture();
    if (c.architecture != "qwen35" && c.architecture != "qwen35moe") {
        refuse(file, c.architecture);
    }
    c.is_moe = c.architecture == "qwen35moe";
    const std::string p = c.architecture + ".";
    const std::string path = file.path();
    c.name = file.string_or("general.name", "");
    const int64_t block_count = file.require_int(p + "block_count", 1, 4096);
    c.n_layer_nextn = static_cast<int32_t>(file.int_or(p + "nextn_predict_layers", 0, 0, block_count));
    c.n_layer = static_cast<int32_t>(block_count) - c.n_layer_nextn;
    check(c.n_layer >= 1, Status::format, "%s: all %lld blocks are multi-token-prediction blocks", path.c_str(),
          static_cast<long long>(block_count));
    c.n_embd = static_cast<int32_t>(file.require_int(p + "embedding_length", 1, max_width));
    c.n_head = static_cast<int32_t>(file.require_int(p + "attention.head_count", 1, 4096));
    c.n_head_kv = static_cast<int32_t>(file.int_or(p + "attention.head_count_kv", c.n_head, 1, c.n_head));
    check(c.n_head % c.n_head_kv == 0, Status::format, "%s: %d attention heads, want a multiple of the %d K/V heads",
          path.c_str(), c.n_head, c.n_head_kv);
    c.head_dim =
        static_cast<int32_t>(file.int_or(p + "attention.key_length", std::max(1, c.n_embd / c.n_head), 2, 4096));
    const int64_t value_length = file.int_or(p + "attention.value_length", c.head_dim, 1, 4096);
    check(value_length == c.head_dim, Status::unsupported,
          "%s: attention.key_length %d and attention.value_length %lld differ", path.c_str(), c.head_dim,
          static_cast<long long>(value_length));
    c.n_ctx_train = static_cast<int32_t>(file.int_or(p + "context_length", 0, 0, INT32_MAX));
    c.rms_eps = static_cast<float>(file.float_or(p + "attention.layer_norm_rms_epsilon", 1e-6, 1e-12, 1.0));
    if (c.is_moe) {
        read_experts(file, p, c);
    } else {
        c.n_ff = static_cast<int32_t>(file.require_int(p + "feed_forward_length", 1, max_width));
    }
    read_layer_kinds(file, p, block_count, c);
    read_rope(file, p, c);
    c.ssm_d_conv = static_cast<int32_t>(file.require_int(p + "ssm.conv_kernel", 2, 16));
    c.ssm_d_state = static_cast<int32_t>(file.require_int(p + "ssm.state_size", 1, 4096));
    c.ssm_n_group = static_cast<int32_t>(file.require_int(p + "ssm.group_count", 1, 4096));
    c.ssm_dt_rank = static_cast<int32_t>(file.require_int(p + "ssm.time_step_rank", 1, 4096));
    c.ssm_d_inner = static_cast<int32_t>(file.require_int(p + "ssm.inner_size", 1, max_width));
    check(c.ssm_d_inner == c.ssm_dt_rank * c.ssm_d_state, Status::format,
          "%s: ssm.inner_size %d, want time_step_rank %d times state_size %d (equal key and value head sizes)",
          path.c_str(), c.ssm_d_inner, c.ssm_dt_rank, c.ssm_d_state);
    check(c.ssm_dt_rank % c.ssm_n_group == 0, Status::format,
          "%s: %d DeltaNet value heads, want a multiple of the %d key heads", path.c_str(), c.ssm_dt_rank,
          c.ssm_n_group);
    const GgufTensorInfo * embed = file.find_tensor("token_embd.weight");
    check(embed != nullptr, Status::format, "%s: tensor token_embd.weight is missing", path.c_str());
    check(embed->n_dims == 2 && embed->ne[0] == c.n_embd && embed->ne[1] <= INT32_MAX, Status::format,
          "%s: tensor token_embd.weight is [%lld, %lld], want [%d, vocabulary]", path.c_str(),
          static_cast<long long>(embed->ne[0]), static_cast<long long>(embed->ne[1]), c.n_embd);
    c.n_vocab = static_cast<int32_t>(embed->ne[1]);
    return c;
}

std::vector<int32_t> read_stop_ids(const GgufFile & file) {
    std::set<int32_t> ids;
    const GgufValue * tokens = file.find("tokenizer.ggml.tokens");
    const bool has_tokens =
        tokens != nullptr && tokens->type == GgufType::array && tokens->element_type == GgufType::string;
    const int64_t n_tokens = has_tokens ? static_cast<int64_t>(tokens->count) : INT32_MAX;
    for (const char * key :
         {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
        const int64_t id = file.int_or(key, -1, -1, INT64_MAX);
        if (id >= 0 && id < n_tokens) {
            ids.insert(static_cast<int32_t>(id));
        }
    }
    if (file.find("tokenizer.ggml.eos_token_id") == nullptr) {
        log(LogLevel::warning, "%s: no tokenizer.ggml.eos_token_id; generation ends at known end markers or the limit",
            file.path().c_str());
    }
    if (has_tokens) {
        static constexpr std::array<std::string_view, 7> known = {
            "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>"};
        for (uint64_t i = 0; i < tokens->count; ++i) {
            const std::string_view piece = file.string_at(*tokens, i);
            if (!piece.empty() && piece.front() == '<' && std::find(known.begin(), known.end(), piece) != known.end()) {
                ids.insert(static_cast<int32_t>(i));
            }
        }
    }
    return {ids.begin(), ids.end()};
}

std::vector<int32_t> default_capture_layers(int32_t n_layer, int32_t n_taps) {
    check(n_taps >= 1 && n_taps <= n_layer, Status::invalid, "%d feature layers, want 1 to %d", n_taps, n_layer);
    const int32_t step = n_taps > 1 ? std::max(1, (n_layer - 2) / (n_taps - 1)) : 1;
    std::vector<int32_t> ids;
    for (int32_t k = 0; k < n_taps && 1 + k * step < n_layer; ++k) {
        ids.push_back(1 + k * step);
    }
    if (ids.empty()) {
        ids.push_back(0);
    }
    return ids;
}

void check_capture_layers(const std::vector<int32_t> & ids, int32_t n_layer) {
    for (size_t i = 0; i < ids.size(); ++i) {
        check(ids[i] >= 0 && ids[i] < n_layer, Status::invalid, "feature layer %d, want 0 to %d", ids[i], n_layer - 1);
        check(i == 0 || ids[i] > ids[i - 1], Status::invalid, "feature layers are not strictly increasing: %d after %d",
              ids[i], i == 0 ? -1 : ids[i - 1]);
    }
}

} // namespace dflash
