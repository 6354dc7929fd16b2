#include "ggmlx/graph.hpp"

#include <algorithm>
#include <atomic>

#include "base/error.hpp"
#ifdef DFLASH_CUDA_KERNELS
#include "cuda/kernels.hpp"
#endif
#include "ggml-alloc.h"
#include "ggmlx/tensors.hpp"

namespace dflash {
namespace {

std::atomic<uint64_t> n_built{0};
std::atomic<uint64_t> n_allocated{0};
std::atomic<uint64_t> n_computed{0};
std::atomic<uint64_t> n_to_device{0};
std::atomic<uint64_t> n_to_host{0};

} // namespace

WorkCounters work_counters() {
    return {n_built.load(), n_allocated.load(), n_computed.load(), n_to_device.load(), n_to_host.load()};
}

Graph::Graph(std::shared_ptr<Device> device, size_t max_nodes) : device_(std::move(device)) {
    ggml_init_params params{};
    // Inputs, weights and views share the descriptor arena with the nodes.
    params.mem_size = ggml_tensor_overhead() * max_nodes * 2 + ggml_graph_overhead_custom(max_nodes, false);
    params.no_alloc = true;
    ctx_.reset(ggml_init(params));
    check(ctx_ != nullptr, Status::out_of_memory, "no host memory for a graph of %zu nodes", max_nodes);
    graph_ = ggml_new_graph_custom(ctx_.get(), max_nodes, false);
    n_built.fetch_add(1, std::memory_order_relaxed);
}

Graph::~Graph() {
    // A queued run may still use this graph's memory.
    const auto guard = device_->lock();
    device_->synchronize();
    allocator_.reset();
}

ggml_tensor * Graph::input(enum ggml_type type, const char * name, int64_t ne0, int64_t ne1) {
    ggml_tensor * tensor = ggml_new_tensor_2d(ctx_.get(), type, ne0, ne1);
    ggml_set_name(tensor, name);
    ggml_set_input(tensor);
    ggml_set_output(tensor); // the allocator would reuse an input's memory after its last reader
    return tensor;
}

ggml_tensor * Graph::alias(const ggml_tensor * elsewhere) {
    ggml_tensor * tensor = ggml_dup_tensor(ctx_.get(), elsewhere);
    std::copy(elsewhere->nb, elsewhere->nb + GGML_MAX_DIMS, tensor->nb);
    tensor->buffer = elsewhere->view_src != nullptr ? elsewhere->view_src->buffer : elsewhere->buffer;
    tensor->data = elsewhere->data;
    check(tensor->data != nullptr, Status::internal, "alias of %s before it has memory", elsewhere->name);
    ggml_set_name(tensor, elsewhere->name);
    return tensor;
}

ggml_tensor * Graph::alias_rows(const ggml_tensor * matrix, enum ggml_type type) {
    const size_t size = ggml_type_size(type);
    check(ggml_is_contiguous(matrix) && ggml_blck_size(type) == 1 && matrix->nb[1] % size == 0, Status::internal,
          "rows of %zu bytes of %s as %s", matrix->nb[1], matrix->name, ggml_type_name(type));
    ggml_tensor * tensor =
        ggml_new_tensor_2d(ctx_.get(), type, static_cast<int64_t>(matrix->nb[1] / size), ggml_nrows(matrix));
    tensor->buffer = matrix->view_src != nullptr ? matrix->view_src->buffer : matrix->buffer;
    tensor->data = matrix->data;
    check(tensor->data != nullptr, Status::internal, "alias of %s before it has memory", matrix->name);
    ggml_set_name(tensor, matrix->name);
    return tensor;
}

void Graph::finish(const char * what) {
    check(!finished_, Status::internal, "graph %s finished twice", what);
    for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        check(device_->supports(node), Status::unsupported, "%s: device %s lacks %s of %s for %s", what,
              device_->name().c_str(), ggml_op_desc(node),
              node->src[0] != nullptr ? ggml_type_name(node->src[0]->type) : ggml_type_name(node->type), node->name);
    }
    const auto guard = device_->lock();
    allocator_.reset(ggml_gallocr_new(device_->buffer_type()));
    check(allocator_ != nullptr, Status::out_of_memory, "no host memory for the allocator of %s", what);
    size_t needed = 0;
    ggml_gallocr_reserve_n_size(allocator_.get(), graph_, nullptr, nullptr, &needed);
    const DeviceInfo info = device_->info();
    const bool fits = device_->is_cpu() || info.memory_free == 0 || needed <= info.memory_free;
    check(fits && ggml_gallocr_reserve(allocator_.get(), graph_) && ggml_gallocr_alloc_graph(allocator_.get(), graph_),
          Status::out_of_memory, "%s needs %zu bytes of working memory on %s, %llu are free", what, needed,
          device_->name().c_str(), static_cast<unsigned long long>(info.memory_free));
    n_allocated.fetch_add(1, std::memory_order_relaxed);
    finished_ = true;
}

void Graph::write(ggml_tensor * input, const void * data, uint64_t offset, uint64_t n_bytes) {
    if (finished_ && input->data == nullptr) {
        return;
    }
    tensor_write_async(*device_, input, data, offset, n_bytes);
    n_to_device.fetch_add(n_bytes, std::memory_order_relaxed);
}

void Graph::write_2d(ggml_tensor * input, const void * data, uint64_t offset, uint64_t n_bytes, uint64_t n_rows,
                     uint64_t stride_tensor, uint64_t stride_data) {
    tensor_write_2d_async(*device_, input, data, offset, n_bytes, n_rows, stride_tensor, stride_data);
    n_to_device.fetch_add(n_bytes * n_rows, std::memory_order_relaxed);
}

void Graph::compute_async() {
    check(finished_, Status::internal, "graph computed before it has memory");
#ifdef DFLASH_CUDA_KERNELS
    const cuda::KernelOwner owner(device_.get());
#endif
    const enum ggml_status status = ggml_backend_graph_compute_async(device_->backend(), graph_);
    check(status == GGML_STATUS_SUCCESS, Status::device, "device %s failed a computation (%s)", device_->name().c_str(),
          ggml_status_to_string(status));
    n_computed.fetch_add(1, std::memory_order_relaxed);
}

void Graph::compute() {
    compute_async();
    device_->synchronize();
}

void Graph::read(const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes) {
    tensor_read_async(*device_, tensor, data, offset, n_bytes);
    device_->synchronize();
    n_to_host.fetch_add(n_bytes, std::memory_order_relaxed);
}

uint64_t Graph::bytes() const {
    return allocator_ ? ggml_gallocr_get_buffer_size(allocator_.get(), 0) : 0;
}

} // namespace dflash
