"""One snapshot in one safetensors file, with checksums; written so that it is there whole or not at all.

Tensors: the parts under their names (f32 and f16 as such, bf16 as U16, other types as rows of bytes), ``tokens`` and
``logits``. Metadata: ``info`` and ``parts`` say what they are, ``parent`` names the file of a delta's parent,
``checksums`` has the SHA-256 of each tensor, and ``checksum`` that of all of these texts.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pydflash.draft_model import DraftModel
from pydflash.errors import FormatError, NotFoundError, SnapshotMismatchError
from pydflash.prefix_snapshot import PartArray, PrefixSnapshot
from pydflash.snapshot_info import SnapshotInfo
from pydflash.target_model import TargetModel

FORMAT: Final = "pydflash prefix snapshot"
VERSION: Final = "1"
_SIGNED: Final = ("format", "version", "info", "parts", "parent", "checksums")
_TEMPORARY: Final = ".tmp"
_MAX_PARENT: Final = 200


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """The description in a file: ``parent`` is the name of the parent's file, empty for a full snapshot."""

    info: SnapshotInfo
    parent: str
    n_bytes: int


def write_snapshot(path: Path, snapshot: PrefixSnapshot, *, parent: str = "") -> int:
    """Write a snapshot to a file, in place of one that is there; its size in bytes.

    The bytes go to a file beside it that takes its name when they are on the disk, so that nobody ever sees a part.

    Raises:
        OSError: it cannot be written; then no file is left.
    """
    tensors: dict[str, PartArray] = {part.name: snapshot.read(i) for i, part in enumerate(snapshot.parts)}
    tensors |= {"tokens": np.array(snapshot.tokens), "logits": snapshot.logits}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "info": json.dumps(snapshot.info.to_dict()),
        "parts": json.dumps([asdict(part) for part in snapshot.parts]),
        "parent": parent,
        "checksums": json.dumps({name: _checksum(data) for name, data in sorted(tensors.items())}),
    }
    metadata["checksum"] = _sign(metadata)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        save_file(tensors, temporary, metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
            n_bytes = os.fstat(file.fileno()).st_size
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    _sync_folder(path.parent)
    return n_bytes


def read_description(path: Path) -> SnapshotFile:
    """What is in a file, without its tensors.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is damaged, or no snapshot.
        SnapshotMismatchError: another version wrote it.
    """
    with _opened(path) as file:
        metadata = _metadata(path, file)
    return _describe(path, metadata)


def read_snapshot(
    path: Path,
    target: TargetModel,
    draft: DraftModel | None,
    *,
    parent_of: Callable[[str], PrefixSnapshot] | None = None,
) -> PrefixSnapshot:
    """Read a file, mapped into memory, and check every byte of it.

    Args:
        path: of the file.
        target, draft: models that are open, which it must belong to.
        parent_of: gives the parent of a delta by the name of its file; None: deltas are refused.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is damaged, cut, or no snapshot.
        SnapshotMismatchError: it is of another version, model or drafter, or its parent is not there.
    """
    with _opened(path) as file:
        metadata = _metadata(path, file)
        described = _describe(path, metadata)
        checksums, parts = _json(path, metadata, "checksums"), _json(path, metadata, "parts")
        if not isinstance(checksums, dict) or not isinstance(parts, list) or set(file.keys()) != set(checksums):
            raise FormatError(f"{path.name}: the tensors are not those that it describes")
        try:
            names = [str(part["name"]) for part in parts]
            tensors = {name: file.get_tensor(name) for name in (*names, "tokens", "logits")}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path.name}: {error}") from error
    for name, data in tensors.items():
        if _checksum(data) != checksums[name]:
            raise FormatError(f"{path.name}: the bytes of {name} are not those that were written")
    parent: PrefixSnapshot | None = None
    if described.info.kind == "delta":
        if parent_of is None:
            raise SnapshotMismatchError(f"{path.name} is a delta, and its parent is not known")
        parent = parent_of(described.parent)
    return PrefixSnapshot.from_parts(
        described.info,
        target,
        draft if described.info.draft_digest else None,
        parent=parent,
        tokens=tensors["tokens"],
        logits=tensors["logits"],
        parts=[tensors[name] for name in names],
    )


def remove_leftovers(folder: Path) -> int:
    """Remove what processes that were killed while writing have left; how many files."""
    removed = 0
    for path in folder.glob(f".*{_TEMPORARY}"):
        owner = path.name.removesuffix(_TEMPORARY).split(".")[-2:-1]
        if owner and owner[0].isdigit() and not _is_alive(int(owner[0])):
            with suppress(OSError):
                path.unlink()
                removed += 1
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise NotFoundError(f"no snapshot {path.name} in {path.parent}")
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise NotFoundError(f"no snapshot {path.name} in {path.parent}") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{path.name}: {error}") from error


def _metadata(path: Path, file: Any) -> dict[str, str]:
    metadata = file.metadata()
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise FormatError(f"{path.name} is no snapshot")
    if metadata.get("version") != VERSION:
        raise SnapshotMismatchError(f"{path.name} is of version {metadata.get('version')!r:.40}, this reads {VERSION}")
    if not all(name in metadata for name in _SIGNED) or metadata.get("checksum") != _sign(metadata):
        raise FormatError(f"{path.name}: the description is not the one that was written")
    return metadata


def _describe(path: Path, metadata: dict[str, str]) -> SnapshotFile:
    parent = metadata["parent"]
    if len(parent) > _MAX_PARENT:
        raise FormatError(f"{path.name}: its parent's name has {len(parent)} characters")
    info = SnapshotInfo.from_dict(_json(path, metadata, "info"))
    return SnapshotFile(info, parent, path.stat().st_size)


def _json(path: Path, metadata: dict[str, str], name: str) -> object:
    try:
        return json.loads(metadata[name])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path.name}: {name}: {error}") from error


def _checksum(data: PartArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data).hexdigest()


def _sign(metadata: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([metadata[name] for name in _SIGNED]).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some systems do not open folders
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)
