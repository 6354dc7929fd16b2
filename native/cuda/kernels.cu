#include "cuda/kernels.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/attention.hpp"
#include "cuda/rows.hpp"
#include "cuda/rows_matmul.hpp"
#include "ggml-backend.h"
#include "ggml.h"

// Declared by the line that third_party/hook_ggml_cuda.py adds to ggml's CUDA backend: asked before each node of a graph,
// it returns how many nodes it has run, 0 for none.
extern "C" int (*dflash_ggml_cuda_hook)(int device, void * stream, struct ggml_cgraph * graph, int node);

namespace dflash::cuda {
namespace {

std::atomic<bool> enabled{true};

enum Kind { kind_matmul, kind_float_matmul, kind_attention, kind_norm, kind_gate, kind_gated_norm, kind_delta_gates, kind_conv, kind_argmax, n_kinds };
constexpr std::array<const char *, n_kinds> kind_names = {"matmul", "float matmul", "attention", "norm", "gate", "gated norm", "delta gates", "convolution", "argmax"};
std::array<std::atomic<int64_t>, n_kinds> taken{};

/// What the kernels of one stream share. Made at its first use; captured graphs hold its addresses.
struct Scratch {
    MatmulScratch matmul;
    int64_t largest_k = 0;
    float * partials = nullptr; // of attention
    size_t partial_floats = 0;
    float * copies = nullptr; // of inputs whose memory ggml has given to outputs
    size_t copy_bytes = 0;
    std::vector<void *> memory; // all that was taken from the device
};

std::mutex scratch_mutex;
std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Scratch>> & all_scratch() {
    static auto * all = new std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Scratch>>; // outlives every thread
    return *all;
}
int users = 0; // under scratch_mutex

/// Of the pass over a graph that this thread is in. A pass visits the nodes in rising order, and within it a tensor's
/// value does not change once it is computed.
struct Pass {
    const ggml_cgraph * graph = nullptr;
    int node = -1;
    const ggml_tensor * packed = nullptr; // whose rows lie in the scratch of the stream
};
thread_local Pass pass;

struct DeviceFacts {
    int n_multiprocessors = 0;
    int most_rows = 0; // of a graph that the kernels take; 0: they cannot run
};

/// Of the current device.
DeviceFacts device_facts() {
    static std::mutex mutex;
    static std::map<int, DeviceFacts> known;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        return {};
    }
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = known.find(device);
    if (found != known.end()) {
        return found->second;
    }
    DeviceFacts facts;
    int major = 0;
    if (cudaDeviceGetAttribute(&facts.n_multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8) {
        // Reading the weights once for every 32 rows beats ggml's prefill where memory is as fast as on these.
        facts.most_rows = major == 9 || major == 10 ? max_batch : max_rows;
    }
    return known[device] = facts;
}

bool allocate(Scratch & scratch, void ** out, size_t bytes) {
    if (cudaMalloc(out, bytes) != cudaSuccess) {
        (void)cudaGetLastError(); // ggml would take it for its own
        return false;
    }
    scratch.memory.push_back(*out);
    return true;
}

/// Null when the device has no memory left for it.
Scratch * scratch_of(int device, cudaStream_t stream) {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    auto & slot = all_scratch()[{device, stream}];
    if (slot == nullptr) {
        auto made = std::make_unique<Scratch>();
        void *scale = nullptr, *partials = nullptr, *arrivals = nullptr;
        if (!allocate(*made, &scale, max_batch * sizeof(float)) ||
            !allocate(*made, &partials, partial_bytes(device_facts().n_multiprocessors)) ||
            !allocate(*made, &arrivals, counter_bytes) ||
            cudaMemsetAsync(arrivals, 0, counter_bytes, stream) != cudaSuccess) {
            for (void * p : made->memory) {
                cudaFree(p);
            }
            (void)cudaGetLastError();
            return nullptr;
        }
        made->matmul.row_scale = static_cast<float *>(scale);
        made->matmul.partials = static_cast<float *>(partials);
        made->matmul.arrivals = static_cast<unsigned *>(arrivals);
        slot = std::move(made);
    }
    return slot.get();
}

/// A launch that failed leaves an error that ggml would take for its own.
bool launched(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error == cudaSuccess;
}

bool is_noop(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return true;
        default: return ggml_is_empty(t);
    }
}

bool weight_type(ggml_type type, WeightType & out) {
    switch (type) {
        case GGML_TYPE_Q4_K: out = WeightType::q4_k; return true;
        case GGML_TYPE_Q5_K: out = WeightType::q5_k; return true;
        case GGML_TYPE_Q6_K: out = WeightType::q6_k; return true;
        case GGML_TYPE_Q8_0: out = WeightType::q8_0; return true;
        case GGML_TYPE_Q4_0: out = WeightType::q4_0; return true;
        case GGML_TYPE_IQ4_XS: out = WeightType::iq4_xs; return true;
        case GGML_TYPE_NVFP4: out = WeightType::nvfp4; return true;
        default: return false;
    }
}

int float_type(ggml_type type) {
    return type == GGML_TYPE_F32 ? 0 : type == GGML_TYPE_F16 ? 1 : type == GGML_TYPE_BF16 ? 2 : -1;
}

constexpr int64_t largest_float_matrix = int64_t{8} << 20; // elements; beyond, ggml's kernels are far better
constexpr int64_t largest_k = 32768; // of a row that can be packed

/// A product of a matrix with few rows, in the layout that the kernels read.
bool is_rows_matmul(const ggml_tensor * t) {
    if (t->op != GGML_OP_MUL_MAT || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
        return false;
    }
    const ggml_tensor *w = t->src[0], *x = t->src[1];
    const int32_t hint = t->op_params[1];
    const char * place = w->buffer == nullptr ? "" : ggml_backend_buft_name(ggml_backend_buffer_get_type(w->buffer));
    return hint == 0 && std::strncmp(place, "CUDA", 4) == 0 && std::strstr(place, "Split") == nullptr &&
           std::strstr(place, "Host") == nullptr && ggml_is_contiguous(w) && w->ne[2] == 1 && w->ne[3] == 1 &&
           x->type == GGML_TYPE_F32 && x->ne[1] >= 1 && x->ne[1] <= device_facts().most_rows && x->ne[2] == 1 && x->ne[3] == 1 &&
           x->nb[0] == sizeof(float) && x->nb[1] % 16 == 0 && reinterpret_cast<uintptr_t>(x->data) % 16 == 0 &&
           w->ne[0] % 4 == 0 && w->ne[0] <= largest_k && w->ne[1] <= 1 << 22;
}

/// The tensor whose memory a reshaped one is.
const ggml_tensor * base_of(const ggml_tensor * t) {
    while (t->op == GGML_OP_RESHAPE) {
        t = t->src[0];
    }
    return t;
}

bool runs(const ggml_tensor * t) { return (t->flags & GGML_TENSOR_FLAG_COMPUTE) != 0; }

/// The nodes from `node` on that compute something, `n` of them; `end` is the index behind the last. False at the end.
template <size_t n>
bool next_nodes(ggml_cgraph * graph, int node, std::array<ggml_tensor *, n> & out, int & end) {
    size_t found = 0;
    for (int i = node; i < ggml_graph_n_nodes(graph) && found < n; ++i) {
        ggml_tensor * t = ggml_graph_node(graph, i);
        if (is_noop(t)) {
            continue;
        }
        if (!runs(t)) {
            return false;
        }
        out[found++] = t;
        end = i + 1;
    }
    return found == n;
}

bool is_unary(const ggml_tensor * t, ggml_unary_op op) { return t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == op; }

bool contiguous_floats(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t); }

