"""The bridge to the extension module: status codes, text, buffers and callbacks.

The only module besides ``_abi`` that imports ``_native``; the others take ``ffi`` and ``lib`` from here.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pydflash._native import ffi, lib
from pydflash.errors import InvalidArgumentError, error_from_status
from pydflash.results import Progress

if TYPE_CHECKING:
    from pydflash._native import CData
else:
    CData = ffi.CData

__all__ = [
    "NULL",
    "CData",
    "FloatArray",
    "IntArray",
    "MaskCall",
    "MaskFn",
    "ProgressCall",
    "TokenIds",
    "as_c_array",
    "as_ids",
    "c_list",
    "c_text",
    "check",
    "ffi",
    "lib",
    "new_error",
    "text_of",
]

NULL: Final = ffi.NULL

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Token ids as callers may pass them: a list, or a one-dimensional array of integers."""
FloatArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.int32]
MaskFn: TypeAlias = Callable[[tuple[int, ...], npt.NDArray[np.uint32]], object]
"""Given the tokens that a call has drawn so far, sets bit ``id % 32`` of word ``id // 32`` for each token that may come
next. The words are zero before, and only valid inside the function."""

# Element types of C arrays, with the only NumPy type that has the same bytes.
_DTYPES: Final[Mapping[str, np.dtype[np.generic]]] = {
    "int32_t[]": np.dtype(np.int32),
    "int64_t[]": np.dtype(np.int64),
    "float[]": np.dtype(np.float32),
    "uint8_t[]": np.dtype(np.uint8),
}


def new_error() -> CData:
    """A ``dflash_error *`` to be passed to calls, one at a time."""
    err = ffi.new("dflash_error *")
    err.struct_size = ffi.sizeof("dflash_error")
    return err


def check(status: int, err: CData, operation: str) -> None:
    """Raise the exception that stands for a status; nothing for OK.

    ``err`` is the dflash_error that was passed to the call.
    """
    if status != 0:
        raise error_from_status(status, text_of(err.message), operation=operation)


def text_of(field: CData) -> str:
    """The text in a char array of a struct. Text that was cut inside a character ends in U+FFFD."""
    return ffi.string(field).decode("utf-8", "replace")


def c_text(name: str, text: str | os.PathLike[str]) -> CData:
    """A NUL-terminated copy for C, alive as long as the result. InvalidArgumentError for text with a NUL in it.

    Paths are encoded as the operating system wants them.
    """
    data = os.fsencode(text)
    if b"\0" in data:
        raise InvalidArgumentError(name, os.fspath(text), "text without NUL characters")
    return ffi.new("char[]", data)


def as_c_array(
    array: npt.NDArray[Any],
    ctype: str,
    *,
    name: str = "array",
    shape: tuple[int | None, ...] | None = None,
    writable: bool = False,
) -> CData:
    """The memory of an array as a C array that keeps it alive; nothing is copied.

    Args:
        array: C-contiguous, with the element type of ``ctype`` in native byte order.
        ctype: one of "int32_t[]", "int64_t[]", "float[]", "uint8_t[]".
        name: how messages call the array.
        shape: what its shape must be; None stands for any length. None: not checked.
        writable: True if C writes to it.

    Raises:
        InvalidArgumentError: the array is none, or has another element type, shape or layout, or is read-only.
    """
    dtype = _DTYPES[ctype]
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(name, array, f"a NumPy array of {dtype}")
    if array.dtype != dtype:
        raise InvalidArgumentError(f"{name}.dtype", str(array.dtype), str(dtype))
    if shape is not None and not _has_shape(array.shape, shape):
        wanted = ", ".join("n" if want is None else str(want) for want in shape)
        raise InvalidArgumentError(f"{name}.shape", array.shape, f"[{wanted}]")
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(f"{name}.flags.c_contiguous", False, "True; see numpy.ascontiguousarray")
    if writable and not array.flags.writeable:
        raise InvalidArgumentError(f"{name}.flags.writeable", False, "True")
    return ffi.from_buffer(ctype, array, require_writable=writable)


def _has_shape(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w is None or n == w for n, w in zip(shape, wanted, strict=True))


