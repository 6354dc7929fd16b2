#include "ggmlx/device.hpp"

#include <vector>

#include "capi/shim.hpp"
#include "capi/text.hpp"
#include "ggmlx/graph.hpp"
#include "ggmlx/own_kernels.hpp"

using namespace dflash;
using namespace dflash::capi;

dflash_status dflash_device_list(dflash_device_info * infos, int64_t capacity, int64_t * n, dflash_error * err) {
    return guard(err, [&] {
        std::vector<dflash_device_info> list;
        for (const DeviceInfo & device : Device::list()) {
            dflash_device_info info{};
            copy_text(info.name, device.name);
            copy_text(info.description, device.description);
            copy_text(info.kind, device.kind);
            info.memory_free = device.memory_free;
            info.memory_total = device.memory_total;
            list.push_back(info);
        }
        copy_list(list, infos, capacity, n);
    });
}

void dflash_work_counters_get(dflash_work_counters * out) {
    if (out != nullptr) {
        const WorkCounters c = work_counters();
        *out = {c.graphs_built, c.buffers_allocated, c.graphs_computed, c.bytes_to_device, c.bytes_to_host};
    }
}

int32_t dflash_own_kernels_set(int32_t most_rows) {
    set_own_kernel_rows(most_rows);
    return own_kernel_rows();
}

int32_t dflash_own_kernels_get(void) {
    return own_kernel_rows();
}

dflash_status dflash_own_kernels_counts(dflash_kernel_count * counts, int64_t capacity, int64_t * n,
                                        dflash_error * err) {
    return guard(err, [&] {
        std::vector<dflash_kernel_count> list;
        for (const OwnKernelCount & kind : own_kernel_counts()) {
            dflash_kernel_count count{};
            copy_text(count.name, kind.name);
            count.nodes = kind.nodes;
            list.push_back(count);
        }
        copy_list(list, counts, capacity, n);
    });
}
