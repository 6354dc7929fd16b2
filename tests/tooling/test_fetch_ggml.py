"""third_party/fetch_ggml.py: what it takes, what it refuses, and what it tells the user."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "third_party" / "fetch_ggml.py"

MEMBERS = {
    "pkg-1.0/setup.py": b"raise SystemExit('must not run')",
    "pkg-1.0/vendor/llama.cpp/LICENSE": b"licence",
    "pkg-1.0/vendor/llama.cpp/src/llama.cpp": b"no",
    "pkg-1.0/vendor/llama.cpp/ggml/CMakeLists.txt": b"cmake",
    "pkg-1.0/vendor/llama.cpp/ggml/include/ggml.h": b"header",
}


def make_sdist(path: Path, members: dict[str, bytes], link: tuple[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link is not None:
            info = tarfile.TarInfo(link[0])
            info.type = tarfile.SYMTYPE
            info.linkname = link[1]
            tar.addfile(info)
    return path


def make_lock(folder: Path, sha256: str, package: str = "pkg") -> Path:
    lock = folder / "ggml.lock"
    lock.write_text(
        f'package = "{package}"\nversion = "1.0"\nsdist = "pkg-1.0.tar.gz"\nsha256 = "{sha256}"\n'
        'root = "vendor/llama.cpp"\ntake = ["ggml/", "LICENSE"]\nggml_version = "9.9.9"\nlicence = "MIT"\n'
    )
    return lock


def command(folder: Path, *arguments: str | Path) -> list[str]:
    cache = ["--cache-dir", str(folder / "cache"), "--lock", str(folder / "ggml.lock")]
    return [sys.executable, str(SCRIPT), *cache, *map(str, arguments)]


def fetch(folder: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        command(folder, *arguments), check=False, capture_output=True, text=True, env=environment, timeout=300
    )


def prepare(folder: Path, members: dict[str, bytes], link: tuple[str, str] | None = None) -> Path:
    sdist = make_sdist(folder / "pkg-1.0.tar.gz", members, link)
    make_lock(folder, hashlib.sha256(sdist.read_bytes()).hexdigest())
    return sdist


def expect_refusal(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for part in ("fetch_ggml: ", *parts):
        assert part in done.stderr


def left_over(folder: Path) -> list[str]:
    cache = folder / "cache"
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def test_only_ggml_and_its_licence_are_taken(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    done = fetch(tmp_path, "--sdist", sdist)
    assert (done.returncode, done.stderr) == (0, "")
    printed = Path(done.stdout.strip())
    names = {path.relative_to(printed.parent).as_posix() for path in printed.parent.rglob("*") if path.is_file()}
    assert names == {"LICENSE", "ggml/CMakeLists.txt", "ggml/include/ggml.h"}
    assert (printed / "include" / "ggml.h").read_bytes() == b"header"
    assert left_over(tmp_path) == [printed.parent.name]


def test_the_second_run_needs_no_archive(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    first = fetch(tmp_path, "--sdist", sdist).stdout
    sdist.unlink()
    second = fetch(tmp_path, env={"PIP_NO_INDEX": "1"})
    assert (second.returncode, second.stdout) == (0, first)


def test_an_incomplete_folder_is_made_again(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    printed = Path(fetch(tmp_path, "--sdist", sdist).stdout.strip())
    (printed / "CMakeLists.txt").unlink()
    assert fetch(tmp_path, "--sdist", sdist).returncode == 0
    assert (printed / "CMakeLists.txt").read_bytes() == b"cmake"


def test_processes_at_the_same_time_agree(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    processes = [
        subprocess.Popen(command(tmp_path, "--sdist", sdist), stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert {process.returncode for process in processes} == {0}
    assert len(outputs) == 1
    assert len(left_over(tmp_path)) == 1


def test_another_hash_is_refused(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    make_lock(tmp_path, "0" * 64)
    expect_refusal(fetch(tmp_path, "--sdist", sdist), "sha256 is", f"ggml.lock wants {'0' * 64}")
    assert left_over(tmp_path) == []


def test_a_download_with_another_hash_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    make_sdist(tmp_path / "pkg-1.0.tar.gz", {**MEMBERS, "pkg-1.0/PKG-INFO": b"Name: pkg\nVersion: 1.0\n"})
    make_lock(tmp_path, "0" * 64)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    expect_refusal(fetch(tmp_path, env=offline), "another sha256 than ggml.lock wants", "0" * 64)
    assert left_over(tmp_path) == []


def test_an_unreachable_registry_is_named_with_the_way_out(tmp_path: Path) -> None:
    make_lock(tmp_path, "0" * 64, package="pydflash-no-such-package")
    empty = tmp_path / "empty"
    empty.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty)}
    expect_refusal(fetch(tmp_path, env=offline), "cannot reach a package registry", "DFLASH_GGML_DIR")


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "pkg-1.0/vendor/llama.cpp/ggml/../../../../escape", "pkg-1.0\\vendor\\..\\..\\escape"],
)
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    sdist = prepare(tmp_path, {**MEMBERS, name: b"bad"})
    expect_refusal(fetch(tmp_path, "--sdist", sdist), "points outside")
    assert left_over(tmp_path) == []
    assert not (tmp_path / "escape").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS, link=("pkg-1.0/vendor/llama.cpp/ggml/link", "/etc/passwd"))
    expect_refusal(fetch(tmp_path, "--sdist", sdist), "not a plain file")


def test_an_archive_without_ggml_is_refused(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, {"pkg-1.0/README": b""})
    expect_refusal(fetch(tmp_path, "--sdist", sdist), "has no vendor/llama.cpp/ggml")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    sdist.write_bytes(sdist.read_bytes()[:-40])
    make_lock(tmp_path, hashlib.sha256(sdist.read_bytes()).hexdigest())
    expect_refusal(fetch(tmp_path, "--sdist", sdist), "damaged archive")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    sdist = prepare(tmp_path, MEMBERS)
    (tmp_path / "cache").mkdir(mode=0o500)
    expect_refusal(fetch(tmp_path, "--sdist", sdist), "Permission denied")
