#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/kernels.hpp"
#include "cuda/takes.hpp"

namespace dflash::cuda {
namespace {

std::mutex scratch_mutex;
std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Scratch>> & all_scratch() {
    static auto * all = new std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Scratch>>; // outlives every thread
    return *all;
}
int users = 0; // under scratch_mutex

} // namespace

Pass & pass() {
    static thread_local Pass own;
    return own;
}

DeviceFacts device_facts() {
    static std::mutex mutex;
    static std::map<int, DeviceFacts> known;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        return {};
    }
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = known.find(device);
    if (found != known.end()) {
        return found->second;
    }
    DeviceFacts facts;
    int major = 0;
    if (cudaDeviceGetAttribute(&facts.n_multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8) {
        // Reading the weights once for every 32 rows beats ggml's prefill where memory is as fast as on these.
        facts.most_rows = major == 9 || major == 10 ? max_batch : max_rows;
    }
    return known[device] = facts;
}

bool allocate(Scratch & scratch, void ** out, size_t bytes) {
    if (cudaMalloc(out, bytes) != cudaSuccess) {
        (void)cudaGetLastError(); // ggml would take it for its own
        return false;
    }
    scratch.memory.push_back(*out);
    return true;
}

Scratch * scratch_of(int device, cudaStream_t stream) {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    auto & slot = all_scratch()[{device, stream}];
    if (slot == nullptr) {
        auto made = std::make_unique<Scratch>();
        void *scale = nullptr, *partials = nullptr, *arrivals = nullptr;
        if (!allocate(*made, &scale, max_batch * sizeof(float)) ||
            !allocate(*made, &partials, partial_bytes(device_facts().n_multiprocessors)) ||
            !allocate(*made, &arrivals, counter_bytes) ||
            cudaMemsetAsync(arrivals, 0, counter_bytes, stream) != cudaSuccess) {
            for (void * p : made->memory) {
                cudaFree(p);
            }
            (void)cudaGetLastError();
            return nullptr;
        }
        made->matmul.row_scale = static_cast<float *>(scale);
        made->matmul.partials = static_cast<float *>(partials);
        made->matmul.arrivals = static_cast<unsigned *>(arrivals);
        slot = std::move(made);
    }
    return slot.get();
}

bool launched(cudaError_t error) {
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return error == cudaSuccess;
}

bool make_room(Scratch & scratch, int64_t k) {
    if (k > scratch.largest_k) {
        const int64_t room = std::max<int64_t>(k, 20480); // what was before is kept for the graphs that hold it
        if (!allocate(scratch, &scratch.matmul.packed, packed_bytes(room))) {
            return false;
        }
        scratch.largest_k = room;
        pass().packed = nullptr;
    }
    return true;
}

const float * Copies::copy(const ggml_tensor * t) {
    const size_t bytes = (ggml_nbytes(t) + 255) / 256 * 256;
    if (used_ == 0 && bytes + room_for_more > scratch_.copy_bytes) {
        void * memory = nullptr;
        if (!allocate(scratch_, &memory, bytes + room_for_more)) {
            return nullptr;
        }
        scratch_.copies = static_cast<float *>(memory);
        scratch_.copy_bytes = bytes + room_for_more;
    }
    if (used_ + bytes > scratch_.copy_bytes) {
        return nullptr;
    }
    float * to = scratch_.copies + used_ / sizeof(float);
    used_ += bytes;
    return launched(cudaMemcpyAsync(to, t->data, ggml_nbytes(t), cudaMemcpyDeviceToDevice, stream_)) ? to : nullptr;
}

void retain_kernels() {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    ++users;
}

void release_kernels() {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    if (--users > 0) {
        return;
    }
    for (auto & entry : all_scratch()) {
        for (void * p : entry.second->memory) {
            cudaFree(p);
        }
    }
    all_scratch().clear();
}

} // namespace dflash::cuda
