"""The same file on the GPU and on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.widened import widened

import pydflash

if TYPE_CHECKING:
    from conftest import Measured, Pair, Toolbox

    from pydflash.options import CacheType

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_row_by_own_kernels")]
OpenTarget = Callable[..., pydflash.TargetModel]


@pytest.mark.parametrize("name", ["demo", "dense", "hd256", "wide", "tiny", "tiny-moe", "tiny-tied"])
def test_target_logits(
    open_target: OpenTarget,
    model_path: Callable[[str], Path],
    tools: "Toolbox",
    measured: "Measured",
    tmp_path: Path,
    name: str,
) -> None:
    """The CPU multiplies the same weights in float32: its own kernels for quantised ones round activations, too."""
    here = open_target(name)
    ids = np.random.default_rng(5).integers(0, here.n_vocab, 96).astype(np.int32)
    with (
        pydflash.TargetModel.open(widened(model_path(name), tmp_path / "widened.gguf"), "CPU") as there,
        pydflash.TargetCache(here, 256) as cache,
        pydflash.TargetCache(there, 256) as reference,
    ):
        found, wanted = (c.forward(ids, logits="all").logits for c in (cache, reference))
        worst, part = tools.worst_state(cache, reference)
    error = tools.difference(found, wanted)
    measured(f"{name}, GPU and CPU: logits", error)
    measured(f"{name}, GPU and CPU: largest logit difference", float(np.abs(found - wanted).max()))
    measured(f"{name}, GPU and CPU: worst state ({part})", worst)
    assert error < tools.other_device
    assert worst < tools.other_device
    assert (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.95


@pytest.mark.parametrize(
    ("k_type", "v_type"), [("f32", "f32"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "f16")]
)
def test_key_value_types(
    open_target: OpenTarget, tools: "Toolbox", measured: "Measured", k_type: "CacheType", v_type: "CacheType"
) -> None:
    here, there = open_target("demo"), open_target("demo", on="CPU")
    ids = np.random.default_rng(6).integers(0, here.n_vocab, 96).astype(np.int32)
    with (
        pydflash.TargetCache(here, 256, k_type, v_type) as cache,
        pydflash.TargetCache(there, 256, k_type, v_type) as reference,
    ):
        found, wanted = (c.forward(ids, logits="all").logits for c in (cache, reference))
    error = tools.difference(found, wanted)
    measured(f"keys and values in {k_type}, GPU and CPU: logits", error)
    assert error < (3 * tools.other_device if k_type == "q4_0" else tools.other_device)


def test_draft_logits(
    demo: "Pair", demo_on_cpu: "Pair", prompts: list[list[int]], tools: "Toolbox", measured: "Measured"
) -> None:
    """The drafter over features of its own device's target: the same proposals but for near ties."""
    worst, equal, total = 0.0, 0, 0
    for ids in prompts[::3]:
        found = []
        for pair in (demo, demo_on_cpu):
            layers = pair.draft.config.target_layer_ids
            with (
                pydflash.TargetCache(pair.target, 512, capture_layers=layers) as cache,
                pydflash.DraftContext(pair.draft) as context,
            ):
                cache.forward(ids[:-1], logits="none")
                context.append(cache, 0, len(ids) - 1)
                found.append(context.propose(ids[-1], logits=True))
        assert found[0].logits is not None
        assert found[1].logits is not None
        worst = max(worst, tools.difference(found[0].logits, found[1].logits))
        equal, total = equal + int((found[0].ids == found[1].ids).sum()), total + len(found[0].ids)
    measured("demo, GPU and CPU: draft logits", worst)
    measured("demo, GPU and CPU: equal proposals", f"{equal} of {total}")
    assert worst < 2 * tools.other_device
    assert equal > 0.9 * total


def test_features_from_host_memory_give_the_same_context(
    demo: "Pair", prompts: list[list[int]], tools: "Toolbox"
) -> None:
    """Appending from the cache's ring, from host memory and from a mirror on the device."""
    ids = prompts[0]
    n = len(ids) - 1
    draft = demo.draft
    with (
        pydflash.TargetCache(demo.target, 512, capture_layers=draft.config.target_layer_ids) as cache,
        pydflash.DraftContext(draft) as direct,
        pydflash.DraftContext(draft) as by_host,
        pydflash.DraftContext(draft) as by_mirror,
        pydflash.DraftFeatureMirror(draft, capacity=256) as mirror,
    ):
        cache.forward(ids[:-1], logits="none")
        direct.append(cache, 0, n)
        by_host.append_host(cache.features(0, n), 0)
        mirror.sync_range(cache, 0, n)
        by_mirror.append_mirror(mirror, 0, n)
        reference = direct.propose(ids[-1], logits=True).logits
        assert reference is not None
        for context in (by_host, by_mirror):
            found = context.propose(ids[-1], logits=True).logits
            assert found is not None
            assert tools.difference(found, reference) < 1e-5


def test_mirror_types(demo: "Pair", prompts: list[list[int]], tools: "Toolbox", measured: "Measured") -> None:
    """Rows come back as exactly as the storage allows, over the ring's end and behind it."""
    ids = np.resize(np.array(prompts[0], np.int32), 90)
    with pydflash.TargetCache(demo.target, 256, capture_layers=demo.draft.config.target_layer_ids) as cache:
        cache.forward(ids, logits="none")
        rows = cache.features(0, 90)
        limits = {"f32": 0.0, "f16": 1e-3, "bf16": 5e-3, "q8_0": 1e-2, "q4_0": 0.15}
        for dtype, limit in limits.items():
            with pydflash.DraftFeatureMirror(demo.draft, capacity=64, dtype=dtype) as mirror:  # type: ignore[arg-type]
                mirror.sync_range(cache, 0, 40)
                mirror.sync_range(cache, 40, 50)
                begin, end = mirror.valid_range
                assert (begin, end) == (26, 90)
                error = tools.difference(mirror.rows(begin, end), rows[begin:end])
                measured(f"mirror in {dtype}", error)
                assert error <= limit
                with pytest.raises(pydflash.InvalidArgumentError):
                    mirror.rows(25, 90)