def as_ids(ids: TokenIds, name: str = "ids") -> IntArray:
    """Token ids as a contiguous int32 array; an int32 array that is one already is returned as it is.

    Raises:
        InvalidArgumentError: not one-dimensional, not integers, or outside int32.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        return np.ascontiguousarray(ids)
    if isinstance(ids, str | bytes | bytearray):
        raise InvalidArgumentError(name, ids, "token ids, not text")
    try:
        values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(name, ids, "a list or a one-dimensional array of integers") from error
    if values.ndim != 1:
        raise InvalidArgumentError(f"{name}.shape", values.shape, "[n]")
    if values.size == 0:
        return np.empty(0, np.int32)
    if not np.issubdtype(values.dtype, np.integer):
        raise InvalidArgumentError(name, ids, "integers")
    info = np.iinfo(np.int32)
    if values.min() < info.min or values.max() > info.max:
        worst = values.max() if values.max() > info.max else values.min()
        raise InvalidArgumentError(name, int(worst), f"integers from {info.min} to {info.max}")
    return values.astype(np.int32)


def c_list(array_type: str, values: Sequence[int]) -> CData:
    """A C array with a copy of the values; NULL when there are none."""
    return ffi.new(array_type, list(values)) if len(values) > 0 else NULL


class ProgressCall:
    """What a native call needs to report progress, to be interrupted, and to let exceptions through.

    ``with ProgressCall(callback) as call``: pass ``call.function`` and ``call.user`` to the native call and give its
    status to check(). The function runs Python code before each chunk of work, so that signal handlers run (Ctrl-C)
    even when the caller wants no reports.

    At most 20 reports a second reach the caller, and the last one always does.
    """

    __slots__ = ("_callback", "_next_report", "failure", "user")

    INTERVAL: Final = 0.05

    function: ClassVar[CData] = lib.pydflash_progress

    def __init__(self, callback: Callable[[Progress], object] | None) -> None:
        self._callback = callback
        self._next_report = 0.0
        self.failure: BaseException | None = None
        self.user = NULL

    def __enter__(self) -> Self:
        _running.add(self)
        try:
            _leave_if_exiting()
            self.user = ffi.new_handle(self)
        except BaseException:
            _running.discard(self)
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.user = NULL  # which ends the cycle through the handle
        _running.discard(self)

    def report(self, done: int, total: int) -> None:
        _leave_if_exiting()
        if self._callback is not None:
            now = time.monotonic()
            if now >= self._next_report or done >= total:
                self._next_report = now + self.INTERVAL
                self._callback(Progress(done, total))

    def check(self, status: int, err: CData, operation: str) -> None:
        """Raise what the callback raised, as itself; else what the status stands for."""
        failure, self.failure = self.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback refers to this frame
        check(status, err, operation)


class MaskCall(ProgressCall):
    """What a native call needs to ask for the tokens that may be drawn; used like ProgressCall."""

    __slots__ = ("_mask",)

    function: ClassVar[CData] = lib.pydflash_mask

    def __init__(self, mask: MaskFn) -> None:
        super().__init__(None)
        self._mask = mask

    def fill(self, emitted: CData, n: int, allowed: CData, n_words: int) -> None:
        _leave_if_exiting()
        words: npt.NDArray[np.uint32] = np.frombuffer(memoryview(ffi.buffer(allowed, 4 * n_words)), dtype=np.uint32)
        self._mask(tuple(ffi.unpack(emitted, n)) if n else (), words)


_running: Final[set[ProgressCall]] = set()
_exiting: Final = threading.Event()


def _leave_if_exiting() -> None:
    if _exiting.is_set() and threading.current_thread() is not threading.main_thread():
        raise SystemExit


def _end_running_calls() -> None:
    # The interpreter ends threads that come back to it while it exits. One that came out of a callback would be unwound
    # through C++ code, which aborts the process: so daemon threads leave their calls first.
    _exiting.set()
    deadline = time.monotonic() + 10.0
    while _running and time.monotonic() < deadline:
        time.sleep(0.002)


atexit.register(_end_running_calls)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # the threads inside are the parent's


def _interrupted(_kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """An exception that came before the first line of the callback: Ctrl-C."""
    user = trace.tb_frame.f_locals.get("user") if trace is not None else None
    if user is not None:
        ffi.from_handle(user).failure = failure


@ffi.def_extern(error=1, onerror=_interrupted)
def pydflash_progress(done: int, total: int, user: CData) -> int:
    call: ProgressCall = ffi.from_handle(user)
    try:
        call.report(done, total)
    except BaseException as failure:  # noqa: BLE001 - raised again by ProgressCall.check()
        call.failure = failure
        return 1
    return 0


@ffi.def_extern(error=1, onerror=_interrupted)
def pydflash_mask(emitted: CData, n: int, allowed: CData, n_words: int, user: CData) -> int:
    call: MaskCall = ffi.from_handle(user)
    try:
        call.fill(emitted, n, allowed, n_words)
    except BaseException as failure:  # noqa: BLE001 - raised again by MaskCall.check()
        call.failure = failure
        return 1
    return 0
