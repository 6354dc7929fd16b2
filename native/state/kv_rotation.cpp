#include "state/kv_rotation.hpp"

#include <cmath>

namespace dflash {

int64_t rotation_size(enum ggml_type type, int64_t head_dim) {
    if (!ggml_is_quantized(type) || head_dim % 64 != 0) {
        return 0;
    }
    int64_t n = 64;
    while (n < 256 && head_dim % (2 * n) == 0) {
        n *= 2;
    }
    return n;
}

std::vector<float> hadamard(int64_t n) {
    std::vector<float> h(static_cast<size_t>(n * n));
    const float unit = 1.0f / std::sqrt(static_cast<float>(n));
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            bool odd = false;
            for (int64_t both = i & j; both != 0; both &= both - 1) {
                odd = !odd;
            }
            h[static_cast<size_t>(i * n + j)] = odd ? -unit : unit;
        }
    }
    return h;
}

} // namespace dflash
