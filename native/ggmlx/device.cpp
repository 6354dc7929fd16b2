#include "ggmlx/device.hpp"

#include <algorithm>
#include <cctype>
#include <thread>

#include "base/error.hpp"
#ifdef DFLASH_CUDA_KERNELS
#include "cuda/kernels.hpp"
#endif
#include "ggmlx/hooks.hpp"
#include "ggmlx/host_memory.hpp"

namespace dflash {
namespace {

const char * kind_name(enum ggml_backend_dev_type type) {
    switch (type) {
    case GGML_BACKEND_DEVICE_TYPE_CPU:
        return "cpu";
    case GGML_BACKEND_DEVICE_TYPE_GPU:
        return "gpu";
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        return "igpu";
    case GGML_BACKEND_DEVICE_TYPE_ACCEL:
        return "accel";
    case GGML_BACKEND_DEVICE_TYPE_META:
        return "meta";
    }
    return "unknown";
}

DeviceInfo describe(ggml_backend_dev_t dev) {
    DeviceInfo info;
    info.name = ggml_backend_dev_name(dev);
    info.description = ggml_backend_dev_description(dev);
    info.kind = kind_name(ggml_backend_dev_type(dev));
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    info.memory_free = free;
    info.memory_total = total;
    return info;
}

ggml_backend_dev_t find_device(const std::string & name) {
    std::string wanted = name;
    std::transform(wanted.begin(), wanted.end(), wanted.begin(), [](unsigned char c) { return std::tolower(c); });
    if (wanted == "cpu") {
        return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    if (wanted == "auto" || wanted == "gpu") {
        ggml_backend_dev_t gpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
        if (gpu == nullptr) {
            gpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU);
        }
        return gpu != nullptr || wanted == "gpu" ? gpu : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    wanted.erase(std::remove(wanted.begin(), wanted.end(), ':'), wanted.end());
    for (const std::string & suffix : {std::string(), std::string("0")}) {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(i);
            std::string have = ggml_backend_dev_name(dev);
            std::transform(have.begin(), have.end(), have.begin(), [](unsigned char c) { return std::tolower(c); });
            if (have == wanted + suffix) {
                return dev;
            }
        }
    }
    return nullptr;
}

} // namespace

Device::Device() : host_memory_(std::make_unique<HostMemoryPool>()) {
}

std::vector<DeviceInfo> Device::list() {
    install_hooks();
    std::vector<DeviceInfo> out;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        out.push_back(describe(ggml_backend_dev_get(i)));
    }
    return out;
}

std::shared_ptr<Device> Device::open(const std::string & name, int32_t n_threads) {
    install_hooks();
    check(n_threads >= 0 && n_threads <= 512, Status::invalid, "n_threads %d, want 0 to 512", n_threads);
    ggml_backend_dev_t dev = find_device(name);
    if (dev == nullptr) {
        std::string known;
        for (const DeviceInfo & info : list()) {
            known += (known.empty() ? "" : ", ") + info.name;
        }
        fail(Status::not_found, "no device \"%s\"; this build and machine have: %s", name.c_str(), known.c_str());
    }
    std::shared_ptr<Device> device(new Device);
    device->backend_.reset(ggml_backend_dev_init(dev, nullptr));
    check(device->backend_ != nullptr, Status::device, "device %s could not be started", ggml_backend_dev_name(dev));
    device->name_ = ggml_backend_dev_name(dev);
    device->is_cpu_ = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
    if (device->is_cpu_) {
        if (n_threads == 0) {
            const unsigned hardware = std::thread::hardware_concurrency();
            n_threads = static_cast<int32_t>(std::clamp(hardware, 1u, 16u));
        }
        auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads"));
        check(set_n_threads != nullptr, Status::internal, "the CPU backend cannot set its thread count");
        set_n_threads(device->backend_.get(), n_threads);
        device->n_threads_ = n_threads;
    }
#ifdef DFLASH_CUDA_KERNELS
    if (device->name_.rfind("CUDA", 0) == 0) {
        cuda::install_kernels();
    }
#endif
    return device;
}

Device::~Device() {
    backend_.reset();
#ifdef DFLASH_CUDA_KERNELS
    cuda::release_kernels(this);
#endif
}

DeviceInfo Device::info() const {
    return describe(ggml_backend_get_device(backend_.get()));
}

} // namespace dflash