/// Rows side by side in memory: [k, n_rows].
bool is_rows(const ggml_tensor * t) {
    return contiguous_floats(t) && t->ne[2] == 1 && t->ne[3] == 1 && t->ne[0] % 4 == 0 && t->ne[0] <= largest_k &&
           t->ne[1] <= device_facts().most_rows && reinterpret_cast<uintptr_t>(t->data) % 16 == 0;
}

bool is_vector(const ggml_tensor * t, int64_t n) { return contiguous_floats(t) && ggml_nelements(t) == n; }

/// Whether two tensors share memory.
bool overlap(const ggml_tensor * x, const ggml_tensor * y) {
    const auto *a = static_cast<const char *>(x->data), *b = static_cast<const char *>(y->data);
    return a < b + ggml_nbytes(y) && b < a + ggml_nbytes(x);
}

/// Whether writing `out` could destroy what is still to be read of `in`. The same rows in place are harmless.
bool clashes(const ggml_tensor * out, const ggml_tensor * in) {
    const auto *a = static_cast<const char *>(out->data), *b = static_cast<const char *>(in->data);
    return a != b && a < b + ggml_nbytes(in) && b < a + ggml_nbytes(out);
}

/// For packed rows of k values.
bool make_room(Scratch & scratch, int64_t k) {
    if (k > scratch.largest_k) {
        const int64_t room = std::max<int64_t>(k, 20480); // what was before is kept for the graphs that hold it
        if (!allocate(scratch, &scratch.matmul.packed, packed_bytes(room))) {
            return false;
        }
        scratch.largest_k = room;
        pass.packed = nullptr;
    }
    return true;
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
        ++taken[kind_float_matmul];
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
        const bool joins = runs(t) && is_rows_matmul(t) && t->src[1] == x && t->src[0]->type == w->type && t->src[0]->ne[0] == k;
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
    if (pass.packed != base_of(x) &&
        !launched(pack_activations(static_cast<const float *>(x->data), row_stride, n_rows, k, scratch->matmul, stream))) {
        return 0;
    }
    pass.packed = base_of(x);
    if (!launched(rows_matmul(type, parts.data(), n_parts, k, ggml_row_size(w->type, k), n_rows, scratch->matmul,
                              device_facts().n_multiprocessors, stream))) {
        return 0;
    }
    taken[kind_matmul] += n_parts;
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
                      n_rows <= device_facts().most_rows && n_head % n_head_kv == 0 && q->nb[0] == 4 && q->nb[1] % 8 == 0 &&
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
    ++taken[kind_attention];
    return 1;
}

