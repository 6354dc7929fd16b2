#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ggmlx/tensors.hpp"

namespace dflash {

/// Quantised weight matrices in the layouts by which a CPU multiplies fastest (tiles for its matrix instructions,
/// interleaved rows), as ggml has them for the machine at hand. A copy, about as large as the matrices. Only
/// ggml_mul_mat with contiguous float32 rows may read them; they have no views and cannot be read back.
class PackedWeights {
  public:
    /// max_matrices: the most that will be added.
    PackedWeights(std::shared_ptr<Device> device, size_t max_matrices);

    /// A matrix [ne0, ne1] to be filled by write(); null when this device has no such layout for it.
    ggml_tensor * add(enum ggml_type type, const std::string & name, int64_t ne0, int64_t ne1);
    /// Memory for all that were added. Throws Status::out_of_memory.
    void allocate(const char * what);
    /// Copies a matrix of add(), whose memory is there. data: all of it, as it lies in a file.
    static void write(ggml_tensor * matrix, const void * data);
    uint64_t bytes() const;

  private:
    std::shared_ptr<Device> device_;
    size_t max_matrices_;
    std::vector<ggml_backend_buffer_type_t> layouts_;
    std::vector<std::pair<ggml_backend_buffer_type_t, std::unique_ptr<TensorGroup>>> groups_;
};

} // namespace dflash
