#include "model/draft_model.hpp"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/error.hpp"
#include "base/log.hpp"
#include "model/draft_source.hpp"

namespace dflash {
namespace {

constexpr enum ggml_type weight_types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0};

std::string shape_text(const std::vector<int64_t> & ne) {
    std::string text = "[";
    for (size_t i = 0; i < ne.size(); ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(ne[i]);
    }
    return text + "]";
}

std::vector<float> as_f32(const DraftSource::Tensor & t, int64_t n) {
    std::vector<float> out(static_cast<size_t>(n));
    if (t.type == GGML_TYPE_F32) {
        std::memcpy(out.data(), t.data, out.size() * sizeof(float));
    } else {
        ggml_get_type_traits(t.type)->to_float(t.data, out.data(), n);
    }
    return out;
}

void check_fits_f16(const DraftSource::Tensor & t, const std::vector<float> & values) {
    constexpr float largest = 65504.0f;
    for (const float value : values) {
        check(std::abs(value) <= largest, Status::unsupported, "tensor %s holds %g, f16 ends at %g; choose bf16 or f32",
              t.file_name.c_str(), static_cast<double>(value), static_cast<double>(largest));
    }
}

} // namespace

class DraftLoader {
  public:
    DraftLoader(DraftSource source, std::shared_ptr<Device> device, std::shared_ptr<const TargetModel> target,
                const std::string & weight_type)
        : source_(std::move(source)), model_(new DraftModel) {
        if (weight_type != "file") {
            weight_type_ = type_from_name(weight_type, "weight_type", weight_types, std::size(weight_types));
        }
        check(target != nullptr, Status::invalid, "a drafter needs its target model");
        check(target->has_output() && target->layer_begin() == 0 && target->layer_end() == target->config().n_layer,
              Status::invalid, "a drafter needs a target with all layers and the output head");
        model_->config_ = source_.config;
        model_->device_ = std::move(device);
        model_->target_ = std::move(target);
        model_->path_ = source_.path;
        model_->digest_ = source_.digest;
        check_draft_fits_target(model_->config_, model_->target_->config(), source_.path);
    }

