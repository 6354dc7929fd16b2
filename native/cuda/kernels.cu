#include "cuda/kernels.hpp"

#include <algorithm>
#include <array>
#include <atomic>

#include "cuda/takes.hpp"

// Declared by the line that third_party/hook_ggml_cuda.py adds to ggml's CUDA backend: asked before each node of a
// graph, it returns how many nodes it has run, 0 for none.
extern "C" int (*dflash_ggml_cuda_hook)(int device, void * stream, struct ggml_cgraph * graph, int node);

namespace dflash::cuda {
namespace {

std::atomic<int> most_rows{max_rows};

constexpr std::array<const char *, n_kinds> kind_names = {"matmul",     "float matmul", "attention",   "norm",  "gate",
                                                          "gated norm", "delta gates",  "convolution", "argmax"};
std::array<std::atomic<int64_t>, n_kinds> taken{};

int hook(int device, void * stream, ggml_cgraph * graph, int node) {
    if (most_rows.load(std::memory_order_relaxed) == 0 || !device_facts().usable) {
        return 0;
    }
    Pass & now = pass();
    if (graph != now.graph || node <= now.node) {
        now = Pass{graph, node, nullptr};
    }
    now.node = node;
    auto * s = static_cast<cudaStream_t>(stream);
    const ggml_tensor * t = ggml_graph_node(graph, node);
    switch (t->op) {
    case GGML_OP_MUL_MAT:
        return take_matmul(device, s, graph, node);
    case GGML_OP_FLASH_ATTN_EXT:
        return take_attention(device, s, graph, node);
    case GGML_OP_ADD: {
        const int n = take_norm(device, s, graph, node);
        return n > 0 ? n : take_delta_gates(device, s, graph, node);
    }
    case GGML_OP_RMS_NORM: {
        const int n = take_gated_norm(device, s, graph, node);
        return n > 0 ? n : take_norm(device, s, graph, node);
    }
    case GGML_OP_ARGMAX:
        return take_argmax(device, s, graph, node);
    case GGML_OP_GLU:
        return take_swiglu(device, s, graph, node);
    case GGML_OP_CONCAT:
        return take_conv(device, s, graph, node);
    case GGML_OP_UNARY:
        return is_unary(t, GGML_UNARY_OP_SIGMOID) ? take_sigmoid_gate(device, s, graph, node) : 0;
    default:
        return 0;
    }
}

} // namespace

void count_taken(Kind kind, int64_t n) {
    taken[kind] += n;
}

void install_kernels() {
    dflash_ggml_cuda_hook = hook;
}

void take_rows(int most) {
    most_rows = std::clamp(most, 0, max_batch);
}

int rows_taken() {
    return most_rows;
}

std::vector<TakenNodes> taken_nodes() {
    std::vector<TakenNodes> out;
    for (size_t i = 0; i < n_kinds; ++i) {
        out.push_back({kind_names[i], taken[i]});
    }
    return out;
}

} // namespace dflash::cuda
