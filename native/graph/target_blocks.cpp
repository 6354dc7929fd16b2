#include "graph/target_blocks.hpp"

#include <cmath>

#include "base/error.hpp"
#include "graph/attention.hpp"
#include "graph/delta_net.hpp"

namespace dflash {
namespace {

ggml_tensor * build_full_attention(Graph & graph, const TargetCache & cache, int32_t il, ggml_tensor * x,
                                   const RowInputs & rows) {
    ggml_context * ctx = graph.ctx();
    const TargetConfig & c = cache.model().config();
    const TargetLayer & l = cache.model().layer(il);
    const int64_t n = x->ne[1];
    const int64_t hd = c.head_dim;

    ggml_tensor * qg = build_linear(ctx, l.wq, x); // per head: hd query values, then hd gate values
    ggml_tensor * k = build_linear(ctx, l.wk, x);
    ggml_tensor * v = build_linear(ctx, l.wv, x);
    for (ggml_tensor * t : {qg, k, v}) { // side by side, so that a backend may run them as one
        graph.expand(t);
    }
    const size_t head_bytes = ggml_row_size(qg->type, hd);
    ggml_tensor * q = ggml_view_3d(ctx, qg, hd, c.n_head, n, 2 * head_bytes, qg->nb[1], 0);
    ggml_tensor * gate = ggml_view_3d(ctx, qg, hd, c.n_head, n, 2 * head_bytes, qg->nb[1], head_bytes);
    gate = ggml_cont_2d(ctx, gate, hd * c.n_head, n);
    q = build_rope(ctx, build_norm(ctx, q, l.q_norm, c.rms_eps), rows.positions, c.rope);

    k = ggml_reshape_3d(ctx, k, hd, c.n_head_kv, n);
    k = build_rope(ctx, build_norm(ctx, k, l.k_norm, c.rms_eps), rows.positions, c.rope);

    if (cache.k_rotation() != nullptr) {
        q = build_rotation(ctx, cache.k_rotation(), q);
        k = build_rotation(ctx, cache.k_rotation(), k);
    }
    if (cache.v_rotation() != nullptr) {
        v = build_rotation(ctx, cache.v_rotation(), v);
    }
    // A view, not a reshape, and 64-bit rows: so a backend can write K from its norm and rope kernel.
    k = ggml_view_2d(ctx, k, hd * c.n_head_kv, n, k->nb[2], 0);
    graph.expand(ggml_set_rows(ctx, cache.attn_k(il), k, rows.kv_rows));
    graph.expand(ggml_set_rows(ctx, cache.attn_v(il), ggml_reshape_2d(ctx, v, hd * c.n_head_kv, n), rows.kv_rows));

    ggml_tensor * out =
        build_attention(graph, q, cache.attn_k(il), cache.attn_v(il), rows.mask, hd, c.n_head_kv, rows.n_kv);
    if (cache.v_rotation() != nullptr) {
        out = build_rotation(ctx, cache.v_rotation(), out);
    }
    out = ggml_mul(ctx, out, ggml_sigmoid(ctx, gate));
    return build_linear(ctx, l.wo, out);
}

ggml_tensor * build_delta_net(Graph & graph, const TargetCache & cache, int32_t il, ggml_tensor * x,
                              const RowInputs & rows, StateUpdate update, DeltaNetCapture * capture) {
    ggml_context * ctx = graph.ctx();
    const TargetConfig & c = cache.model().config();
    const TargetLayer & l = cache.model().layer(il);
    const int64_t n = x->ne[1];
    const int64_t s = c.ssm_d_state;
    const int64_t hk = c.ssm_n_group;
    const int64_t hv = c.ssm_dt_rank;
    const int64_t channels = c.conv_channels();
    const int64_t history = c.ssm_d_conv - 1;
    ggml_tensor * state = cache.ssm_state(il);
    ggml_tensor * conv_state = cache.conv_state(il);

    ggml_tensor * mixed = build_linear(ctx, l.wqkv, x);
    ggml_tensor * z = build_linear(ctx, l.wqkv_gate, x);
    ggml_tensor * beta = build_linear(ctx, l.ssm_beta, x);
    ggml_tensor * g = build_linear(ctx, l.ssm_alpha, x);
    for (ggml_tensor * t : {mixed, z, beta, g}) { // side by side, so that a backend may run them as one
        graph.expand(t);
    }
    beta = ggml_sigmoid(ctx, beta);
    g = ggml_add(ctx, g, l.ssm_dt_bias);
    g = ggml_mul(ctx, ggml_softplus(ctx, g), l.ssm_a);
    beta = ggml_reshape_3d(ctx, beta, 1, hv, n);
    g = ggml_reshape_3d(ctx, g, 1, hv, n);

    ggml_tensor * window = nullptr;  // [channels, history + n]
    ggml_tensor * by_time = nullptr; // its transpose
    if (update == StateUpdate::write) {
        by_time = ggml_concat(ctx, ggml_transpose(ctx, conv_state), ggml_transpose(ctx, mixed), 0);
    } else { // a commit gathers columns of the window
        window = ggml_concat(ctx, conv_state, mixed, 1);
        by_time = rows.tree == nullptr ? ggml_cont(ctx, ggml_transpose(ctx, window)) : nullptr;
    }
    ggml_tensor * qkv = rows.tree == nullptr ? ggml_ssm_conv(ctx, by_time, l.ssm_conv1d)
                                             : build_tree_conv(ctx, window, l.ssm_conv1d, *rows.tree);
    qkv = ggml_silu(ctx, qkv); // [channels, n]
    if (update == StateUpdate::write) {
        graph.expand(qkv);
        ggml_tensor * newest =
            ggml_view_2d(ctx, by_time, history, channels, by_time->nb[1], by_time->nb[0] * static_cast<size_t>(n));
        graph.expand(ggml_cpy(ctx, ggml_transpose(ctx, newest), conv_state));
    }

    // x / sqrt(sum x^2 + eps) written as a scaled RMS norm: queries and keys share one pass.
    ggml_tensor * qk = ggml_view_3d(ctx, qkv, s, 2 * hk, n, ggml_row_size(qkv->type, s), qkv->nb[1], 0);
    qk = ggml_rms_norm(ctx, qk, c.rms_eps / static_cast<float>(s));
    qk = ggml_scale(ctx, qk, 1.0f / std::sqrt(static_cast<float>(s)));
    ggml_tensor * q = ggml_view_3d(ctx, qk, s, hk, n, qk->nb[1], qk->nb[2], 0);
    ggml_tensor * k = ggml_view_3d(ctx, qk, s, hk, n, qk->nb[1], qk->nb[2], qk->nb[1] * static_cast<size_t>(hk));
    ggml_tensor * v =
        ggml_view_3d(ctx, qkv, s, hv, n, ggml_row_size(qkv->type, s), qkv->nb[1], ggml_row_size(qkv->type, 2 * hk * s));

    const bool keep_states = update == StateUpdate::keep && rows.tree == nullptr && cache.options().keep_states;
    const DeltaState after = update == StateUpdate::write ? DeltaState::write
                             : keep_states                ? DeltaState::each
                                                          : DeltaState::drop;
    ggml_tensor * mix = rows.tree == nullptr ? build_delta_rule(graph, q, k, v, g, beta, state, after)
                                             : build_tree_delta(graph, qk, qkv, g, beta, state, *rows.tree);
    if (update == StateUpdate::keep) {
        check(capture != nullptr, Status::internal, "verify without a capture for layer %d", il);
        *capture = {il, window, qk, qkv, g, beta, nullptr};
        for (ggml_tensor * t : {window, qk, qkv, g, beta}) {
            graph.keep(t);
        }
        if (keep_states) {
            capture->states =
                ggml_view_4d(ctx, mix, s, s, hv, n, ggml_row_size(mix->type, s), ggml_row_size(mix->type, s * s),
                             ggml_row_size(mix->type, s * s * hv), ggml_row_size(mix->type, s * hv * n));
            graph.keep(capture->states);
        }
    }

    ggml_tensor * out =
        ggml_view_3d(ctx, mix, s, hv, n, ggml_row_size(mix->type, s), ggml_row_size(mix->type, s * hv), 0);
    out = build_norm(ctx, out, l.ssm_norm, c.rms_eps);
    out = ggml_mul(ctx, out, ggml_silu(ctx, ggml_reshape_3d(ctx, z, s, hv, n)));
    return build_linear(ctx, l.ssm_out, ggml_reshape_2d(ctx, out, s * hv, n));
}

ggml_tensor * expert_matmul(ggml_context * ctx, const Linear & stack, ggml_tensor * x, ggml_tensor * selected) {
    ggml_tensor * y = ggml_mul_mat_id(ctx, stack.w, x, selected);
    if (stack.scale != 1.0f) {
        y = ggml_scale(ctx, y, stack.scale);
    }
    if (stack.expert_scale != nullptr) {
        const int64_t k = selected->ne[0];
        const int64_t n = selected->ne[1];
        ggml_tensor * table = ggml_reshape_2d(ctx, stack.expert_scale, 1, stack.expert_scale->ne[0]);
        ggml_tensor * chosen = ggml_get_rows(ctx, table, ggml_reshape_1d(ctx, ggml_cont(ctx, selected), k * n));
        y = ggml_mul(ctx, y, ggml_reshape_3d(ctx, chosen, 1, k, n));
    }
    return y;
}

ggml_tensor * build_experts(ggml_context * ctx, const TargetConfig & c, const TargetLayer & l, ggml_tensor * x,
                            ggml_tensor ** selected_out) {
    const int64_t n = x->ne[1];
    const int64_t used = c.n_expert_used;
    ggml_tensor * logits = build_linear(ctx, l.ffn_gate_inp, x);
    ggml_tensor * probs = c.expert_gating_func == 2 ? ggml_sigmoid(ctx, logits) : ggml_soft_max(ctx, logits);
    ggml_tensor * selected = ggml_argsort_top_k(ctx, probs, static_cast<int>(used)); // strided view [used, n]
    if (selected_out != nullptr) {
        *selected_out = selected;
    }
    ggml_tensor * weights = ggml_get_rows(ctx, ggml_reshape_3d(ctx, probs, 1, c.n_expert, n), selected); // [1, used, n]
    weights = ggml_reshape_2d(ctx, weights, used, n);
    ggml_tensor * sum = ggml_clamp(ctx, ggml_sum_rows(ctx, weights), 6.103515625e-5f, INFINITY);
    weights = ggml_div(ctx, weights, sum);
    if (c.expert_weights_scale != 0.0f && c.expert_weights_scale != 1.0f) {
        weights = ggml_scale(ctx, weights, c.expert_weights_scale);
    }
    weights = ggml_reshape_3d(ctx, weights, 1, used, n);

    ggml_tensor * x3 = ggml_reshape_3d(ctx, x, x->ne[0], 1, n);
    ggml_tensor * hidden = nullptr;
    if (l.ffn_gate_up_exps.w != nullptr) {
        ggml_tensor * both = expert_matmul(ctx, l.ffn_gate_up_exps, x3, selected);
        const int64_t f = c.n_ff_exp;
        ggml_tensor * gate = ggml_cont(ctx, ggml_view_3d(ctx, both, f, used, n, both->nb[1], both->nb[2], 0));
        ggml_tensor * up =
            ggml_cont(ctx, ggml_view_3d(ctx, both, f, used, n, both->nb[1], both->nb[2], ggml_row_size(both->type, f)));
        hidden = ggml_swiglu_split(ctx, gate, up);
    } else {
        ggml_tensor * gate = expert_matmul(ctx, l.ffn_gate_exps, x3, selected);
        ggml_tensor * up = expert_matmul(ctx, l.ffn_up_exps, x3, selected);
        hidden = ggml_swiglu_split(ctx, gate, up);
    }
    ggml_tensor * experts = ggml_mul(ctx, expert_matmul(ctx, l.ffn_down_exps, hidden, selected), weights);
    ggml_tensor * out = nullptr;
    for (int64_t i = 0; i < used; ++i) {
        ggml_tensor * one =
            ggml_view_2d(ctx, experts, experts->ne[0], n, experts->nb[2], experts->nb[1] * static_cast<size_t>(i));
        out = out == nullptr ? one : ggml_add(ctx, out, one);
    }
    if (used == 1) {
        out = ggml_cont(ctx, out);
    }
    if (l.ffn_up_shexp.w != nullptr) {
        ggml_tensor * shared =
            ggml_swiglu_split(ctx, build_linear(ctx, l.ffn_gate_shexp, x), build_linear(ctx, l.ffn_up_shexp, x));
        shared = build_linear(ctx, l.ffn_down_shexp, shared);
        if (l.ffn_gate_inp_shexp != nullptr) {
            ggml_tensor * gate = ggml_mul_mat(ctx, l.ffn_gate_inp_shexp, x);
            if (l.ffn_gate_inp_shexp_scale != 1.0f) {
                gate = ggml_scale(ctx, gate, l.ffn_gate_inp_shexp_scale);
            }
            shared = ggml_mul(ctx, shared, ggml_sigmoid(ctx, gate));
        }
        out = ggml_add(ctx, out, shared);
    }
    return out;
}

} // namespace

ggml_tensor * build_linear(ggml_context * ctx, const Linear & linear, ggml_tensor * x) {
    ggml_tensor * y = ggml_mul_mat(ctx, linear.w, x);
    if (linear.scale != 1.0f) {
        y = ggml_scale(ctx, y, linear.scale);
    }
    return linear.bias != nullptr ? ggml_add(ctx, y, linear.bias) : y;
}

ggml_tensor * build_norm(ggml_context * ctx, ggml_tensor * x, ggml_tensor * weight, float eps) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, eps), weight);
}