    std::shared_ptr<const DraftModel> run() {
        const DraftConfig & c = model_->config_;
        model_->weights_ = std::make_unique<TensorGroup>(model_->device_, source_.tensors.size() + 8);
        if (model_->target_->packs()) {
            model_->packed_ = std::make_unique<PackedWeights>(model_->device_, source_.tensors.size() + 8);
        }
        model_->fc_ = linear("fc", int64_t{1} * c.n_taps() * c.n_embd, c.n_embd);
        model_->hidden_norm_ = vector("enc.output_norm.weight", c.n_embd);
        model_->out_norm_ = vector("output_norm.weight", c.n_embd);
        model_->layers_.resize(static_cast<size_t>(c.n_layer));
        for (int32_t i = 0; i < c.n_layer; ++i) {
            wire_layer(model_->layers_[static_cast<size_t>(i)], "blk." + std::to_string(i) + ".");
        }
        if (source_.find("rope_freqs.weight") != nullptr) {
            model_->rope_freqs_ = vector("rope_freqs.weight", c.head_dim / 2);
        }
        wire_vocabulary();
        wire_chain();
        for (const DraftSource::Tensor & t : source_.tensors) {
            check(used_.count(t.name) == 1, Status::unsupported, "%s: tensor %s belongs to no layer of this drafter",
                  source_.path.c_str(), t.file_name.c_str());
        }
        model_->weights_->allocate("drafter weights");
        if (model_->packed_ != nullptr) {
            model_->packed_->allocate("drafter weights");
        }
        const auto guard = model_->device_->lock();
        for (const auto & [tensor, bytes] : host_) {
            tensor_write(tensor, bytes.data(), 0, bytes.size());
        }
        for (const auto & [tensor, t] : mapped_) {
            tensor_write(tensor, t->data, 0, t->nbytes);
        }
        for (const auto & [tensor, info] : borrowed_) {
            tensor_write(tensor, info->data, 0, info->nbytes);
        }
        ggml_backend_buffer_set_usage(model_->weights_->buffer(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        return std::move(model_);
    }

  private:
    const DraftSource::Tensor & require(const std::string & name, const std::vector<int64_t> & ne) {
        const DraftSource::Tensor * t = source_.find(name);
        check(t != nullptr, Status::format, "%s: tensor %s is missing", source_.path.c_str(), name.c_str());
        check(t->ne == ne, Status::format, "%s: tensor %s is %s, want %s", source_.path.c_str(), t->file_name.c_str(),
              shape_text(t->ne).c_str(), shape_text(ne).c_str());
        used_.insert(name);
        return *t;
    }

    ggml_tensor * vector(const std::string & name, int64_t n, int64_t ne1 = 1, int64_t ne2 = 1) {
        const DraftSource::Tensor & t =
            require(name, ne2 > 1 ? std::vector<int64_t>{n, ne1, ne2} : std::vector<int64_t>{n});
        ggml_tensor * tensor = model_->weights_->add(GGML_TYPE_F32, name, n, ne1, ne2);
        const std::vector<float> values = as_f32(t, n * ne1 * ne2);
        std::vector<uint8_t> bytes(values.size() * sizeof(float));
        std::memcpy(bytes.data(), values.data(), bytes.size());
        host_.emplace_back(tensor, std::move(bytes));
        return tensor;
    }

    /// factor: only products read it, whole.
    ggml_tensor * matrix(enum ggml_type type, const std::string & name, int64_t n_in, int64_t n_out, bool factor) {
        ggml_tensor * packed =
            factor && model_->packed_ != nullptr ? model_->packed_->add(type, name, n_in, n_out) : nullptr;
        return packed != nullptr ? packed : model_->weights_->add(type, name, n_in, n_out);
    }

    Linear linear(const std::string & base, int64_t n_in, int64_t n_out, bool factor = true) {
        const DraftSource::Tensor & t = require(base + ".weight", {n_in, n_out});
        Linear l;
        const bool convert = weight_type_ != GGML_TYPE_COUNT && weight_type_ != t.type && !ggml_is_quantized(t.type) &&
                             n_in % ggml_blck_size(weight_type_) == 0;
        l.w = matrix(convert ? weight_type_ : t.type, base + ".weight", n_in, n_out, factor);
        if (convert) {
            const std::vector<float> values = as_f32(t, n_in * n_out);
            if (weight_type_ == GGML_TYPE_F16) {
                check_fits_f16(t, values);
            }
            std::vector<uint8_t> bytes(ggml_row_size(weight_type_, n_in) * static_cast<size_t>(n_out));
            ggml_quantize_chunk(weight_type_, values.data(), bytes.data(), 0, n_out, n_in, nullptr);
            host_.emplace_back(l.w, std::move(bytes));
        } else {
            mapped_.emplace_back(l.w, &t);
        }
        if (source_.find(base + ".scale") != nullptr) {
            l.scale = as_f32(require(base + ".scale", {1}), 1)[0];
        }
        return l;
    }

    void wire_layer(DraftLayer & l, const std::string & b) {
        const DraftConfig & c = model_->config_;
        const int64_t q = int64_t{1} * c.n_head * c.head_dim;
        const int64_t kv = int64_t{1} * c.n_head_kv * c.head_dim;
        l.attn_norm = vector(b + "attn_norm.weight", c.n_embd);
        l.ffn_norm = vector(b + "ffn_norm.weight", c.n_embd);
        l.wq = linear(b + "attn_q", c.n_embd, q);
        l.wk = linear(b + "attn_k", c.n_embd, kv);
        l.wv = linear(b + "attn_v", c.n_embd, kv);
        l.wo = linear(b + "attn_output", q, c.n_embd);
        l.q_norm = vector(b + "attn_q_norm.weight", c.head_dim);
        l.k_norm = vector(b + "attn_k_norm.weight", c.head_dim);
        l.w_gate = linear(b + "ffn_gate", c.n_embd, c.n_ff);
        l.w_up = linear(b + "ffn_up", c.n_embd, c.n_ff);
        l.w_down = linear(b + "ffn_down", c.n_ff, c.n_embd);
        if (c.conv_kernel > 0) {
            const int64_t n_dynamic = int64_t{2} * c.conv_kernel * (c.n_embd / c.conv_group);
            l.attn_conv_base = vector(b + "attn_conv_base", c.n_embd, c.conv_kernel, 2);
            l.ffn_conv_base = vector(b + "ffn_conv_base", c.n_embd, c.conv_kernel, 2);
            l.attn_conv_proj = linear(b + "attn_conv_proj", c.n_embd, n_dynamic);
            l.ffn_conv_proj = linear(b + "ffn_conv_proj", c.n_embd, n_dynamic);
        }
    }

    void wire_chain() {
        const DraftConfig & c = model_->config_;
        DraftChain & chain = model_->chain_;
        const int64_t n_target = model_->target_->config().n_vocab;
        if (c.selector_rank > 0) {
            chain.previous = linear("selector_predecessor", c.selector_rank, n_target, false).w;
            chain.next = linear("selector_successor", c.selector_rank, n_target, false);
            chain.gate = linear("selector_hidden", c.n_embd, c.selector_rank);
            const int64_t n_draft = model_->output_.w->ne[1];
            check(c.selector_top_k <= n_draft, Status::format, "%s: selector_top_k %d of a vocabulary of %lld",
                  source_.path.c_str(), c.selector_top_k, static_cast<long long>(n_draft));
        } else if (c.markov_rank > 0) {
            chain.previous = linear("markov_w1", c.markov_rank, n_target, false).w;
            chain.next = linear("markov_w2", c.markov_rank, model_->output_.w->ne[1], false);
        }
        if (c.has_confidence) {
            chain.confidence = linear("conf_proj", c.n_embd + (c.confidence_sees_previous ? c.markov_rank : 0), 1);
            if (source_.find("conf_proj.bias") != nullptr) {
                chain.confidence.bias = vector("conf_proj.bias", 1);
            }
        }
    }

    /// A tensor of the target's file copied to the drafter's device.
    ggml_tensor * borrow(const char * name, bool factor) {
        const GgufTensorInfo * info = model_->target_->file()->find_tensor(name);
        if (info == nullptr) {
            return nullptr;
        }
        ggml_tensor * tensor = matrix(info->type, name, info->ne[0], info->ne[1], factor);
        borrowed_.emplace_back(tensor, info);
        return tensor;
    }

    void wire_vocabulary() {
        const DraftConfig & c = model_->config_;
        const TargetModel & target = *model_->target_;
        const int64_t n_vocab = target.config().n_vocab;
        const bool same_device = model_->device_ == target.device();
        if (source_.find("token_embd.weight") != nullptr) {
            model_->tok_embd_ = linear("token_embd", c.n_embd, n_vocab, false).w;
        } else {
            model_->tok_embd_ = same_device ? target.tok_embd() : borrow("token_embd.weight", false);
        }
        if (const DraftSource::Tensor * head = source_.find("output.weight")) {
            check(head->ne.size() == 2, Status::format, "%s: tensor output.weight is %s, want [%d, vocabulary]",
                  source_.path.c_str(), shape_text(head->ne).c_str(), c.n_embd);
            model_->output_ = linear("output", c.n_embd, head->ne[1]);
            model_->own_head_ = true;
            wire_vocabulary_map(head->ne[1], n_vocab);
        } else {
            check(source_.find("d2t") == nullptr, Status::format, "%s: a d2t map without an output head",
                  source_.path.c_str());
            check(c.n_vocab_draft == 0 || c.n_vocab_draft == n_vocab, Status::format,
                  "%s: draft_vocab_size %d without an output head of that size, the target has %lld tokens",
                  source_.path.c_str(), c.n_vocab_draft, static_cast<long long>(n_vocab));
            model_->output_ = target.output();
            if (!same_device) {
                ggml_tensor * w = borrow("output.weight", true);
                model_->output_.w = w != nullptr ? w : model_->tok_embd_;
                check(model_->output_.bias == nullptr, Status::unsupported,
                      "a drafter on another device cannot borrow a head with a bias");
            }
        }
    }

    void wire_vocabulary_map(int64_t n_draft, int64_t n_target) {
        const DraftSource::Tensor * map = source_.find("d2t");
        if (map == nullptr) {
            check(n_draft == n_target, Status::mismatch,
                  "%s: the drafter's head has %lld tokens, the target %lld, and there is no d2t map",
                  source_.path.c_str(), static_cast<long long>(n_draft), static_cast<long long>(n_target));
            return;
        }
        require("d2t", {n_draft});
        const int32_t announced = model_->config_.n_vocab_draft;
        check(announced == 0 || announced == n_draft, Status::format,
              "%s: draft_vocab_size %d, the head has %lld tokens", source_.path.c_str(), announced,
              static_cast<long long>(n_draft));
        check(map->type == GGML_TYPE_I64 || map->type == GGML_TYPE_I32, Status::format,
              "%s: tensor d2t has type %s, want i64 or i32", source_.path.c_str(), ggml_type_name(map->type));
        std::vector<int32_t> ids(static_cast<size_t>(n_draft));
        std::vector<int64_t> draft_of(static_cast<size_t>(n_target), -1);
        for (size_t i = 0; i < ids.size(); ++i) {
            int64_t id = 0;
            if (map->type == GGML_TYPE_I64) {
                std::memcpy(&id, map->data + i * sizeof(int64_t), sizeof(int64_t));
            } else {
                int32_t small = 0;
                std::memcpy(&small, map->data + i * sizeof(int32_t), sizeof(int32_t));
                id = small;
            }
            check(id >= 0 && id < n_target, Status::format, "%s: d2t maps %zu to %lld, want 0 to %lld",
                  source_.path.c_str(), i, static_cast<long long>(id), static_cast<long long>(n_target - 1));
            int64_t & before = draft_of[static_cast<size_t>(id)];
            check(before < 0, Status::format, "%s: d2t maps both %lld and %zu to %lld", source_.path.c_str(),
                  static_cast<long long>(before), i, static_cast<long long>(id));
            before = static_cast<int64_t>(i);
            ids[i] = static_cast<int32_t>(id);
        }
        check_target_map(draft_of);
        model_->d2t_ = model_->weights_->add(GGML_TYPE_I32, "d2t", 1, n_draft);
        std::vector<uint8_t> bytes(ids.size() * sizeof(int32_t));
        std::memcpy(bytes.data(), ids.data(), bytes.size());
        host_.emplace_back(model_->d2t_, std::move(bytes));
    }

    /// t2d, where it is there, marks the same tokens that d2t names. Nothing else reads it.
    void check_target_map(const std::vector<int64_t> & draft_of) {
        if (source_.find("t2d") == nullptr) {
            return;
        }
        const DraftSource::Tensor & map = require("t2d", {static_cast<int64_t>(draft_of.size())});
        check(map.type == GGML_TYPE_I8, Status::format, "%s: tensor t2d has type %s, want bool or i8",
              source_.path.c_str(), ggml_type_name(map.type));
        for (size_t i = 0; i < draft_of.size(); ++i) {
            check((map.data[i] != 0) == (draft_of[i] >= 0), Status::format, "%s: t2d says %d for token %zu, d2t %s it",
                  source_.path.c_str(), map.data[i], i, draft_of[i] >= 0 ? "names" : "does not name");
        }
    }

    DraftSource source_;
    std::shared_ptr<DraftModel> model_;
    enum ggml_type weight_type_ = GGML_TYPE_COUNT; // COUNT: as in the file
    std::set<std::string> used_;
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> host_;
    std::vector<std::pair<ggml_tensor *, const DraftSource::Tensor *>> mapped_;
    std::vector<std::pair<ggml_tensor *, const GgufTensorInfo *>> borrowed_;
};

std::shared_ptr<const DraftModel> DraftModel::load(const std::string & path, std::shared_ptr<Device> device,
                                                   std::shared_ptr<const TargetModel> target,
                                                   const std::string & weight_type) {
    return DraftLoader(open_draft_source(path), std::move(device), std::move(target), weight_type).run();
}

std::shared_ptr<const DraftModel> load_draft_safetensors(const std::string & folder, std::shared_ptr<Device> device,
                                                         std::shared_ptr<const TargetModel> target) {
    std::error_code error;
    check(std::filesystem::is_directory(folder, error), Status::not_found, "%s is not a folder", folder.c_str());
    return DraftModel::load(folder, std::move(device), std::move(target));
}

std::shared_ptr<const DraftModel> load_draft_gguf(const std::string & path, std::shared_ptr<Device> device,
                                                  std::shared_ptr<const TargetModel> target) {
    std::error_code error;
    check(!std::filesystem::is_directory(path, error), Status::invalid, "%s is a folder, want a GGUF file",
          path.c_str());
    return DraftModel::load(path, std::move(device), std::move(target));
}

} // namespace dflash
