"""PrefixCache: which snapshots to keep, and which one serves a prompt best."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pydflash._ffi import IntArray, TokenIds, as_ids
from pydflash.errors import PydflashError, SnapshotMismatchError
from pydflash.options import as_integer
from pydflash.prefix_folder import PrefixFolder, reason_of
from pydflash.prefix_keys import PrefixKeys, state_key_of_snapshot
from pydflash.prefix_snapshot import PrefixSnapshot

log = logging.getLogger(__name__)

_MAX_WAITING: Final = 4  # snapshots on their way to the disk; each of them stays in memory until it is there
_MAX_FILES: Final = 4  # tried in one look-up, when some are of no use


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """What a look-up found.

    Attributes:
        snapshot: the longest that fits; None: none does.
        n: its tokens, 0 without one.
        source: "memory", "disk", or "" without one.
        reason: why there is none, or why a longer one on disk was of no use.
    """

    snapshot: PrefixSnapshot | None
    n: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counts since the cache was made; ``n_bytes`` and ``n_snapshots`` are of now.

    ``hit_tokens`` were not evaluated because of hits. ``misses_by_reason`` has "empty" (nothing stored), "no common
    prefix", "nothing stored at or before the common prefix", "longer than the prompt", and what was wrong with files.
    ``too_large`` snapshots did not fit the budget at all; ``disk_skipped`` ones came faster than the disk takes them.
    """

    lookups: int
    hits: int
    disk_hits: int
    hit_tokens: int
    inserted: int
    evicted: int
    too_large: int
    disk_written: int
    disk_bytes_written: int
    disk_failed: int
    disk_skipped: int
    n_snapshots: int
    n_bytes: int
    max_bytes: int
    misses_by_reason: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def misses(self) -> int:
        """Look-ups that found nothing."""
        return self.lookups - self.hits


@dataclass(slots=True)
class _Entry:
    snapshot: PrefixSnapshot
    block: bytes
    children: int = 0


