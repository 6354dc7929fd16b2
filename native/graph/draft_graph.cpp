#include "graph/draft_graph.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "graph/attention.hpp"

namespace dflash {
namespace {

/// K of x after k_norm and RoPE, and V of x, ready for the cache: [head_dim * n_head_kv, n].
struct KeyValue {
    ggml_tensor * k;
    ggml_tensor * v;
};

KeyValue build_key_value(ggml_context * ctx, const DraftContext & context, int32_t il, ggml_tensor * x,
                         ggml_tensor * positions) {
    const DraftModel & model = context.model();
    const DraftConfig & c = model.config();
    const DraftLayer & l = model.layer(il);
    const int64_t n = x->ne[1];
    ggml_tensor * k = ggml_reshape_3d(ctx, build_linear(ctx, l.wk, x), c.head_dim, c.n_head_kv, n);
    k = build_rope(ctx, build_norm(ctx, k, l.k_norm, c.rms_eps), positions, c.rope, model.rope_freqs());
    ggml_tensor * v = build_linear(ctx, l.wv, x);
    if (context.k_rotation() != nullptr) {
        k = build_rotation(ctx, context.k_rotation(), k);
    }
    if (context.v_rotation() != nullptr) {
        v = build_rotation(ctx, context.v_rotation(), v);
    }
    const int64_t width = int64_t{1} * c.head_dim * c.n_head_kv;
    return {ggml_reshape_2d(ctx, k, width, n), ggml_reshape_2d(ctx, v, width, n)};
}

/// The likeliest tokens of every slot, so that a tree needs no logits on the host.
void add_candidates(Graph & graph, const DraftModel & model, int32_t n_top, DraftProposeGraph & built) {
    ggml_context * ctx = graph.ctx();
    const int64_t n_vocab = built.logits->ne[0];
    const int64_t n = built.n_out;
    const int64_t k = std::min<int64_t>(n_top, n_vocab);
    ggml_tensor * ids = ggml_top_k(ctx, built.logits, static_cast<int>(k));
    const auto chosen = [&](ggml_tensor * rows) {
        return ggml_reshape_2d(ctx, ggml_get_rows(ctx, ggml_reshape_3d(ctx, rows, 1, n_vocab, n), ids), k, n);
    };
    built.top_values = ggml_concat(ctx, chosen(built.logits), chosen(ggml_soft_max(ctx, built.logits)), 0);
    graph.keep(built.top_values);
    ids = ggml_reshape_1d(ctx, ids, k * n);
    built.top_ids = model.d2t() != nullptr ? ggml_reshape_1d(ctx, ggml_get_rows(ctx, model.d2t(), ids), k * n) : ids;
    graph.keep(built.top_ids);
}

ggml_tensor * first_rows(ggml_context * ctx, ggml_tensor * t, int64_t n) {
    return ggml_view_2d(ctx, t, t->ne[0], n, t->nb[1], 0);
}

} // namespace

std::vector<int64_t> draft_keys(const DraftContext & context) {
    std::vector<int64_t> keys;
    for (int32_t i = 0; i < context.model().config().n_layer; ++i) {
        // Rows of positions below the cursor; after a rewind the ring holds later ones too, which the mask hides.
        const int64_t used = std::min(context.high(), context.ring_capacity(i));
        keys.push_back(std::min(context.rows(i), round_up(context.ring_offset() + used, 256)));
    }
    return keys;
}

std::unique_ptr<DraftAppendGraph> build_draft_append_graph(const DraftContext & context, int32_t n_rows,
                                                           ggml_tensor * ring) {
    const DraftModel & model = context.model();
    const DraftConfig & c = model.config();
    auto built = std::make_unique<DraftAppendGraph>();
    built->n_rows = n_rows;
    built->ring = ring;
    built->graph = std::make_unique<Graph>(model.device(), 64 + 40 * static_cast<size_t>(c.n_layer));
    Graph & graph = *built->graph;
    ggml_context * ctx = graph.ctx();
    const int64_t n = n_rows;
    const int64_t width = int64_t{1} * c.n_taps() * c.n_embd;
    built->ints = graph.input(GGML_TYPE_I32, "ints", n * (2 + c.n_layer));
    const auto slice = [&](int64_t at) {
        return ggml_view_1d(ctx, built->ints, n, static_cast<size_t>(at * n) * sizeof(int32_t));
    };
    ggml_tensor * f = nullptr;
    if (ring != nullptr) {
        f = ggml_get_rows(ctx, ring, slice(1));
    } else {
        built->features = graph.input(GGML_TYPE_F32, "features", width, n);
        f = built->features;
    }
    ggml_tensor * u = build_norm(ctx, build_linear(ctx, model.fc(), f), model.hidden_norm(), c.rms_eps);
    for (int32_t i = 0; i < c.n_layer; ++i) {
        const KeyValue kv = build_key_value(ctx, context, i, u, slice(0));
        graph.expand(ggml_set_rows(ctx, context.k(i), kv.k, slice(2 + i)));
        graph.expand(ggml_set_rows(ctx, context.v(i), kv.v, slice(2 + i)));
    }
    graph.finish("draft context write");
    return built;
}

std::unique_ptr<DraftProposeGraph> build_draft_propose_graph(const DraftContext & context, int32_t n_out, int32_t n_top,
                                                             ggml_tensor * block_ids, ggml_tensor * verify_ids) {
    const DraftModel & model = context.model();
    const DraftConfig & c = model.config();
    auto built = std::make_unique<DraftProposeGraph>();
    built->n_kv = draft_keys(context);
    built->n_out = n_out;
    built->n_top = n_top;
    const size_t n_nodes = 64 + 64 * static_cast<size_t>(c.conv_kernel); // of a layer
    built->graph = std::make_unique<Graph>(model.device(), 160 + n_nodes * static_cast<size_t>(c.n_layer) +
                                                               (c.is_chained() ? 32 * static_cast<size_t>(n_out) : 0));
    Graph & graph = *built->graph;
    ggml_context * ctx = graph.ctx();
    const int64_t n = c.block_size;
    const int64_t first = c.sample_from_anchor ? 0 : 1;
    // The last layer runs for the rows that propose, behind a convolution also for those that it looks back to.
    const int64_t last_begin = c.conv_kernel > 0 ? 0 : first;
    const int64_t n_last = first + n_out - last_begin;
    const auto columns = [&](ggml_tensor * t, int64_t begin, int64_t n_columns) {
        return ggml_view_2d(ctx, t, t->ne[0], n_columns, t->nb[1], t->nb[1] * static_cast<size_t>(begin));
    };
    built->positions = graph.input(GGML_TYPE_I32, "positions", n);
    std::vector<const DraftMask *> mask_of;
    for (int32_t i = 0; i < c.n_layer; ++i) {
        auto it = std::find_if(built->masks.begin(), built->masks.end(), [&](const auto & m) { return m->serves(i); });
        if (it == built->masks.end()) {
            built->masks.push_back(std::make_unique<DraftMask>(graph, context, i, built->n_kv[static_cast<size_t>(i)]));
            it = built->masks.end() - 1;
        }
        mask_of.push_back(it->get());
    }
    ggml_tensor * x = nullptr;
    if (model.tok_embd() != nullptr) {
        x = ggml_get_rows(ctx, model.tok_embd(), block_ids);
    } else {
        built->embeddings = graph.input(GGML_TYPE_F32, "embeddings", c.n_embd, n);
        x = built->embeddings;
    }
    if (c.embedding_scale != 1.0f) {
        x = ggml_scale(ctx, x, c.embedding_scale);
    }
    for (int32_t i = 0; i < c.n_layer; ++i) {
        const DraftLayer & l = model.layer(i);
        ggml_tensor * a = build_norm(ctx, x, l.attn_norm, c.rms_eps);
        const GroupedConv attn_conv(ctx, c, l.attn_conv_base, l.attn_conv_proj, a);
        a = attn_conv.apply(a, 0);
        ggml_tensor * queries = a;
        ggml_tensor * mask = mask_of[static_cast<size_t>(i)]->tensor();
        ggml_tensor * positions = built->positions;
        if (i + 1 == c.n_layer) {
            queries = columns(a, last_begin, n_last);
            mask = columns(mask, last_begin, n_last);
            positions = ggml_view_1d(ctx, positions, n_last, static_cast<size_t>(last_begin) * sizeof(int32_t));
            x = columns(x, last_begin, n_last);
        }
        ggml_tensor * q = ggml_reshape_3d(ctx, build_linear(ctx, l.wq, queries), c.head_dim, c.n_head, queries->ne[1]);
        q = build_rope(ctx, build_norm(ctx, q, l.q_norm, c.rms_eps), positions, c.rope, model.rope_freqs());
        if (context.k_rotation() != nullptr) {
            q = build_rotation(ctx, context.k_rotation(), q);
        }
        const KeyValue kv = build_key_value(ctx, context, i, a, built->positions);
        graph.expand(ggml_cpy(ctx, kv.k, first_rows(ctx, context.k(i), n)));
        graph.expand(ggml_cpy(ctx, kv.v, first_rows(ctx, context.v(i), n)));
        ggml_tensor * out = build_attention(graph, q, context.k(i), context.v(i), mask, c.head_dim, c.n_head_kv,
                                            built->n_kv[static_cast<size_t>(i)]);
        if (context.v_rotation() != nullptr) {
            out = build_rotation(ctx, context.v_rotation(), out);
        }
        x = ggml_add(ctx, x, attn_conv.apply(build_linear(ctx, l.wo, out), 1));
        ggml_tensor * f = build_norm(ctx, x, l.ffn_norm, c.rms_eps);
        const GroupedConv ffn_conv(ctx, c, l.ffn_conv_base, l.ffn_conv_proj, f);
        f = ffn_conv.apply(f, 0);
        f = ggml_swiglu_split(ctx, build_linear(ctx, l.w_gate, f), build_linear(ctx, l.w_up, f));
        x = ggml_add(ctx, x, ffn_conv.apply(build_linear(ctx, l.w_down, f), 1));
    }
    if (n_last > n_out) {
        x = columns(x, first, n_out);
    }
    x = build_norm(ctx, x, model.out_norm(), c.rms_eps);
    built->hidden = x;
    graph.keep(x);
    ggml_tensor * logits = build_linear(ctx, model.output(), x);
    ggml_tensor * anchor = ggml_view_1d(ctx, block_ids, 1, 0);
    if (c.markov_rank > 0) { // it adds to what the head gives; scaling afterwards changes no order
        graph.keep(logits);
        built->chain = build_chain(graph, model, logits, x, anchor, n_top);
    }
    if (c.logit_scale != 1.0f) {
        logits = ggml_scale(ctx, logits, c.logit_scale);
    }
    if (c.final_logit_softcapping > 0.0f) {
        logits = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, logits, 1.0f / c.final_logit_softcapping)),
                            c.final_logit_softcapping);
    }
    built->logits = logits;
    graph.keep(logits);
    if (c.selector_rank > 0) {
        built->chain = build_chain(graph, model, logits, x, anchor, n_top);
    }
    ggml_tensor * ids = built->chain.ids;
    if (ids == nullptr) {
        ids = ggml_argmax(ctx, logits);
        if (model.d2t() != nullptr) {
            ids = ggml_reshape_1d(ctx, ggml_get_rows(ctx, model.d2t(), ids), n_out);
        }
        graph.keep(ids);
        if (n_top > 0) {
            add_candidates(graph, model, n_top, *built);
        }
    }
    built->ids = ids;
    graph.expand(ggml_cpy(ctx, ggml_view_1d(ctx, block_ids, 1, 0), ggml_view_1d(ctx, verify_ids, 1, 0)));
    graph.expand(ggml_cpy(ctx, ids, ggml_view_1d(ctx, verify_ids, n_out, sizeof(int32_t))));
    graph.finish("draft proposal");
    return built;
}

} // namespace dflash
