#include "ggmlx/own_kernels.hpp"

#ifdef DFLASH_CUDA_KERNELS
#include "cuda/kernels.hpp"
#endif

namespace dflash {

#ifdef DFLASH_CUDA_KERNELS

bool own_kernels_enabled() {
    return cuda::kernels_enabled();
}

void enable_own_kernels(bool enabled) {
    cuda::enable_kernels(enabled);
}

std::vector<OwnKernelCount> own_kernel_counts() {
    std::vector<OwnKernelCount> out;
    for (const cuda::TakenNodes & t : cuda::taken_nodes()) {
        out.push_back({t.kind, t.count});
    }
    return out;
}

#else

bool own_kernels_enabled() {
    return false;
}

void enable_own_kernels(bool /*enabled*/) {
}

std::vector<OwnKernelCount> own_kernel_counts() {
    return {};
}

#endif

} // namespace dflash
