#include <algorithm>
#include <cstring>

#include "cuda/attention.hpp"
#include "cuda/takes.hpp"

namespace dflash::cuda {
namespace {

int float_type(ggml_type type) {
    return type == GGML_TYPE_F32 ? 0 : type == GGML_TYPE_F16 ? 1 : type == GGML_TYPE_BF16 ? 2 : -1;
}

constexpr int64_t largest_float_matrix = int64_t{8} << 20; // elements; beyond, ggml's kernels are far better

} // namespace

bool weight_type(ggml_type type, WeightType & out) {
    switch (type) {
    case GGML_TYPE_Q4_K:
        out = WeightType::q4_k;
        return true;
    case GGML_TYPE_Q5_K:
        out = WeightType::q5_k;
        return true;
    case GGML_TYPE_Q6_K:
        out = WeightType::q6_k;
        return true;
    case GGML_TYPE_Q8_0:
        out = WeightType::q8_0;
        return true;
    case GGML_TYPE_Q4_0:
        out = WeightType::q4_0;
        return true;
    case GGML_TYPE_IQ4_XS:
        out = WeightType::iq4_xs;
        return true;
    case GGML_TYPE_NVFP4:
        out = WeightType::nvfp4;
        return true;
    default:
        return false;
    }
}

bool is_rows_matmul(const ggml_tensor * t) {
    if (t->op != GGML_OP_MUL_MAT || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
        return false;
    }
    const ggml_tensor *w = t->src[0], *x = t->src[1];
    const int32_t hint = t->op_params[1];
    const char * place = w->buffer == nullptr ? "" : ggml_backend_buft_name(ggml_backend_buffer_get_type(w->buffer));
    return hint == 0 && std::strncmp(place, "CUDA", 4) == 0 && std::strstr(place, "Split") == nullptr &&
           std::strstr(place, "Host") == nullptr && ggml_is_contiguous(w) && w->ne[2] == 1 && w->ne[3] == 1 &&
           x->type == GGML_TYPE_F32 && x->ne[1] >= 1 && x->ne[1] <= rows_taken() && x->ne[2] == 1 && x->ne[3] == 1 &&
           x->nb[0] == sizeof(float) && x->nb[1] % 16 == 0 && reinterpret_cast<uintptr_t>(x->data) % 16 == 0 &&
           w->ne[0] % 4 == 0 && w->ne[0] <= largest_k && w->ne[1] <= 1 << 22;
}

int take_matmul(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    const ggml_tensor * first = ggml_graph_node(graph, node);
    if (!is_rows_matmul(first)) {
        return 0;
    }
    const ggml_tensor *w = first->src[0], *x = first->src[1];
    const int64_t k = w->ne[0];
    const auto n_rows = static_cast<int>(x->ne[1]);
    const auto row_stride = static_cast<int64_t>(x->nb[1] / sizeof(float));
    if (const int type = float_type(w->type); type >= 0) {
        if (ggml_nelements(w) > largest_float_matrix) {
            return 0;
        }
        if (!launched(float_matmul(type, w->data, static_cast<const float *>(x->data), row_stride,
                                   static_cast<float *>(first->data), static_cast<int>(w->ne[1]), k, n_rows, stream))) {
            return 0;
        }
        count_taken(kind_float_matmul, 1);
        return 1;
    }
    WeightType type = {};
    if (!weight_type(w->type, type)) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    if (!make_room(*scratch, k)) {
        return 0;
    }
    // Products of the same rows that follow at once join the launch.
    std::array<MatmulPart, max_parts> parts{};
    int n_parts = 0, end = node, tiles = 0;
    for (int i = node; i < ggml_graph_n_nodes(graph) && n_parts < max_parts; ++i) {
        const ggml_tensor * t = ggml_graph_node(graph, i);
        if (is_noop(t)) {
            continue;
        }
        const bool joins =
            runs(t) && is_rows_matmul(t) && t->src[1] == x && t->src[0]->type == w->type && t->src[0]->ne[0] == k;
        tiles += joins ? static_cast<int>((t->src[0]->ne[1] + 127) / 128) : 0;
        if (!joins || tiles > static_cast<int>(max_tiles)) {
            break;
        }
        parts[static_cast<size_t>(n_parts++)] = {t->src[0]->data, static_cast<float *>(t->data),
                                                 static_cast<int>(t->src[0]->ne[1])};
        end = i + 1;
    }
    if (n_parts == 0) {
        return 0;
    }
    if (pass().packed != base_of(x) && !launched(pack_activations(static_cast<const float *>(x->data), row_stride,
                                                                  n_rows, k, scratch->matmul, stream))) {
        return 0;
    }
    pass().packed = base_of(x);
    if (!launched(rows_matmul(type, parts.data(), n_parts, k, ggml_row_size(w->type, k), n_rows, scratch->matmul,
                              device_facts().n_multiprocessors, stream))) {
        return 0;
    }
    count_taken(kind_matmul, n_parts);
    return end - node;
}

int take_attention(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    const ggml_tensor * t = ggml_graph_node(graph, node);
    if (t->op != GGML_OP_FLASH_ATTN_EXT) {
        return 0;
    }
    const ggml_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *mask = t->src[3];
    std::array<float, 3> params{}; // scale, max_bias, logit_softcap
    std::memcpy(params.data(), t->op_params, sizeof(params));
    const int64_t head_dim = q->ne[0], n_rows = q->ne[1], n_head = q->ne[2], n_head_kv = k->ne[2], n_kv = k->ne[1];
    const bool fits = params[1] == 0.0f && params[2] == 0.0f && t->src[4] == nullptr && mask != nullptr &&
                      mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && mask->ne[3] == 1 && mask->ne[0] >= n_kv &&
                      mask->ne[1] >= n_rows && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 &&
                      v->type == GGML_TYPE_F16 && q->ne[3] == 1 && k->ne[3] == 1 && v->ne[0] == head_dim &&
                      v->ne[1] == n_kv && v->ne[2] == n_head_kv && attention_supports(static_cast<int>(head_dim)) &&
                      n_rows <= rows_taken() && n_head % n_head_kv == 0 && q->nb[0] == 4 && q->nb[1] % 8 == 0 &&
                      q->nb[2] % 8 == 0 && k->nb[0] == 2 && v->nb[0] == 2 && k->nb[1] % 16 == 0 && k->nb[2] % 16 == 0 &&
                      v->nb[1] % 16 == 0 && v->nb[2] % 16 == 0 && mask->nb[0] == 2 && t->type == GGML_TYPE_F32 &&
                      ggml_is_contiguous(t);
    if (!fits) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    // Sized for the whole cache and a full block, so that it does not grow with the text.
    const int64_t positions = k->view_src != nullptr ? std::max(n_kv, k->view_src->ne[1]) : n_kv;
    const int64_t rows = n_rows == 1 ? 1 : n_rows <= 16 ? 16 : max_rows;
    const size_t floats = attention_partial_floats(static_cast<int>(rows), static_cast<int>(n_head),
                                                   static_cast<int>(head_dim), static_cast<int>(positions));
    if (floats > scratch->partial_floats) {
        void * memory = nullptr;
        if (!allocate(*scratch, &memory, floats * sizeof(float))) {
            return 0;
        }
        scratch->partials = static_cast<float *>(memory);
        scratch->partial_floats = floats;
    }
    AttentionArgs a;
    a.q = static_cast<const float *>(q->data);
    a.q_row = static_cast<int64_t>(q->nb[1] / sizeof(float));
    a.q_head = static_cast<int64_t>(q->nb[2] / sizeof(float));
    a.k = k->data;
    a.v = v->data;
    a.k_position = static_cast<int64_t>(k->nb[1]);
    a.k_head = static_cast<int64_t>(k->nb[2]);
    a.v_position = static_cast<int64_t>(v->nb[1]);
    a.v_head = static_cast<int64_t>(v->nb[2]);
    a.mask = mask->data;
    a.mask_row = static_cast<int64_t>(mask->nb[1] / 2);
    a.out = static_cast<float *>(t->data);
    a.n_rows = static_cast<int>(n_rows);
    a.n_head = static_cast<int>(n_head);
    a.n_head_kv = static_cast<int>(n_head_kv);
    a.head_dim = static_cast<int>(head_dim);
    a.n_kv = static_cast<int>(n_kv);
    a.scale = params[0];
    a.partials = scratch->partials;
    for (int64_t first = 0; first < n_rows; first += max_rows) {
        AttentionArgs part = a;
        part.n_rows = static_cast<int>(std::min<int64_t>(max_rows, n_rows - first));
        part.q = a.q + first * a.q_row;
        part.mask = static_cast<const char *>(a.mask) + first * static_cast<int64_t>(mask->nb[1]);
        part.out = a.out + first * n_head * head_dim;
        if (!launched(attention(part, device_facts().n_multiprocessors, stream))) {
            return 0;
        }
    }
    count_taken(kind_attention, 1);
    return 1;
}

} // namespace dflash::cuda
