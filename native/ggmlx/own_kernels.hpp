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

/// Most rows of a forward that they take: 0 to 512, always 0 in a build without them.
int32_t own_kernel_rows();
/// Clamped to 0 .. 512; changes nothing in a build without them.
void set_own_kernel_rows(int32_t rows);
std::vector<OwnKernelCount> own_kernel_counts();

} // namespace dflash
