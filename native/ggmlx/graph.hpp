#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-cpp.h"
#include "ggml.h"
#include "ggmlx/device.hpp"

namespace dflash {

/// What a process has done since it started; for tests that prove a steady state does none of it.
struct WorkCounters {
    uint64_t graphs_built = 0;
    uint64_t buffers_allocated = 0;
    uint64_t graphs_computed = 0;
    uint64_t bytes_to_device = 0;
    uint64_t bytes_to_host = 0;
};

/// The counters of this process; any thread.
WorkCounters work_counters();

/// A fixed-shape computation that is built once and run many times. Everything that differs between runs comes in
/// through input tensors, so that a backend may replay it.
class Graph {
  public:
    Graph(std::shared_ptr<Device> device, size_t max_nodes);
    ~Graph();
    Graph(const Graph &) = delete;
    Graph & operator=(const Graph &) = delete;

    ggml_context * ctx() const { return ctx_.get(); }
    const std::shared_ptr<Device> & device() const { return device_; }

    /// A tensor that the host fills before a run and that keeps its content between runs.
    ggml_tensor * input(enum ggml_type type, const char * name, int64_t ne0, int64_t ne1 = 1);
    /// The memory of a kept tensor of another graph as a source of this one. That graph must outlive this one.
    ggml_tensor * alias(const ggml_tensor * elsewhere);
    /// The rows of a contiguous matrix as rows of another type, bytes as they are. Throws Status::internal unless a row
    /// has a whole number of elements.
    ggml_tensor * alias_rows(const ggml_tensor * matrix, enum ggml_type type);
    /// Adds the node and all it depends on, in this order.
    void expand(ggml_tensor * node) { ggml_build_forward_expand(graph_, node); }
    /// Like expand, and keeps the node's memory intact until the next run.
    void keep(ggml_tensor * node) {
        ggml_set_output(node);
        if (node->view_src != nullptr) {
            ggml_set_output(node->view_src); // the allocator looks at the owner of the memory
        }
        ggml_build_forward_expand(graph_, node);
    }
    /// Checks that the device has every operation and gives the graph memory. Call once, after the last expand().
    /// Throws Status::unsupported naming the operation, Status::out_of_memory with the bytes needed and free.
    void finish(const char * what);

    /// Fills an input. An input that no node reads has no memory; writing it does nothing.
    void write(ggml_tensor * input, const void * data, uint64_t offset, uint64_t n_bytes);
    void write_2d(ggml_tensor * input, const void * data, uint64_t offset, uint64_t n_bytes, uint64_t n_rows,
                  uint64_t stride_tensor, uint64_t stride_data);
    /// Queues one run. Throws Status::device when the backend refuses.
    void compute_async();
    /// Runs and waits.
    void compute();
    /// Copies a kept tensor to the host; waits for the run first.
    void read(const ggml_tensor * tensor, void * data, uint64_t offset, uint64_t n_bytes);

    uint64_t bytes() const;
    int n_nodes() const { return ggml_graph_n_nodes(graph_); }

  private:
    std::shared_ptr<Device> device_;
    ggml_context_ptr ctx_;
    ggml_gallocr_ptr allocator_;
    ggml_cgraph * graph_ = nullptr;
    bool finished_ = false;
};

} // namespace dflash
