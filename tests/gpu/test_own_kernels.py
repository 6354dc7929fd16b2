"""pydflash's own CUDA kernels: a row's result has the same bits whatever the number of rows beside it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.widened import widened

import pydflash
from pydflash import EngineOptions, SamplingOptions
from pydflash.text import Tokenizer

if TYPE_CHECKING:
    from conftest import Measured, Pair, Toolbox

pytestmark = pytest.mark.gpu
MODELS = ["demo", "dense", "hd256", "wide", "tiny", "tiny-tied"]
OpenTarget = Callable[..., pydflash.TargetModel]


@pytest.fixture(autouse=True)
def own_kernels(real_gpu: str) -> Iterator[None]:
    if not pydflash.own_kernel_counts():
        pytest.skip("this build has no kernels of its own")
    assert pydflash.own_kernel_rows() == 32, "they are on by default"
    yield
    pydflash.own_kernel_rows(32)


def ids_of(model: pydflash.TargetModel, n: int) -> np.ndarray:
    if model.config.name == "Target":
        text = Path(random.__file__).read_text(encoding="utf-8")
        return np.array(Tokenizer.from_metadata(model.metadata).encode(text[4000:][: 12 * n])[:n], np.int32)
    return np.random.default_rng(5).integers(0, model.n_vocab, n).astype(np.int32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_before", [7, 250, 300])
def test_rows_have_the_same_bits_at_every_width(
    open_target: OpenTarget, tools: "Toolbox", name: str, n_before: int
) -> None:
    """Also where a block crosses a run of 256 positions, and whatever stands beside a row."""
    model = open_target(name)
    ids = ids_of(model, n_before + 16)
    block = ids[n_before:]
    with pydflash.TargetCache(model, capacity=1024) as alone, pydflash.TargetCache(model, capacity=1024) as together:
        for cache in (alone, together):
            cache.forward(ids[:n_before], logits="none")
        wanted = np.concatenate([alone.forward(block[i : i + 1], logits="all").logits for i in range(len(block))])
        taken = pydflash.own_kernel_counts()
        assert taken["attention"] > 0
        assert taken["matmul"] + taken["float matmul"] > 0
        for width in (2, 3, 5, 8, 9, 16):
            verify = together.verify(block[:width])
            np.testing.assert_array_equal(verify.logits, wanted[:width], err_msg=f"width {width}")
            verify.commit(0)
        other = block.copy()
        other[9:] = (other[9:] + 11) % model.n_vocab
        np.testing.assert_array_equal(together.verify(other).logits[:9], wanted[:9])
        together.verify(block).commit(len(block))
        for key, values in tools.state_of(alone).items():
            np.testing.assert_array_equal(tools.state_of(together)[key], values, err_msg=key)


def test_greedy_and_sampled_texts_are_those_of_plain_decoding(
    demo: "Pair", prompts: list[list[int]], device: str, measured: "Measured"
) -> None:
    """Token for token, at every width."""
    plans = [
        SamplingOptions(max_tokens=160, logprobs=1),
        SamplingOptions(max_tokens=96, temperature=0.8, seed=11, logprobs=1),
    ]
    options = EngineOptions(n_ctx=512, device=device)
    with pydflash.Engine.open(demo.target, None, options) as engine:
        wanted = [[engine.generate(ids, plan).token_ids for ids in prompts] for plan in plans]
    steps = emitted = 0
    with pydflash.Engine.open(demo.target, demo.draft, options) as engine:
        for plan, texts in zip(plans, wanted, strict=True):
            for width in (None, 2, 5, 8, 16):
                for ids, text in zip(prompts, texts, strict=True):
                    result = engine.generate(ids, SamplingOptions(**{**_fields(plan), "width": width}))
                    assert result.token_ids == text, f"width {width}, temperature {plan.temperature}"
                    steps, emitted = steps + result.stats.steps, emitted + result.stats.emitted - 1
    measured("own kernels: requests with equal text", 2 * 5 * len(prompts))
    measured("own kernels: tokens a step", emitted / steps)


def _fields(options: SamplingOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


@pytest.mark.parametrize("name", ["demo", "wide", "hd256", "tiny"])
def test_results_are_nearer_to_float32_than_those_of_ggml(
    open_target: OpenTarget,
    model_path: Callable[[str], Path],
    tools: "Toolbox",
    measured: "Measured",
    tmp_path: Path,
    name: str,
) -> None:
    """The reference multiplies the same weights in float32 on the CPU."""
    model = open_target(name)
    ids = ids_of(model, 48)

    def logits(target: pydflash.TargetModel) -> np.ndarray:
        with pydflash.TargetCache(target, capacity=256) as cache:
            return cache.forward(ids, logits="all", chunk=16).logits

    with pydflash.TargetModel.open(widened(model_path(name), tmp_path / "widened.gguf"), "CPU") as exact:
        reference = logits(exact)
    own = tools.difference(logits(model), reference)
    pydflash.own_kernel_rows(0)
    stock = tools.difference(logits(model), reference)
    measured(f"{name}: own kernels against float32", own)
    measured(f"{name}: ggml's kernels against float32", stock)
    assert own <= stock
    assert own < tools.other_device


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("most", "chunks"), [(32, (1, 3, 16, 32)), (512, (300, 1, 3, 16, 33, 100))])
def test_chunks_of_a_prompt_have_the_same_bits(
    open_target: OpenTarget, tools: "Toolbox", name: str, most: int, chunks: tuple[int, ...]
) -> None:
    """Those that the kernels take; with 512 rows, every prompt."""
    pydflash.own_kernel_rows(most)
    model = open_target(name)
    ids = ids_of(model, 300)
    with pydflash.TargetCache(model, capacity=512) as first, pydflash.TargetCache(model, capacity=512) as other:
        wanted = first.forward(ids, logits="all", chunk=chunks[0]).logits
        for chunk in chunks[1:]:
            other.reset()
            logits = other.forward(ids, logits="all", chunk=chunk).logits
            np.testing.assert_array_equal(logits, wanted, err_msg=f"chunks of {chunk}")
            for key, values in tools.state_of(first).items():
                np.testing.assert_array_equal(tools.state_of(other)[key], values, err_msg=f"chunks of {chunk}: {key}")
