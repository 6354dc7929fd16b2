#pragma once

#include <cstdint>

namespace dflash::cpu {

/// Float32 vectors, one for each head, token and sequence; strides in floats.
struct TokenRows {
    const float * data = nullptr;
    int64_t head_stride = 0;
    int64_t token_stride = 0;
    int64_t sequence_stride = 0;

    const float * at(int64_t head, int64_t token, int64_t sequence) const {
        return data + head * head_stride + token * token_stride + sequence * sequence_stride;
    }
};

/// The gated delta rule, token after token: S = e^g S; S += beta (v - S k) k^T; out = S q / sqrt(size). S is
/// [size, size] for each head, row j belongs to value j. What a token gives does not depend on how many follow it.
struct DeltaCall {
    TokenRows q; // head h of v goes with head h % n_head_k of q and k
    TokenRows k;
    TokenRows v;
    TokenRows g;    // one number
    TokenRows beta; // one number
    int64_t size = 0;
    int64_t n_head_k = 0;
    int64_t n_head = 0;
    int64_t n_tokens = 0;
    int64_t n_sequences = 1;
    const float * state = nullptr; // [size, size] for each head; all sequences start from it
    float * out = nullptr;         // [size] for each head, token and sequence; null: not wanted
    float * newest = nullptr;      // the state behind the last token, may be `state`; null: not wanted
    float * each = nullptr;        // the state behind each token, newest first; null: not wanted
};

/// Whether there is a kernel for states of this size.
bool delta_net_takes(int64_t size);

/// Thread ith of nth does its share. With more than one sequence only `out` is written.
void delta_net(const DeltaCall & call, int ith, int nth);

} // namespace dflash::cpu
