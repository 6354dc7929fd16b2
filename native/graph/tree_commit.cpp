#include "graph/tree_commit.hpp"

#include "graph/delta_net.hpp"

namespace dflash {
namespace {

/// Rows of a stored tensor, moved without looking at what they hold.
void move_rows(Graph & graph, ggml_tensor * stored, ggml_tensor * from, ggml_tensor * to) {
    ggml_context * ctx = graph.ctx();
    ggml_tensor * rows = stored;
    if (stored->type != GGML_TYPE_F32 && stored->nb[1] % sizeof(float) == 0) {
        rows = graph.alias_rows(stored, GGML_TYPE_F32);
    }
    graph.expand(ggml_set_rows(ctx, rows, ggml_get_rows(ctx, rows, from), to));
}

} // namespace

std::unique_ptr<TreeCommitGraph> build_tree_commit_graph(const TargetCache & cache, const TargetGraph & verify) {
    const TargetConfig & c = cache.model().config();
    const int64_t n = verify.shape.tree_levels;
    const int64_t s = c.ssm_d_state;
    const int64_t hk = c.ssm_n_group;
    const int64_t hv = c.ssm_dt_rank;
    const int64_t history = c.ssm_d_conv - 1;
    auto built = std::make_unique<TreeCommitGraph>();
    built->n_levels = n;
    const auto n_layers = static_cast<size_t>(c.n_layer);
    built->graph = std::make_unique<Graph>(cache.model().device(), 64 + 32 * n_layers);
    Graph & graph = *built->graph;
    ggml_context * ctx = graph.ctx();
    built->keep = graph.input(GGML_TYPE_F32, "keep", 1, n);
    built->ints = graph.input(GGML_TYPE_I32, "tree_commit_ints", 3 * n + history);
    built->row_ints = graph.input(GGML_TYPE_I64, "tree_commit_rows", 2 * n);
    const auto ints = [&](int64_t at, int64_t count) {
        return ggml_view_1d(ctx, built->ints, count, static_cast<size_t>(at) * sizeof(int32_t));
    };
    ggml_tensor * path = ints(0, n);
    ggml_tensor * columns = ints(n, history);
    ggml_tensor * kv_from = ints(n + history, n);
    ggml_tensor * kv_to = ggml_view_1d(ctx, built->row_ints, n, 0);
    for (const DeltaNetCapture & captured : verify.captures) {
        DeltaNetCapture d = captured;
        for (ggml_tensor ** t : {&d.conv_input, &d.qk, &d.qkv, &d.g, &d.beta}) {
            *t = graph.alias(*t);
        }
        ggml_tensor * state = cache.ssm_state(d.layer);
        const int64_t rows = d.qk->ne[2];
        ggml_tensor * qk = ggml_get_rows(ctx, ggml_reshape_2d(ctx, d.qk, s * 2 * hk, rows), path);
        const size_t head = ggml_row_size(qk->type, s);
        ggml_tensor * k = ggml_view_3d(ctx, qk, s, hk, n, head, qk->nb[1], head * static_cast<size_t>(hk));
        ggml_tensor * values =
            ggml_view_2d(ctx, d.qkv, s * hv, rows, d.qkv->nb[1], ggml_row_size(d.qkv->type, 2 * hk * s));
        ggml_tensor * v = ggml_reshape_3d(ctx, ggml_get_rows(ctx, values, path), s, hv, n);
        ggml_tensor * g = ggml_get_rows(ctx, ggml_reshape_2d(ctx, d.g, hv, rows), path);
        ggml_tensor * beta = ggml_get_rows(ctx, ggml_reshape_2d(ctx, d.beta, hv, rows), path);
        g = ggml_mul(ctx, g, built->keep);
        beta = ggml_mul(ctx, beta, built->keep);
        build_delta_state(graph, k, v, ggml_reshape_3d(ctx, g, 1, hv, n), ggml_reshape_3d(ctx, beta, 1, hv, n), state);
        graph.expand(ggml_cpy(ctx, ggml_get_rows(ctx, d.conv_input, columns), cache.conv_state(d.layer)));
    }
    for (int32_t i = cache.layer_begin(); i < cache.layer_end(); ++i) {
        if (cache.attn_k(i) != nullptr) {
            move_rows(graph, cache.attn_k(i), kv_from, kv_to);
            move_rows(graph, cache.attn_v(i), kv_from, kv_to);
        }
    }
    if (cache.target_feat() != nullptr) {
        ggml_tensor * to = ggml_view_1d(ctx, built->row_ints, n, static_cast<size_t>(n) * sizeof(int64_t));
        move_rows(graph, cache.target_feat(), ints(2 * n + history, n), to);
    }
    graph.finish("tree commit");
    return built;
}

} // namespace dflash
