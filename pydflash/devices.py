"""The compute devices of this build and machine, and what the process has done on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydflash._ffi import NULL, check, ffi, lib, text_of
from pydflash._handle import native_call
from pydflash.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that a model can be put on.

    Attributes:
        name: what to pass as ``device``, such as "CPU" or "CUDA0".
        description: as the driver gives it.
        kind: "cpu", "gpu", "igpu", "accel" or "meta".
        memory_free, memory_total: bytes now, as the driver reports them.
    """

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """Totals of this process since it started.

    Attributes:
        graphs_built, graphs_computed: compute graphs made, and runs of them.
        buffers_allocated: working memories of graphs.
        bytes_to_device, bytes_to_host: inputs and results of graphs.
    """

    graphs_built: int
    buffers_allocated: int
    graphs_computed: int
    bytes_to_device: int
    bytes_to_host: int


_COUNTERS: Final = tuple(WorkCounters.__dataclass_fields__)


def devices() -> list[DeviceInfo]:
    """All devices, the CPU included. Any thread.

    Raises:
        DeviceError: a driver failed.
    """
    n = ffi.new("int64_t *")
    with native_call() as err:
        check(lib.dflash_device_list(NULL, 0, n, err), err, "device_list")
        infos = ffi.new("dflash_device_info[]", n[0])
        check(lib.dflash_device_list(infos, len(infos), n, err), err, "device_list")
    return [
        DeviceInfo(text_of(d.name), text_of(d.description), text_of(d.kind), d.memory_free, d.memory_total)
        for d in infos[0 : min(n[0], len(infos))]
    ]


def work_counters() -> WorkCounters:
    """What this process has computed and moved so far; the difference of two readings is the cost of a call."""
    out = ffi.new("dflash_work_counters *")
    lib.dflash_work_counters_get(out)
    return WorkCounters(*(getattr(out, name) for name in _COUNTERS))


def own_kernels(enabled: bool | None = None) -> bool:
    """Whether pydflash's own CUDA kernels run; with an argument, turn them on or off first.

    They compute products and attention of 1 to 32 rows, each row with the same bits whatever their number, and are on
    where the build has them. Off leaves everything to ggml. What CUDA has captured before keeps its kernels, so call
    this before models are opened. Any thread.

    Raises:
        UnsupportedModelError: turned on in a build without them.
    """
    if enabled is None:
        return bool(lib.dflash_own_kernels_get())
    on = bool(lib.dflash_own_kernels_set(bool(enabled)))
    if enabled and not on:
        raise UnsupportedModelError("own_kernels(True): this build has none, it was built without DFLASH_CUDA")
    return on


def own_kernel_counts() -> dict[str, int]:
    """Nodes of graphs that own kernels have taken since the process started, by kind; empty in a build without them.

    A graph that CUDA has captured counts once. Any thread.
    """
    n = ffi.new("int64_t *")
    with native_call() as err:
        check(lib.dflash_own_kernels_counts(NULL, 0, n, err), err, "own_kernels_counts")
        counts = ffi.new("dflash_kernel_count[]", n[0])
        check(lib.dflash_own_kernels_counts(counts, len(counts), n, err), err, "own_kernels_counts")
    return {text_of(c.name): int(c.nodes) for c in counts[0 : min(n[0], len(counts))]}
