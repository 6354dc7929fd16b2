"""Device memory: too little of it is an error with numbers after which all goes on, and requests leave none behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pydflash
from pydflash import EngineOptions, SamplingOptions

if TYPE_CHECKING:
    from conftest import Measured, Pair, Toolbox

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("programs") / "full_device.py"
NUMBERS = re.compile(r"needs (\d+) bytes.* on (\S+), (\d+) are free")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_cache_that_does_not_fit(real_gpu: str, demo: "Pair", prompts: list[list[int]], tools: "Toolbox") -> None:
    total = tools.memory(real_gpu).memory_total
    wide: dict[str, object] = {"capacity": 1 << 24, "k_type": "f32", "v_type": "f32", "feature_capacity": 1 << 24}
    wide["capture_layers"] = tuple(range(demo.target.config.n_layer))
    if pydflash.TargetCache.plan(demo.target, **wide).total_bytes < 1.2 * total:  # type: ignore[arg-type]
        pytest.skip("the largest cache of the built-in target fits this device")
    with pydflash.Engine.open(demo.target, demo.draft, EngineOptions(n_ctx=512, device=real_gpu)) as engine:
        wanted = engine.generate(prompts[0], SamplingOptions(max_tokens=32)).token_ids
        free = tools.memory(real_gpu).memory_free
        for _ in range(20):
            with pytest.raises(pydflash.OutOfMemoryError) as caught:
                pydflash.TargetCache(demo.target, **wide)  # type: ignore[arg-type]
        found = NUMBERS.search(str(caught.value))
        assert found, str(caught.value)
        assert found[2] == real_gpu
        assert int(found[1]) >= total
        assert int(found[3]) <= total
        assert tools.memory(real_gpu).memory_free >= free - (4 << 20)
        assert engine.generate(prompts[0], SamplingOptions(max_tokens=32)).token_ids == wanted


@pytest.mark.parametrize("what", ["load", "draft", "engine", "prefill"])
def test_a_full_device(real_gpu: str, what: str) -> None:
    """In a process of its own, with all but a few megabytes of the device taken."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), real_gpu, what], check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["error"] == "OutOfMemoryError", report
    assert NUMBERS.search(report["message"]), report
    assert report["works_afterwards"] is True
    assert report["lost_bytes"] < 8 << 20


def test_requests_leave_memory_as_it_was(
    demo: "Pair", prompts: list[list[int]], device: str, tools: "Toolbox", measured: "Measured"
) -> None:
    """200 requests of mixed lengths, after one round of them all. The prefix cache is full within that."""
    lengths = [(1, 3), (7, 24), (40, 8), (90, 12), (200, 5), (256, 2), (300, 16), (33, 40)]
    tokens = [token for ids in prompts for token in ids]
    on_gpu = tools.memory(device).kind != "cpu"
    free, resident = [], []
    options = EngineOptions(n_ctx=512, device=device, prefix_bytes=16 << 20)
    with pydflash.Engine.open(demo.target, demo.draft, options) as engine:
        for i in range(200 + 2 * len(lengths)):
            n, n_new = lengths[i % len(lengths)]
            at = 31 * i % (len(tokens) - n)
            width = (None, 16, 4)[i % 3]
            result = engine.generate(tokens[at : at + n], SamplingOptions(max_tokens=n_new, width=width, seed=i))
            assert 1 <= len(result.token_ids) <= n_new
            if i >= 2 * len(lengths):
                free.append(tools.memory(device).memory_free)
                resident.append(resident_bytes())
    measured("device bytes lost over 200 requests", free[0] - free[-1] if on_gpu else "not a GPU")
    measured("host bytes gained over 200 requests", resident[-1] - resident[0])
    assert resident[-1] - resident[0] < 32 << 20
    if on_gpu:
        assert free[0] - min(free) < 16 << 20
        assert free[0] - free[-1] < 4 << 20


def test_closing_gives_everything_back(real_gpu: str, tools: "Toolbox", prompts: list[list[int]]) -> None:
    def once() -> None:
        with pydflash.Engine.open(options=EngineOptions(n_ctx=1024, device=real_gpu)) as engine:
            engine.generate(prompts[0], SamplingOptions(max_tokens=16))

    once()
    free = tools.memory(real_gpu).memory_free
    for _ in range(10):
        once()
    assert free - tools.memory(real_gpu).memory_free < 8 << 20
