#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "state/draft_context.hpp"
#include "state/target_cache.hpp"

// Copies of device state as float32 in host memory, for people and tests. Each call waits for the device.
namespace dflash {

/// Features of positions [begin, end), [end - begin, n_taps * n_embd]. Status::invalid when they are not there.
std::vector<float> read_features(const TargetCache & cache, int64_t begin, int64_t end);

/// "k" or "v": rows of positions [begin, end) of a full-attention layer, as stored (a quantised cache holds rotated
/// rows), [end - begin, n_head_kv * head_dim]. "recurrent": [Hv, S, S]; "conv": [d_conv - 1, channels].
std::vector<float> read_cache_tensor(const TargetCache & cache, int32_t layer, const std::string & what, int64_t begin,
                                     int64_t end);

/// "k" or "v" rows of context positions [begin, end) of a drafter layer, [end - begin, n_head_kv * head_dim].
std::vector<float> read_draft_rows(const DraftContext & context, int32_t layer, const std::string & what, int64_t begin,
                                   int64_t end);

} // namespace dflash
