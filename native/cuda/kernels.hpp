#pragma once

// Own CUDA kernels for graphs of 1 .. 32 rows. They take nodes of a ggml graph where ggml's CUDA backend would run its
// own kernels, one after the other and inside the same stream and CUDA graph; what they do not cover stays with ggml.

#include <cstdint>
#include <string>
#include <vector>

namespace dflash::cuda {

/// Registers the kernels with ggml's CUDA backend. Any thread; again is harmless.
void install_kernels();

/// Counts who uses CUDA devices: with the last one gone, the kernels' memory is freed. Any thread.
void retain_kernels();
void release_kernels();

/// Whether the kernels take nodes from now on. Graphs that CUDA has already captured keep what they have. Any thread.
void enable_kernels(bool enabled);
bool kernels_enabled();

/// How many nodes of each kind were taken since the process began, as "op: count" pairs; for debugging and tests.
struct TakenNodes {
    const char * kind;
    int64_t count;
};
std::vector<TakenNodes> taken_nodes();

} // namespace dflash::cuda
