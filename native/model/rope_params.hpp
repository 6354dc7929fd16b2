#pragma once

#include <cstdint>

namespace dflash {

/// Rotary embedding in NEOX pairing (d, d + n_dims/2) over the first n_dims of a head; the rest passes through.
/// angle_j(p) = p * theta^(-2j/n_dims), scaled by freq_scale and blended per dimension when ext_factor > 0 (YaRN,
/// arXiv 2309.00071). The magnitude 1 + 0.1 ln(1/freq_scale) of YaRN is applied by the operator itself.
struct RopeParams {
    int32_t n_dims = 0;
    float theta = 0.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float attn_factor = 1.0f;
    float beta_fast = 32.0f;
    float beta_slow = 1.0f;
    int32_t n_ctx_orig = 0;
};

} // namespace dflash
