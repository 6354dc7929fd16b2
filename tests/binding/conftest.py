"""Fixtures of the binding tests: the built-in pair, opened once, and scripts in a process of their own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pydflash

Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def target() -> Iterator[pydflash.TargetModel]:
    with pydflash.TargetModel.open(n_threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def drafter(target: pydflash.TargetModel) -> Iterator[pydflash.DraftModel]:
    with pydflash.DraftModel.open(None, target) as model:
        yield model


@pytest.fixture
def cache(target: pydflash.TargetModel) -> Iterator[pydflash.TargetCache]:
    with pydflash.TargetCache(target, 512) as cache:
        yield cache


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run Python source in a fresh interpreter that shows every warning, outside the source tree."""

    def run(source: str, *flags: str) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / "script.py"
        path.write_text(source)
        return subprocess.run(
            [sys.executable, "-X", "dev", *flags, str(path)],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
        )

    return run
