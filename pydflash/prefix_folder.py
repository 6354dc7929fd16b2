"""PrefixFolder: the part of a prefix cache that is on disk.

``<directory>/<state key>/<position>-<key>-<parent's key or 0>.safetensors``; files of one state key belong together,
the bound is on the directory. A look-up reads names only, and then the one file that it found, with its parents.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydflash.draft_model import DraftModel
from pydflash.errors import FormatError, NotFoundError, PydflashError, SnapshotMismatchError
from pydflash.prefix_file import read_snapshot, remove_leftovers, write_snapshot
from pydflash.prefix_keys import PrefixKeys, state_key_of_snapshot
from pydflash.prefix_snapshot import PrefixSnapshot
from pydflash.target_model import TargetModel

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"([0-9]{1,9})-([0-9a-f]{32})-([0-9a-f]{32}|0)\.safetensors")
_STATE_KEY: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    position: int
    key: str
    parent: str  # a key; "0": none


class PrefixFolder:
    """Snapshots on disk, found by their tokens. Any thread, any number of processes."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state_key: str,
        target: TargetModel,
        draft: DraftModel | None,
        max_bytes: int,
    ) -> None:
        """Use a directory, made if it is not there.

        Raises:
            OSError: it cannot be made.
        """
        self._directory = Path(directory)
        self._state_key = state_key
        self._folder = self._directory / state_key
        self._target, self._draft, self._max_bytes = target, draft, max_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)

    @property
    def directory(self) -> Path:
        """Holds a folder for each kind of state."""
        return self._directory

    def positions(self, limit: int) -> list[int]:
        """Positions of files, at most ``limit``, greatest first; not all of them need to fit a prompt."""
        return sorted({file.position for file in self._files(self._folder) if file.position <= limit}, reverse=True)

    def find(self, keys: PrefixKeys, above: int, limit: int) -> int | None:
        """The greatest position above one and up to another whose file has the first tokens of these keys."""
        by_position: dict[int, set[str]] = {}
        for file in self._files(self._folder):
            if above < file.position <= limit:
                by_position.setdefault(file.position, set()).add(file.key)
        return next((n for n in sorted(by_position, reverse=True) if keys.key(n) in by_position[n]), None)

    def load(self, keys: PrefixKeys, position: int, known: Callable[[str], PrefixSnapshot | None]) -> PrefixSnapshot:
        """The snapshot of the first ``position`` tokens.

        Args:
            keys: of the prompt.
            position: from find().
            known: snapshots that are in memory, by key; a delta's parent is looked for there first.

        Raises:
            NotFoundError: it is gone. FormatError: it is damaged; then it is removed.
            SnapshotMismatchError: it is of something else, or its parent is gone.
        """
        files = {file.key: file for file in self._files(self._folder)}
        wanted = keys.key(position)
        snapshot = self._load(files, wanted, known, 0)
        if state_key_of_snapshot(snapshot.info) != self._state_key:
            raise SnapshotMismatchError(f"{files[wanted].path.name} is of another kind of cache than its folder says")
        if not _same_tokens(snapshot, keys, position):
            raise SnapshotMismatchError(f"{files[wanted].path.name} holds other tokens than its name says")
        return snapshot

    def _load(
        self, files: dict[str, _File], key: str, known: Callable[[str], PrefixSnapshot | None], depth: int
    ) -> PrefixSnapshot:
        found = known(key) if depth > 0 else None
        if found is not None:
            return found
        file = files.get(key)
        if file is None or depth > 1000:
            raise SnapshotMismatchError("the parent of a delta is gone") if depth else NotFoundError("the file is gone")
        try:
            snapshot = read_snapshot(
                file.path,
                self._target,
                self._draft,
                parent_of=lambda parent: self._load(files, parent, known, depth + 1),
            )
        except FormatError as error:
            log.warning("removing a damaged file of the prefix cache: %s", error)
            with suppress(OSError):
                file.path.unlink()
            raise
        with suppress(OSError):
            os.utime(file.path)
        return snapshot

    def put(self, snapshot: PrefixSnapshot, keys: PrefixKeys) -> int:
        """Write a snapshot and those of its parents that are not there; bytes written.

        Raises:
            OSError: it cannot be written.
        """
        there = {file.key: file for file in self._files(self._folder)}
        chain: list[PrefixSnapshot] = [snapshot]
        while (above := chain[-1].parent) is not None:
            chain.append(above)
        written = 0
        for link in reversed(chain):
            key = keys.key(link.position)
            if key in there:
                with suppress(OSError):
                    os.utime(there[key].path)
                continue
            parent = "" if link.parent is None else keys.key(link.parent.position)
            name = f"{link.position}-{key}-{parent or '0'}.safetensors"
            written += write_snapshot(self._folder / name, link, parent=parent)
        if written:
            self._shrink(keep=keys.key(snapshot.position))
        return written

    def _shrink(self, keep: str) -> None:
        """Remove the files that were used least recently, those first that no other one is made on."""
        while True:
            files = [file for folder in self._folders() for file in self._files(folder)]
            sizes: dict[Path, os.stat_result] = {}
            for file in files:
                with suppress(OSError):
                    sizes[file.path] = file.path.stat()
            if sum(stat.st_size for stat in sizes.values()) <= self._max_bytes:
                return
            parents = {(file.path.parent, file.parent) for file in files}
            leaves = [
                file
                for file in files
                if file.path in sizes and (file.path.parent, file.key) not in parents and file.key != keep
            ]
            if not leaves:
                # Only the newest and what it is made on are left, and they are too much.
                leaves = [file for file in files if file.path in sizes and file.key == keep]
            if not leaves:
                return
            oldest = min(leaves, key=lambda file: sizes[file.path].st_mtime_ns)
            try:
                oldest.path.unlink()
            except FileNotFoundError:
                continue  # another process was faster
            except OSError as error:
                log.warning("%s cannot be removed: %s", oldest.path, error)
                return

    def _folders(self) -> list[Path]:
        with suppress(OSError):
            return [path for path in self._directory.iterdir() if _STATE_KEY.fullmatch(path.name) and path.is_dir()]
        return []

    @staticmethod
    def _files(folder: Path) -> list[_File]:
        files = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match:
                    files.append(_File(folder / entry.name, int(match[1]), match[2], match[3]))
        return files


def _same_tokens(snapshot: PrefixSnapshot, keys: PrefixKeys, position: int) -> bool:
    tokens = snapshot.tokens
    return len(tokens) == position and bool((tokens == keys.ids[:position]).all())


def reason_of(error: PydflashError) -> str:
    """Why a file was of no use, in a word."""
    if isinstance(error, NotFoundError):
        return "file gone"
    return "file damaged" if isinstance(error, FormatError) else "file of something else"
