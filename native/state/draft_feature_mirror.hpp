#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "ggmlx/device.hpp"
#include "ggmlx/tensors.hpp"
#include "state/draft_feature_record.hpp"
#include "state/draft_feature_transfer.hpp"

namespace dflash {

struct DraftFeatureMirrorOptions {
    int64_t capacity = 0;                         // rows of the ring, 1 to 2^24
    int32_t n_target_layers = 0;                  // captured layers, 1 to 256
    int32_t hidden_size = 0;                      // values of one layer's slice, 1 to 2^20
    std::string type = "f32";                     // f32 f16 bf16 q8_0 q4_0
    uint64_t transfer_bytes = uint64_t{16} << 20; // most float32 bytes in flight, up to 2^30; one row always goes
};

/// A ring of captured features to copy from, such as a TargetCache keeps: position p in row p % capacity.
struct FeatureSource {
    const ggml_tensor * rows = nullptr; // [n_target_layers * hidden_size, >= capacity], f32 f16 bf16
    int64_t capacity = 0;
    PositionRange valid;            // positions whose rows are there; at most capacity of them
    std::shared_ptr<Device> device; // where `rows` lives and is written
};

/// A ring of target features on the drafter's device. Row p % capacity holds position p: n_target_layers slices of
/// hidden_size values, in the order of the captured layers. Memory: capacity rows of ggml_row_size(type, width) bytes,
/// plus at most transfer_bytes of staging memory here and on every other device that rows came from.
///
/// Rows are converted and placed by graphs on the devices. Host memory is touched only where the caller passes it, and
/// for sources that span devices (tensor parallel). Another Device object counts as another device.
///
/// What a row holds is recorded: a position can be read only after all its layers were written and before anything
/// took its place. Writing a position again, or over a later one, means that the sequence was taken back: everything
/// from there on is forgotten. Start another sequence with clear().
///
/// Not thread-safe: one user at a time. Calls take the locks of the devices they use and return when the data is there.
/// A refused call throws before the first write and leaves ring and record as they were; if a device fails in the
/// middle, the rows that were to be written are no longer held.
class DraftFeatureMirror {
  public:
    DraftFeatureMirror() = default;
    ~DraftFeatureMirror() { close(); }
    DraftFeatureMirror(const DraftFeatureMirror &) = delete;
    DraftFeatureMirror & operator=(const DraftFeatureMirror &) = delete;

    /// As draft_feature_mirror_init.
    static std::unique_ptr<DraftFeatureMirror> create(std::shared_ptr<Device> device,
                                                      const DraftFeatureMirrorOptions & options);

    bool is_open() const { return target_feat_ != nullptr; }
    const std::shared_ptr<Device> & device() const { return device_; } // null when closed
    enum ggml_type type() const { return type_; }
    int64_t capacity() const { return options_.capacity; }
    int32_t n_target_layers() const { return options_.n_target_layers; }
    int32_t hidden_size() const { return options_.hidden_size; }
    int64_t width() const { return int64_t{1} * options_.n_target_layers * options_.hidden_size; }
    /// Bytes of the ring.
    uint64_t nbytes() const { return is_open() ? ggml_nbytes(target_feat_) : 0; }
    /// Bytes of staging memory, on all devices.
    uint64_t staging_bytes() const;
    /// [width, capacity] of type(), zero where nothing was written. Rows outside a range that holds() are not to be
    /// read, and none are to be written except by the functions below. Null when closed.
    ggml_tensor * target_feat() const { return target_feat_; }
    /// Identifies the ring's memory in this process, see TensorGroup::serial; 0 when closed.
    uint64_t memory_serial() const { return memory_ ? memory_->serial() : 0; }

    /// The unbroken run of positions that ends with the newest one held; empty when there is none.
    PositionRange valid_range() const { return record_.newest(); }
    /// True if every position in [begin, begin + n) can be read.
    bool holds(int64_t begin, int64_t n) const { return is_open() && n >= 0 && record_.holds(begin, n); }
    /// Forgets positions >= `position`: the sequence goes on from there. Throws Status::invalid when it is negative.
    void rewind(int64_t position);
    /// Forgets all positions.
    void clear() { record_.clear(); }
    /// Frees everything; all getters are as for a new object. May be repeated.
    void close();

  private:
    friend void draft_feature_mirror_init(DraftFeatureMirror &, std::shared_ptr<Device>,
                                          const DraftFeatureMirrorOptions &);
    friend int64_t draft_feature_mirror_sync_range(const FeatureSource &, DraftFeatureMirror &, int64_t, int64_t);
    friend int64_t copy_capture_slice_to_draft_ring(DraftFeatureMirror &, int32_t, const ggml_tensor *,
                                                    const std::shared_ptr<Device> &, int64_t, int64_t, int64_t);
    friend int64_t copy_host_capture_slice_to_draft_ring(DraftFeatureMirror &, int32_t, int64_t, int64_t, const float *,
                                                         uint64_t);
    friend int64_t copy_feature_ring_range_to_tensor(DraftFeatureMirror &, ggml_tensor *,
                                                     const std::shared_ptr<Device> &, int64_t, int64_t);
    friend int64_t copy_feature_ring_range_to_host_f32(DraftFeatureMirror &, int64_t, int64_t, float *, uint64_t);
    friend int64_t copy_host_f32_to_feature_ring_range(DraftFeatureMirror &, int64_t, int64_t, const float *, uint64_t);

    using Pass = std::function<void(int64_t first)>; // carries the rows from the first-th on

