"""Fixtures of the GPU tests: the device, models on it and beside it on the CPU, and the numbers that a run reports.

PYDFLASH_TEST_DEVICE names another device than the first GPU; with CPU the tests run without one, those apart that are
about a GPU's memory or lack of an operation.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.models import MODELS

import pydflash
from pydflash import builtin

ROOT = Path(__file__).resolve().parents[2]
Floats = npt.NDArray[np.float32]
Measured = Callable[[str, object], None]

# Largest |difference| / |reference|, both as Euclidean norms. Kernels for few and for many rows add up in another
# order, and float32 matrices go through TF32; the CPU rounds activations for a quantised product as the GPU does.
SAME_DEVICE = 1e-2
OTHER_DEVICE = 2e-2
# Where another batch size changes a greedy text, its two likeliest tokens may be this close.
LARGEST_GAP = 0.05

_NUMBERS = pytest.StashKey[list[tuple[str, object]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NUMBERS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[_NUMBERS]:
        terminalreporter.section("measured on the device")
        for name, value in config.stash[_NUMBERS]:
            terminalreporter.write_line(f"{name}: {f'{value:.3g}' if isinstance(value, float) else value}")


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Measured:
    """Keeps a number for the summary at the end of the run."""
    numbers = request.config.stash[_NUMBERS]
    return lambda name, value: numbers.append((name, value))


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test."""
    named = os.environ.get("PYDFLASH_TEST_DEVICE")
    if named:
        return named
    known = pydflash.devices()
    for info in known:
        if info.kind in ("gpu", "igpu"):
            return info.name
    pytest.skip(f"no GPU: this build and machine have {', '.join(info.name for info in known)}")


@pytest.fixture(scope="session")
def real_gpu(device: str) -> str:
    """The device under test, which has memory of its own."""
    if device.upper() == "CPU":
        pytest.skip("this is about a GPU, and the tests run on the CPU")
    return device


@pytest.fixture
def every_row_by_own_kernels() -> Iterator[None]:
    """Prompts too, where the build has own kernels: then the cut of a prompt changes no bit. ggml's kernels for many
    rows round activations to 8 bits, by which quantised models differ more than these tests allow."""
    before = pydflash.own_kernel_rows()
    if before:
        pydflash.own_kernel_rows(512)
    yield
    pydflash.own_kernel_rows(before)


def memory(device: str) -> pydflash.DeviceInfo:
    return next(info for info in pydflash.devices() if info.name == device)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, f32_path: Callable[[str], Path]) -> Callable[[str], Path]:
    """Files that GPUs can run, by name: the built-in one, tiny trained shapes, made-up ones of both architectures.

    bf16 files are widened to f32: products of bf16 matrices round activations or not, depending on device and rows.
    """
    folder = tmp_path_factory.mktemp("made-up")

    def path(name: str) -> Path:
        if name == "demo":
            return builtin.target_path()
        if name == "wide":
            return MODELS / "wide-q4_k.gguf"
        if not name.startswith("tiny"):
            return f32_path(name)
        place = folder / name
        if not place.exists():
            script = ROOT / "scripts" / "make_random_pair.py"
            options = ["--size", name, "--degenerate", "no", "--seed", "3"]
            subprocess.run([sys.executable, str(script), str(place), *options], check=True, capture_output=True)
        return place / "target.gguf"

    return path


@pytest.fixture(scope="session")
def open_target(device: str, model_path: Callable[[str], Path]) -> Iterator[Callable[..., pydflash.TargetModel]]:
    """An opened target by name, on the device under test or, with on="CPU", on the CPU."""
    opened: dict[tuple[str, str], pydflash.TargetModel] = {}

    def target(name: str, on: str = device) -> pydflash.TargetModel:
        if (name, on) not in opened:
            opened[name, on] = pydflash.TargetModel.open(model_path(name), on)
        return opened[name, on]

    yield target
    for model in opened.values():
        model.close()


@dataclass(frozen=True)
class Pair:
    target: pydflash.TargetModel
    draft: pydflash.DraftModel


@pytest.fixture(scope="session")
def demo(open_target: Callable[..., pydflash.TargetModel]) -> Iterator[Pair]:
    """The built-in pair on the device under test."""
    target = open_target("demo")
    with pydflash.DraftModel.open(None, target) as draft:
        yield Pair(target, draft)


@pytest.fixture(scope="session")
def demo_on_cpu(open_target: Callable[..., pydflash.TargetModel]) -> Iterator[Pair]:
    target = open_target("demo", on="CPU")
    with pydflash.DraftModel.open(None, target) as draft:
        yield Pair(target, draft)


@pytest.fixture(scope="session")
def prompts(demo: Pair) -> list[list[int]]:
    """Token ids of the prompts in scripts/prompts.json, chat ones through the template."""
    entries = json.loads((ROOT / "scripts" / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    with pydflash.Engine.open(demo.target, None) as engine:
        ids = []
        for entry in entries:
            text = entry["text"]
            ids.append(list(engine.encode([{"role": "user", "content": text}] if entry["kind"] == "chat" else text)))
    return ids


def difference(found: Floats, reference: Floats) -> float:
    """|found - reference| / |reference|; infinite for values that are no numbers."""
    error = np.linalg.norm((found.astype(np.float64) - reference).ravel())
    scale = np.linalg.norm(reference.astype(np.float64).ravel())
    ratio = float(error / scale) if scale > 0 else float(error)
    return ratio if np.isfinite(ratio) else np.inf


def top_gap(logits: Floats) -> Floats:
    """Largest minus second largest logit of each row."""
    two = np.partition(logits, -2, axis=-1)[..., -2:]
    gaps: Floats = two[..., 1] - two[..., 0]
    return gaps


def state_of(cache: pydflash.TargetCache) -> dict[str, Floats]:
    """Everything a cache holds for the committed tokens, kind by kind and layer by layer."""
    out: dict[str, Floats] = {"features": cache.features(*cache.feature_range)}
    for layer, kind in enumerate(cache.model.config.layer_kinds):
        if kind == "recurrent":
            out[f"recurrent {layer}"] = cache.read(layer, "recurrent")
            out[f"conv {layer}"] = cache.read(layer, "conv")
        else:
            out[f"k {layer}"] = cache.read(layer, "k")
            out[f"v {layer}"] = cache.read(layer, "v")
    return out


@dataclass(frozen=True)
class Toolbox:
    """The functions above, for test modules, which cannot import each other."""

    difference: Callable[[Floats, Floats], float] = difference
    top_gap: Callable[[Floats], Floats] = top_gap
    state_of: Callable[[pydflash.TargetCache], dict[str, Floats]] = state_of
    memory: Callable[[str], pydflash.DeviceInfo] = memory
    same_device: float = SAME_DEVICE
    other_device: float = OTHER_DEVICE
    largest_gap: float = LARGEST_GAP

    def worst_state(self, a: pydflash.TargetCache, b: pydflash.TargetCache) -> tuple[float, str]:
        """The part of the state that differs most."""
        assert a.position == b.position
        left, right = self.state_of(a), self.state_of(b)
        assert left.keys() == right.keys()
        return max((self.difference(left[name], right[name]), name) for name in left)

    def other_argmax(self, found: Floats, reference: Floats) -> tuple[int, float]:
        """How many rows have another likeliest token, and by how much it was ahead in the reference at most."""
        differ = found.argmax(-1) != reference.argmax(-1)
        return int(differ.sum()), float(self.top_gap(reference)[differ].max(initial=0.0))


@pytest.fixture(scope="session")
def tools() -> Toolbox:
    return Toolbox()
