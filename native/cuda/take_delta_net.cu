#include <cstring>

#include "cuda/takes.hpp"

namespace dflash::cuda {

/// Per head: RMS norm, weight, times silu(z).
int take_gated_norm(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    std::array<ggml_tensor *, 4> t{};
    int end = 0;
    if (!next_nodes(graph, node, t, end) || t[1]->op != GGML_OP_MUL || t[1]->src[0] != t[0] ||
        !is_unary(t[2], GGML_UNARY_OP_SILU) || t[3]->op != GGML_OP_MUL || t[3]->src[0] != t[1] ||
        t[3]->src[1] != t[2]) {
        return 0;
    }
    const ggml_tensor *x = t[0]->src[0], *z = t[2]->src[0], *weight = t[1]->src[1];
    const int64_t head = x->ne[0], k = head * x->ne[1];
    if (x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) ||
        x->nb[1] != static_cast<size_t>(head) * sizeof(float) || x->nb[2] % 16 != 0 || x->ne[3] != 1 ||
        x->ne[2] > rows_taken() || !contiguous_floats(z) || !contiguous_floats(t[3]) || !ggml_are_same_shape(t[3], x) ||
        !ggml_are_same_shape(z, x) || !is_vector(weight, head) || (head != 64 && head != 128) || k > largest_k) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    float eps = 0.0f;
    std::memcpy(&eps, t[0]->op_params, sizeof(eps));
    const RowPlan plan = plan_rows(*scratch, graph, end, t[3], k);
    Copies copies(*scratch, stream);
    const float * x_values = clashes(t[3], x) ? copies.copy(x) : floats(x);
    const float * z_values = clashes(t[3], z) ? copies.copy(z) : floats(z);
    if (x_values == nullptr || z_values == nullptr) {
        return 0;
    }
    return took(kind_gated_norm, plan,
                gated_norm(x_values, static_cast<int64_t>(x->nb[2] / sizeof(float)), z_values, floats(weight), eps,
                           static_cast<int>(head), plan.output, plan.scratch, stream),
                end - node);
}

/// softplus(a + bias) * rate, and sigmoid(b).
int take_delta_gates(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    std::array<ggml_tensor *, 4> t{};
    int end = 0;
    if (!next_nodes(graph, node, t, end) || !is_unary(t[1], GGML_UNARY_OP_SOFTPLUS) || t[1]->src[0] != t[0] ||
        t[2]->op != GGML_OP_MUL || t[2]->src[0] != t[1] || !is_unary(t[3], GGML_UNARY_OP_SIGMOID)) {
        return 0;
    }
    const ggml_tensor *a = t[0]->src[0], *bias = t[0]->src[1], *rate = t[2]->src[1], *b = t[3]->src[0];
    const int64_t heads = a->ne[0], n_rows = a->ne[1];
    if (!contiguous_floats(a) || !contiguous_floats(b) || !ggml_are_same_shape(a, b) || a->ne[2] != 1 ||
        a->ne[3] != 1 || n_rows > rows_taken() || !is_vector(bias, heads) || !is_vector(rate, heads) ||
        !contiguous_floats(t[2]) || !contiguous_floats(t[3])) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    Copies copies(*scratch, stream);
    const float * a_values = clashes(t[2], a) || clashes(t[3], a) ? copies.copy(a) : floats(a);
    const float * b_values = clashes(t[2], b) || clashes(t[3], b) ? copies.copy(b) : floats(b);
    if (a_values == nullptr || b_values == nullptr) {
        return 0;
    }
    return took(kind_delta_gates, {},
                delta_gates(a_values, floats(bias), floats(rate), floats(t[2]), b_values, floats(t[3]),
                            static_cast<int>(n_rows), static_cast<int>(heads), stream),
                end - node);
}

