"""The compute devices of this build and machine, and what the process has done on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydflash._ffi import NULL, check, ffi, lib, text_of
from pydflash._handle import native_call
from pydflash.errors import InvalidArgumentError, UnsupportedModelError


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


_MOST_OWN_ROWS: Final = 512
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


def own_kernel_rows(rows: int | None = None) -> int:
    """Most rows of a forward that pydflash's own CUDA kernels take; with an argument, set it first.

    They compute what a forward of few rows needs, each row with the same bits whatever their number. At first they
    take 32, so drafting and plain decoding agree; 0 leaves everything to ggml. With 512, the most, prompts too have the
    same bits however they are cut into chunks, but are read slower than by ggml's kernels. What CUDA has captured
    before keeps its kernels, so call this before models are opened. Any thread.

    Raises:
        InvalidArgumentError: rows is not in 0 to 512.
        UnsupportedModelError: rows is not 0 and this build has no own kernels.
    """
    if rows is None:
        return int(lib.dflash_own_kernels_get())
    if isinstance(rows, bool) or not 0 <= rows <= _MOST_OWN_ROWS:
        raise InvalidArgumentError("rows", rows, f"0 to {_MOST_OWN_ROWS}")
    taken = int(lib.dflash_own_kernels_set(rows))
    if taken != rows:
        raise UnsupportedModelError(f"own_kernel_rows({rows}): this build has none, it was built without DFLASH_CUDA")
    return taken


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
