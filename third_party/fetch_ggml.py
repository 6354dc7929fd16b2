#!/usr/bin/env python3
"""Bring the pinned ggml sources into the user's cache and print their folder.

Run by CMake at configure time; standard library only. The archive named in ggml.lock is downloaded by pip in its
hash-checking mode, so that a changed archive is refused before pip asks it for metadata. Exit status 1 comes with one
line on standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent


class FetchError(Exception):
    """A failure whose text is shown to the user as one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    package: str
    version: str
    sdist: str
    sha256: str
    root: str
    take: tuple[str, ...]
    ggml_version: str

    @classmethod
    def read(cls, path: Path) -> Lock:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        try:
            return cls(**{name: fields[name] for name in cls.__slots__ if name != "take"}, take=tuple(fields["take"]))
        except KeyError as missing:
            raise FetchError(f"{path.name}: key {missing} is missing") from None

    @property
    def folder(self) -> str:
        return f"ggml-{self.ggml_version}-{self.sha256[:12]}"


def default_cache_dir() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home() / "AppData" / "Local") / "pydflash"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification tells programs to ignore a relative path.
    return (base if base.is_absolute() else Path.home() / ".cache") / "pydflash"


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("ggml/CMakeLists.txt", "ggml/include/ggml.h", "LICENSE"))


def check_hash(archive: Path, lock: Lock) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != lock.sha256:
        raise FetchError(f"{archive.name}: sha256 is {found}, ggml.lock wants {lock.sha256}")


def answers(python: str, code: str) -> bool:
    try:
        return subprocess.run([python, "-c", code], check=False, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def python_with_pip() -> str:
    """This interpreter if it has pip (a build environment made by pip does not always), else the first that has."""
    found = (shutil.which(name) for name in ("python3", "python"))
    candidates = [sys.executable, *(path for path in found if path)]
    for python in candidates:
        if answers(python, "import pip"):
            return python
    raise FetchError(f"no Python with pip among {', '.join(candidates)}: install pip, or set DFLASH_GGML_DIR")


def download(lock: Lock, folder: Path) -> Path:
    python = python_with_pip()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{lock.package}=={lock.version} --hash=sha256:{lock.sha256}\n", encoding="utf-8")
    command = [python, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-deps", "--require-hashes", "--no-binary", lock.package]
    if answers(python, "import scikit_build_core"):
        # pip asks the archive's build backend for metadata. It is the same one as ours, so it need not be installed
        # again into an environment of its own, which takes far longer than the download.
        command.append("--no-build-isolation")
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise FetchError(explain(done.stdout + done.stderr, lock))
    archive = folder / lock.sdist
    if not archive.is_file():
        raise FetchError(f"pip downloaded {lock.package} {lock.version}, but not as {lock.sdist}")
    return archive


def explain(output: str, lock: Lock) -> str:
    name = f"{lock.package} {lock.version}"
    if "DO NOT MATCH THE HASHES" in output:
        return f"{name}: the archive offered for download has another sha256 than ggml.lock wants ({lock.sha256})"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
    hint = "set DFLASH_GGML_DIR to an existing ggml checkout to build without it (third_party/README.md)"
    if any(sign in output for sign in ("from versions: none", "Max retries exceeded", "NewConnectionError")):
        return f"cannot reach a package registry that has {name}; {hint}. pip: {errors[0]}"
    return f"pip could not download {name}; {hint}. pip: {errors[-1]}"


def wanted(name: str, lock: Lock) -> PurePosixPath | None:
    """Path below the output folder of an archive member, None if it is not taken. Refuses to leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise FetchError(f"{lock.sdist}: member {name!r} points outside the archive")
    root = PurePosixPath(lock.root)
    below = PurePosixPath(*path.parts[1:])  # the first part is the archive's own folder
    if not below.is_relative_to(root):
        return None
    relative = below.relative_to(root)
    text = relative.as_posix()
    return relative if any(text == take or (take[-1] == "/" and text.startswith(take)) for take in lock.take) else None


def unpack(archive: Path, lock: Lock, folder: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                target = wanted(member.name, lock)
                if target is None or member.isdir():
                    continue
                source = tar.extractfile(member) if member.isreg() else None
                if source is None:
                    raise FetchError(f"{lock.sdist}: member {member.name!r} is not a plain file")
                path = folder / target
                path.parent.mkdir(parents=True, exist_ok=True)
                with source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
    except (tarfile.TarError, EOFError) as broken:
        raise FetchError(f"{archive.name}: damaged archive: {broken}") from broken
    if not is_complete(folder):
        raise FetchError(f"{lock.sdist}: has no {lock.root}/ggml with a licence beside it")


def publish(made: Path, final: Path) -> None:
    """Move a finished folder into place in one step; a folder that another process put there first is as good."""
    if final.exists() and not is_complete(final):
        shutil.rmtree(final)
    try:
        made.rename(final)
    except OSError:
        if not is_complete(final):
            raise


def fetch(lock: Lock, cache: Path, sdist: Path | None) -> Path:
    final = cache / lock.folder
    if is_complete(final):
        return final / "ggml"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{lock.folder}.", dir=cache) as text:
        temporary = Path(text)
        archive = sdist or download(lock, temporary)
        check_hash(archive, lock)
        made = temporary / "sources"
        unpack(archive, lock, made)
        publish(made, final)
    return final / "ggml"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Bring the pinned ggml sources into the cache; print their folder.")
    parser.add_argument("--cache-dir", type=Path, help="default: the user's cache folder")
    parser.add_argument("--sdist", type=Path, help="use this archive instead of downloading it")
    parser.add_argument("--lock", type=Path, default=HERE / "ggml.lock", help="default: the lock file beside this one")
    options = parser.parse_args(argv)
    try:
        folder = fetch(Lock.read(options.lock), options.cache_dir or default_cache_dir(), options.sdist)
    except FetchError as error:
        print(f"fetch_ggml: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fetch_ggml: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
