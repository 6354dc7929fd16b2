#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dflash {

/// Kernels of our own inside ggml's CUDA backend, where this build has them (cuda/kernels.hpp).
struct OwnKernelCount {
    std::string name;
    int64_t nodes;
};

bool own_kernels_enabled();
/// Changes nothing in a build without them.
void enable_own_kernels(bool enabled);
std::vector<OwnKernelCount> own_kernel_counts();

} // namespace dflash
