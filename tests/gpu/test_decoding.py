"""Whole requests on a GPU: with a drafter the text is the one without, up to near ties between two tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import pydflash
from pydflash import EngineOptions, SamplingOptions

if TYPE_CHECKING:
    from conftest import Measured, Pair, Toolbox

pytestmark = pytest.mark.gpu
N_NEW = 96


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


@pytest.fixture(scope="module")
def plain(demo: "Pair", prompts: list[list[int]], device: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Ids of plain greedy decoding for each prompt, and the gap between the two likeliest tokens at each place."""
    options = SamplingOptions(max_tokens=N_NEW, logprobs=2)
    found = []
    with pydflash.Engine.open(demo.target, None, EngineOptions(n_ctx=512, device=device)) as engine:
        for ids in prompts:
            result = engine.generate(ids, options)
            assert result.logprobs is not None
            gaps = tuple(entry.top[0][1] - entry.top[1][1] for entry in result.logprobs)
            found.append((result.token_ids, gaps))
    return found


@pytest.mark.parametrize("width", [2, 4, 8, 16, None])
def test_greedy_text_is_that_of_plain_decoding(
    demo: "Pair",
    prompts: list[list[int]],
    plain: list[tuple[tuple[int, ...], tuple[float, ...]]],
    device: str,
    tools: "Toolbox",
    measured: "Measured",
    width: int | None,
) -> None:
    n_differ, n_tokens, steps, emitted, gaps_at_difference = 0, 0, 0, 0, []
    with pydflash.Engine.open(demo.target, demo.draft, EngineOptions(n_ctx=512, device=device)) as engine:
        for ids, (wanted, gaps) in zip(prompts, plain, strict=True):
            result = engine.generate(ids, SamplingOptions(max_tokens=N_NEW, width=width))
            at = first_difference(result.token_ids, wanted)
            if at is None:
                assert len(result.token_ids) == len(wanted)
            else:
                n_differ += 1
                gaps_at_difference.append(gaps[at])
            n_tokens += len(wanted) if at is None else at
            steps, emitted = steps + result.stats.steps, emitted + result.stats.emitted - 1
            if width is not None:
                assert result.stats.accepted > 0
    label = f"width {width or 'chosen'}"
    measured(f"{label}: requests of {len(prompts)} whose text departs", n_differ)
    measured(f"{label}: tokens before that, all requests", n_tokens)
    measured(f"{label}: gaps where it departs", [round(gap, 4) for gap in gaps_at_difference])
    measured(f"{label}: tokens a step", emitted / steps)
    assert all(gap < tools.largest_gap for gap in gaps_at_difference)


def test_acceptance_is_that_of_the_cpu(
    demo: "Pair", demo_on_cpu: "Pair", prompts: list[list[int]], device: str, measured: "Measured"
) -> None:
    lengths = {}
    for name, pair, where in (("GPU", demo, device), ("CPU", demo_on_cpu, "cpu")):
        steps = emitted = 0
        with pydflash.Engine.open(pair.target, pair.draft, EngineOptions(n_ctx=512, device=where)) as engine:
            for ids in prompts[::2]:
                stats = engine.generate(ids, SamplingOptions(max_tokens=48, width=16)).stats
                steps, emitted = steps + stats.steps, emitted + stats.emitted - 1
        lengths[name] = emitted / steps
        measured(f"tokens a step of 16 on the {name}", lengths[name])
    assert lengths["GPU"] > 1.5
    assert lengths["GPU"] == pytest.approx(lengths["CPU"], rel=0.1)