/// Copies of the inputs of one fused run of nodes. Its nodes run as one, so an output must not lie where another block
/// still reads; ggml's allocator, which thinks of them one by one, may put it there.
class Copies {
  public:
    Copies(Scratch & scratch, cudaStream_t stream) : scratch_(scratch), stream_(stream) {}
    /// The values of `t`, contiguous; null when no memory is left.
    const float * copy(const ggml_tensor * t) {
        const size_t bytes = (ggml_nbytes(t) + 255) / 256 * 256;
        if (used_ == 0 && bytes + room_for_more > scratch_.copy_bytes) {
            void * memory = nullptr;
            if (!allocate(scratch_, &memory, bytes + room_for_more)) {
                return nullptr;
            }
            scratch_.copies = static_cast<float *>(memory);
            scratch_.copy_bytes = bytes + room_for_more;
        }
        if (used_ + bytes > scratch_.copy_bytes) {
            return nullptr;
        }
        float * to = scratch_.copies + used_ / sizeof(float);
        used_ += bytes;
        return launched(cudaMemcpyAsync(to, t->data, ggml_nbytes(t), cudaMemcpyDeviceToDevice, stream_)) ? to : nullptr;
    }

  private:
    static constexpr size_t room_for_more = size_t{1} << 20;
    Scratch & scratch_;
    cudaStream_t stream_;
    size_t used_ = 0;
};

/// Whether the product that follows reads `rows` packed; then there is room for them.
bool is_packed_next(Scratch & scratch, ggml_cgraph * graph, int node, const ggml_tensor * rows) {
    std::array<ggml_tensor *, 1> next{};
    int end = 0;
    WeightType type = {};
    return next_nodes(graph, node, next, end) && is_rows_matmul(next[0]) && base_of(next[0]->src[1]) == rows &&
           weight_type(next[0]->src[0]->type, type) && make_room(scratch, next[0]->src[1]->ne[0]);
}

/// The output of a row kernel, and the scratch that it packs into: none when no product reads the rows packed.
struct RowPlan {
    RowOutput output;
    MatmulScratch scratch;
    const ggml_tensor * packed = nullptr;
};

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
        pass.packed = plan.packed;
    }
    ++taken[kind];
    return n_nodes;
}

