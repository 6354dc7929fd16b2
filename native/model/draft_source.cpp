#include "model/draft_source.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <regex>

#include "base/error.hpp"
#include "gguf/safetensors_file.hpp"

namespace dflash {
namespace {

namespace fs = std::filesystem;

struct Renaming {
    const char * pattern;
    const char * name;
};

// Hugging Face names, with or without a "model." prefix.
const Renaming hf_names[] = {
    {R"((?:model\.)?fc\.weight)", "fc.weight"},
    {R"((?:model\.)?hidden_norm\.weight)", "enc.output_norm.weight"},
    {R"((?:model\.)?norm\.weight)", "output_norm.weight"},
    {R"((?:model\.)?embed_tokens\.weight)", "token_embd.weight"},
    {R"(lm_head\.weight)", "output.weight"},
    {R"((?:model\.)?layers\.(\d+)\.input_layernorm\.weight)", "blk.$1.attn_norm.weight"},
    {R"((?:model\.)?layers\.(\d+)\.post_attention_layernorm\.weight)", "blk.$1.ffn_norm.weight"},
    {R"((?:model\.)?layers\.(\d+)\.self_attn\.([qkv])_proj\.weight)", "blk.$1.attn_$2.weight"},
    {R"((?:model\.)?layers\.(\d+)\.self_attn\.o_proj\.weight)", "blk.$1.attn_output.weight"},
    {R"((?:model\.)?layers\.(\d+)\.self_attn\.([qk])_norm\.weight)", "blk.$1.attn_$2_norm.weight"},
    {R"((?:model\.)?layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight)", "blk.$1.ffn_$2.weight"},
    {R"((?:model\.)?layers\.(\d+)\.attention_conv\.base_kernel)", "blk.$1.attn_conv_base"},
    {R"((?:model\.)?layers\.(\d+)\.attention_conv\.kernel_projection\.weight)", "blk.$1.attn_conv_proj.weight"},
    {R"((?:model\.)?layers\.(\d+)\.mlp_conv\.base_kernel)", "blk.$1.ffn_conv_base"},
    {R"((?:model\.)?layers\.(\d+)\.mlp_conv\.kernel_projection\.weight)", "blk.$1.ffn_conv_proj.weight"},
    {R"((?:model\.)?candidate_selector\.(predecessor|successor)_codebook(?:\.weight)?)", "selector_$1.weight"},
    {R"((?:model\.)?candidate_selector\.hidden_projection\.weight)", "selector_hidden.weight"},
    {R"((?:model\.)?markov_head\.markov_w([12])\.weight)", "markov_w$1.weight"},
    {R"((?:model\.)?confidence_head\.proj\.(weight|bias))", "conf_proj.$1"},
    {R"((?:model\.)?(d2t|t2d))", "$1"},
};

const Renaming llamacpp_names[] = {
    {R"((fc|enc\.output_norm|output_norm|token_embd|output)\.weight)", "$1.weight"},
    {R"((fc|output|markov_w2)\.scale)", "$1.scale"},
    {R"((selector_predecessor|selector_successor|selector_hidden|markov_w1|markov_w2)\.weight)", "$1.weight"},
    {R"(conf_proj\.(weight|bias))", "conf_proj.$1"},
    {R"((d2t|t2d))", "$1"},
    {R"(blk\.(\d+)\.(attn|ffn)_conv_base)", "blk.$1.$2_conv_base"},
    {R"(blk\.(\d+)\.(attn|ffn)_conv_proj\.weight)", "blk.$1.$2_conv_proj.weight"},
    {R"(rope_freqs\.weight)", "rope_freqs.weight"},
    {R"(blk\.(\d+)\.(attn_norm|ffn_norm|attn_q|attn_k|attn_v|attn_output|attn_q_norm|attn_k_norm|ffn_gate|ffn_up|ffn_down)\.weight)",
     "blk.$1.$2.weight"},
    {R"(blk\.(\d+)\.(attn_q|attn_k|attn_v|attn_output|ffn_gate|ffn_up|ffn_down)\.scale)", "blk.$1.$2.scale"},
};

const Renaming lucebox_names[] = {
    {R"(dflash[._]fc\.weight)", "fc.weight"},
    {R"(dflash[._]hidden_norm\.weight)", "enc.output_norm.weight"},
    {R"(output_norm\.weight)", "output_norm.weight"},
    {R"(blk\.(\d+)\.(?:ffn_norm|post_attention_norm)\.weight)", "blk.$1.ffn_norm.weight"},
    {R"(blk\.(\d+)\.(attn_norm|attn_q|attn_k|attn_v|attn_output|attn_q_norm|attn_k_norm|ffn_gate|ffn_up|ffn_down)\.weight)",
     "blk.$1.$2.weight"},
};

template <size_t N> std::string canonical(const Renaming (&table)[N], const std::string & name) {
    for (const Renaming & r : table) {
        const std::regex pattern(r.pattern);
        if (std::regex_match(name, pattern)) {
            return std::regex_replace(name, pattern, r.name);
        }
    }
    return "";
}

// Parts of drafters for other targets. No implementation that could be held against a result is at hand for them.
const Renaming not_run[] = {
    {R"(.*\.(?:attn_gate|self_attn\.g_proj)\.weight)", "a gate on the attention output"},
    {R"((?:.*\.)?aux_hidden_norms?\.\d+\.weight)", "a norm for each layer's features"},
    {R"((?:.*\.)?(?:self_attn\.)?(?:attn_)?sinks?(?:\.weight)?)", "attention sinks"},
    {R"((?:.*\.)?(?:dflash\.)?domino.*)", "a Domino head"},
    {R"(.*markov_head\.(?:gate_proj|joint_proj)\..*)", "a gated or recurrent Markov head"},
};

void add(DraftSource & source, std::string name, DraftSource::Tensor tensor) {
    if (name.empty()) {
        for (const Renaming & part : not_run) {
            check(!std::regex_match(tensor.file_name, std::regex(part.pattern)), Status::unsupported,
                  "%s: tensor %s: drafters with %s are not supported", source.path.c_str(), tensor.file_name.c_str(),
                  part.name);
        }
    }
    check(!name.empty(), Status::unsupported,
          "%s: tensor %s is not part of a DFlash drafter that this version runs; it is not ignored because the "
          "drafter would then propose something else",
          source.path.c_str(), tensor.file_name.c_str());
    check(source.find(name) == nullptr, Status::format, "%s: tensor %s stands for %s, which is there already",
          source.path.c_str(), tensor.file_name.c_str(), name.c_str());
    tensor.name = std::move(name);
    source.tensors.push_back(std::move(tensor));
}

enum ggml_type type_of(const std::string & dtype, const std::string & path, const std::string & name) {
    if (dtype == "F32") {
        return GGML_TYPE_F32;
    }
    if (dtype == "F16") {
        return GGML_TYPE_F16;
    }
    if (dtype == "BF16") {
        return GGML_TYPE_BF16;
    }
    if ((name == "d2t" || name == "model.d2t") && (dtype == "I64" || dtype == "I32")) {
        return dtype == "I64" ? GGML_TYPE_I64 : GGML_TYPE_I32;
    }
    if ((name == "t2d" || name == "model.t2d") && (dtype == "BOOL" || dtype == "U8" || dtype == "I8")) {
        return GGML_TYPE_I8;
    }
    fail(Status::unsupported, "%s: tensor %s has dtype %s, want F32, F16 or BF16", path.c_str(), name.c_str(),
         dtype.c_str());
}

/// Shape and presence of the DSpark heads' tensors decide; keys of the configuration must agree with them.
void note_heads(DraftSource & source) {
    DraftConfig & c = source.config;
    if (const DraftSource::Tensor * w1 = source.find("markov_w1.weight")) {
        const int64_t rank = w1->ne.size() == 2 ? w1->ne[0] : 0;
        check(rank >= 1 && rank <= 65536 && (c.markov_rank == 0 || c.markov_rank == rank), Status::format,
              "%s: tensor %s has rank %lld, want %d", source.path.c_str(), w1->file_name.c_str(),
              static_cast<long long>(rank), c.markov_rank);
        c.markov_rank = static_cast<int32_t>(rank);
    }
    if (const DraftSource::Tensor * w = source.find("conf_proj.weight")) {
        c.has_confidence = true;
        // Without the Markov embedding it is narrower; a GGUF has no key that says so.
        if (!w->ne.empty() && w->ne[0] == c.n_embd) {
            c.confidence_sees_previous = false;
        }
    }
    check_draft_heads(c, source.path);
}

/// In a Hugging Face file d2t holds how far the target's id lies above the draft id; everywhere else it is that id.
void make_absolute(DraftSource & source) {
    for (DraftSource::Tensor & t : source.tensors) {
        if (t.name != "d2t") {
            continue;
        }
        const size_t width = t.type == GGML_TYPE_I64 ? sizeof(int64_t) : sizeof(int32_t);
        auto ids = std::make_shared<std::vector<int64_t>>(t.nbytes / width);
        for (size_t i = 0; i < ids->size(); ++i) {
            int64_t offset = 0;
            int32_t narrow = 0;
            std::memcpy(t.type == GGML_TYPE_I64 ? static_cast<void *>(&offset) : &narrow, t.data + i * width, width);
            offset = t.type == GGML_TYPE_I64 ? offset : narrow;
            check(offset >= -INT32_MAX && offset <= INT32_MAX, Status::format, "%s: d2t[%zu] is %lld",
                  source.path.c_str(), i, static_cast<long long>(offset));
            (*ids)[i] = static_cast<int64_t>(i) + offset;
        }
        t.type = GGML_TYPE_I64;
        t.data = reinterpret_cast<const uint8_t *>(ids->data());
        t.nbytes = ids->size() * sizeof(int64_t);
        source.files.push_back(ids);
    }
}

DraftSource open_folder(const std::string & path) {
    DraftSource source;
    source.path = path;
    HfConfig config = HfConfig::open((fs::path(path) / "config.json").string());
    config.look_in("transformer_layer_config");
    source.config = read_draft_config_hf(config);
    std::vector<std::string> files;
    for (const auto & item : fs::directory_iterator(path)) {
        if (item.path().extension() == ".safetensors") {
            files.push_back(item.path().string());
        }
    }
    std::sort(files.begin(), files.end());
    check(!files.empty(), Status::not_found, "%s: no .safetensors file in this folder", path.c_str());
    for (const std::string & name : files) {
        const auto file = SafetensorsFile::open(name);
        source.files.push_back(file);
        source.digest += file->digest();
        for (const SafetensorsFile::Tensor & t : file->tensors()) {
            DraftSource::Tensor tensor;
            tensor.file_name = t.name;
            tensor.type = type_of(t.dtype, path, t.name);
            tensor.ne.assign(t.shape.rbegin(), t.shape.rend());
            tensor.data = t.data;
            tensor.nbytes = t.nbytes;
            add(source, canonical(hf_names, t.name), std::move(tensor));
        }
    }
    make_absolute(source);
    note_heads(source);
    return source;
}

DraftSource open_gguf(const std::string & path) {
    const auto file = GgufFile::open(path);
    DraftSource source;
    source.path = path;
    source.digest = file->digest();
    source.files.push_back(file);
    const std::string arch = file->architecture();
    const bool lucebox = is_lucebox_architecture(arch);
    check(lucebox || arch == "dflash", Status::unsupported,
          "%s: architecture %s is not a DFlash drafter; want dflash, qwen35-dflash-draft, dflash-draft or "
          "gemma4-dflash-draft",
          path.c_str(), arch.c_str());
    source.config = lucebox ? read_draft_config_lucebox(*file) : read_draft_config_llamacpp(*file);
    for (const GgufTensorInfo & t : file->tensors()) {
        DraftSource::Tensor tensor;
        tensor.file_name = t.name;
        tensor.type = t.type;
        tensor.ne.assign(t.ne, t.ne + t.n_dims);
        tensor.data = t.data;
        tensor.nbytes = t.nbytes;
        add(source, lucebox ? canonical(lucebox_names, t.name) : canonical(llamacpp_names, t.name), std::move(tensor));
    }
    note_heads(source);
    return source;
}

} // namespace

const DraftSource::Tensor * DraftSource::find(const std::string & name) const {
    const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const Tensor & t) { return t.name == name; });
    return it == tensors.end() ? nullptr : &*it;
}

DraftSource open_draft_source(const std::string & path) {
    std::error_code error;
    return fs::is_directory(path, error) ? open_folder(path) : open_gguf(path);
}

} // namespace dflash
