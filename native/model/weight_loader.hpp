#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "ggmlx/packed_weights.hpp"
#include "ggmlx/tensors.hpp"
#include "gguf/gguf_file.hpp"

namespace dflash {

/// Collects the tensors that a model wants from one GGUF, checks their shapes, and gives them memory: in place in the
/// mapped file on a device that computes from host memory, packed there when wanted, else in one device buffer.
class WeightLoader {
  public:
    /// pack: keep the factors of products as PackedWeights.
    WeightLoader(std::shared_ptr<const GgufFile> file, std::shared_ptr<Device> device, size_t max_tensors, bool pack);

    enum class Need { required, optional };
    /// Matrix or stack of any type that the device can multiply by. Null when optional and absent.
    /// load = false checks presence and shape only and returns null.
    ggml_tensor * matrix(const std::string & name, std::initializer_list<int64_t> shape, bool load,
                         Need need = Need::required);
    /// The same for a matrix that only ggml_mul_mat reads, whole.
    ggml_tensor * factor(const std::string & name, std::initializer_list<int64_t> shape, bool load,
                         Need need = Need::required);
    /// A packed copy of a matrix that was declared already; null when matrices are not packed here.
    ggml_tensor * packed(const std::string & name);
    /// Vector or small matrix that must be float32.
    ggml_tensor * f32(const std::string & name, std::initializer_list<int64_t> shape, bool load,
                      Need need = Need::required);
    /// A row range [begin, begin + n) of a matrix returned above.
    ggml_tensor * rows(ggml_tensor * matrix, int64_t begin, int64_t n, const std::string & name);
    /// The float32 scalar or vector tensors `<base>.scale` or `<base>.weight.scale`; empty when absent.
    std::vector<float> scales(const std::string & base, int64_t max_count);

    /// Memory and bytes for all collected tensors. progress may be empty; returning false throws Status::cancelled.
    void finish(const char * what, const std::function<bool(double)> & progress);

    /// Memory of the weights after finish(); mapped and packed ones count where they are computed from.
    uint64_t bytes() const { return bytes_; }
    std::unique_ptr<TensorGroup> take_group() { return std::move(group_); }
    std::vector<std::unique_ptr<HostPlacement>> take_placements() { return std::move(placements_); }
    std::unique_ptr<PackedWeights> take_packed() { return std::move(packed_); }

  private:
    struct Wanted {
        ggml_tensor * tensor;
        const GgufTensorInfo * info;
    };
    enum class Kind { any, f32, factor };
    ggml_tensor * declare(const std::string & name, std::initializer_list<int64_t> shape, bool load, Need need,
                          Kind kind);

    std::shared_ptr<const GgufFile> file_;
    std::shared_ptr<Device> device_;
    std::unique_ptr<TensorGroup> group_;
    std::vector<std::unique_ptr<HostPlacement>> placements_;
    std::unique_ptr<PackedWeights> packed_; // null: not wanted
    std::vector<Wanted> wanted_;
    std::vector<Wanted> wanted_packed_;
    std::vector<ggml_tensor *> views_;
    uint64_t bytes_ = 0;
};

} // namespace dflash