ggml_tensor * build_rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, const RopeParams & r,
                         ggml_tensor * freq_factors) {
    return ggml_rope_ext(ctx, x, positions, freq_factors, r.n_dims, GGML_ROPE_TYPE_NEOX, r.n_ctx_orig, r.theta,
                         r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow);
}

ggml_tensor * state_target(ggml_context * ctx, ggml_tensor * state) {
    const int64_t n = ggml_nelements(state);
    const size_t bytes = ggml_row_size(state->type, n);
    return ggml_view_3d(ctx, state, n, 1, 1, bytes, bytes, 0);
}

ggml_tensor * build_rotation(ggml_context * ctx, ggml_tensor * r, ggml_tensor * x) {
    const int64_t n = r->ne[0];
    ggml_tensor * flat = ggml_reshape_2d(ctx, x, n, ggml_nelements(x) / n);
    ggml_tensor * y = ggml_mul_mat(ctx, r, flat);
    ggml_mul_mat_set_hint(y, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_4d(ctx, y, x->ne[0], x->ne[1], x->ne[2], x->ne[3]);
}

ggml_tensor * build_feed_forward(ggml_context * ctx, const TargetConfig & config, const TargetLayer & l,
                                 ggml_tensor * x, ggml_tensor ** selected) {
    if (config.is_moe) {
        return build_experts(ctx, config, l, x, selected);
    }
    ggml_tensor * gate = build_linear(ctx, l.w_gate, x);
    ggml_tensor * up = build_linear(ctx, l.w_up, x);
    return build_linear(ctx, l.w_down, ggml_swiglu_split(ctx, gate, up));
}

ggml_tensor * build_mixer(Graph & graph, const TargetCache & cache, int32_t layer, ggml_tensor * x,
                          const RowInputs & rows, StateUpdate update, DeltaNetCapture * capture) {
    if (cache.model().config().recurrent[static_cast<size_t>(layer)]) {
        return build_delta_net(graph, cache, layer, x, rows, update, capture);
    }
    return build_full_attention(graph, cache, layer, x, rows);
}

} // namespace dflash
