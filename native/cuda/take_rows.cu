#include <cstring>

#include "cuda/takes.hpp"

namespace dflash::cuda {
namespace {

/// Whether the product that follows reads `rows` packed; then there is room for them.
bool is_packed_next(Scratch & scratch, ggml_cgraph * graph, int node, const ggml_tensor * rows) {
    std::array<ggml_tensor *, 1> next{};
    int end = 0;
    WeightType type = {};
    return next_nodes(graph, node, next, end) && is_rows_matmul(next[0]) && base_of(next[0]->src[1]) == rows &&
           weight_type(next[0]->src[0]->type, type) && make_room(scratch, next[0]->src[1]->ne[0]);
}

} // namespace

RowPlan plan_rows(Scratch & scratch, ggml_cgraph * graph, int end, const ggml_tensor * rows, int64_t k) {
    RowPlan plan;
    plan.output = {static_cast<float *>(rows->data), static_cast<int>(ggml_nelements(rows) / k), static_cast<int>(k)};
    plan.scratch = scratch.matmul;
    if (is_packed_next(scratch, graph, end, rows)) {
        plan.scratch = scratch.matmul; // make_room may have moved it
        plan.packed = rows;
    } else {
        plan.scratch.packed = nullptr;
    }
    return plan;
}

int took(Kind kind, const RowPlan & plan, cudaError_t error, int n_nodes) {
    if (!launched(error)) {
        return 0;
    }
    if (plan.packed != nullptr) {
        pass().packed = plan.packed;
    }
    count_taken(kind, 1);
    return n_nodes;
}

/// [a + b,] RMS norm, weight.
int take_norm(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    std::array<ggml_tensor *, 3> t{};
    std::array<ggml_tensor *, 2> two{};
    int end = 0;
    const bool adds = ggml_graph_node(graph, node)->op == GGML_OP_ADD;
    if (adds ? !next_nodes(graph, node, t, end) : !next_nodes(graph, node, two, end)) {
        return 0;
    }
    ggml_tensor *norm = adds ? t[1] : two[0], *product = adds ? t[2] : two[1];
    if (norm->op != GGML_OP_RMS_NORM || product->op != GGML_OP_MUL || product->src[0] != norm || !is_rows(norm) ||
        !is_rows(product) || !is_vector(product->src[1], norm->ne[0]) || !is_rows(norm->src[0])) {
        return 0;
    }
    const ggml_tensor *a = norm->src[0], *b = nullptr;
    // The heads of one row look like rows; their norms stay with ggml, at every number of rows.
    if (a->op == GGML_OP_RESHAPE || a->op == GGML_OP_VIEW || a->op == GGML_OP_PERMUTE) {
        return 0;
    }
    if (adds) {
        if (norm->src[0] != t[0]) {
            return 0;
        }
        a = t[0]->src[0];
        b = t[0]->src[1];
        if (!is_rows(a) || !is_rows(b) || !ggml_are_same_shape(a, b) || clashes(t[0], a) || clashes(t[0], b) ||
            clashes(product, a) || clashes(product, b)) {
            return 0;
        }
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    float eps = 0.0f;
    std::memcpy(&eps, norm->op_params, sizeof(eps));
    const RowPlan plan = plan_rows(*scratch, graph, end, product, norm->ne[0]);
    return took(kind_norm, plan,
                add_norm(floats(a), b == nullptr ? nullptr : floats(b), adds ? floats(t[0]) : nullptr,
                         floats(product->src[1]), eps, plan.output, plan.scratch, stream),
                end - node);
}

/// silu(gate) * up
int take_swiglu(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    ggml_tensor * t = ggml_graph_node(graph, node);
    if (ggml_get_glu_op(t) != GGML_GLU_OP_SWIGLU || t->src[1] == nullptr || !is_rows(t) || !is_rows(t->src[0]) ||
        !is_rows(t->src[1]) || !ggml_are_same_shape(t->src[0], t->src[1]) || !ggml_are_same_shape(t, t->src[0])) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    const RowPlan plan = plan_rows(*scratch, graph, node + 1, t, t->ne[0]);
    return took(kind_gate, plan,
                gate_rows(Gate::swiglu, floats(t->src[0]), floats(t->src[1]), plan.output, plan.scratch, stream), 1);
}

/// value * sigmoid(gate)
int take_sigmoid_gate(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    std::array<ggml_tensor *, 2> t{};
    int end = 0;
    if (!next_nodes(graph, node, t, end) || t[1]->op != GGML_OP_MUL || t[1]->src[1] != t[0]) {
        return 0;
    }
    const ggml_tensor *gate = t[0]->src[0], *value = t[1]->src[0];
    if (!is_rows(gate) || !is_rows(value) || !is_rows(t[1]) || !ggml_are_same_shape(gate, value) ||
        clashes(t[1], gate) || clashes(t[1], value)) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    if (scratch == nullptr) {
        return 0;
    }
    const RowPlan plan = plan_rows(*scratch, graph, end, t[1], t[1]->ne[0]);
    return took(kind_gate, plan,
                gate_rows(Gate::sigmoid, floats(gate), floats(value), plan.output, plan.scratch, stream), end - node);
}

/// The likeliest token of each row, by a few blocks instead of one.
int take_argmax(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    ggml_tensor * t = ggml_graph_node(graph, node);
    const ggml_tensor * x = t->src[0];
    if (!contiguous_floats(x) || x->ne[2] != 1 || x->ne[3] != 1 || x->ne[1] > max_rows || x->ne[0] < 4096 ||
        x->ne[0] > 1 << 30 || t->type != GGML_TYPE_I32) {
        return 0;
    }
    Scratch * scratch = scratch_of(device, stream);
    const auto n_rows = static_cast<int>(x->ne[1]);
    if (scratch == nullptr || argmax_scratch_bytes(max_rows) > partial_bytes(1) ||
        !launched(argmax_rows(floats(x), x->ne[0], n_rows, static_cast<int32_t *>(t->data), scratch->matmul.partials,
                              stream))) {
        return 0;
    }
    count_taken(kind_argmax, 1);
    return 1;
}

} // namespace dflash::cuda
