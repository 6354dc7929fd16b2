"""Masks on draws, and prompts given in pieces."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

import pydflash
from pydflash.decoder import MaskFn

PROMPT = "import os\nimport sys\n\ndef main(argv):\n"
EVERY = np.uint32(0xFFFFFFFF)
EVEN = np.uint32(0x55555555)


@pytest.fixture(scope="module")
def engine() -> Iterator[pydflash.Engine]:
    with pydflash.Engine.open(options=pydflash.EngineOptions(n_threads=1, n_ctx=512)) as engine:
        yield engine


def words(value: np.uint32) -> MaskFn:
    def mask(_emitted: tuple[int, ...], allowed: npt.NDArray[np.uint32]) -> None:
        assert not allowed.any()
        allowed[:] = value

    return mask


def decode(
    engine: pydflash.Engine, width: int, mask: MaskFn | None, *, pieces: int = 1, n: int = 40, **sampling: float
) -> tuple[list[int], pydflash.DecoderStats]:
    decoder, ids = engine.decoder, engine.encode(PROMPT)
    decoder.reset()
    decoder.begin(pydflash.SamplingOptions(seed=7, **sampling), stop_ids=[])  # type: ignore[arg-type]
    for begin in range(pieces - 1):
        decoder.feed(ids[begin : begin + 1])
    tokens = list(decoder.prefill(ids[pieces - 1 :], n, mask=mask).tokens)
    while len(tokens) < n:
        tokens += decoder.step(width, n - len(tokens), mask=mask).tokens
    return tokens, decoder.stats


def test_a_mask_that_allows_everything_changes_nothing(engine: pydflash.Engine) -> None:
    plain, _ = decode(engine, 1, None)
    masked, stats = decode(engine, 8, words(EVERY))
    assert masked == plain
    assert stats.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_under_a_mask_give_the_text_of_masked_plain_decoding(
    engine: pydflash.Engine, temperature: float
) -> None:
    alone, _ = decode(engine, 1, words(EVEN), temperature=temperature)
    drafted, stats = decode(engine, 8, words(EVEN), temperature=temperature)
    assert drafted == alone
    assert all(token % 2 == 0 for token in drafted)
    assert stats.accepted > 0
    unmasked, _ = decode(engine, 1, None, temperature=temperature)
    assert unmasked != alone


def test_the_mask_sees_every_token_of_a_call_in_order(engine: pydflash.Engine) -> None:
    seen: list[tuple[int, ...]] = []

    def mask(emitted: tuple[int, ...], allowed: npt.NDArray[np.uint32]) -> None:
        seen.append(emitted)
        allowed[:] = EVERY

    engine.decoder.reset()
    engine.decoder.begin(pydflash.SamplingOptions(), stop_ids=[])
    engine.decoder.prefill(engine.encode(PROMPT), 100)
    for _ in range(8):
        seen.clear()
        result = engine.decoder.step(8, 100, mask=mask)
        assert seen == [result.tokens[:i] for i in range(len(result.tokens))]


def test_logprobs_stay_those_of_the_whole_vocabulary(engine: pydflash.Engine) -> None:
    decoder = engine.decoder
    decoder.reset()
    decoder.begin(pydflash.SamplingOptions(logprobs=5))
    only = 1234

    def mask(_emitted: tuple[int, ...], allowed: npt.NDArray[np.uint32]) -> None:
        allowed[only // 32] = 1 << (only % 32)

    result = decoder.prefill(engine.encode(PROMPT), 10, mask=mask)
    assert result.tokens == (only,)
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    assert result.logprobs[0] < result.top_logprobs[0][0][1] < 0.0
    decoder.reset()
    decoder.begin(pydflash.SamplingOptions(logprobs=5))
    free = decoder.prefill(engine.encode(PROMPT), 10)
    assert free.top_logprobs == result.top_logprobs


def test_a_mask_without_tokens_is_refused_and_the_decoder_can_be_used_again(engine: pydflash.Engine) -> None:
    with pytest.raises(pydflash.InvalidArgumentError, match="mask"):
        decode(engine, 8, words(np.uint32(0)))
    assert decode(engine, 8, None)[0] == decode(engine, 8, words(EVERY))[0]


def test_an_exception_of_a_mask_comes_out_as_itself(engine: pydflash.Engine) -> None:
    calls = 0

    def mask(_emitted: tuple[int, ...], allowed: npt.NDArray[np.uint32]) -> None:
        nonlocal calls
        calls += 1
        allowed[:] = EVERY
        if calls == 12:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        decode(engine, 8, mask)
    assert decode(engine, 8, None)[0] == decode(engine, 1, None)[0]


def test_a_prompt_in_pieces_gives_the_tokens_of_a_whole_one(engine: pydflash.Engine) -> None:
    whole, _ = decode(engine, 8, None)
    pieces, stats = decode(engine, 8, None, pieces=6)
    assert pieces == whole
    assert stats.prompt_tokens == len(engine.encode(PROMPT))


def test_feed_needs_a_token_and_draws_none(engine: pydflash.Engine) -> None:
    with pydflash.TargetCache(engine.target, 64) as cache, pydflash.Decoder(cache) as decoder:
        with pytest.raises(pydflash.InvalidArgumentError, match="begun"):
            decoder.prefill([1], 1)
        decoder.begin()
        with pytest.raises(pydflash.InvalidArgumentError):
            decoder.feed([])
        with pytest.raises(pydflash.CapacityError):
            decoder.feed(list(range(65)))
        seen: list[pydflash.Progress] = []
        decoder.feed([1, 2, 3], seen.append)
        assert seen[-1] == pydflash.Progress(3, 3)
        assert decoder.tokens == [1, 2, 3]
        with pytest.raises(pydflash.InvalidArgumentError, match="prefill"):
            decoder.step(1, 4)


def test_progress_and_a_mask_exclude_each_other(engine: pydflash.Engine) -> None:
    engine.decoder.reset()
    engine.decoder.begin()
    with pytest.raises(pydflash.InvalidArgumentError, match="progress"):
        engine.decoder.prefill([1], 1, lambda _: None, mask=words(EVERY))
