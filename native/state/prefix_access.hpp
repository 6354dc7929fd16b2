#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "state/prefix_snapshot.hpp"

namespace dflash {

/// The inside of a snapshot, for the files that make and restore them.
struct SnapshotAccess {
    /// An empty snapshot with memory for its parts.
    static std::shared_ptr<PrefixSnapshot> make(SnapshotHeader header,
                                                const std::shared_ptr<const TargetModel> & target,
                                                const std::shared_ptr<const DraftModel> & draft, SnapshotPtr parent,
                                                std::vector<int32_t> tokens, std::vector<float> logits, bool on_device);
    /// Queues the copy of n bytes from `offset` of a tensor to byte `at` of a part.
    static void fetch(PrefixSnapshot & snapshot, Device & device, const SnapshotPart & part, uint64_t at,
                      const ggml_tensor * from, uint64_t offset, uint64_t n_bytes);
    /// The opposite way.
    static void put(const PrefixSnapshot & snapshot, Device & device, const SnapshotPart & part, uint64_t at,
                    ggml_tensor * to, uint64_t offset, uint64_t n_bytes);
    static uint8_t * host_bytes(PrefixSnapshot & snapshot) { return snapshot.host_memory_->data(); }
    /// What is under way ends here.
    static void mark(PrefixSnapshot & snapshot);
};

/// Where the rows [begin, begin + n) of a part lie in its tensor: at most two runs of bytes.
struct PartRun {
    uint64_t at = 0;     // in the part
    uint64_t offset = 0; // in the tensor
    uint64_t n_bytes = 0;
};
std::vector<PartRun> runs_of(const SnapshotPart & part, int64_t begin, int64_t n, const TargetCache & cache,
                             const DraftContext * context);

inline bool of_drafter(const SnapshotPart & part) {
    return part.source == SnapshotPart::Source::draft_k || part.source == SnapshotPart::Source::draft_v;
}

} // namespace dflash
