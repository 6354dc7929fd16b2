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
using ScratchKey = std::pair<int, const void *>; // ggml's device, and the owner or else the stream
std::map<ScratchKey, std::unique_ptr<Scratch>> & all_scratch() {
    static auto * all = new std::map<ScratchKey, std::unique_ptr<Scratch>>; // outlives every thread
    return *all;
}
thread_local const void * current_owner = nullptr;

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
    facts.usable =
        cudaDeviceGetAttribute(&facts.n_multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
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
    auto & slot = all_scratch()[{device, current_owner != nullptr ? current_owner : stream}];
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
        size_t room = 4 * room_for_more; // doubled, so that what is kept for earlier graphs stays less than this
        while (room < bytes + room_for_more) {
            room *= 2;
        }
        void * memory = nullptr;
        if (!allocate(scratch_, &memory, room)) {
            return nullptr;
        }
        scratch_.copies = static_cast<float *>(memory);
        scratch_.copy_bytes = room;
    }
    if (used_ + bytes > scratch_.copy_bytes) {
        return nullptr;
    }
    float * to = scratch_.copies + used_ / sizeof(float);
    used_ += bytes;
    return launched(cudaMemcpyAsync(to, t->data, ggml_nbytes(t), cudaMemcpyDeviceToDevice, stream_)) ? to : nullptr;
}

KernelOwner::KernelOwner(const void * owner) : before_(current_owner) {
    current_owner = owner;
}

KernelOwner::~KernelOwner() {
    current_owner = before_;
}

void release_kernels(const void * owner) {
    const std::lock_guard<std::mutex> guard(scratch_mutex);
    auto & all = all_scratch();
    for (auto at = all.begin(); at != all.end();) {
        if (at->first.second == owner) {
            for (void * p : at->second->memory) {
                cudaFree(p);
            }
            at = all.erase(at);
        } else {
            ++at;
        }
    }
}

} // namespace dflash::cuda
