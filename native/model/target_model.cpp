#include "model/target_model.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "model/weight_loader.hpp"

namespace dflash {

/// Wires the tensors of one file into a TargetModel.
class TargetLoader {
  public:
    TargetLoader(std::shared_ptr<const GgufFile> file, std::shared_ptr<Device> device, const TargetLoadPlan & plan)
        : file_(file), model_(new TargetModel), c_(model_->config_),
          weights_(file, device, file->tensors().size() * 2 + 16, plan.pack), plan_(plan) {
        model_->file_ = file;
        model_->device_ = device;
        c_ = read_target_config(*file);
        model_->layer_begin_ = plan.layer_begin;
        model_->layer_end_ = plan.layer_end < 0 ? c_.n_layer : plan.layer_end;
        check(model_->layer_begin_ >= 0 && model_->layer_begin_ < model_->layer_end_ &&
                  model_->layer_end_ <= c_.n_layer,
              Status::invalid, "layers [%d, %d), want a part of [0, %d)", model_->layer_begin_, model_->layer_end_,
              c_.n_layer);
    }

    std::shared_ptr<const TargetModel> run() {
        model_->embedder_ = CpuEmbedder(*file_->find_tensor("token_embd.weight"));
        model_->layers_.resize(static_cast<size_t>(c_.n_layer));
        for (int32_t i = 0; i < c_.n_layer; ++i) {
            wire_layer(i, i >= model_->layer_begin_ && i < model_->layer_end_);
        }
        wire_ends();
        weights_.finish("target weights", plan_.progress);
        model_->weight_bytes_ = weights_.bytes();
        model_->weights_ = weights_.take_group();
        model_->placements_ = weights_.take_placements();
        model_->packed_ = weights_.take_packed();
        model_->stop_ids_ = read_stop_ids(*file_);
        model_->mask_token_id_ =
            static_cast<int32_t>(file_->int_or("tokenizer.ggml.mask_token_id", -1, -1, c_.n_vocab - 1));
        model_->digest_ = file_->digest();
        return std::move(model_);
    }

  private:
    using Need = WeightLoader::Need;

    Linear linear(const std::string & base, std::initializer_list<int64_t> shape, bool load, bool whole = true) {
        Linear l;
        l.w = whole ? weights_.factor(base + ".weight", shape, load) : weights_.matrix(base + ".weight", shape, load);
        const auto scale = weights_.scales(base, 1);
        l.scale = scale.empty() ? 1.0f : scale[0];
        const int64_t n_out = *(shape.begin() + 1);
        l.bias = weights_.f32(base + ".bias", {n_out}, load, Need::optional);
        return l;
    }

    Linear stack(const std::string & base, std::initializer_list<int64_t> shape, bool load, Need need) {
        Linear l;
        l.w = weights_.matrix(base + ".weight", shape, load, need);
        const auto scale = weights_.scales(base, c_.n_expert);
        if (scale.size() == 1) {
            l.scale = scale[0];
        } else if (!scale.empty()) {
            const char * suffix = file_->find_tensor(base + ".scale") != nullptr ? ".scale" : ".weight.scale";
            l.expert_scale = weights_.f32(base + suffix, {c_.n_expert}, load);
        }
        return l;
    }

    void wire_layer(int32_t i, bool load) {
        TargetLayer & l = model_->layers_[static_cast<size_t>(i)];
        const std::string b = "blk." + std::to_string(i) + ".";
        l.attn_norm = weights_.f32(b + "attn_norm.weight", {c_.n_embd}, load);
        l.attn_post_norm = weights_.f32(b + "post_attention_norm.weight", {c_.n_embd}, load);
        if (c_.recurrent[static_cast<size_t>(i)]) {
            wire_delta_net(l, b, load);
        } else {
            wire_attention(l, b, load);
        }
        if (c_.is_moe) {
            wire_experts(l, b, load);
        } else {
            l.w_gate = linear(b + "ffn_gate", {c_.n_embd, c_.n_ff}, load);
            l.w_up = linear(b + "ffn_up", {c_.n_embd, c_.n_ff}, load);
            l.w_down = linear(b + "ffn_down", {c_.n_ff, c_.n_embd}, load);
        }
    }

