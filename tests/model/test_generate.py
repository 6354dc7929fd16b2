"""Requests through the engine: the same text however it is computed, and where it ends."""

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

import pydflash
from pydflash import Engine, EngineOptions, SamplingOptions

EngineMaker = Callable[..., Engine]
WIDTHS = [1, 2, 3, 8, None]
N = 40


@pytest.mark.parametrize("width", WIDTHS)
def test_greedy_equals_another_implementation(
    make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]], width: int | None
) -> None:
    engine = make_engine()
    for prompt, wanted in zip(prompts, greedy, strict=True):
        n = min(N, len(wanted))
        result = engine.generate(prompt, SamplingOptions(max_tokens=n, ignore_eos=True, width=width))
        assert list(result.token_ids) == wanted[:n]
        assert result.finish_reason == "length"
        assert engine.decoder.tokens == prompt + wanted[:n]
        assert engine.decoder.position == len(prompt) + n - 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 17, 512])
def test_chunk_size_does_not_change_the_text(
    make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]], chunk: int
) -> None:
    engine = make_engine(prefill_chunk=chunk)
    result = engine.generate(prompts[0], SamplingOptions(max_tokens=N, ignore_eos=True))
    assert list(result.token_ids) == greedy[0][:N]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repeat_penalty": 1.2, "penalty_last_n": -1},
        {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {7: 3.0, 8: -math.inf}},
    ],
)
def test_same_seed_same_text_with_and_without_a_drafter(
    make_engine: EngineMaker, prompts: list[list[int]], options: dict[str, object]
) -> None:
    alone, drafted = make_engine(None), make_engine()
    for seed, prompt in enumerate(prompts):
        chosen = SamplingOptions(seed=seed, max_tokens=N, ignore_eos=True, **options)  # type: ignore[arg-type]
        wanted = alone.generate(prompt, chosen)
        for width in (8, None):
            got = drafted.generate(prompt, SamplingOptions(**{**_fields(chosen), "width": width}))  # type: ignore[arg-type]
            assert got.token_ids == wanted.token_ids
            assert got.text == wanted.text
            assert got.seed == seed


def _fields(options: SamplingOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in SamplingOptions.__dataclass_fields__}


