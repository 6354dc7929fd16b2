#include "graph/tree_blocks.hpp"

#include "graph/delta_net.hpp"

namespace dflash {

ggml_tensor * build_tree_conv(ggml_context * ctx, ggml_tensor * window, ggml_tensor * weight, const TreeRows & tree) {
    const int64_t width = weight->ne[0];
    const int64_t channels = window->ne[0];
    const int64_t n = tree.place->ne[0];
    ggml_tensor * x = ggml_get_rows(ctx, window, tree.conv_rows); // [channels, width * n]
    x = ggml_permute(ctx, ggml_reshape_3d(ctx, x, channels, width, n), 1, 0, 2, 3);
    return ggml_reshape_2d(ctx, ggml_ssm_conv(ctx, ggml_cont(ctx, x), weight), channels, n);
}

ggml_tensor * build_tree_delta(Graph & graph, ggml_tensor * qk, ggml_tensor * qkv, ggml_tensor * g, ggml_tensor * beta,
                               ggml_tensor * state, const TreeRows & tree) {
    ggml_context * ctx = graph.ctx();
    const int64_t s = state->ne[0];
    const int64_t hv = state->ne[2];
    const int64_t hk = qk->ne[1] / 2;
    const int64_t n = qk->ne[2];
    const int64_t t = tree.n_levels;
    const int64_t b = tree.n_paths;
    const size_t tail = qkv->nb[0] * static_cast<size_t>(qkv->ne[0] - s * hv);
    ggml_tensor * paths = ggml_get_rows(ctx, ggml_reshape_2d(ctx, qk, s * 2 * hk, n), tree.path_rows);
    const size_t row = paths->nb[1];
    const size_t head = ggml_row_size(paths->type, s);
    ggml_tensor * q = ggml_view_4d(ctx, paths, s, hk, t, b, head, row, row * static_cast<size_t>(t), 0);
    ggml_tensor * k =
        ggml_view_4d(ctx, paths, s, hk, t, b, head, row, row * static_cast<size_t>(t), head * static_cast<size_t>(hk));
    ggml_tensor * v = ggml_get_rows(ctx, ggml_view_2d(ctx, qkv, s * hv, n, qkv->nb[1], tail), tree.path_rows);
    g = ggml_get_rows(ctx, ggml_reshape_2d(ctx, g, hv, n), tree.path_rows);
    beta = ggml_get_rows(ctx, ggml_reshape_2d(ctx, beta, hv, n), tree.path_rows);
    ggml_tensor * mix =
        build_delta_rule(graph, q, k, ggml_reshape_4d(ctx, v, s, hv, t, b), ggml_reshape_4d(ctx, g, 1, hv, t, b),
                         ggml_reshape_4d(ctx, beta, 1, hv, t, b), state, DeltaState::drop);
    return ggml_get_rows(ctx, ggml_view_2d(ctx, mix, s * hv, t * b, mix->nb[1], 0), tree.place);
}

} // namespace dflash
