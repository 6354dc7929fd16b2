#include "graph/attention.hpp"

#include <cmath>

#include "cpu/attention.hpp"

namespace dflash {
namespace {

constexpr int64_t cpu_dim_multiple = 16;
constexpr int64_t cpu_max_group = 64;

const uint8_t * bytes_of(const ggml_tensor * t) {
    return static_cast<const uint8_t *>(t->data);
}

cpu::KeyRows key_rows(const ggml_tensor * t) {
    cpu::KeyRows rows;
    rows.data = bytes_of(t);
    rows.key_stride = t->nb[1];
    rows.head_stride = t->nb[2];
    rows.type = t->type == GGML_TYPE_F32   ? cpu::KeyRows::Type::f32
                : t->type == GGML_TYPE_F16 ? cpu::KeyRows::Type::f16
                                           : cpu::KeyRows::Type::other;
    rows.to_float = ggml_get_type_traits(t->type)->to_float;
    return rows;
}

/// Sources of both nodes: q [head_dim, n_head, n_rows], K and V [head_dim, n_kv, n_head_kv], mask [n_kv, n_rows].
cpu::AttentionCall call_of(const ggml_tensor * node) {
    const ggml_tensor * q = node->src[0];
    const ggml_tensor * k = node->src[1];
    cpu::AttentionCall call;
    call.q = bytes_of(q);
    call.q_head_stride = q->nb[1];
    call.q_row_stride = q->nb[2];
    call.k = key_rows(k);
    call.v = key_rows(node->src[2]);
    call.mask = bytes_of(node->src[3]);
    call.mask_stride = node->src[3]->nb[1];
    call.head_dim = q->ne[0];
    call.n_head = q->ne[1];
    call.n_head_kv = k->ne[2];
    call.n_kv = k->ne[1];
    call.n_rows = q->ne[2];
    return call;
}

void compute_all(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    cpu::attention(call_of(node), static_cast<float *>(node->data), ith, nth);
}

void compute_partial(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    cpu::attention_partial(call_of(node), static_cast<float *>(node->data), ith, nth);
}

void compute_merge(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    const ggml_tensor * partials = node->src[0];
    const int64_t heads_and_rows = partials->ne[1];
    const int64_t head_dim = ggml_nelements(node) / heads_and_rows;
    cpu::attention_merge(static_cast<const float *>(partials->data), head_dim, heads_and_rows, partials->ne[2],
                         static_cast<float *>(node->data), ith, nth);
}

ggml_tensor * build_on_cpu(Graph & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask) {
    ggml_context * ctx = graph.ctx();
    const int64_t head_dim = q->ne[0];
    const int64_t n_head = q->ne[1];
    const int64_t n_rows = q->ne[2];
    const int64_t n_kv = k->ne[1];
    ggml_tensor * sources[] = {q, k, v, mask};
    const int64_t n_parts = (n_kv + cpu::attention_part - 1) / cpu::attention_part;
    const int64_t pieces = cpu::attention_pieces(n_rows, n_head, k->ne[2]);
    if (n_parts == 1 || pieces >= 2 * int64_t{graph.device()->n_threads()} || graph.device()->n_threads() == 1) {
        return ggml_custom_4d(ctx, GGML_TYPE_F32, head_dim * n_head, n_rows, 1, 1, sources, 4, compute_all,
                              GGML_N_TASKS_MAX, nullptr);
    }
    ggml_tensor * partials = ggml_custom_4d(ctx, GGML_TYPE_F32, cpu::attention_partial_width(head_dim), n_head * n_rows,
                                            n_parts, 1, sources, 4, compute_partial, GGML_N_TASKS_MAX, nullptr);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, head_dim * n_head, n_rows, 1, 1, &partials, 1, compute_merge,
                          GGML_N_TASKS_MAX, nullptr);
}

} // namespace

ggml_tensor * build_attention(Graph & graph, ggml_tensor * q, ggml_tensor * k_rows, ggml_tensor * v_rows,
                              ggml_tensor * mask, int64_t head_dim, int64_t n_head_kv, int64_t n_kv) {
    ggml_context * ctx = graph.ctx();
    const int64_t n_head = q->ne[1];
    const int64_t n = q->ne[2];
    ggml_tensor * k =
        ggml_view_3d(ctx, k_rows, head_dim, n_kv, n_head_kv, k_rows->nb[1], ggml_row_size(k_rows->type, head_dim), 0);
    ggml_tensor * v =
        ggml_view_3d(ctx, v_rows, head_dim, n_kv, n_head_kv, v_rows->nb[1], ggml_row_size(v_rows->type, head_dim), 0);
    if (graph.device()->is_cpu() && head_dim % cpu_dim_multiple == 0 && n_head / n_head_kv <= cpu_max_group) {
        return build_on_cpu(graph, q, k, v, mask);
    }
    ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), k, v, mask,
                                            1.0f / std::sqrt(static_cast<float>(head_dim)), 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return ggml_reshape_2d(ctx, out, head_dim * n_head, n);
}

} // namespace dflash
