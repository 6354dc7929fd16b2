"""NativeHandle: what every class around a native object needs, once.

Threads: a lock per object; a second thread waits. Native code refuses what the lock cannot order, a callback that calls
into the object it was called from, with BusyError. Processes: an object made before a fork does not work in the child.
Memory: close() or ``with`` frees it; a forgotten object is freed when it is collected, with a ResourceWarning; one that
lives until the interpreter exits is freed quietly. Objects keep those they were made from.
"""
# ruff: noqa: SLF001 - handles see each other's locks and pointers

from __future__ import annotations

import itertools
import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, Self

from pydflash import _log
from pydflash._ffi import CData, check, ffi, new_error
from pydflash.errors import ClosedError, InvalidArgumentError, PydflashError

_serials: Final = itertools.count()


class _SharedLock:
    """A re-entrant lock with a place in the order in which locks are taken."""

    __slots__ = ("lock", "serial")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.serial = next(_serials)


class NativeHandle(ABC):
    """Base of the classes that hold a native object.

    A context manager: leaving the block closes the object.
    """

    # Until _adopt() has run, as after a constructor that failed, the object counts as closed.
    _ptr: CData | None = None
    _parents: tuple[NativeHandle, ...] = ()

    def _adopt(
        self,
        raw: CData,
        free: Callable[[CData], object],
        *parents: NativeHandle | None,
        exclusive: bool = False,
    ) -> None:
        """Take over a new native object.

        Args:
            raw: the pointer; free: the function that frees it.
            parents: objects to be kept alive.
            exclusive: True if calls also need the parents for themselves.
        """
        self._lock = _SharedLock()
        self._cancel_lock = threading.RLock()  # re-entrant for signal handlers
        self._pid = os.getpid()
        self._err = new_error()
        self._parents = tuple(parent for parent in parents if parent is not None)
        shared = [parent._lock for parent in self._parents] if exclusive else []
        order = sorted([self._lock, *shared], key=lambda lock: lock.serial)
        # Always four, the last one again where there are fewer: it is re-entrant, and one `with` of plain names is the
        # cheapest way in that no Ctrl-C can leave half done.
        self._locks = (*(lock.lock for lock in order), *(self._lock.lock for _ in range(4 - len(order))))
        self._ptr = ffi.gc(raw, free)
        self._leak = weakref.finalize(self, _warn_unclosed, type(self).__name__, self._pid)
        self._leak.atexit = False

    def __repr__(self) -> str:
        """Never waits and never fails: facts that are known, then the state if nobody is inside."""
        name = type(self).__name__
        if not hasattr(self, "_leak"):
            return f"<{name}: not open>"
        facts = f"<{name} {self._facts()}"
        if self._ptr is None:
            return f"{facts}, closed>"
        if self._pid != os.getpid():
            return f"{facts}, of process {self._pid}>"
        with ExitStack() as stack:
            for lock in self._locks:
                if not lock.acquire(blocking=False):
                    return f"{facts}, in use>"
                stack.callback(lock.release)
            try:
                return f"{facts}, {self._state_text()}>"
            except PydflashError as error:
                return f"{facts}, {type(error).__name__}>"

    @abstractmethod
    def _facts(self) -> str:
        """For repr(): what does not change."""

    def _state_text(self) -> str:
        """For repr(): what may change; called while nobody else is inside."""
        return "open"

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._ptr is None

    def close(self) -> None:
        """Free the native object; nothing on one that is closed. Waits for a call that another thread has inside.

        Objects made from this one keep working.
        """
        if self._ptr is None:
            return
        if os.getpid() != self._pid:  # a child process: neither the lock nor the memory is its own
            self._forget()
            return
        with self._lock.lock:
            with self._cancel_lock:
                ptr = self._forget()
            if ptr is not None:
                ffi.release(ptr)
        _log.drain()

    def _forget(self) -> CData | None:
        ptr, self._ptr = self._ptr, None
        self._parents = ()
        self._leak.detach()
        return ptr

    def __enter__(self) -> Self:
        if self._ptr is None:
            raise self._closed_error()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @contextmanager
    def _use(self) -> Iterator[tuple[CData, CData]]:
        """The pointer and the dflash_error for one native call, with everything locked that it needs.

        Raises:
            ClosedError: the object is closed.
            InvalidArgumentError: it was made by another process.
        """
        self._check_process()
        first, second, third, fourth = self._locks
        try:
            with first, second, third, fourth:
                yield self._open_pointer(), self._err
        finally:
            _log.drain()

    def _check_process(self) -> None:
        if self._ptr is None:
            raise self._closed_error()
        if self._pid != os.getpid():
            limit = f"{os.getpid()}, this one: native objects do not survive a fork"
            raise InvalidArgumentError(f"the process that made the {type(self).__name__}", self._pid, limit)

    def _open_pointer(self) -> CData:
        if self._ptr is None:
            raise self._closed_error()
        return self._ptr

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the {type(self).__name__} is closed")

    def _cancel(self, function: Callable[[CData, CData], int], operation: str) -> None:
        """Call a cancel function, which may run beside any other call; nothing on a closed object."""
        with self._cancel_lock:
            if self._ptr is not None and self._pid == os.getpid():
                err = new_error()
                check(function(self._ptr, err), err, operation)


def _warn_unclosed(name: str, pid: int) -> None:
    if pid == os.getpid():
        warnings.warn(f"unclosed {name}", ResourceWarning, stacklevel=2)


def use(handle: NativeHandle) -> AbstractContextManager[tuple[CData, CData]]:
    """The pointer of another object and the dflash_error for one native call; errors as NativeHandle._use()."""
    return handle._use()


@contextmanager
def use_all(*handles: NativeHandle) -> Iterator[tuple[CData, ...]]:
    """The pointers of several objects, in order, and then the dflash_error, for one native call that takes them all."""
    for handle in handles:
        handle._check_process()
    try:
        with ExitStack() as stack:
            for handle in sorted(set(handles), key=lambda handle: handle._lock.serial):
                stack.enter_context(handle._lock.lock)
            yield (*(handle._open_pointer() for handle in handles), handles[0]._err)
    finally:
        _log.drain()


@contextmanager
def native_call() -> Iterator[CData]:
    """The dflash_error for a call that needs no handle; hands over what was logged."""
    try:
        yield new_error()
    finally:
        _log.drain()
