#pragma once

// What the functions share that take nodes of a graph: the memory of a stream, how nodes are recognised, what is
// counted.

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/rows.hpp"
#include "cuda/rows_matmul.hpp"
#include "ggml-backend.h"
#include "ggml.h"

namespace dflash::cuda {

enum Kind {
    kind_matmul,
    kind_float_matmul,
    kind_attention,
    kind_norm,
    kind_gate,
    kind_gated_norm,
    kind_delta_gates,
    kind_conv,
    kind_argmax,
    n_kinds
};
void count_taken(Kind kind, int64_t n);
/// Most rows of a forward that the kernels take (kernels.hpp).
int rows_taken();

/// What the kernels of one owner or stream share. Made at its first use; captured graphs hold its addresses.
struct Scratch {
    MatmulScratch matmul;
    int64_t largest_k = 0;
    float * partials = nullptr; // of attention
    size_t partial_floats = 0;
    float * copies = nullptr; // of inputs whose memory ggml has given to outputs
    size_t copy_bytes = 0;
    std::vector<void *> memory; // all that was taken from the device
};

/// Of the pass over a graph that this thread is in. A pass visits the nodes in rising order, and within it a tensor's
/// value does not change once it is computed.
struct Pass {
    const ggml_cgraph * graph = nullptr;
    int node = -1;
    const ggml_tensor * packed = nullptr; // whose rows lie in the scratch of the stream
};
/// Of this thread.
Pass & pass();

struct DeviceFacts {
    int n_multiprocessors = 0;
    bool usable = false; // by these kernels
};

/// Of the current device.
DeviceFacts device_facts();

/// False when the device has no memory left; what the scratch had is kept for the graphs that hold it.
bool allocate(Scratch & scratch, void ** out, size_t bytes);
/// Null when the device has no memory left for it.
Scratch * scratch_of(int device, cudaStream_t stream);
/// For packed rows of k values.
bool make_room(Scratch & scratch, int64_t k);
/// A launch that failed leaves an error that ggml would take for its own; this clears it.
bool launched(cudaError_t error);

/// Copies of the inputs of one fused run of nodes. Its nodes run as one, so an output must not lie where another block
/// still reads; ggml's allocator, which thinks of them one by one, may put it there.
class Copies {
  public:
    Copies(Scratch & scratch, cudaStream_t stream) : scratch_(scratch), stream_(stream) {}
    /// The values of `t`, contiguous; null when no memory is left.
    const float * copy(const ggml_tensor * t);

  private:
    static constexpr size_t room_for_more = size_t{1} << 20;
    Scratch & scratch_;
    cudaStream_t stream_;
    size_t used_ = 0;
};

constexpr int64_t largest_k = 32768; // of a row that can be packed

inline bool is_noop(const ggml_tensor * t) {
    switch (t->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    default:
        return ggml_is_empty(t);
    }
}

/// The tensor whose memory a reshaped one is.
inline const ggml_tensor * base_of(const ggml_tensor * t) {
    while (t->op == GGML_OP_RESHAPE) {
        t = t->src[0];
    }
    return t;
}

inline bool runs(const ggml_tensor * t) {
    return (t->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

/// The nodes from `node` on that compute something, `n` of them; `end` is the index behind the last. False at the end.
template <size_t n> bool next_nodes(ggml_cgraph * graph, int node, std::array<ggml_tensor *, n> & out, int & end) {
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

inline bool is_unary(const ggml_tensor * t, ggml_unary_op op) {
    return t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == op;
}

inline bool contiguous_floats(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t);
}

/// Rows side by side in memory: [k, n_rows].
inline bool is_rows(const ggml_tensor * t) {
    return contiguous_floats(t) && t->ne[2] == 1 && t->ne[3] == 1 && t->ne[0] % 4 == 0 && t->ne[0] <= largest_k &&
           t->ne[1] <= rows_taken() && reinterpret_cast<uintptr_t>(t->data) % 16 == 0;
}

inline bool is_vector(const ggml_tensor * t, int64_t n) {
    return contiguous_floats(t) && ggml_nelements(t) == n;
}

/// Whether two tensors share memory.
inline bool overlap(const ggml_tensor * x, const ggml_tensor * y) {
    const auto *a = static_cast<const char *>(x->data), *b = static_cast<const char *>(y->data);
    return a < b + ggml_nbytes(y) && b < a + ggml_nbytes(x);
}

/// Whether writing `out` could destroy what is still to be read of `in`. The same rows in place are harmless.
inline bool clashes(const ggml_tensor * out, const ggml_tensor * in) {
    const auto *a = static_cast<const char *>(out->data), *b = static_cast<const char *>(in->data);
    return a != b && a < b + ggml_nbytes(in) && b < a + ggml_nbytes(out);
}

inline const float * floats(const ggml_tensor * t) {
    return static_cast<const float *>(t->data);
}
inline float * floats(ggml_tensor * t) {
    return static_cast<float *>(t->data);
}

bool weight_type(ggml_type type, WeightType & out);
/// A product of a matrix with few rows, in the layout that the kernels read.
bool is_rows_matmul(const ggml_tensor * t);

/// The output of a row kernel, and the scratch that it packs into: none when no product reads the rows packed.
struct RowPlan {
    RowOutput output;
    MatmulScratch scratch;
    const ggml_tensor * packed = nullptr;
};

/// For rows that the nodes before `end` leave in `rows`.
RowPlan plan_rows(Scratch & scratch, ggml_cgraph * graph, int end, const ggml_tensor * rows, int64_t k);
/// n_nodes when the launch went well, else 0.
int took(Kind kind, const RowPlan & plan, cudaError_t error, int n_nodes);

// Each runs the nodes that begin at `node` if it knows them, and returns how many it has run, 0 for none.
int take_matmul(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_attention(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_norm(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_swiglu(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_sigmoid_gate(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_gated_norm(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_delta_gates(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_conv(int device, cudaStream_t stream, ggml_cgraph * graph, int node);
int take_argmax(int device, cudaStream_t stream, ggml_cgraph * graph, int node);

} // namespace dflash::cuda