    void wire_attention(TargetLayer & l, const std::string & b, bool load) {
        const int64_t q_rows = int64_t{2} * c_.head_dim * c_.n_head;
        const int64_t kv_rows = int64_t{1} * c_.head_dim * c_.n_head_kv;
        if (file_->find_tensor(b + "attn_qkv.weight") != nullptr) {
            const Linear fused = linear(b + "attn_qkv", {c_.n_embd, q_rows + 2 * kv_rows}, load, false);
            check(fused.bias == nullptr, Status::unsupported, "%s: tensor %sattn_qkv.bias of a fused projection",
                  file_->path().c_str(), b.c_str());
            l.wq.w = weights_.rows(fused.w, 0, q_rows, b + "attn_q");
            l.wk.w = weights_.rows(fused.w, q_rows, kv_rows, b + "attn_k");
            l.wv.w = weights_.rows(fused.w, q_rows + kv_rows, kv_rows, b + "attn_v");
            l.wq.scale = l.wk.scale = l.wv.scale = fused.scale;
        } else {
            l.wq = linear(b + "attn_q", {c_.n_embd, q_rows}, load);
            l.wk = linear(b + "attn_k", {c_.n_embd, kv_rows}, load);
            l.wv = linear(b + "attn_v", {c_.n_embd, kv_rows}, load);
        }
        l.wo = linear(b + "attn_output", {int64_t{1} * c_.head_dim * c_.n_head, c_.n_embd}, load);
        l.q_norm = weights_.f32(b + "attn_q_norm.weight", {c_.head_dim}, load);
        l.k_norm = weights_.f32(b + "attn_k_norm.weight", {c_.head_dim}, load);
    }

    void wire_delta_net(TargetLayer & l, const std::string & b, bool load) {
        l.wqkv = linear(b + "attn_qkv", {c_.n_embd, c_.conv_channels()}, load);
        l.wqkv_gate = linear(b + "attn_gate", {c_.n_embd, c_.ssm_d_inner}, load);
        l.ssm_conv1d = weights_.f32(b + "ssm_conv1d.weight", {c_.ssm_d_conv, c_.conv_channels()}, load);
        l.ssm_beta = linear(b + "ssm_beta", {c_.n_embd, c_.ssm_dt_rank}, load);
        l.ssm_alpha = linear(b + "ssm_alpha", {c_.n_embd, c_.ssm_dt_rank}, load);
        l.ssm_a = weights_.f32(b + "ssm_a", {c_.ssm_dt_rank}, load);
        l.ssm_dt_bias = weights_.f32(b + "ssm_dt.bias", {c_.ssm_dt_rank}, load);
        l.ssm_norm = weights_.f32(b + "ssm_norm.weight", {c_.ssm_d_state}, load);
        l.ssm_out = linear(b + "ssm_out", {c_.ssm_d_inner, c_.n_embd}, load);
    }

    /// Width from the file's own tensor when the key is absent: dimension `axis` of the tensor.
    int32_t width_of(const std::string & name, int axis, int32_t divisor, int32_t from_key) const {
        if (from_key > 0) {
            return from_key;
        }
        const GgufTensorInfo * info = file_->find_tensor(name);
        return info != nullptr ? static_cast<int32_t>(info->ne[axis] / divisor) : 0;
    }

