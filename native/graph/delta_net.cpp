#include "graph/delta_net.hpp"

#include "cpu/delta_net.hpp"
#include "graph/target_blocks.hpp"

namespace dflash {
namespace {

cpu::TokenRows token_rows(const ggml_tensor * t) {
    const auto floats = [](size_t bytes) { return static_cast<int64_t>(bytes / sizeof(float)); };
    return {static_cast<const float *>(t->data), floats(t->nb[1]), floats(t->nb[2]), floats(t->nb[3])};
}

cpu::DeltaCall call_of(const ggml_tensor * node) {
    cpu::DeltaCall call;
    call.q = token_rows(node->src[0]);
    call.k = token_rows(node->src[1]);
    call.v = token_rows(node->src[2]);
    call.g = token_rows(node->src[3]);
    call.beta = token_rows(node->src[4]);
    call.state = static_cast<const float *>(node->src[5]->data);
    call.size = node->src[5]->ne[0];
    call.n_head_k = node->src[1]->ne[1];
    call.n_head = node->src[2]->ne[1];
    call.n_tokens = node->src[2]->ne[2];
    call.n_sequences = node->src[2]->ne[3];
    return call;
}

void compute_drop(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    cpu::DeltaCall call = call_of(node);
    call.out = static_cast<float *>(node->data);
    cpu::delta_net(call, ith, nth);
}

void compute_write(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    cpu::DeltaCall call = call_of(node);
    call.out = static_cast<float *>(node->data);
    call.newest = static_cast<float *>(node->src[5]->data);
    cpu::delta_net(call, ith, nth);
}

void compute_each(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    cpu::DeltaCall call = call_of(node);
    call.out = static_cast<float *>(node->data);
    call.each = call.out + call.size * call.n_head * call.n_tokens;
    cpu::delta_net(call, ith, nth);
}

void compute_state(ggml_tensor * node, int ith, int nth, void * /*user*/) {
    cpu::DeltaCall call = call_of(node);
    call.newest = static_cast<float *>(node->src[5]->data);
    cpu::delta_net(call, ith, nth);
}

bool on_cpu(const Graph & graph, const ggml_tensor * state) {
    return graph.device()->is_cpu() && cpu::delta_net_takes(state->ne[0]);
}

void copy_state(Graph & graph, ggml_tensor * mix, const ggml_tensor * v, ggml_tensor * state) {
    ggml_context * ctx = graph.ctx();
    const size_t tail = ggml_row_size(mix->type, v->ne[0] * v->ne[1] * v->ne[2]);
    graph.expand(ggml_cpy(ctx, ggml_view_1d(ctx, mix, ggml_nelements(state), tail), state_target(ctx, state)));
}

} // namespace

ggml_tensor * build_delta_rule(Graph & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g,
                               ggml_tensor * beta, ggml_tensor * state, DeltaState what) {
    ggml_context * ctx = graph.ctx();
    const int64_t s = state->ne[0];
    const int64_t n = v->ne[2];
    const int64_t b = v->ne[3];
    if (on_cpu(graph, state)) {
        ggml_tensor * sources[] = {q, k, v, g, beta, state};
        const int64_t columns = n * b + (what == DeltaState::each ? s * n : 0);
        const ggml_custom_op_t compute = what == DeltaState::drop    ? compute_drop
                                         : what == DeltaState::write ? compute_write
                                                                     : compute_each;
        ggml_tensor * out = ggml_custom_4d(ctx, GGML_TYPE_F32, s * v->ne[1], columns, 1, 1, sources, 6, compute,
                                           GGML_N_TASKS_MAX, nullptr);
        if (what == DeltaState::write) {
            graph.expand(out);
        }
        return out;
    }
    ggml_tensor * states = b == 1 ? state : ggml_repeat_4d(ctx, state, s, s, state->ne[2], b);
    ggml_tensor * mix = ggml_gated_delta_net(ctx, q, k, v, g, beta, states, what == DeltaState::each ? n : 1);
    if (what == DeltaState::write) {
        copy_state(graph, mix, v, state);
    }
    return mix;
}

void build_delta_state(Graph & graph, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                       ggml_tensor * state) {
    if (on_cpu(graph, state)) {
        ggml_tensor * sources[] = {k, k, v, g, beta, state};
        graph.expand(ggml_custom_4d(graph.ctx(), GGML_TYPE_F32, 1, 1, 1, 1, sources, 6, compute_state, GGML_N_TASKS_MAX,
                                    nullptr));
        return;
    }
    // The state does not depend on queries; keys stand in for them.
    copy_state(graph, ggml_gated_delta_net(graph.ctx(), k, k, v, g, beta, state, 1), v, state);
}

} // namespace dflash