def test_sampled_text_depends_on_the_seed_alone(
    demo: "Pair", prompts: list[list[int]], device: str, measured: "Measured"
) -> None:
    """The same run twice gives the same ids; with and without a drafter they depart seldom, at a draw near a border."""
    options = EngineOptions(n_ctx=512, device=device)
    runs: dict[str, list[tuple[int, ...]]] = {"plain": [], "plain again": [], "drafted": [], "drafted again": []}
    for name, texts in runs.items():
        draft = demo.draft if name.startswith("drafted") else None
        with pydflash.Engine.open(demo.target, draft, options) as engine:
            for seed, ids in enumerate(prompts[:12]):
                sampling = SamplingOptions(temperature=0.8, top_p=0.95, seed=seed, max_tokens=48, width=8)
                texts.append(engine.generate(ids, sampling).token_ids)
    assert runs["plain"] == runs["plain again"]
    assert runs["drafted"] == runs["drafted again"]
    departures = [first_difference(a, b) for a, b in zip(runs["plain"], runs["drafted"], strict=True)]
    n_equal = departures.count(None)
    measured("sampled texts of 12 that are equal with and without a drafter", n_equal)
    assert n_equal >= 8


@pytest.mark.parametrize("size", ["tiny", "tiny-moe"])
def test_a_drafter_that_is_never_right_changes_nothing(
    open_target: Callable[..., pydflash.TargetModel],
    model_path: Callable[[str], "object"],
    device: str,
    tools: "Toolbox",
    measured: "Measured",
    size: str,
) -> None:
    """Rejected blocks leave no trace: a made-up target whose every position has a distribution of its own."""
    target = open_target(size)
    folder = target.path.parent
    ids = list(range(300, 340))
    options = EngineOptions(n_ctx=512, device=device)
    greedy = SamplingOptions(max_tokens=64, logprobs=2, ignore_eos=True, width=16)
    with pydflash.Engine.open(target, None, options) as engine:
        wanted = engine.generate(ids, greedy)
    with pydflash.Engine.open(target, folder / "draft-ordinary.gguf", options) as engine:
        found = engine.generate(ids, SamplingOptions(max_tokens=64, ignore_eos=True, width=16))
    assert found.stats.proposed > 500
    assert found.stats.accepted < 0.1 * found.stats.proposed
    assert wanted.logprobs is not None
    at = first_difference(found.token_ids, wanted.token_ids)
    measured(f"{size}, rejected blocks: first difference", at)
    if at is not None:
        first, second = wanted.logprobs[at].top[:2]
        assert first[1] - second[1] < tools.largest_gap


def test_steps_build_and_allocate_nothing(demo: "Pair", prompts: list[list[int]], measured: "Measured") -> None:
    """Once each width was used: no graph, no memory, a few bytes each way, at every width and for plain decoding."""
    with (
        pydflash.TargetCache(demo.target, 512, capture_layers=demo.draft.config.target_layer_ids) as cache,
        pydflash.DraftContext(demo.draft) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        for width in (1, 2, 4, 8, 16):
            _cost_of_steps(decoder, prompts[1], width)  # this one builds
            n_steps, spent = _cost_of_steps(decoder, prompts[1], width)
            measured(f"a step of width {width}", {name: round(value, 2) for name, value in spent.items()})
            assert n_steps > 10
            assert spent["graphs_built"] == spent["buffers_allocated"] == 0
            assert 1 <= spent["graphs_computed"] <= 4
            assert spent["bytes_to_device"] < 16384
            assert spent["bytes_to_host"] < 1024


def _cost_of_steps(decoder: pydflash.Decoder, prompt: list[int], width: int) -> tuple[int, dict[str, float]]:
    """Steps up to a position at which more keys would need another graph, and the work of each."""
    decoder.reset()
    decoder.begin(SamplingOptions(), [])
    decoder.prefill(prompt, 1000)
    before = pydflash.work_counters()
    n_steps = 0
    while decoder.position < 224:
        decoder.step(width, 1000)
        n_steps += 1
    after = pydflash.work_counters()
    names = ("graphs_built", "buffers_allocated", "graphs_computed", "bytes_to_device", "bytes_to_host")
    return n_steps, {name: (getattr(after, name) - getattr(before, name)) / n_steps for name in names}
