"""programs/generate.c, built against the installed header and library, writes what the Python engine writes."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import pydflash
from pydflash import _native, builtin

SOURCE = Path(__file__).parent / "programs" / "generate.c"
INSTALLED = Path(_native.__file__).parent
C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
CXX_COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
N_TOKENS = 48
WIDTH = 16

pytestmark = pytest.mark.skipif(C_COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("program") / "generate"
    warnings = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wstrict-prototypes", "-Werror"]
    library = [f"-I{INSTALLED / 'include'}", f"-L{INSTALLED}", "-ldflash", f"-Wl,-rpath,{INSTALLED}"]
    done = subprocess.run(
        [C_COMPILER or "", *warnings, SOURCE, *library, "-o", out], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def engine() -> Iterator[pydflash.Engine]:
    with pydflash.Engine.open(options=pydflash.EngineOptions(n_threads=1, draft_weights="file")) as opened:
        yield opened


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], check=False, capture_output=True, text=True, timeout=300)


def ids_of(done: subprocess.CompletedProcess[str]) -> tuple[int, ...]:
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize("prompt", ["def quicksort(items):\n", "class Stack:\n    def __init__(self):\n"])
def test_same_tokens_as_the_engine(program: Path, engine: pydflash.Engine, prompt: str) -> None:
    """Both verify whole blocks: widths chosen by measured cost would round differently from run to run."""
    ids = engine.encode(prompt)
    expected = engine.generate(ids, pydflash.SamplingOptions(max_tokens=N_TOKENS, width=WIDTH))
    done = run(program, builtin.target_path(), builtin.draft_path(), N_TOKENS, *ids)
    assert ids_of(done) == expected.token_ids
    counts = [int(number) for number in re.findall(r"\d+", done.stderr)]
    stats = expected.stats
    assert counts == [stats.emitted, stats.steps, stats.accepted, stats.proposed]
    assert stats.accepted > 0


def test_same_tokens_without_a_drafter(program: Path, engine: pydflash.Engine) -> None:
    ids = engine.encode("import os\n")
    expected = engine.generate(ids, pydflash.SamplingOptions(max_tokens=N_TOKENS, width=1))
    done = run(program, builtin.target_path(), "-", N_TOKENS, *ids)
    assert ids_of(done) == expected.token_ids
    assert f"{N_TOKENS} tokens in {N_TOKENS - 1} steps, 0 of 0 " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "usage: "),
        (["no-such-file.gguf", "-", 4, 1], 1, "NOT_FOUND: no-such-file.gguf"),
        ([builtin.target_path(), "no-such-file.gguf", 4, 1], 1, "NOT_FOUND: no-such-file.gguf"),
        ([builtin.draft_path(), "-", 4, 1], 1, "UNSUPPORTED: "),
        ([builtin.target_path(), "-", 4, 1_000_000], 1, "INVALID: token id 1000000"),
        ([builtin.target_path(), "-", 0, 1], 1, "INVALID: budget 0"),
    ],
)
def test_failures_are_messages(program: Path, arguments: list[object], status: int, message: str) -> None:
    done = run(program, *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert done.stdout.split() == []


@pytest.mark.skipif(CXX_COMPILER is None, reason="no C++ compiler")
def test_the_program_is_also_cpp() -> None:
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++", f"-I{INSTALLED / 'include'}"]
    done = subprocess.run([CXX_COMPILER or "", *flags, SOURCE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