class PrefixCache:
    """Snapshots by their tokens, in memory and perhaps on disk, shared by all sequences over the same models.

    A snapshot is found by the chained hash of the token blocks before its end, and its tokens are compared one by one
    before it is given out. When the budget is passed, the one that was used least recently goes first, but none that a
    delta in the cache is made on. Snapshots that somebody holds stay usable when they are dropped here.

    Memory: ``allocated_bytes`` of all snapshots, at most ``max_bytes``. Any thread.
    """

    def __init__(
        self,
        state_key: str,
        *,
        max_bytes: int = 4 << 30,
        block_size: int = 64,
        folder: PrefixFolder | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            state_key: of the states it is for; see prefix_keys.state_key_of_cache().
            max_bytes: budget of host memory.
            block_size: tokens of a hashed block.
            folder: where snapshots also go, and where they are looked for.

        Raises:
            InvalidArgumentError: a number is outside its limits.
        """
        self._state_key = state_key
        self._max_bytes = as_integer("max_bytes", max_bytes, 0, 2**63 - 1)
        self._block_size = as_integer("block_size", block_size, 1, 1 << 20)
        self._folder = folder
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._by_block: dict[bytes, set[str]] = {}
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._writer: ThreadPoolExecutor | None = None
        self._waiting = 0

    def __repr__(self) -> str:
        with self._lock:
            return f"<PrefixCache of {len(self._entries)} snapshots, {self._bytes / 2**20:.1f} MiB>"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixSnapshot]:
        """Snapshots, the one that was used least recently first."""
        with self._lock:
            return iter([entry.snapshot for entry in self._entries.values()])

    @property
    def state_key(self) -> str:
        """Of the states it is for."""
        return self._state_key

    @property
    def folder(self) -> PrefixFolder | None:
        """The part on disk."""
        return self._folder

    @property
    def stats(self) -> PrefixCacheStats:
        """Counts until now."""
        with self._lock:
            return PrefixCacheStats(
                n_snapshots=len(self._entries),
                n_bytes=self._bytes,
                max_bytes=self._max_bytes,
                misses_by_reason=dict(self._misses),
                **{name: self._counts[name] for name in _COUNTS},
            )

    def longest(self, ids: TokenIds) -> tuple[PrefixSnapshot | None, int]:
        """The longest snapshot that a prompt can go on from, and its tokens; (None, 0) if there is none."""
        found = self.lookup(ids)
        return found.snapshot, found.n

    def lookup(
        self, ids: TokenIds, *, above: int = 0, limit: int | None = None, need_logits: bool = True
    ) -> PrefixLookup:
        """The longest snapshot that a prompt can go on from, and why there is no longer one.

        Args:
            ids: the prompt.
            above: what the caller has already: only a longer snapshot is of use, and without one nothing is counted.
            limit: most tokens of the snapshot; None: all.
            need_logits: a snapshot of the whole prompt serves only if it has the logits behind its last token.
        """
        keys = PrefixKeys(self._state_key, ids, self._block_size)
        bare = len(keys.ids) - 1 if need_logits else len(keys.ids)
        limit = len(keys.ids) if limit is None else min(as_integer("limit", limit, 0), len(keys.ids))
        above = as_integer("above", above, 0)
        with self._lock:
            found = self._longest_here(keys, limit, bare)
            if found is not None and found.position <= above:
                found = None
            reason = "" if found is not None or above else self._reason(keys, limit)
        n, source = (found.position, "memory") if found is not None else (0, "")
        loaded, why = self._longest_on_disk(keys, max(n, above), limit, bare)
        if loaded is not None:
            found, n, source, why = loaded, loaded.position, "disk", ""
            self._keep(loaded, keys)
        reason = why or reason
        with self._lock:
            self._counts["lookups"] += found is not None or above == 0
            if found is None and above == 0:
                self._misses[reason] += 1
            elif found is not None:
                self._counts["hits"] += 1
                self._counts["disk_hits"] += source == "disk"
                self._counts["hit_tokens"] += n
        return PrefixLookup(found, n, source, reason)

    def insert(self, snapshot: PrefixSnapshot) -> bool:
        """Keep a snapshot, and write it to disk in the background; False if it is larger than the whole budget.

        Raises:
            SnapshotMismatchError: it is of another kind of state, thin, or does not know its tokens.
        """
        if snapshot.kind == "thin" or len(snapshot.tokens) == 0:
            raise SnapshotMismatchError("a snapshot to be looked up needs its state and its tokens")
        if state_key_of_snapshot(snapshot.info) != self._state_key:
            raise SnapshotMismatchError(
                "the snapshot is of another model, drafter or kind of cache than this one keeps"
            )
        keys = PrefixKeys(self._state_key, snapshot.tokens, self._block_size)
        kept = self._keep(snapshot, keys)
        self._write(snapshot, keys)
        return kept

    def contains(self, snapshot: PrefixSnapshot) -> bool:
        """True if this very snapshot is kept in memory."""
        with self._lock:
            return any(entry.snapshot is snapshot for entry in reversed(self._entries.values()))

    def clear(self) -> None:
        """Drop all snapshots in memory; files stay."""
        with self._lock:
            self._entries.clear()
            self._by_block.clear()
            self._bytes = 0

    def flush(self) -> None:
        """Return when everything that was inserted is on disk."""
        writer = self._writer
        if writer is not None:
            writer.submit(lambda: None).result()

    def close(self) -> None:
        """flush(), and drop everything in memory. The cache stays usable without a disk."""
        self.flush()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()
        self._folder = None
        self.clear()

    def _longest_here(self, keys: PrefixKeys, limit: int, bare: int) -> PrefixSnapshot | None:
        for block in reversed(keys.blocks):
            best: tuple[int, str] | None = None
            for key in self._by_block.get(block, ()):
                snapshot = self._entries[key].snapshot
                n = snapshot.position
                usable = n <= limit and (n <= bare or snapshot.has_logits)
                if usable and (best is None or n > best[0]) and np.array_equal(snapshot.tokens, keys.ids[:n]):
                    best = (n, key)
            if best is not None:
                self._touch(best[1])
                return self._entries[best[1]].snapshot
        return None

    def _longest_on_disk(
        self, keys: PrefixKeys, above: int, limit: int, bare: int
    ) -> tuple[PrefixSnapshot | None, str]:
        """A longer one than what memory has, or why a file that looked like it was of no use."""
        folder, reason = self._folder, ""
        if folder is None:
            return None, reason
        for _ in range(_MAX_FILES):
            position = folder.find(keys, above, limit)
            if position is None:
                break
            try:
                snapshot = folder.load(keys, position, self._known)
            except PydflashError as error:
                log.info("a file of the prefix cache is of no use: %s", error)
                reason = reason or reason_of(error)
            else:
                if position <= bare or snapshot.has_logits:
                    return snapshot, ""
            limit = position - 1
        return None, reason

    def _touch(self, key: str) -> None:
        """Most recently used, and so is everything that it is made on: the parents a little more so."""
        snapshot: PrefixSnapshot | None = self._entries[key].snapshot
        self._entries.move_to_end(key)
        links = {id(entry.snapshot): name for name, entry in self._entries.items()}
        while snapshot is not None and (snapshot := snapshot.parent) is not None:
            name = links.get(id(snapshot))
            if name is not None:
                self._entries.move_to_end(name)

    def _reason(self, keys: PrefixKeys, limit: int) -> str:
        if not self._entries:
            return "empty"
        shared = max(_common(entry.snapshot.tokens, keys.ids) for entry in self._entries.values())
        if shared == 0:
            return "no common prefix"
        longer = any(
            entry.snapshot.position > limit and _common(entry.snapshot.tokens, keys.ids) >= limit
            for entry in self._entries.values()
        )
        return "longer than the prompt" if longer else "nothing stored at or before the common prefix"

    def _known(self, key: str) -> PrefixSnapshot | None:
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry.snapshot

    def _keep(self, snapshot: PrefixSnapshot, keys: PrefixKeys) -> bool:
        """Enter a snapshot and those of its parents that are not here: they take memory as long as it lives."""
        chain: list[PrefixSnapshot] = [snapshot]
        while (above := chain[-1].parent) is not None:
            chain.append(above)
        with self._lock:
            if sum(link.allocated_bytes for link in chain) > self._max_bytes:
                self._counts["too_large"] += 1
                return False
            here = {id(entry.snapshot) for entry in self._entries.values()}
            for link in reversed(chain):
                if id(link) in here:
                    continue
                key = keys.key(link.position)
                old = self._entries.get(key)
                if old is not None and old.children == 0 and (link.has_logits or not old.snapshot.has_logits):
                    self._drop(key)
                elif old is not None and link is snapshot:
                    self._entries.move_to_end(key)
                    continue
                elif old is not None:
                    key = f"{key}#{id(link)}"  # a parent that is not the one of this name: it is found by nobody
                entry = _Entry(link, keys.block_of(link.position))
                self._entries[key] = entry
                self._by_block.setdefault(entry.block, set()).add(key)
                self._bytes += link.allocated_bytes
                self._counts["inserted"] += 1
                self._add_to_parent(link, 1)
            self._evict()
            return True

    def _add_to_parent(self, snapshot: PrefixSnapshot, n: int) -> None:
        if snapshot.parent is not None:
            for entry in self._entries.values():
                if entry.snapshot is snapshot.parent:
                    entry.children += n

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            key = next((name for name, entry in self._entries.items() if entry.children == 0), None)
            if key is None:
                return
            self._drop(key)
            self._counts["evicted"] += 1

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._by_block[entry.block].discard(key)
        if not self._by_block[entry.block]:
            del self._by_block[entry.block]
        self._bytes -= entry.snapshot.allocated_bytes
        self._add_to_parent(entry.snapshot, -1)

    def _write(self, snapshot: PrefixSnapshot, keys: PrefixKeys) -> None:
        folder = self._folder
        if folder is None:
            return
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                self._counts["disk_skipped"] += 1
                return
            self._waiting += 1
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, "pydflash-prefix")
            writer = self._writer

        def work() -> None:
            try:
                written = folder.put(snapshot, keys)
                with self._lock:
                    self._counts["disk_written"] += written > 0
                    self._counts["disk_bytes_written"] += written
            except (OSError, PydflashError) as error:
                log.warning("a snapshot could not be written to %s: %s", folder.directory, error)
                with self._lock:
                    self._counts["disk_failed"] += 1
            finally:
                with self._lock:
                    self._waiting -= 1

        writer.submit(work)


_COUNTS: Final = (
    *("lookups", "hits", "disk_hits", "hit_tokens", "inserted", "evicted", "too_large"),
    *("disk_written", "disk_bytes_written", "disk_failed", "disk_skipped"),
)


def _common(left: IntArray, right: IntArray) -> int:
    """Tokens that two lists have in common at their beginnings."""
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0]) if len(differ) else n


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Tokens that two lists have in common at their beginnings."""
    return _common(as_ids(left), as_ids(right))