    DraftFeatureTransfer & local() { return *transfers_.front(); }
    DraftFeatureTransfer & transfer_on(const std::shared_ptr<Device> & device);
    Pass from_tensor(const ggml_tensor * source, RingRows source_rows, const std::shared_ptr<Device> & device,
                     ggml_tensor * target, RingRows target_rows, int64_t n_rows);
    Pass from_parts(const ggml_tensor * source, RingRows source_rows, ggml_tensor * target, RingRows target_rows,
                    int64_t n_rows);
    Pass from_host(const float * source, ggml_tensor * target, RingRows target_rows, int64_t n_rows);
    void write_all(int32_t layer, int32_t n_layers, int64_t start, int64_t n, int64_t n_rows, const Pass & pass);
    void read_all(int64_t start, int64_t n,
                  const std::function<void(DraftFeatureTransfer::Pass & pass, int64_t first)> & take);

    std::shared_ptr<Device> device_;
    DraftFeatureMirrorOptions options_;
    enum ggml_type type_ = GGML_TYPE_F32;
    std::unique_ptr<TensorGroup> memory_;
    ggml_tensor * target_feat_ = nullptr;
    std::vector<ggml_tensor *> slices_; // [hidden_size, capacity] views of the ring, one per captured layer
    DraftFeatureRecord record_;
    std::vector<std::unique_ptr<DraftFeatureTransfer>> transfers_; // the mirror's device first
};

/// The type of that name; Status::invalid naming the accepted ones.
enum ggml_type feature_type_from_name(const std::string & name);
/// True if slices of `width` values can be stored: positive and a multiple of the type's block.
bool check_feature_width_compatible(enum ggml_type type, int64_t width);

/// (Re)opens a mirror with a zeroed ring and no positions. Throws Status::invalid naming the option and its limit and
/// Status::unsupported when slices of hidden_size values do not fit the type's blocks; then nothing changed. Throws
/// Status::out_of_memory with bytes needed and free; then the mirror is closed.
void draft_feature_mirror_init(DraftFeatureMirror & mirror, std::shared_ptr<Device> device,
                               const DraftFeatureMirrorOptions & options);
/// As DraftFeatureMirror::close().
void draft_feature_mirror_free(DraftFeatureMirror & mirror);

/// True if positions [committed - ctx_len, committed) can be used in place as a float32 graph input: the ring is f32,
/// holds them all, and they do not wrap. slot0 is then their first row, else untouched. Only these ctx_len rows are
/// theirs: whoever needs padding rows takes a copy. Never throws.
bool draft_feature_mirror_can_view(const DraftFeatureMirror & mirror, int64_t committed, int64_t ctx_len,
                                   int64_t & slot0);

// All functions below return the number of rows copied; 0 rows are a legal request without effect, though their other
// arguments are checked. They throw Status::invalid for a closed mirror, a null argument, a negative number, an
// overflow or positions that are not there (message: what is), Status::capacity when n_tokens exceeds the ring's or the
// source's rows, Status::mismatch for a tensor of another width, shape, layout or device, Status::unsupported for a
// type or an operation that the device lacks, Status::out_of_memory for the staging memory.

/// Copies positions [start_pos, start_pos + n_tokens) of the source, converted to the mirror's type.
int64_t draft_feature_mirror_sync_range(const FeatureSource & source, DraftFeatureMirror & mirror, int64_t start_pos,
                                        int64_t n_tokens);
/// Copies the newest positions below `committed` that the source has, as many as fit the mirror. The source must have
/// position committed - 1.
int64_t draft_feature_mirror_sync_tail(const FeatureSource & source, DraftFeatureMirror & mirror, int64_t committed);

/// Writes slice capture_idx of positions [start_pos, start_pos + n_tokens) from rows chunk_start... of act_out:
/// [hidden_size, >= chunk_start + n_tokens], f32 f16 bf16, on src_device.
int64_t copy_capture_slice_to_draft_ring(DraftFeatureMirror & mirror, int32_t capture_idx, const ggml_tensor * act_out,
                                         const std::shared_ptr<Device> & src_device, int64_t chunk_start,
                                         int64_t start_pos, int64_t n_tokens);
/// The same from host memory: exactly n_tokens * hidden_size values.
int64_t copy_host_capture_slice_to_draft_ring(DraftFeatureMirror & mirror, int32_t capture_idx, int64_t start_pos,
                                              int64_t n_tokens, const float * host, uint64_t host_elems);

/// Reads positions [start_pos, start_pos + n_tokens) into rows 0... of dst: f32 [width, >= n_tokens], contiguous, on
/// dst_device. Further rows of dst stay as they are.
int64_t copy_feature_ring_range_to_tensor(DraftFeatureMirror & mirror, ggml_tensor * dst,
                                          const std::shared_ptr<Device> & dst_device, int64_t start_pos,
                                          int64_t n_tokens);
/// The same into host memory of exactly n_tokens * width values, and into a vector that gets this size.
int64_t copy_feature_ring_range_to_host_f32(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            float * out, uint64_t out_elems);
int64_t copy_feature_ring_range_to_host_f32(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            std::vector<float> & out);
/// Writes whole rows from host memory of at least n_tokens * width values.
int64_t copy_host_f32_to_feature_ring_range(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            const float * src, uint64_t src_elems);
int64_t copy_host_f32_to_feature_ring_range(DraftFeatureMirror & mirror, int64_t start_pos, int64_t n_tokens,
                                            const std::vector<float> & src);

} // namespace dflash
