#pragma once

// Own CUDA kernels for graphs of 1 .. 32 rows. They take nodes of a ggml graph where ggml's CUDA backend would run its
// own kernels, one after the other and inside the same stream and CUDA graph; what they do not cover stays with ggml.

#include <cstdint>
#include <string>
#include <vector>

namespace dflash::cuda {

/// Registers the kernels with ggml's CUDA backend. Any thread; again is harmless.
void install_kernels();

/// While it lives, graphs that this thread computes use the memory of `owner`, one backend's, so that backends may
/// compute beside each other. Without one they use the stream's.
class KernelOwner {
  public:
    explicit KernelOwner(const void * owner);
    ~KernelOwner();
    KernelOwner(const KernelOwner &) = delete;
    KernelOwner & operator=(const KernelOwner &) = delete;

  private:
    const void * before_;
};

/// Frees the memory of an owner whose backend, and the graphs with it, are gone. Any thread.
void release_kernels(const void * owner);

/// Forwards of at most so many rows are taken from now on, 0 .. 512; 0: none. Graphs that CUDA has already captured
/// keep what they have. Any thread.
void take_rows(int most);
int rows_taken();

/// How many nodes of each kind were taken since the process began, as "op: count" pairs; for debugging and tests.
struct TakenNodes {
    const char * kind;
    int64_t count;
};
std::vector<TakenNodes> taken_nodes();

} // namespace dflash::cuda
