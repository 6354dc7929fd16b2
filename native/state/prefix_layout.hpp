#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "state/draft_context.hpp"
#include "state/target_cache.hpp"

namespace dflash {

enum class SnapshotKind : int32_t {
    full = 0,  // all that is needed to go on
    delta = 1, // the same, but K/V and draft rows only from where its parent ends
    thin = 2,  // K/V of a range and nothing else
};

/// What a snapshot is of. Equal fields of two snapshots, or of a snapshot and a cache, mean that bytes may be copied
/// between them.
struct SnapshotHeader {
    static constexpr int32_t current_version = 1;

    int32_t version = current_version;
    SnapshotKind kind = SnapshotKind::full;
    std::string architecture;
    std::string target_digest;
    std::string k_type, v_type;
    int64_t k_rotation = 0, v_rotation = 0; // order of the Hadamard matrix, 0: stored as computed
    float rope_theta = 0.0f;
    int32_t rope_dims = 0;
    int64_t fa_window = 0;
    int32_t layer_begin = 0, layer_end = 0;
    std::vector<int32_t> capture_layers;
    std::string feature_type; // empty without captured layers

    int64_t position = 0;   // tokens
    int64_t kv_begin = 0;   // K/V rows [kv_begin, position) are here
    PositionRange features; // feature rows that are here

    std::string draft_digest; // empty: no drafter state
    std::string draft_k_type, draft_v_type;
    int64_t draft_k_rotation = 0, draft_v_rotation = 0;
    int64_t draft_begin = 0, draft_cursor = 0, draft_high = 0; // as DraftContext has them
    std::vector<int64_t> draft_held;                           // by layer: first position with its parents
    std::vector<int64_t> draft_rows;                           // by layer: first position here, up to draft_cursor

    bool has_draft() const { return !draft_digest.empty(); }
};

/// One run of bytes of a snapshot.
struct SnapshotPart {
    enum class Source : int32_t { k, v, recurrent, conv, features, draft_k, draft_v };

    std::string name; // snap_cache_k_<layer>, snap_ssm_state_<layer>, snap_target_feat, snap_draft_k_<layer>, ...
    Source source = Source::k;
    int32_t layer = 0;
    enum ggml_type type = GGML_TYPE_F32;
    int64_t width = 0; // values of a row
    int64_t rows = 0;
    int64_t begin = 0; // position of the first row; 0 for states
    uint64_t offset = 0;
    uint64_t n_bytes = 0;

    const char * type_name() const { return ggml_type_name(type); }
};

/// Header of what these hold now, without ranges of rows. context may be null.
SnapshotHeader header_of(const TargetCache & cache, const DraftContext * context);

/// The parts of a snapshot, in the order of their bytes. draft may be null when the header has no drafter state.
/// Throws Status::mismatch when the header does not belong to the models, Status::format when its ranges are wrong.
std::vector<SnapshotPart> snapshot_parts(const SnapshotHeader & header, const TargetModel & target,
                                         const DraftModel * draft);
/// Bytes of all parts, each part at a multiple of 64.
uint64_t parts_bytes(const std::vector<SnapshotPart> & parts);

/// Throws Status::mismatch naming the first field in which the two differ; `a` and `b` name them in the message.
void check_same_target(const SnapshotHeader & x, const char * a, const SnapshotHeader & y, const char * b);
void check_same_drafter(const SnapshotHeader & x, const char * a, const SnapshotHeader & y, const char * b);

/// 32 hexadecimal digits of the ids, int32 little-endian; the same as everywhere else for equal ids.
std::string token_digest(const std::vector<int32_t> & tokens);

/// Tensor of a cache or context that a part is copied from and to.
ggml_tensor * tensor_of(const SnapshotPart & part, const TargetCache & cache, const DraftContext * context);

} // namespace dflash
