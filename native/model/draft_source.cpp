#include "model/draft_source.hpp"

#include <algorithm>
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
};

const Renaming llamacpp_names[] = {
    {R"((fc|enc\.output_norm|output_norm|token_embd|output)\.weight)", "$1.weight"},
    {R"((fc|output)\.scale)", "$1.scale"},
    {R"(d2t)", "d2t"},
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

void add(DraftSource & source, std::string name, DraftSource::Tensor tensor) {
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
    fail(Status::unsupported, "%s: tensor %s has dtype %s, want F32, F16 or BF16", path.c_str(), name.c_str(),
         dtype.c_str());
}

DraftSource open_folder(const std::string & path) {
    DraftSource source;
    source.path = path;
    source.config = read_draft_config_hf(HfConfig::open((fs::path(path) / "config.json").string()));
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
