"""DraftFeatureMirror: a ring of captured target features on the drafter's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from pydflash._ffi import CData, FloatArray, as_c_array, c_text, check, ffi, lib, text_of
from pydflash._handle import NativeHandle, native_call, use, use_all
from pydflash.draft_model import DraftModel
from pydflash.errors import InvalidArgumentError
from pydflash.options import MirrorType, as_choice, as_integer
from pydflash.target_cache import TargetCache


@dataclass(frozen=True, slots=True)
class MirrorState:
    """A mirror at one moment.

    Attributes:
        begin, end: the unbroken run of positions that ends with the newest one held; equal when there is none.
        capacity: rows of the ring.
        n_target_layers, hidden_size: a row is n_target_layers slices of hidden_size values.
        n_bytes: of the ring; staging_bytes: of the memory through which rows are converted.
        type, device: how and where the rows are stored.
    """

    begin: int
    end: int
    capacity: int
    n_target_layers: int
    hidden_size: int
    n_bytes: int
    staging_bytes: int
    type: str
    device: str


_NUMBERS: Final = ("begin", "end", "capacity", "n_target_layers", "hidden_size", "n_bytes", "staging_bytes")


class DraftFeatureMirror(NativeHandle):
    """A ring of target features: position p in row ``p % capacity``, the captured layers of a position side by side.

    For a drafter on another device than the target, for snapshots, and for looking at features. Memory:
    ``capacity * n_target_layers * hidden_size`` values; one takes 4 bytes in f32, 2 in f16 and bf16, and a block of 32
    values takes 34 bytes in q8_0, 18 in q4_0.

    A position can be read once all its layers were written and until another takes its row. Writing a position again
    means that the sequence was taken back: later ones are forgotten. A call that is refused changes nothing.

    One thread at a time: a second one waits.
    """

    def __init__(
        self,
        draft: DraftModel | None = None,
        *,
        capacity: int = 4096,
        dtype: MirrorType = "f32",
        n_target_layers: int | None = None,
        hidden_size: int | None = None,
        device: str = "cpu",
        n_threads: int = 0,
    ) -> None:
        """Allocate an empty ring.

        Args:
            draft: the drafter whose geometry and device it takes; the arguments behind dtype are then not allowed.
            capacity: rows.
            dtype: storage, one of f32 f16 bf16 q8_0 q4_0.
            n_target_layers, hidden_size: geometry, needed without a drafter.
            device, n_threads: where it lives without a drafter.

        Raises:
            InvalidArgumentError: an option is outside its limits.
            UnsupportedModelError: hidden_size values do not fit the blocks of the type.
            OutOfMemoryError: the device has too little memory.
        """
        options = ffi.new("dflash_draft_feature_mirror_options *")
        lib.dflash_draft_feature_mirror_options_init(options)
        type_text = c_text("dtype", as_choice("dtype", dtype, MirrorType))
        options.type = type_text
        options.capacity = as_integer("capacity", capacity, 1)
        out = ffi.new("dflash_draft_feature_mirror **")
        operation = "draft_feature_mirror_new"
        if draft is not None:
            for name, value in (("n_target_layers", n_target_layers), ("hidden_size", hidden_size)):
                if value is not None:
                    raise InvalidArgumentError(name, value, "None with a drafter, whose geometry is taken")
            with use(draft) as (draft_ptr, err):
                options.draft = draft_ptr
                check(lib.dflash_draft_feature_mirror_new(out, options, err), err, operation)
        else:
            options.n_target_layers = as_integer("n_target_layers", n_target_layers, 1)
            options.hidden_size = as_integer("hidden_size", hidden_size, 1)
            options.n_threads = as_integer("n_threads", n_threads, 0)
            device_text = c_text("device", device)
            options.device = device_text
            with native_call() as err:
                check(lib.dflash_draft_feature_mirror_new(out, options, err), err, operation)
        self._c_state = ffi.new("dflash_draft_feature_mirror_state *")
        self._c_rows = ffi.new("int64_t *")
        self._adopt(out[0], lib.dflash_draft_feature_mirror_free, draft)
        self._made = self.state

    def _facts(self) -> str:
        s = self._made
        return f"of {s.capacity} rows of {s.n_target_layers} x {s.hidden_size} {s.type} on {s.device}"

    def _state_text(self) -> str:
        s = self.state
        return f"positions [{s.begin}, {s.end}), {s.n_bytes / 2**20:.1f} MiB"

    @property
    def state(self) -> MirrorState:
        """All numbers at once."""
        with self._use() as (ptr, err):
            s = self._c_state
            check(lib.dflash_draft_feature_mirror_state_get(ptr, s, err), err, "draft_feature_mirror_state_get")
            numbers = {name: getattr(s, name) for name in _NUMBERS}
            return MirrorState(**numbers, type=text_of(s.type), device=text_of(s.device))

    @property
    def capacity(self) -> int:
        """Rows of the ring."""
        return self._made.capacity

    @property
    def n_target_layers(self) -> int:
        """Slices of a row."""
        return self._made.n_target_layers

    @property
    def hidden_size(self) -> int:
        """Values of a slice."""
        return self._made.hidden_size

    @property
    def valid_range(self) -> tuple[int, int]:
        """Positions [begin, end): the unbroken run that ends with the newest one held."""
        state = self.state
        return state.begin, state.end

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self._made.n_bytes

    def can_view(self, committed: int, ctx_len: int) -> int | None:
        """First row of positions [committed - ctx_len, committed) if a float32 graph can use them in place, else None.

        That takes an f32 ring which holds them all without a wrap.
        """
        slot0 = ffi.new("int64_t *")
        with self._use() as (ptr, err):
            status = lib.dflash_draft_feature_mirror_can_view(ptr, committed, ctx_len, slot0, err)
            check(status, err, "draft_feature_mirror_can_view")
        return int(slot0[0]) if slot0[0] >= 0 else None

    def sync_range(self, cache: TargetCache, begin: int, n: int) -> int:
        """Copy positions [begin, begin + n) from a cache's features. Returns n.

        Raises:
            InvalidArgumentError: the cache does not have them (any more), or a number is negative.
            CapacityError: more rows than either ring has.
            SnapshotMismatchError: the cache captures rows of another width.
        """
        with use_all(self, cache) as (ptr, source, err):
            status = lib.dflash_draft_feature_mirror_sync_range(ptr, source, begin, n, self._c_rows, err)
            check(status, err, "draft_feature_mirror_sync_range")
            return int(self._c_rows[0])

    def sync_tail(self, cache: TargetCache) -> int:
        """Copy the newest positions that a cache has, as many as fit. Returns how many; errors as sync_range()."""
        with use_all(self, cache) as (ptr, source, err):
            status = lib.dflash_draft_feature_mirror_sync_tail(ptr, source, self._c_rows, err)
            check(status, err, "draft_feature_mirror_sync_tail")
            return int(self._c_rows[0])

    def write_slice(self, capture_idx: int, start: int, values: FloatArray) -> int:
        """Write one captured layer of positions from ``start`` on: float32 [n, hidden_size]. Returns n.

        Raises:
            InvalidArgumentError: another shape or type, or a number outside its limits.
            CapacityError: more rows than the ring has.
        """
        c_values = as_c_array(values, "float[]", name="values", shape=(None, self.hidden_size))

        def write(ptr: CData, err: CData) -> int:
            return lib.dflash_draft_feature_mirror_write_slice(
                ptr, capture_idx, start, len(values), c_values, values.size, self._c_rows, err
            )

        return self._count(write, "draft_feature_mirror_write_slice")

    def write_rows(self, start: int, values: FloatArray) -> int:
        """Write whole rows of positions from ``start`` on: float32 [n, n_target_layers * hidden_size]. Returns n.

        Errors as write_slice().
        """
        width = self.n_target_layers * self.hidden_size
        c_values = as_c_array(values, "float[]", name="values", shape=(None, width))

        def write(ptr: CData, err: CData) -> int:
            return lib.dflash_draft_feature_mirror_write_rows(
                ptr, start, len(values), c_values, values.size, self._c_rows, err
            )

        return self._count(write, "draft_feature_mirror_write_rows")

    def rows(self, begin: int, end: int) -> FloatArray:
        """Rows of positions [begin, end): float32 [end - begin, n_target_layers * hidden_size], owned by the caller.

        Raises:
            InvalidArgumentError: they are not there (any more), never were, or are more than the ring has.
        """
        as_integer("begin", begin, 0)
        as_integer("end", end, begin)
        if end - begin > self.capacity:
            raise InvalidArgumentError("end", end, f"at most begin + {self.capacity}, the rows of the ring")
        out = np.empty((end - begin, self.n_target_layers * self.hidden_size), np.float32)
        c_out = as_c_array(out, "float[]", writable=True)

        def read(ptr: CData, err: CData) -> int:
            return lib.dflash_draft_feature_mirror_read_rows(
                ptr, begin, end - begin, c_out, out.size, self._c_rows, err
            )

        self._count(read, "draft_feature_mirror_read_rows")
        return out

    def clear(self) -> None:
        """Forget all positions; the memory stays."""
        with self._use() as (ptr, err):
            check(lib.dflash_draft_feature_mirror_clear(ptr, err), err, "draft_feature_mirror_clear")

    def _count(self, call: Callable[[CData, CData], int], operation: str) -> int:
        with self._use() as (ptr, err):
            check(call(ptr, err), err, operation)
            return int(self._c_rows[0])