/// The convolution of a DeltaNet layer, in the form that moves the state on and in the one that keeps the window.
int take_conv(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    std::array<ggml_tensor *, 6> t{};
    int end = 0;
    if (!next_nodes(graph, node, t, end)) {
        return 0;
    }
    const bool keeps = t[1]->op == GGML_OP_CONT;
    ggml_tensor *concat = t[0], *conv = keeps ? t[2] : t[1], *active = keeps ? t[3] : t[2],
                *copy = keeps ? nullptr : t[3];
    ggml_tensor *norm = t[4], *scale = t[5];
    if (conv->op != GGML_OP_SSM_CONV || !is_unary(active, GGML_UNARY_OP_SILU) || active->src[0] != conv ||
        (copy != nullptr && copy->op != GGML_OP_CPY) || norm->op != GGML_OP_RMS_NORM || scale->op != GGML_OP_SCALE ||
        scale->src[0] != norm) {
        return 0;
    }
    const ggml_tensor *state = concat->src[0], *rows = concat->src[1], *taps = conv->src[1], *heads = norm->src[0];
    if (keeps) {
        if (concat->op_params[0] != 1 || t[1]->src[0]->op != GGML_OP_TRANSPOSE || t[1]->src[0]->src[0] != concat ||
            conv->src[0] != t[1]) {
            return 0;
        }
    } else {
        if (concat->op_params[0] != 0 || state->op != GGML_OP_TRANSPOSE || rows->op != GGML_OP_TRANSPOSE ||
            conv->src[0] != concat) {
            return 0;
        }
        state = state->src[0];
        rows = rows->src[0];
        // The copy takes the last columns of the window back into the state.
        const ggml_tensor * newest = copy->src[0]->op == GGML_OP_TRANSPOSE ? copy->src[0]->src[0] : nullptr;
        if (newest == nullptr || newest->view_src != concat || copy->src[1]->data != state->data ||
            newest->view_offs != concat->nb[0] * static_cast<size_t>(rows->ne[1]) ||
            !ggml_is_contiguous(copy->src[1])) {
            return 0;
        }
    }
    const int64_t channels = rows->ne[0], n_rows = rows->ne[1], head = heads->ne[0], n_normed = heads->ne[1];
    float bias = 0.0f;
    ConvArgs a;
    std::memcpy(&a.eps, norm->op_params, sizeof(float));
    std::memcpy(&a.scale, scale->op_params, sizeof(float));
    std::memcpy(&bias, static_cast<const float *>(static_cast<const void *>(scale->op_params)) + 1, sizeof(float));
    if (bias != 0.0f || !contiguous_floats(state) || state->ne[0] != channels || state->ne[1] != 3 ||
        !contiguous_floats(rows) || rows->ne[2] != 1 || n_rows > rows_taken() || !contiguous_floats(taps) ||
        taps->ne[0] != 4 || taps->ne[1] != channels || !contiguous_floats(active) || active->ne[0] != channels ||
        active->ne[1] != n_rows || (head != 64 && head != 128) || channels % head != 0 || heads->view_src != active ||
        heads->view_offs != 0 || heads->nb[1] != static_cast<size_t>(head) * sizeof(float) ||
        heads->nb[2] != active->nb[1] || n_normed * head > channels || !contiguous_floats(scale) ||
        overlap(scale, state) || overlap(active, state)) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    Copies copies(*scratch, stream);
    const bool shared = overlap(active, rows) || overlap(scale, rows) || (keeps && overlap(concat, rows));
    a.rows = shared ? copies.copy(rows) : floats(rows);
    if (a.rows == nullptr) {
        return 0;
    }
    a.state = floats(state);
    a.taps = floats(taps);
    a.window = keeps ? floats(concat) : nullptr;
    a.new_state = keeps ? nullptr : static_cast<float *>(state->data);
    a.mixed = floats(active);
    a.normed = floats(scale);
    a.n_rows = static_cast<int>(n_rows);
    a.channels = static_cast<int>(channels);
    a.head = static_cast<int>(head);
    a.n_normed = static_cast<int>(n_normed);
    return took(kind_conv, {}, delta_conv(a, stream), end - node);
}

} // namespace dflash::cuda
