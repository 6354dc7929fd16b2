"""Acceptance does not fade with the length of the context: windows, rings and stored types of the drafter's context.

The target is nano with a short memory (its states decay eight times as fast, its attention adds nothing), so the same
prompt goes on with the same text behind any amount of other text. d-long was taught on it; both layers slide.
scripts/bench_long_context.py takes the same pair to 128K.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.gguf_edit import Tensors, edit_gguf
from support.goldens import step_golden

import pydflash
from pydflash import SamplingOptions, builtin
from pydflash.text.tokenizer import Tokenizer

Path_ = Callable[[str], Path]


def forget(table: Tensors) -> None:
    data, kind = table["blk.3.attn_output.weight"]
    table["blk.3.attn_output.weight"] = (np.zeros_like(data), kind)
    for layer in range(3):
        data, kind = table[f"blk.{layer}.ssm_a"]
        table[f"blk.{layer}.ssm_a"] = (data * np.float32(8.0), kind)


@pytest.fixture(scope="module")
def forgetful(f32_path: Path_, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pydflash.TargetModel]:
    path = edit_gguf(f32_path("nano"), tmp_path_factory.mktemp("long") / "forgetful.gguf", tensors=forget)
    with pydflash.TargetModel.open(path, n_threads=1) as target:
        yield target


def decode(
    target: pydflash.TargetModel, path: Path, n: int, prompt: list[int], slack: int = 64
) -> tuple[list[int], list[int], float]:
    """Text behind n tokens in front of a prompt, tokens of each step, and the least time of a draft."""
    filler = np.random.default_rng(0).integers(0, 256, n).tolist()
    with (
        pydflash.DraftModel.open(path, target) as draft,
        pydflash.TargetCache(
            target, n + 256, k_type="f32", v_type="f32", capture_layers=draft.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(draft, "f32", "f32", slack=slack) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
        out = list(decoder.prefill(filler + prompt, 64).tokens)
        lengths, ms = [], []
        while len(out) < 64:
            step = decoder.step(8, 64 - len(out))
            out += step.tokens
            lengths.append(len(step.tokens))
            ms += [step.draft_ms] if step.n_proposed else []
        return out, lengths, min(ms)


@pytest.mark.parametrize("slack", [0, 64, 1000])
def test_acceptance_is_flat_over_the_context(forgetful: pydflash.TargetModel, f32_path: Path_, slack: int) -> None:
    """Every step is the reference's at any depth, whatever the ring's size, and a draft costs the same."""
    case = step_golden("d-long")["cases"][0]
    least = {}
    for n in (0, 300, 1024, 8192):
        text, lengths, least[n] = decode(forgetful, f32_path("d-long"), n, case["prompt"], slack)
        assert text == case["greedy"]
        assert lengths == [produced for _, _, produced in case["steps"]]
    assert least[8192] < 3 * least[1024]


def test_the_window_is_what_counts(forgetful: pydflash.TargetModel, f32_path: Path_, tmp_path: Path) -> None:
    """Other windows with the same ring accept less, a too long one only once there is more context than was trained."""
    case = step_golden("d-long")["cases"][0]
    steps = {}
    for window in (4, 24, 900):
        path = edit_gguf(f32_path("d-long"), tmp_path / "window.gguf", {"dflash.attention.sliding_window": window})
        for n in (0, 1024):
            text, lengths, _ = decode(forgetful, path, n, case["prompt"])
            assert text == case["greedy"]
            steps[window, n] = len(lengths)
    assert steps[24, 0] == steps[24, 1024]
    assert steps[4, 1024] > steps[24, 1024]
    assert steps[900, 1024] > steps[24, 1024]


def test_far_positions_draft_as_near_ones(forgetful: pydflash.TargetModel, f32_path: Path_) -> None:
    """The same features from position 131,072 on give the same proposals: only distances count."""
    case = step_golden("d-long")["cases"][0]
    ids = case["prompt"] + case["greedy"]
    with (
        pydflash.DraftModel.open(f32_path("d-long"), forgetful) as draft,
        pydflash.TargetCache(
            forgetful, 512, k_type="f32", v_type="f32", capture_layers=draft.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(draft, "f32", "f32") as context,
    ):
        cache.forward(np.array(ids), logits="none")
        features = cache.features(0, len(ids))
        for end in range(len(case["prompt"]), len(ids) - 1, 9):
            found = []
            for base in (0, 131_072):
                context.reset(base)
                context.append_host(features[:end], base)
                found.append(context.propose(ids[end], logits=True))
            np.testing.assert_array_equal(found[0].ids, found[1].ids)
            assert found[0].logits is not None
            assert found[1].logits is not None
            assert np.abs(found[0].logits - found[1].logits).max() < 0.1


def test_quantised_keys_and_values_keep_acceptance() -> None:
    """With rotation, q8_0 and q4_0 in cache and context are within 3 % of f16 on the same texts."""
    path = Path(__file__).parents[2] / "scripts" / "bench_kv_types.py"
    spec = importlib.util.spec_from_file_location("bench_kv_types", path)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    prompts = ["import os\n\n\ndef walk(path):\n", "class Queue:\n    def __init__(self):\n", "def add(a, b):\n"]
    prompts.append("def quicksort(items):\n    if len(items) <= 1:\n        return items\n")
    with (
        pydflash.TargetModel.open(builtin.target_path(), n_threads=1) as target,
        pydflash.DraftModel.open(builtin.draft_path(), target) as draft,
        pydflash.DraftContext(draft, "q4_0", "q4_0") as small,
        pydflash.DraftContext(draft, "f16", "f16") as large,
    ):
        assert small.state.memory_bytes < 0.35 * large.state.memory_bytes
        tokenizer = Tokenizer.from_metadata(target.metadata)
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        texts = [bench.continued(target, prompt, 64) for prompt in ids]
        steps = {
            types: sum(bench.steps_along(target, draft, *pair, types) for pair in zip(ids, texts, strict=True))
            for types in (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
        }
    assert steps["q8_0", "q8_0"] <= 1.03 * steps["f16", "f16"]
    assert steps["q4_0", "q4_0"] <= 1.03 * steps["f16", "f16"]
