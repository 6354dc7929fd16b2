"""The drafter on a second device, features through a mirror: one GPU shown as two, and a GPU beside the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Measured

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("programs") / "two_devices.py"
EXACT = ("f32", "f16", "bf16", "q8_0")


def run(target: str, draft: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), target, draft],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], measured: "Measured", where: str) -> None:
    """The mirror's storage decides how many drafts are right, and nothing decides the text."""
    one = found["one device"]
    rate = one["accepted"] / one["proposed"]
    measured(f"{where}: accepted share on one device", rate)
    n_tokens = sum(map(len, one["ids"]))
    for mirror_type in (*EXACT, "q4_0"):
        other = found[mirror_type]
        share = other["accepted"] / other["proposed"]
        pairs = list(zip(one["ids"], other["ids"], strict=True))
        same = sum(a == b for ids, other_ids in pairs for a, b in zip(ids, other_ids, strict=False))
        measured(f"{where}, mirror in {mirror_type}: accepted share", share)
        measured(f"{where}, mirror in {mirror_type}: equal tokens of {n_tokens}", same)
        assert sum(a == b for a, b in pairs) >= len(pairs) - 2  # rows of another batch may tip a near tie
        assert share > (0.5 if mirror_type == "q4_0" else 0.9) * rate


def test_one_gpu_as_two(real_gpu: str, measured: "Measured") -> None:
    if not real_gpu.startswith("CUDA"):
        pytest.skip(f"only ggml's CUDA backend shows one GPU as several, this is {real_gpu}")
    found = run("CUDA0", "CUDA1", GGML_CUDA_DEVICES="2")
    assert found["devices"] == {"target": "CUDA0", "draft": "CUDA1"}
    check(found, measured, "one GPU as two")


def test_drafter_on_the_cpu(real_gpu: str, measured: "Measured") -> None:
    found = run(real_gpu, "CPU")
    assert found["devices"] == {"target": real_gpu, "draft": "CPU"}
    check(found, measured, "GPU and CPU")
