"""Fixtures shared by all tests: tiny models in float32, opened once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.models import DRAFTERS, MODELS, upcast_gguf

import pydflash

# One CPU thread: a tiny model gains nothing from more, and a busy machine makes threads wait for each other.
THREADS = 1


@pytest.fixture(scope="session")
def f32_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of the float32 copy of a committed model, by its name without type and ending."""
    folder = tmp_path_factory.mktemp("f32")

    def path(name: str) -> Path:
        out = folder / f"{name}.gguf"
        if not out.exists():
            source = MODELS / f"{name}-bf16.gguf"
            upcast_gguf(source if source.exists() else DRAFTERS / f"{name}-bf16.gguf", out)
        return out

    return path


@pytest.fixture(scope="session")
def f32_target(f32_path: Callable[[str], Path]) -> Iterator[Callable[[str], pydflash.TargetModel]]:
    """An opened float32 target on the CPU, by its name."""
    opened: dict[str, pydflash.TargetModel] = {}

    def target(name: str) -> pydflash.TargetModel:
        if name not in opened:
            opened[name] = pydflash.TargetModel.open(f32_path(name), n_threads=THREADS)
        return opened[name]

    yield target
    for model in opened.values():
        model.close()


@pytest.fixture(scope="session")
def f32_drafter(
    f32_path: Callable[[str], Path], f32_target: Callable[[str], pydflash.TargetModel]
) -> Iterator[Callable[[str], pydflash.DraftModel]]:
    """An opened float32 drafter of the nano target, by its name."""
    opened: dict[str, pydflash.DraftModel] = {}

    def drafter(name: str) -> pydflash.DraftModel:
        if name not in opened:
            opened[name] = pydflash.DraftModel.open(f32_path(name), f32_target("nano"))
        return opened[name]

    yield drafter
    for model in opened.values():
        model.close()
