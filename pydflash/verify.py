"""Verify: rows that a target has run and that its cache has not accepted yet."""
# ruff: noqa: SLF001 - the outcome and its cache are two halves of one thing

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydflash._ffi import FloatArray, IntArray
from pydflash.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pydflash.target_cache import TargetCache


class Verify:
    """Rows that a verify forward ran behind the position of a cache, which it did not change.

    Current until the next call that moves the cache; commit() then, and the inspection functions, raise
    InvalidArgumentError. Keeps its cache alive.

    Attributes:
        base: position of row 0.
        n_rows: rows that were run.
        argmax: likeliest token behind each row, int32 [n_rows].
        parents: of the rows of a tree, int32 [n_rows]; None for a chain.
    """

    __slots__ = ("_cache", "_logits", "_serial", "argmax", "base", "n_rows", "parents")

    def __init__(
        self,
        cache: TargetCache,
        serial: int,
        base: int,
        argmax: IntArray,
        logits: FloatArray | None,
        parents: IntArray | None = None,
    ) -> None:
        self._cache = cache
        self._serial = serial
        self._logits = logits
        self.base = base
        self.n_rows = len(argmax)
        self.argmax = argmax
        self.parents = parents

    def __repr__(self) -> str:
        rows = f"positions [{self.base}, {self.base + self.n_rows})"
        if self.parents is not None:
            rows = f"a tree of {self.n_rows} rows from position {self.base}"
        return f"<Verify of {rows}{'' if self.current else ', stale'}>"

    @property
    def current(self) -> bool:
        """False once a later verify, commit, forward, reset or restore of its cache has replaced it.

        A decoder that moves the cache is noticed by commit() only.
        """
        return self._serial == self._cache._verify_serial and not self._cache.closed

    @property
    def logits(self) -> FloatArray:
        """float32 [n_rows, n_vocab], owned by the caller.

        Raises:
            InvalidArgumentError: verify() was told not to fetch them.
        """
        if self._logits is None:
            raise InvalidArgumentError("logits", "not fetched", "verify(..., logits=True)")
        return self._logits

    def commit(self, n: int) -> None:
        """Accept the first n rows, 0 <= n <= n_rows: the cache moves to base + n. Once.

        Raises:
            InvalidArgumentError: n is outside its limits, the rows are no longer current, or the first n rows of a tree
                are no path.
        """
        with self._cache._lock.lock:
            self._require_current()
            self._cache.commit(n)

    def commit_path(self, path: Sequence[int]) -> None:
        """Accept rows from the root down, each a child of the one before: the cache moves to base + len(path). Once.

        Keys, values and features of the path move to the rows of their positions; the recurrence runs again along it.
        An empty path accepts nothing.

        Raises:
            InvalidArgumentError: the rows are no path, or no longer current.
        """
        with self._cache._lock.lock:
            self._require_current()
            self._cache.commit_path(path)

    def state(self, layer: int, row: int) -> FloatArray:
        """Recurrent state of a layer after a row, float32 [value heads, S, S]; the cache needs ``keep_states=True``."""
        with self._cache._lock.lock:
            self._require_current()
            return self._cache._verify_state(layer, row)

    def conv_input(self, layer: int) -> FloatArray:
        """Input of a recurrent layer's convolution, float32 [d_conv - 1 + n_rows, channels], oldest first."""
        with self._cache._lock.lock:
            self._require_current()
            return self._cache._verify_conv(layer, self.n_rows)

    def _require_current(self) -> None:
        if not self.current:
            raise InvalidArgumentError.from_native(
                f"{self!r}: only the newest outcome of an open cache can be used, and committed once"
            )
