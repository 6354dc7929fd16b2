#include "ggmlx/packed_weights.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace dflash {
namespace {

/// Whether a product of such a matrix with float32 rows works in this layout.
bool multiplies(const Device & device, ggml_backend_buffer_type_t layout, enum ggml_type type, int64_t ne0,
                int64_t ne1) {
    ggml_init_params params{};
    params.mem_size = ggml_tensor_overhead() * 4;
    params.no_alloc = true;
    const ggml_context_ptr ctx(ggml_init(params));
    const ggml_backend_buffer_ptr nothing(ggml_backend_buft_alloc_buffer(layout, 0));
    check(ctx != nullptr && nothing != nullptr, Status::out_of_memory, "no host memory for four tensor descriptors");
    ggml_tensor * matrix = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
    matrix->buffer = nothing.get();
    return device.supports(ggml_mul_mat(ctx.get(), matrix, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, ne0, 16)));
}

} // namespace

PackedWeights::PackedWeights(std::shared_ptr<Device> device, size_t max_matrices)
    : device_(std::move(device)), max_matrices_(max_matrices) {
    if (!device_->is_cpu()) {
        return;
    }
    const ggml_backend_dev_t dev = ggml_backend_get_device(device_->backend());
    const auto get_layouts = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts"));
    if (get_layouts != nullptr) {
        for (ggml_backend_buffer_type_t * at = get_layouts(dev); at != nullptr && *at != nullptr; ++at) {
            layouts_.push_back(*at);
        }
    }
}

ggml_tensor * PackedWeights::add(enum ggml_type type, const std::string & name, int64_t ne0, int64_t ne1) {
    if (!ggml_is_quantized(type)) {
        return nullptr; // those are mostly small here, or a choice for accuracy
    }
    for (const ggml_backend_buffer_type_t layout : layouts_) {
        if (!multiplies(*device_, layout, type, ne0, ne1)) {
            continue;
        }
        auto it = std::find_if(groups_.begin(), groups_.end(), [&](const auto & g) { return g.first == layout; });
        if (it == groups_.end()) {
            it = groups_.emplace(groups_.end(), layout, std::make_unique<TensorGroup>(device_, max_matrices_));
        }
        return it->second->add(type, name, ne0, ne1);
    }
    return nullptr;
}

void PackedWeights::allocate(const char * what) {
    for (const auto & [layout, group] : groups_) {
        group->allocate(what, layout);
        ggml_backend_buffer_set_usage(group->buffer(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
}

void PackedWeights::write(ggml_tensor * matrix, const void * data) {
    tensor_write(matrix, data, 0, ggml_nbytes(matrix));
}

uint64_t PackedWeights::bytes() const {
    uint64_t n = 0;
    for (const auto & group : groups_) {
        n += group.second->bytes();
    }
    return n;
}

} // namespace dflash
