#include "capi/handles.hpp"
#include "capi/shim.hpp"
#include "capi/text.hpp"
#include "engine/inspect.hpp"

using namespace dflash;
using namespace dflash::capi;

dflash_status dflash_draft_model_open(dflash_draft_model ** out, const char * path, const char * device,
                                      const char * weight_type, const dflash_target_model * target,
                                      dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        const std::string file = required(path, "path");
        const auto target_model = borrow(target)->model;
        const std::shared_ptr<Device> on =
            device == nullptr ? target_model->device() : Device::open(device, target_model->device()->n_threads());
        auto handle = std::make_shared<dflash_draft_model>();
        handle->model = DraftModel::load(file, on, target_model, text_or(weight_type, "file"));
        publish(out, std::move(handle));
    });
}

void dflash_draft_model_free(dflash_draft_model * model) {
    release(model);
}

dflash_status dflash_draft_model_info(const dflash_draft_model * model, dflash_draft_info * info, dflash_error * err) {
    return guard(err, [&] {
        dflash_draft_info & i = output(info, "info");
        const auto handle = borrow(model);
        const DraftModel & m = *handle->model;
        const DraftConfig & c = m.config();
        copy_text(i.form, c.form);
        copy_text(i.digest, m.digest());
        copy_text(i.device, m.device()->name());
        i.n_layer = c.n_layer;
        i.n_embd = c.n_embd;
        i.n_ff = c.n_ff;
        i.n_head = c.n_head;
        i.n_head_kv = c.n_head_kv;
        i.head_dim = c.head_dim;
        i.block_size = c.block_size;
        i.n_proposals = c.n_proposals();
        i.mask_token_id = c.mask_token_id;
        i.n_taps = c.n_taps();
        std::copy(c.target_layer_ids.begin(), c.target_layer_ids.end(), i.target_layer_ids);
        for (size_t l = 0; l < c.windows.size() && l < 64; ++l) {
            i.windows[l] = c.windows[l];
            i.causal[l] = c.causal[l] ? 1 : 0;
        }
        i.sample_from_anchor = c.sample_from_anchor ? 1 : 0;
        i.has_own_head = m.has_own_head() ? 1 : 0;
        i.rope_theta = c.rope.theta;
        i.rope_freq_scale = c.rope.freq_scale;
        i.rope_ext_factor = c.rope.ext_factor;
        i.rope_attn_factor = c.rope.attn_factor;
        i.rope_n_ctx_orig = c.rope.n_ctx_orig;
        i.rms_eps = c.rms_eps;
        i.embedding_scale = c.embedding_scale;
        i.logit_scale = c.logit_scale;
        i.final_logit_softcapping = c.final_logit_softcapping;
        i.weight_bytes = m.weight_bytes();
    });
}

dflash_status dflash_draft_model_heads(const dflash_draft_model * model, dflash_draft_heads * heads,
                                       dflash_error * err) {
    return guard(err, [&] {
        dflash_draft_heads & h = output(heads, "heads");
        const auto handle = borrow(model);
        const DraftConfig & c = handle->model->config();
        h.n_vocab = handle->model->n_vocab_draft();
        h.conv_kernel = c.conv_kernel;
        h.conv_group = c.conv_group;
        h.selector_rank = c.selector_rank;
        h.selector_top_k = c.selector_top_k;
        h.markov_rank = c.markov_rank;
        h.has_confidence = c.has_confidence ? 1 : 0;
    });
}

void dflash_draft_context_options_init(dflash_draft_context_options * options) {
    if (options != nullptr) {
        *options = {};
        options->struct_size = sizeof(*options);
        options->slack = DraftContextOptions{}.slack;
        options->full_rows = DraftContextOptions{}.full_rows;
    }
}

dflash_status dflash_draft_context_new(dflash_draft_context ** out, const dflash_draft_model * model,
                                       const dflash_draft_context_options * options, dflash_error * err) {
    return guard(err, [&] {
        output(out, "out");
        dflash_draft_context_options defaults;
        dflash_draft_context_options_init(&defaults);
        const dflash_draft_context_options o = read_options(options, defaults, sizeof(defaults), "options");
        DraftContextOptions context_options;
        const auto draft_model = borrow(model)->model;
        const char * usual = draft_model->device()->is_cpu() ? "f32" : "f16";
        context_options.k_type = text_or(o.k_type, usual);
        context_options.v_type = text_or(o.v_type, usual);
        context_options.full_rows = o.full_rows;
        context_options.slack = o.slack;
        auto handle = std::make_shared<dflash_draft_context>();
        handle->context = DraftContext::create(draft_model, context_options);
        handle->forward = std::make_unique<DraftForward>(*handle->context);
        publish(out, std::move(handle));
    });
}

