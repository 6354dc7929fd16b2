#include "model/target_model.hpp"

#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"

using namespace dflash;
using namespace dflash::capi;

void dflash_target_options_init(dflash_target_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
        options->layer_end = -1;
        options->load_output = 1;
        options->embedding_on_device = 1;
        options->pack_weights = 1;
    }
}

dflash_status dflash_target_model_open(dflash_target_model ** out, const char * path,
                                       const dflash_target_options * options, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        dflash_target_options defaults;
        dflash_target_options_init(&defaults);
        const dflash_target_options o = read_options(options, defaults, sizeof(defaults), "options");
        TargetLoadPlan plan;
        plan.layer_begin = o.layer_begin;
        plan.layer_end = o.layer_end;
        plan.load_output = o.load_output != 0;
        plan.embedding_on_device = o.embedding_on_device != 0;
        plan.pack = o.pack_weights != 0;
        if (o.progress != nullptr) {
            plan.progress = [&o](double fraction) {
                return o.progress(static_cast<int64_t>(fraction * 1000.0), 1000, o.user) == 0;
            };
        }
        auto handle = std::make_shared<dflash_target_model>();
        const std::string file = required(path, "path");
        handle->model = TargetModel::load(file, Device::open(text_or(o.device, "cpu"), o.n_threads), plan);
        publish(out, std::move(handle));
    });
}

void dflash_target_model_free(dflash_target_model * model) {
    release(model);
}

dflash_status dflash_target_model_info(const dflash_target_model * model, dflash_target_info * info,
                                       dflash_error * err) {
    return guard(err, [&] {
        dflash_target_info & i = output(info, "info");
        const auto handle = borrow(model);
        const TargetModel & m = *handle->model;
        const TargetConfig & c = m.config();
        copy_text(i.architecture, c.architecture);
        copy_text(i.name, c.name);
        copy_text(i.digest, m.digest());
        copy_text(i.device, m.device()->name());
        i.n_layer = c.n_layer;
        i.n_layer_nextn = c.n_layer_nextn;
        i.layer_begin = m.layer_begin();
        i.layer_end = m.layer_end();
        i.n_embd = c.n_embd;
        i.n_vocab = c.n_vocab;
        i.n_head = c.n_head;
        i.n_head_kv = c.n_head_kv;
        i.head_dim = c.head_dim;
        i.n_ff = c.n_ff;
        i.n_ctx_train = c.n_ctx_train;
        i.ssm_d_conv = c.ssm_d_conv;
        i.ssm_d_state = c.ssm_d_state;
        i.ssm_n_group = c.ssm_n_group;
        i.ssm_dt_rank = c.ssm_dt_rank;
        i.is_moe = c.is_moe ? 1 : 0;
        i.n_expert = c.n_expert;
        i.n_expert_used = c.n_expert_used;
        i.has_output = m.has_output() ? 1 : 0;
        i.mask_token_id = m.mask_token_id();
        i.weight_bytes = m.weight_bytes();
    });
}

dflash_status dflash_target_model_layer_kind(const dflash_target_model * model, int32_t layer, int32_t * recurrent,
                                             dflash_error * err) {
    return guard(err, [&] {
        output(recurrent, "recurrent");
        const auto handle = borrow(model);
        const TargetConfig & c = handle->model->config();
        check(layer >= 0 && layer < c.n_layer, Status::invalid, "layer %d, want 0 to %d", layer, c.n_layer - 1);
        *recurrent = c.recurrent[static_cast<size_t>(layer)] ? 1 : 0;
    });
}

dflash_status dflash_target_model_stop_ids(const dflash_target_model * model, int32_t * ids, int64_t capacity,
                                           int64_t * n, dflash_error * err) {
    return guard(err, [&] { copy_list(borrow(model)->model->stop_ids(), ids, capacity, n); });
}

dflash_status dflash_target_model_embed(const dflash_target_model * model, const int32_t * ids, int64_t n, float * out,
                                        dflash_error * err) {
    return guard(err, [&] {
        const auto handle = borrow(model);
        check(n >= 0, Status::invalid, "%lld ids, want >= 0", static_cast<long long>(n));
        if (n > 0) {
            handle->model->embedder().embed(required(ids, "ids"), n, required(out, "out"));
        }
    });
}

dflash_status dflash_target_model_default_capture(const dflash_target_model * model, int32_t n_taps, int32_t * ids,
                                                  int64_t capacity, int64_t * n, dflash_error * err) {
    return guard(err, [&] {
        copy_list(default_capture_layers(borrow(model)->model->config().n_layer, n_taps), ids, capacity, n);
    });
}