def test_a_drawn_seed_is_reported_and_repeats_the_text(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    results = [engine.generate(prompts[0], SamplingOptions(temperature=1.5, max_tokens=12)) for _ in range(4)]
    seeds = [result.seed for result in results]
    assert len(set(seeds)) == 4
    again = engine.generate(prompts[0], SamplingOptions(temperature=1.5, max_tokens=12, seed=seeds[2]))
    assert again.token_ids == results[2].token_ids
    assert len({result.token_ids for result in results}) > 1


def test_the_first_token_is_drawn_like_all_others(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    """Its share over seeds is what its log-probability says."""
    engine = make_engine()
    wanted = engine.generate(prompts[0], SamplingOptions(max_tokens=1, logprobs=20, seed=0)).logprobs
    assert wanted is not None
    likeliest, logprob = wanted[0].top[0]
    n = 300
    drawn = [
        engine.generate(prompts[0], SamplingOptions(temperature=1.0, max_tokens=1, seed=seed)).token_ids[0]
        for seed in range(n)
    ]
    p = math.exp(logprob)
    assert abs(drawn.count(likeliest) / n - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert len(set(drawn)) > 5


def test_logprobs_with_and_without_a_drafter(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    alone, drafted = make_engine(None), make_engine()
    for prompt in prompts:
        options = SamplingOptions(max_tokens=N, ignore_eos=True, logprobs=3, width=8, seed=1)
        wanted, got = alone.generate(prompt, options).logprobs, drafted.generate(prompt, options).logprobs
        assert wanted is not None
        assert got is not None
        assert [entry.token_id for entry in got] == [entry.token_id for entry in wanted]
        np.testing.assert_allclose([e.logprob for e in got], [e.logprob for e in wanted], atol=1e-3)
        for ours, theirs in zip(got, wanted, strict=True):
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
            np.testing.assert_allclose([x for _, x in ours.top], [x for _, x in theirs.top], atol=1e-3)
    assert drafted.stats is not None
    assert drafted.stats.accepted > 0
    assert alone.generate(prompts[0], SamplingOptions(max_tokens=2)).logprobs is None
    chosen_only = alone.generate(prompts[0], SamplingOptions(max_tokens=2, logprobs=0)).logprobs
    assert chosen_only is not None
    assert chosen_only[0].top == ()


def _token_texts(engine: Engine, ids: list[int]) -> list[str]:
    """Text of an answer cut where its tokens end, whole characters only."""
    cuts = [len(_decoded(engine, ids[:n])) for n in range(len(ids) + 1)]
    text = _decoded(engine, ids)
    return [text[a:b] for a, b in pairwise(cuts)]


def _decoded(engine: Engine, ids: list[int]) -> str:
    data = b"".join(engine.tokenizer.token_bytes(i) for i in ids)
    stream = pydflash.text.Utf8Stream()
    return stream.feed(data)


@pytest.mark.parametrize("width", [1, 8])
def test_stop_text_at_every_place(
    make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]], width: int
) -> None:
    """Across up to three tokens, wherever blocks begin and end: text, ids and the decoder agree, and nothing leaks."""
    engine = make_engine()
    prompt, ids = prompts[0], greedy[0][:N]
    pieces = _token_texts(engine, ids)
    text = "".join(pieces)
    tested = 0
    for first in range(1, len(ids) - 3):
        begin = len("".join(pieces[:first])) + len(pieces[first]) // 2
        end = len("".join(pieces[: first + 3]))
        stop = text[begin:end]
        if not stop or "\ufffd" in stop or text.find(stop) != begin:
            continue
        tested += 1
        options = SamplingOptions(max_tokens=N, ignore_eos=True, stop=(stop,), width=width, seed=1)
        result = engine.generate(prompt, options)
        assert result.text == text[:begin]
        assert result.finish_reason == "stop"
        assert result.stop_text == stop
        n = len(result.token_ids)
        assert list(result.token_ids) == ids[:n]
        # The last token that counts began before the stop text, the next one did not.
        assert len(_decoded(engine, ids[: n - 1])) < begin
        assert len(_decoded(engine, ids[:n])) >= begin
        held = engine.decoder.tokens
        assert held[: len(prompt) + n] == prompt + ids[:n]
        if width == 8 and len(held) == len(prompt) + n:
            assert engine.decoder.step(1, 4).tokens == (ids[n],)
        shown = "".join(event.text for event in engine.stream(prompt, options))
        assert shown == result.text
    assert tested > 10


def test_a_stop_text_in_an_accepted_block_cuts_the_cache(
    make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    """Where the stop text lies inside one step, the decoder holds exactly the prompt and the ids."""
    engine = make_engine()
    exact = 0
    for prompt, ids in zip(prompts, greedy, strict=True):
        pieces = _token_texts(engine, ids[:N])
        for i, piece in enumerate(pieces):
            if len(piece) < 2 or "\ufffd" in piece or piece in "".join(pieces[:i]):
                continue
            result = engine.generate(prompt, SamplingOptions(max_tokens=N, ignore_eos=True, stop=piece, width=8))
            assert list(result.token_ids) == ids[:i]
            held = engine.decoder.tokens
            assert held[: len(prompt) + i] == prompt + ids[:i]
            # The step's first token cannot be taken back, since the token before it was consumed with it.
            assert len(held) <= len(prompt) + i + 1
            exact += len(held) == len(prompt) + i
    assert exact > 3


def test_stop_tokens_end_the_request_and_give_no_text(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    stop_id = min(engine.target.stop_ids)
    for after in (0, 3):
        free = engine.generate(prompts[0], SamplingOptions(max_tokens=after + 1, ignore_eos=True))
        # With a bias this strong the stop token is next; without penalties it would come at once.
        ids = list(free.token_ids[:after])
        result = engine.generate(
            prompts[0] + ids, SamplingOptions(max_tokens=20, logit_bias={stop_id: 1000.0}, width=8)
        )
        assert result.token_ids == (stop_id,)
        assert result.text == ""
        assert result.finish_reason == "stop"
        assert result.stop_text is None
        ignoring = engine.generate(
            prompts[0], SamplingOptions(max_tokens=6, logit_bias={stop_id: 1000.0}, ignore_eos=True)
        )
        assert stop_id not in ignoring.token_ids
        assert ignoring.finish_reason == "length"


def test_a_model_without_stop_tokens_ends_by_length(
    make_engine: EngineMaker, f32_path: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loads with a warning; max_tokens and the context end its answers."""
    path = _without_stop_tokens(f32_path("nano"), tmp_path / "endless.gguf")
    with caplog.at_level(logging.WARNING, "pydflash"):
        engine = Engine.open(path, None, EngineOptions(n_ctx=64, n_threads=1))
    with engine:
        assert engine.target.stop_ids == frozenset()
        assert "end-of-sequence" in caplog.text or "stop" in caplog.text
        assert len(engine.generate([1, 2, 3], SamplingOptions(max_tokens=30)).token_ids) == 30
        whole = engine.generate([1, 2, 3])
        assert whole.finish_reason == "length"
        assert len(whole.token_ids) == 61


def _without_stop_tokens(source: Path, out: Path) -> Path:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "qwen35")
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "tokenizer.ggml.eos_token_id"):
            continue
        value = entry.contents()
        if name == "tokenizer.ggml.tokens":
            value = [f"marker{i}" if piece.startswith("<|") else piece for i, piece in enumerate(value)]
        kind = entry.types[0]
        element = entry.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_every_length_gives_valid_text(make_engine: EngineMaker, max_tokens: int) -> None:
    """Answers of a random model are full of broken characters."""
    engine = make_engine()
    replaced = 0
    for seed in range(25):
        options = SamplingOptions(temperature=2.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        events = list(engine.stream([seed + 1, 2, 3], options))
        texts = [event.text for event in events]
        ids = [i for event in events for i in event.token_ids]
        assert len(ids) == max_tokens
        for text in texts:
            text.encode()
        spoken = [i for i in ids if i not in engine.tokenizer.special_ids]
        data = b"".join(engine.tokenizer.token_bytes(i) for i in spoken)
        assert "".join(texts) == data.decode(errors="replace")
        replaced += "\ufffd" in "".join(texts)
        assert engine.generate([seed + 1, 2, 3], options).text == "".join(texts)
    assert replaced > 0


def test_prompts_up_to_the_context(make_engine: EngineMaker) -> None:
    """A prompt may leave room for one token and no less; answers end with the context."""
    n_ctx, block = 96, 8
    engine, alone = make_engine(n_ctx=n_ctx), make_engine(None, n_ctx=n_ctx)
    for n in (n_ctx - block - 1, n_ctx - block, n_ctx - 2, n_ctx - 1):
        prompt = [(i * 37) % 300 for i in range(n)]
        result = engine.generate(prompt, SamplingOptions(ignore_eos=True, width=8))
        assert result.finish_reason == "length"
        assert len(result.token_ids) == n_ctx - n
        assert result.token_ids == alone.generate(prompt, SamplingOptions(ignore_eos=True)).token_ids
    for n in (n_ctx, n_ctx + 1, 3 * n_ctx):
        with pytest.raises(pydflash.CapacityError, match=f"has {n} tokens.*context of {n_ctx}") as info:
            engine.generate([5] * n)
        assert (info.value.needed, info.value.available) == (n + 1, n_ctx)
    assert len(engine.generate([1, 2], SamplingOptions(max_tokens=3, ignore_eos=True)).token_ids) == 3
