#include "ggmlx/own_kernels.hpp"

#ifdef DFLASH_CUDA_KERNELS
#include "cuda/kernels.hpp"
#endif

namespace dflash {

#ifdef DFLASH_CUDA_KERNELS

int32_t own_kernel_rows() {
    return cuda::rows_taken();
}

void set_own_kernel_rows(int32_t rows) {
    cuda::take_rows(rows);
}

std::vector<OwnKernelCount> own_kernel_counts() {
    std::vector<OwnKernelCount> out;
    for (const cuda::TakenNodes & t : cuda::taken_nodes()) {
        out.push_back({t.kind, t.count});
    }
    return out;
}

#else

int32_t own_kernel_rows() {
    return 0;
}

void set_own_kernel_rows(int32_t /*rows*/) {
}

std::vector<OwnKernelCount> own_kernel_counts() {
    return {};
}

#endif

} // namespace dflash
