#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "ggmlx/graph.hpp"
#include "ggmlx/tensors.hpp"

namespace dflash {

/// Consecutive rows of a ring: the i-th is (first + i) % capacity. For rows that do not wrap, capacity is their number.
struct RingRows {
    int64_t capacity = 0;
    int64_t first = 0;
};

/// Carries float rows between tensors of one device by get_rows and set_rows, so that conversion and ring wraps happen
/// there. One pass carries a power-of-two number of rows through a fixed staging memory; passes are built once per
/// shape and run many times. Not thread-safe; the caller holds the device's lock.
class DraftFeatureTransfer {
  public:
    struct Pass {
        explicit Pass(std::shared_ptr<Device> device) : graph(std::move(device), 8) {}

        Graph graph;
        int64_t n_rows = 0;
        ggml_tensor * source = nullptr;      // stands for the tensor read from; null when the staging memory is
        ggml_tensor * source_rows = nullptr; // i32 [n_rows]
        ggml_tensor * target_rows = nullptr; // i32 [n_rows]; null when the staging memory is written
        ggml_tensor * staged = nullptr;      // f32 [width, n_rows], at the start of the staging memory
    };

    /// n_values: float32 values of staging memory. Throws Status::out_of_memory.
    DraftFeatureTransfer(std::shared_ptr<Device> device, int64_t n_values);

    const std::shared_ptr<Device> & device() const { return device_; }
    const ggml_tensor * staging() const { return staging_; }
    ggml_tensor * staging() { return staging_; }
    uint64_t bytes() const { return memory_.bytes(); }

    /// Rows one pass carries when n > 0 rows of `width` values are to be moved: the largest power of two that is not
    /// above n and fits the staging memory.
    int64_t rows_per_pass(int64_t width, int64_t n) const;

    // A pass for n_rows rows, built if there is none of this shape yet. Source: f32, f16, bf16, q8_0 or q4_0, rows at
    // any stride. Throws Status::unsupported when the device lacks the conversion, Status::out_of_memory.
    Pass & gather(const ggml_tensor * source, int64_t n_rows);                     // source -> staging
    Pass & scatter(ggml_tensor * target, int64_t n_rows);                          // staging -> target
    Pass & move(const ggml_tensor * source, ggml_tensor * target, int64_t n_rows); // source -> target

    /// Runs a pass and waits. `source` has the type and width the pass was made for; ignored by scatter.
    void run(Pass & pass, const ggml_tensor * source, RingRows source_rows, RingRows target_rows);

  private:
    using Shape = std::tuple<enum ggml_type, int64_t, const ggml_tensor *, int64_t>; // source type, width, target, rows

    Pass & build(const ggml_tensor * source, ggml_tensor * target, int64_t n_rows);

    std::shared_ptr<Device> device_;
    TensorGroup memory_;
    ggml_tensor * staging_ = nullptr; // f32 [n_values]
    std::map<Shape, std::unique_ptr<Pass>> passes_;
};

/// Calls pass(first) so that n > 0 rows are covered by passes of n_rows <= n rows. The last pass reaches back over rows
/// that were carried before rather than beyond the last row.
template <class Run> void for_each_pass(int64_t n, int64_t n_rows, Run && pass) {
    for (int64_t first = 0; first < n; first += n_rows) {
        pass(first < n - n_rows ? first : n - n_rows);
    }
}

} // namespace dflash