void dflash_draft_context_free(dflash_draft_context * context) {
    release(context);
}

dflash_status dflash_draft_context_state_get(dflash_draft_context * context, dflash_draft_context_state * out,
                                             dflash_error * err) {
    return guard(err, [&] {
        dflash_draft_context_state & s = output(out, "out");
        const Use<dflash_draft_context> use(context);
        s.begin = use->context->begin();
        s.cursor = use->context->cursor();
        s.memory_bytes = use->context->bytes();
        s.graph_bytes = use->forward->graph_bytes();
    });
}

dflash_status dflash_draft_context_append(dflash_draft_context * context, dflash_target_cache * cache, int64_t base,
                                          int64_t n, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        const Use<dflash_target_cache> source(cache);
        use->forward->append(*source->cache, base, n);
        use->context->model().device()->synchronize();
    });
}

dflash_status dflash_draft_context_append_mirror(dflash_draft_context * context, dflash_draft_feature_mirror * mirror,
                                                 int64_t base, int64_t n, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        const Use<dflash_draft_feature_mirror> source(mirror);
        const DraftFeatureMirror & m = *source->mirror;
        check(m.device() == use->context->model().device(), Status::mismatch,
              "the mirror is not on the drafter's device");
        check(n == 0 || m.holds(base, n), Status::invalid, "the mirror does not hold positions [%lld, %lld)",
              static_cast<long long>(base), static_cast<long long>(base + n));
        use->forward->append_ring(m.target_feat(), m.memory_serial(), m.capacity(), base, n);
        use->context->model().device()->synchronize();
    });
}

dflash_status dflash_draft_context_append_host(dflash_draft_context * context, const float * features, int64_t base,
                                               int64_t n, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        use->forward->append_host(features, base, n);
    });
}

dflash_status dflash_draft_context_propose(dflash_draft_context * context, int32_t anchor, int32_t * proposals,
                                           float * logits, int64_t n_logits, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        required(proposals, "proposals");
        use->forward->propose(anchor);
        const std::vector<int32_t> ids = use->forward->proposals();
        if (logits != nullptr) {
            const std::vector<float> values = use->forward->logits();
            check(n_logits == static_cast<int64_t>(values.size()), Status::invalid, "room for %lld logits, want %zu",
                  static_cast<long long>(n_logits), values.size());
            std::copy(values.begin(), values.end(), logits);
        }
        std::copy(ids.begin(), ids.end(), proposals);
    });
}

dflash_status dflash_draft_context_propose_tree(dflash_draft_context * context, int32_t anchor, int32_t n_nodes,
                                                int32_t * tokens, int32_t * parents, float * scores, int32_t * n,
                                                dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        required(tokens, "tokens");
        required(parents, "parents");
        required(scores, "scores");
        output(n, "n");
        const DraftTree tree = use->forward->propose_tree(anchor, n_nodes);
        std::copy(tree.tokens.begin(), tree.tokens.end(), tokens);
        std::copy(tree.parents.begin(), tree.parents.end(), parents);
        std::copy(tree.scores.begin(), tree.scores.end(), scores);
        *n = static_cast<int32_t>(tree.tokens.size());
    });
}

dflash_status dflash_draft_context_chances(dflash_draft_context * context, float * chances, int64_t n_values,
                                           dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        required(chances, "chances");
        const std::vector<float> values = use->forward->chances();
        check(n_values >= 0 && n_values <= static_cast<int64_t>(values.size()), Status::invalid,
              "%lld chances, want 0 to %zu", static_cast<long long>(n_values), values.size());
        std::copy(values.begin(), values.begin() + n_values, chances);
    });
}

dflash_status dflash_draft_context_rewind(dflash_draft_context * context, int64_t position, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        use->context->rewind(position);
    });
}

dflash_status dflash_draft_context_reset(dflash_draft_context * context, int64_t position, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        use->context->reset(position);
    });
}

dflash_status dflash_draft_context_read(dflash_draft_context * context, int32_t layer, const char * what, int64_t begin,
                                        int64_t end, float * out, dflash_error * err) {
    return guard(err, [&] {
        const Use<dflash_draft_context> use(context);
        const std::vector<float> rows = read_draft_rows(*use->context, layer, required(what, "what"), begin, end);
        if (!rows.empty()) {
            std::copy(rows.begin(), rows.end(), required(out, "out"));
        }
    });
}