    void wire_experts(TargetLayer & l, const std::string & b, bool load) {
        const bool fused = file_->find_tensor(b + "ffn_gate_up_exps.weight") != nullptr;
        c_.n_ff_exp = width_of(b + "ffn_down_exps.weight", 0, 1, c_.n_ff_exp);
        c_.n_ff_shexp = width_of(b + "ffn_down_shexp.weight", 0, 1, c_.n_ff_shexp);
        const int64_t n = c_.n_expert;
        l.ffn_gate_inp = linear(b + "ffn_gate_inp", {c_.n_embd, n}, load);
        if (fused) {
            l.ffn_gate_up_exps = stack(b + "ffn_gate_up_exps", {c_.n_embd, 2 * c_.n_ff_exp, n}, load, Need::required);
        } else {
            l.ffn_gate_exps = stack(b + "ffn_gate_exps", {c_.n_embd, c_.n_ff_exp, n}, load, Need::required);
            l.ffn_up_exps = stack(b + "ffn_up_exps", {c_.n_embd, c_.n_ff_exp, n}, load, Need::required);
        }
        l.ffn_down_exps = stack(b + "ffn_down_exps", {c_.n_ff_exp, c_.n_embd, n}, load, Need::required);
        const bool any_shared = file_->find_tensor(b + "ffn_gate_shexp.weight") != nullptr ||
                                file_->find_tensor(b + "ffn_up_shexp.weight") != nullptr ||
                                file_->find_tensor(b + "ffn_down_shexp.weight") != nullptr;
        if (any_shared) {
            l.ffn_gate_shexp = linear(b + "ffn_gate_shexp", {c_.n_embd, c_.n_ff_shexp}, load);
            l.ffn_up_shexp = linear(b + "ffn_up_shexp", {c_.n_embd, c_.n_ff_shexp}, load);
            l.ffn_down_shexp = linear(b + "ffn_down_shexp", {c_.n_ff_shexp, c_.n_embd}, load);
            l.ffn_gate_inp_shexp = weights_.matrix(b + "ffn_gate_inp_shexp.weight", {c_.n_embd}, load, Need::optional);
            const auto scale = weights_.scales(b + "ffn_gate_inp_shexp", 1);
            l.ffn_gate_inp_shexp_scale = scale.empty() ? 1.0f : scale[0];
        }
    }

    void wire_ends() {
        const bool tied = file_->find_tensor("output.weight") == nullptr;
        const bool load = plan_.load_output;
        const bool embed_here = (plan_.embedding_on_device && model_->layer_begin_ == 0) || (tied && load);
        model_->tok_embd_ = weights_.matrix("token_embd.weight", {c_.n_embd, c_.n_vocab}, embed_here);
        model_->out_norm_ = weights_.f32("output_norm.weight", {c_.n_embd}, load);
        if (tied) {
            // Rows of a packed matrix cannot be looked up: the head gets a packed copy of its own.
            ggml_tensor * packed = load ? weights_.packed("token_embd.weight") : nullptr;
            model_->output_.w = packed != nullptr ? packed : load ? model_->tok_embd_ : nullptr;
        } else {
            model_->output_ = linear("output", {c_.n_embd, c_.n_vocab}, load);
        }
        if (plan_.embedding_on_device && model_->layer_begin_ == 0 && !device_gathers(model_->tok_embd_)) {
            log(LogLevel::info, "device %s cannot look up rows of %s; embeddings are read on the host",
                model_->device_->name().c_str(), ggml_type_name(model_->tok_embd_->type));
            model_->tok_embd_ = nullptr;
        }
    }

    bool device_gathers(ggml_tensor * table) const {
        ggml_init_params params{};
        params.mem_size = ggml_tensor_overhead() * 4;
        params.no_alloc = true;
        const ggml_context_ptr ctx(ggml_init(params));
        ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1);
        return model_->device_->supports(ggml_get_rows(ctx.get(), table, ids));
    }

    std::shared_ptr<const GgufFile> file_;
    std::shared_ptr<TargetModel> model_;
    TargetConfig & c_;
    WeightLoader weights_;
    const TargetLoadPlan & plan_;
};

std::shared_ptr<const TargetModel> TargetModel::load(const std::string & path, std::shared_ptr<Device> device,
                                                     const TargetLoadPlan & plan) {
    return TargetLoader(GgufFile::open(path), std::move(device), plan).run();
}

std::shared_ptr<const TargetModel> load_target_gguf(const std::string & path, std::shared_ptr<Device> device) {
    return TargetModel::load(path, std::move(device), TargetLoadPlan{});
}

std::shared_ptr<const TargetModel> load_target_gguf_partial(const std::string & path, std::shared_ptr<Device> device,
                                                            const TargetLoadPlan & plan) {
    return TargetModel::load(path, std::move(device), plan);
}

bool is_eos_tok(int32_t token, const TargetModel & model) {
    return token >= 0 && std::binary_search(model.stop_ids().begin(), model.stop_ids().end(), token);
}

} // namespace dflash
