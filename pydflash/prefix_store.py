"""PrefixStore: snapshots under names of a user's choice, one file each in one folder."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydflash.draft_model import DraftModel
from pydflash.errors import CapacityError, FormatError, InvalidArgumentError, NotFoundError
from pydflash.options import as_integer
from pydflash.prefix_file import read_description, read_snapshot, remove_leftovers, write_snapshot
from pydflash.prefix_snapshot import PrefixSnapshot
from pydflash.target_model import TargetModel

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A named file: tokens in it, its bytes, and the milliseconds that saving or erasing took."""

    name: str
    n_tokens: int
    n_bytes: int
    ms: float


class PrefixStore:
    """Saves, loads and erases snapshots by name.

    A file holds a whole snapshot, also that of a delta, and is the same for every process with the same models. Names
    are letters, digits, ".", "_" and "-", 1 to 128 of them, not beginning with "." or "-"; nothing else reaches the
    file system, so a name that comes from a network cannot leave the folder.

    Any thread, any number of processes: a file is there whole or not at all.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        target: TargetModel,
        draft: DraftModel | None = None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        """Use a folder, made if it is not there.

        Args:
            directory: the folder; other files in it are left alone.
            target, draft: models that files belong to.
            max_bytes: of all files together; a save that would pass it is refused. None: no limit.

        Raises:
            InvalidArgumentError: max_bytes is not positive, or the path is no folder.
            OSError: the folder cannot be made.
        """
        self._directory = Path(directory)
        self._target, self._draft = target, draft
        self._max_bytes = None if max_bytes is None else as_integer("max_bytes", max_bytes, 1, 2**63 - 1)
        if self._directory.exists() and not self._directory.is_dir():
            raise InvalidArgumentError("directory", str(self._directory), "a folder")
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._directory)

    def __repr__(self) -> str:
        return f"<PrefixStore {str(self._directory)!r}>"

    @property
    def directory(self) -> Path:
        """The folder."""
        return self._directory

    def path(self, name: str) -> Path:
        """Where a name is kept, whether it is there or not.

        Raises:
            InvalidArgumentError: the name has other characters, or too many.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            limit = 'a name of 1 to 128 letters, digits, ".", "_" and "-" that begins with none of "." and "-"'
            raise InvalidArgumentError("name", name, limit)
        return self._directory / name

    def save(self, name: str, snapshot: PrefixSnapshot) -> SavedPrefix:
        """Write a snapshot, in place of one of that name.

        Raises:
            InvalidArgumentError: the name is not allowed, or belongs to a file that is no snapshot.
            CapacityError: the folder would pass max_bytes.
            SnapshotMismatchError: the snapshot is of other models.
            UnsupportedModelError: it is thin.
            OSError: it cannot be written; what was there before is left.
        """
        started = time.perf_counter()
        path = self.path(name)
        self._check_own(path)
        whole = snapshot.flatten(self._target, self._draft)
        if self._max_bytes is not None:
            others = sum(entry.n_bytes for entry in self.entries() if entry.name != name)
            if others + whole.n_bytes > self._max_bytes:
                raise CapacityError(
                    f"{whole.n_bytes} bytes beside {others} in {self._directory}, at most {self._max_bytes}",
                    needed=others + whole.n_bytes,
                    available=self._max_bytes,
                )
        n_bytes = write_snapshot(path, whole)
        return SavedPrefix(name, whole.position, n_bytes, _ms_since(started))

    def load(self, name: str) -> PrefixSnapshot:
        """Read a snapshot.

        Raises:
            InvalidArgumentError: the name is not allowed.
            NotFoundError: there is none of that name.
            FormatError: the file is damaged, or no snapshot.
            SnapshotMismatchError: it is of another model, drafter or version.
        """
        return read_snapshot(self.path(name), self._target, self._draft)

    def erase(self, name: str) -> SavedPrefix:
        """Remove a file.

        Raises:
            InvalidArgumentError: the name is not allowed, or belongs to a file that is no snapshot.
            NotFoundError: there is none of that name.
        """
        started = time.perf_counter()
        path = self.path(name)
        if not path.is_file():
            raise NotFoundError(f"no snapshot {name} in {self._directory}")
        self._check_own(path)
        n_tokens, n_bytes = self._size(path)
        with suppress(FileNotFoundError):
            path.unlink()
        return SavedPrefix(name, n_tokens, n_bytes, _ms_since(started))

    def entries(self) -> tuple[SavedPrefix, ...]:
        """All snapshots in the folder, by name; damaged ones have 0 tokens."""
        found = []
        for path in sorted(self._directory.iterdir()):
            if _NAME.fullmatch(path.name) and path.is_file():
                with suppress(InvalidArgumentError, NotFoundError, FileNotFoundError):
                    self._check_own(path)
                    found.append(SavedPrefix(path.name, *self._size(path), 0.0))
        return tuple(found)

    @staticmethod
    def _size(path: Path) -> tuple[int, int]:
        try:
            described = read_description(path)
        except (FormatError, ValueError):
            return 0, path.stat().st_size
        return described.info.position, described.n_bytes

    @staticmethod
    def _check_own(path: Path) -> None:
        """A file that is not one of ours is neither overwritten nor erased. A damaged one of ours may be."""
        if path.exists():
            if not path.is_file():
                raise InvalidArgumentError("name", path.name, "the name of a file")
            with path.open("rb") as file:
                head = file.read(4096)
            # A safetensors file begins with the length of its header, and ours has the metadata first.
            if head and b"__metadata__" not in head:
                raise InvalidArgumentError("name", path.name, "no file but a snapshot's")


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
