"""Decoder from Python: results of steps, sampling options, statistics, and what a step costs outside native code."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import pydflash
from pydflash import Decoder, DraftContext, DraftFeatureMirror, DraftModel, SamplingOptions, TargetCache, TargetModel

PROMPT = [301, 40, 7, 999, 1200, 3, 77]


@pytest.fixture
def decoder(target: TargetModel, drafter: DraftModel) -> Iterator[Decoder]:
    with ExitStack() as stack:
        layers = drafter.config.target_layer_ids
        cache = stack.enter_context(TargetCache(target, 512, capture_layers=layers))
        context = stack.enter_context(DraftContext(drafter))
        yield stack.enter_context(Decoder(cache, context))


def run(decoder: Decoder, sampling: SamplingOptions, n: int, width: int) -> list[int]:
    """n new tokens of the prompt."""
    decoder.reset()
    decoder.begin(sampling)
    result = decoder.prefill(PROMPT, n)
    tokens = list(result.tokens)
    while len(tokens) < n and result.reason == "none":
        result = decoder.step(width, n - len(tokens))
        tokens += result.tokens
    decoder.settle()
    assert decoder.tokens == PROMPT + tokens
    assert decoder.position == len(PROMPT) + len(tokens) - 1
    return tokens


def test_steps(decoder: Decoder) -> None:
    decoder.begin()
    first = decoder.prefill(PROMPT, 40)
    assert (len(first.tokens), first.n_proposed, first.reason) == (1, 0, "none")
    assert first.logprobs is None
    assert first.top_logprobs is None
    emitted = 1
    while emitted < 40:
        before = decoder.position
        result = decoder.step(16, 40 - emitted)
        emitted += len(result.tokens)
        assert result.n_proposed == result.width - 1
        assert result.n_accepted <= result.n_proposed
        assert len(result.tokens) in (result.n_accepted, result.n_accepted + 1)
        assert result.width <= min(16, 40)
        assert decoder.position == before + len(result.tokens)
        assert min(result.draft_ms, result.verify_ms, result.accept_ms, result.commit_ms, result.append_ms) >= 0
        assert all(type(token) is int for token in result.tokens)
    assert result.reason == "budget"
    stats = decoder.stats
    assert (stats.prompt_tokens, stats.emitted, stats.position) == (7, 40, decoder.position)
    assert stats.room == 512 - stats.position
    assert stats.steps == stats.draft_steps > 0
    assert sum(stats.proposed_by_slot) == stats.proposed
    assert sum(stats.accepted_by_slot) == stats.accepted
    assert len(stats.proposed_by_slot) == len(stats.accepted_by_slot) <= 15
    assert stats.proposed_by_slot == tuple(sorted(stats.proposed_by_slot, reverse=True))
    assert (stats.has_drafter, stats.draft_disabled, stats.max_width) == (True, "", 16)
    assert stats.prefill_ms > 0
    decoder.begin()
    assert decoder.stats.emitted == 0


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(ignore_eos=True),
        SamplingOptions(temperature=1.0, seed=7, ignore_eos=True),
        SamplingOptions(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, seed=2**64 - 1, ignore_eos=True),
        SamplingOptions(repeat_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "filtered", "penalties"],
)
def test_the_drafter_changes_nothing_but_the_speed(decoder: Decoder, sampling: SamplingOptions) -> None:
    alone = run(decoder, sampling, 48, 1)
    assert decoder.stats.proposed == 0
    drafted = run(decoder, sampling, 48, 16)
    assert decoder.stats.proposed > 0
    assert drafted == alone
    assert len(alone) == 48


def test_seeds(decoder: Decoder) -> None:
    hot = SamplingOptions(temperature=1.5, ignore_eos=True)
    decoder.begin(hot)
    seeds = {decoder.begin(hot) for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert decoder.begin(SamplingOptions(seed=5)) == 5
    texts = {tuple(run(decoder, SamplingOptions(temperature=1.5, seed=seed), 12, 1)) for seed in range(6)}
    assert len(texts) > 3


def test_logprobs(decoder: Decoder) -> None:
    decoder.begin(SamplingOptions(logprobs=3, ignore_eos=True))
    results = [decoder.prefill(PROMPT, 30)] + [decoder.step(16, 20) for _ in range(4)]
    for result in results:
        assert result.logprobs is not None
        assert result.top_logprobs is not None
        assert len(result.logprobs) == len(result.top_logprobs) == len(result.tokens)
        for token, logprob, top in zip(result.tokens, result.logprobs, result.top_logprobs, strict=True):
            assert len(top) == 3
            assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
            assert top[0] == (token, pytest.approx(logprob))  # greedy
            assert sum(math.exp(value) for _, value in top) <= 1.0001
    decoder.reset()
    decoder.begin(SamplingOptions(logprobs=0))
    result = decoder.prefill(PROMPT, 3)
    assert result.logprobs == (results[0].logprobs or ())[:1]
    assert result.top_logprobs is None
    decoder.begin(SamplingOptions())
    assert decoder.step(1, 2).logprobs is None


def test_logit_bias_and_stop_ids(decoder: Decoder) -> None:
    greedy = run(decoder, SamplingOptions(ignore_eos=True), 12, 16)
    forced = run(decoder, SamplingOptions(logit_bias={2000: 1000.0}), 5, 16)
    assert forced == [2000] * 5
    banned = run(decoder, SamplingOptions(logit_bias={greedy[0]: -math.inf}, ignore_eos=True), 12, 16)
    assert greedy[0] not in banned
    stop = next(token for i, token in enumerate(greedy) if i >= 4 and token not in greedy[:i])
    for width in (1, 16):
        decoder.reset()
        decoder.begin(SamplingOptions(), stop_ids=[stop, 4094])
        result, tokens = decoder.prefill(PROMPT, 12), []
        while result.reason == "none":
            tokens += result.tokens
            result = decoder.step(width, 12)
        tokens += result.tokens
        assert result.reason == "stop"
        assert tokens == greedy[: greedy.index(stop) + 1]
    decoder.reset()
    decoder.begin(SamplingOptions(logit_bias={4094: 1000.0}), stop_ids=[])
    assert decoder.prefill(PROMPT, 5).reason == "none"
    decoder.reset()
    decoder.begin(SamplingOptions(logit_bias={4094: 1000.0}))
    assert decoder.prefill(PROMPT, 5).reason == "stop"
    with pytest.raises(pydflash.InvalidArgumentError, match="9999"):
        decoder.begin(SamplingOptions(), stop_ids=[9999])
    with pytest.raises(pydflash.InvalidArgumentError, match="9999"):
        decoder.begin(SamplingOptions(logit_bias={9999: 1.0}))


def test_settle_keeps_what_it_is_told_to(decoder: Decoder) -> None:
    decoder.begin(SamplingOptions(ignore_eos=True))
    decoder.prefill(PROMPT, 100)
    result = decoder.step(16, 100)
    while len(result.tokens) < 2:
        result = decoder.step(16, 100)
    before = decoder.tokens
    n = len(result.tokens)
    with pytest.raises(pydflash.InvalidArgumentError):
        decoder.settle(0)
    with pytest.raises(pydflash.InvalidArgumentError):
        decoder.settle(n + 1)
    decoder.settle(1)
    assert decoder.tokens == before[: len(before) - n + 1]
    assert decoder.cache.position == decoder.position == len(decoder.tokens) - 1
    decoder.settle()
    again = decoder.step(16, 100)
    assert decoder.tokens[: len(before)] == before[: len(decoder.tokens)] or again.tokens


def test_order_of_calls_and_limits(decoder: Decoder) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match="begun"):
        decoder.prefill(PROMPT, 10)
    with pytest.raises(pydflash.InvalidArgumentError, match="prefill"):
        decoder.step(1, 10)
    decoder.begin()
    for budget in (0, -1):
        with pytest.raises(pydflash.InvalidArgumentError, match="budget"):
            decoder.prefill(PROMPT, budget)
    with pytest.raises(pydflash.InvalidArgumentError, match="empty"):
        decoder.prefill([], 10)
    with pytest.raises(pydflash.CapacityError):
        decoder.prefill([1] * 513, 10)
    assert decoder.prefill([1] * 512, 10).tokens
    assert decoder.room == 0
    with pytest.raises(pydflash.CapacityError, match="512"):
        decoder.step(16, 10)
    decoder.reset()
    assert (decoder.position, decoder.tokens) == (0, [])


def test_without_a_drafter(target: TargetModel) -> None:
    with TargetCache(target, 64, capture_layers=()) as cache, Decoder(cache) as decoder:
        assert (decoder.max_width, decoder.has_drafter, decoder.draft_context) == (1, False, None)
        decoder.begin()
        decoder.prefill(PROMPT, 10)
        assert decoder.step(16, 10).width == 1


def test_pieces_must_fit(target: TargetModel, drafter: DraftModel) -> None:
    with TargetCache(target, 64, capture_layers=(0, 2)) as cache, DraftContext(drafter) as context:
        with pytest.raises(pydflash.SnapshotMismatchError, match="layers"):
            Decoder(cache, context)
        with pytest.raises(pydflash.InvalidArgumentError, match="on_draft_failure"):
            Decoder(cache, on_draft_failure="ignore")  # type: ignore[arg-type]
        with pytest.raises(pydflash.InvalidArgumentError, match="prefill_chunk"):
            Decoder(cache, prefill_chunk=0)


def test_through_a_mirror(target: TargetModel, drafter: DraftModel, decoder: Decoder) -> None:
    expected = run(decoder, SamplingOptions(ignore_eos=True), 40, 16)
    accepted = decoder.stats.accepted
    with ExitStack() as stack:
        cache = stack.enter_context(TargetCache(target, 512, capture_layers=drafter.config.target_layer_ids))
        context = stack.enter_context(DraftContext(drafter))
        mirror = stack.enter_context(DraftFeatureMirror(drafter, capacity=64))
        mirrored = stack.enter_context(Decoder(cache, context, mirror))
        assert run(mirrored, SamplingOptions(ignore_eos=True), 40, 16) == expected
        assert mirrored.stats.accepted == accepted
        assert mirror.valid_range[1] >= 40


def test_a_decoder_goes_on_from_a_filled_cache(target: TargetModel) -> None:
    with TargetCache(target, 64, capture_layers=()) as cache:
        expected = int(cache.forward(PROMPT).logits[0].argmax())
        cache.reset()
        cache.forward(PROMPT[:4])
        with Decoder(cache) as decoder:
            decoder.begin()
            assert decoder.prefill(PROMPT[4:], 5).tokens == (expected,)
            assert decoder.position == 7


def test_python_costs_little_beside_a_step(decoder: Decoder) -> None:
    """Less than 30 microseconds around the native call of a step, in the best of some rounds."""
    decoder.begin(SamplingOptions(ignore_eos=True))
    decoder.prefill(PROMPT, 400)
    rounds, n = [], 100
    for _ in range(20):
        begun = time.thread_time()
        for _ in range(n):
            with decoder._use() as (ptr, err):  # all that step() does but the native call
                decoder._step_result(ptr, err)
        rounds.append((time.thread_time() - begun) / n)
    assert min(rounds) < 30e-6


def test_results_are_values(decoder: Decoder) -> None:
    decoder.begin()
    first = decoder.prefill(PROMPT, 10)
    kept = (first.tokens, first.accept_ms)
    decoder.step(16, 9)
    assert (first.tokens, first.accept_ms) == kept
    with pytest.raises(AttributeError):
        first.width = 3  # type: ignore[misc]
    assert isinstance(np.array(first.tokens), np.ndarray)
