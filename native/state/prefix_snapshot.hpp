#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ggmlx/host_memory.hpp"
#include "state/prefix_layout.hpp"

namespace dflash {

class PrefixSnapshot;
using SnapshotPtr = std::shared_ptr<const PrefixSnapshot>;

/// Which feature rows go into a snapshot.
enum class SnapshotFeatures : int32_t {
    tail = 0, // with a drafter, those that it has not read yet; without one, all
    all = 1,
    none = 2,
};

struct SnapshotOptions {
    /// Tokens that the cache holds, [position]; may be empty, but then nothing can be looked up by them and no delta
    /// made.
    std::vector<int32_t> tokens;
    /// Not null: take only what was added since this one.
    SnapshotPtr parent;
    SnapshotFeatures features = SnapshotFeatures::tail;
    bool on_device = false; // bytes stay on the target's device instead of host memory
};

/// An immutable copy of a target cache at a position, together with a drafter's context: all that is needed to go on
/// from there, in this process or another one. Reading is for any thread.
///
/// Bytes of a full one at n tokens: n * (row of K + row of V) for each full-attention layer, the recurrent and
/// convolution states, the draft rows (at most a ring for each layer), and feature rows that the drafter has not read.
class PrefixSnapshot {
  public:
    ~PrefixSnapshot();

    const SnapshotHeader & header() const { return header_; }
    const std::vector<SnapshotPart> & parts() const { return parts_; }
    const std::vector<int32_t> & tokens() const { return tokens_; }
    const std::string & digest_of_tokens() const { return token_digest_; }
    /// Logits behind the last token, float32 [n_vocab]; empty when they were not known.
    const std::vector<float> & logits() const { return logits_; }
    const SnapshotPtr & parent() const { return parent_; }
    int64_t position() const { return header_.position; }
    /// Parents above this one.
    int32_t depth() const { return depth_; }
    bool on_device() const { return device_memory_ != nullptr; }
    /// Of this one's parts, tokens and logits; parents not counted.
    uint64_t bytes() const;
    /// Memory that this one holds, parents not counted.
    uint64_t allocated_bytes() const;

    /// Copies a part. Waits for copies that are still under way.
    void read(const SnapshotPart & part, void * out) const;
    /// Waits for copies that are still under way.
    void wait() const;

  private:
    friend struct SnapshotAccess;
    PrefixSnapshot() = default;

    SnapshotHeader header_;
    std::vector<SnapshotPart> parts_;
    std::vector<int32_t> tokens_;
    std::string token_digest_;
    std::vector<float> logits_;
    SnapshotPtr parent_;
    int32_t depth_ = 0;
    std::shared_ptr<Device> device_, draft_device_;
    std::unique_ptr<HostMemory> host_memory_;
    std::unique_ptr<TensorGroup> device_memory_;
    ggml_tensor * blob_ = nullptr; // i8 [bytes] in device_memory_
    DeviceMark done_, draft_done_;
};

/// Most parents that a delta may have: a restore walks all of them.
constexpr int32_t max_snapshot_depth = 256;

/// Full or delta snapshot of what the cache holds, with the drafter's state when context is given. Copies to host
/// memory are queued; the caller may go on at once. Nothing of the cache changes.
/// Throws Status::invalid: nothing committed, or another number of tokens; Status::mismatch: the parent is of something
/// else, or no prefix of it; Status::unsupported: a cache spread over several devices; Status::out_of_memory.
SnapshotPtr snapshot_target_cache(const TargetCache & cache, const DraftContext * context, SnapshotOptions options);

/// K/V of positions [kv_start, kv_end) only. Throws Status::invalid unless 0 <= kv_start < kv_end <= position.
SnapshotPtr snapshot_target_cache_thin(const TargetCache & cache, int64_t kv_start, int64_t kv_end,
                                       std::vector<int32_t> tokens = {});

/// A snapshot from bytes, as read(part) gave them; data[i] holds parts[i] of snapshot_parts(header, ...).
/// Throws Status::mismatch and Status::format like snapshot_parts(), and for tokens, logits or a parent that do not fit
/// the header.
SnapshotPtr import_snapshot(const SnapshotHeader & header, std::shared_ptr<const TargetModel> target,
                            std::shared_ptr<const DraftModel> draft, SnapshotPtr parent, std::vector<int32_t> tokens,
                            std::vector<float> logits, const std::vector<const void *> & data,
                            const std::vector<uint64_t> & n_bytes);

/// Forgets a snapshot; deltas made on it keep its memory.
void free_prefix_snapshot(SnapshotPtr & snapshot);

struct RestoreOptions {
    /// Called before every single write, with its number; for tests that make a restore fail there by throwing.
    std::function<void(int64_t)> before_write;
};

/// Puts a snapshot into a cache, and into the drafter's context when that is not null: position, K/V, states, features,
/// logits, draft rows. The cache may have another capacity than the one it was taken from. Everything is checked before
/// the first write, and after a failure cache and context are as before (a cache that holds tokens is copied aside for
/// this, unless it is cheaper to start from nothing: an empty one is only emptied again).
/// Throws Status::mismatch: of another model, drafter, type, rotation, rope or layers, without drafter state although a
/// context is given, or of fewer draft rows than this context keeps; Status::capacity: more tokens or features than
/// fit; Status::unsupported: a thin snapshot.
void restore_target_cache(const PrefixSnapshot & snapshot, TargetCache & cache, DraftContext * context,
                          const RestoreOptions & options = {});

/// Puts a full or delta snapshot (null: what the cache holds) and then K/V ranges into a cache, in the caller's order.
/// Throws Status::unsupported when a layer of the cache is recurrent and the ranges reach beyond the base: its state
/// would stay behind. Throws Status::invalid for a gap between ranges, else as restore_target_cache().
void restore_target_cache_chain(const PrefixSnapshot * thick, const std::vector<const PrefixSnapshot *> & thins,
                                TargetCache & cache, const RestoreOptions & options = {});

/// What restore_target_cache() would refuse, without doing anything.
void check_restore(const PrefixSnapshot & snapshot, const TargetCache & cache, const DraftContext * context);

} // namespace dflash