const float * floats(const ggml_tensor * t) { return static_cast<const float *>(t->data); }
float * floats(ggml_tensor * t) { return static_cast<float *>(t->data); }

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
    if (!is_rows(gate) || !is_rows(value) || !is_rows(t[1]) || !ggml_are_same_shape(gate, value) || clashes(t[1], gate) ||
        clashes(t[1], value)) {
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

/// Per head: RMS norm, weight, times silu(z).
int take_gated_norm(int device, cudaStream_t stream, ggml_cgraph * graph, int node) {
    std::array<ggml_tensor *, 4> t{};
    int end = 0;
    if (!next_nodes(graph, node, t, end) || t[1]->op != GGML_OP_MUL || t[1]->src[0] != t[0] ||
        !is_unary(t[2], GGML_UNARY_OP_SILU) || t[3]->op != GGML_OP_MUL || t[3]->src[0] != t[1] || t[3]->src[1] != t[2]) {
        return 0;
    }
    const ggml_tensor *x = t[0]->src[0], *z = t[2]->src[0], *weight = t[1]->src[1];
    const int64_t head = x->ne[0], k = head * x->ne[1];
    if (x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || x->nb[1] != static_cast<size_t>(head) * sizeof(float) ||
        x->nb[2] % 16 != 0 || x->ne[3] != 1 || x->ne[2] > device_facts().most_rows || !contiguous_floats(z) ||
        !contiguous_floats(t[3]) || !ggml_are_same_shape(t[3], x) || !ggml_are_same_shape(z, x) || !is_vector(weight, head) ||
        (head != 64 && head != 128) || k > largest_k) {
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
    if (!contiguous_floats(a) || !contiguous_floats(b) || !ggml_are_same_shape(a, b) || a->ne[2] != 1 || a->ne[3] != 1 ||
        n_rows > device_facts().most_rows || !is_vector(bias, heads) || !is_vector(rate, heads) ||
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
    ggml_tensor *concat = t[0], *conv = keeps ? t[2] : t[1], *active = keeps ? t[3] : t[2], *copy = keeps ? nullptr : t[3];
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
            newest->view_offs != concat->nb[0] * static_cast<size_t>(rows->ne[1]) || !ggml_is_contiguous(copy->src[1])) {
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
        !contiguous_floats(rows) || rows->ne[2] != 1 || n_rows > device_facts().most_rows || !contiguous_floats(taps) ||
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
        !launched(argmax_rows(floats(x), x->ne[0], n_rows, static_cast<int32_t *>(t->data), scratch->matmul.partials, stream))) {
        return 0;
    }
    ++taken[kind_argmax];
    return 1;
}

int hook(int device, void * stream, ggml_cgraph * graph, int node) {
    if (!enabled.load(std::memory_order_relaxed) || device_facts().most_rows == 0) {
        return 0;
    }
    if (graph != pass.graph || node <= pass.node) {
        pass = Pass{graph, node, nullptr};
    }
    pass.node = node;
    auto * s = static_cast<cudaStream_t>(stream);
    const ggml_tensor * t = ggml_graph_node(graph, node);
    switch (t->op) {
        case GGML_OP_MUL_MAT: return take_matmul(device, s, graph, node);
        case GGML_OP_FLASH_ATTN_EXT: return take_attention(device, s, graph, node);
        case GGML_OP_ADD: {
            const int n = take_norm(device, s, graph, node);
            return n > 0 ? n : take_delta_gates(device, s, graph, node);
        }
        case GGML_OP_RMS_NORM: {
            const int n = take_gated_norm(device, s, graph, node);
            return n > 0 ? n : take_norm(device, s, graph, node);
        }
        case GGML_OP_ARGMAX: return take_argmax(device, s, graph, node);
        case GGML_OP_GLU: return take_swiglu(device, s, graph, node);
        case GGML_OP_CONCAT: return take_conv(device, s, graph, node);
        case GGML_OP_UNARY:
            return is_unary(t, GGML_UNARY_OP_SIGMOID) ? take_sigmoid_gate(device, s, graph, node) : 0;
        default: return 0;
    }
}

} // namespace

void install_kernels() { dflash_ggml_cuda_hook = hook; }

void retain_kernels() {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    ++users;
}

void release_kernels() {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    if (--users > 0) {
        return;
    }
    for (auto & entry : all_scratch()) {
        for (void * p : entry.second->memory) {
            cudaFree(p);
        }
    }
    all_scratch().clear();
}

void enable_kernels(bool on) { enabled = on; }
bool kernels_enabled() { return enabled; }

std::vector<TakenNodes> taken_nodes() {
    std::vector<TakenNodes> out;
    for (size_t i = 0; i < n_kinds; ++i) {
        out.push_back({kind_names[i], taken[i]});
    }
    return out;
}

} // namespace dflash::cuda
