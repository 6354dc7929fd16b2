"""The engine goes on from what it knows, and answers as if it did not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pydflash
from pydflash import Engine, EngineOptions, PrefixCache, SamplingOptions, SequencePrefix
from pydflash.prefix_keys import state_key_of_cache

EngineMaker = Callable[..., Engine]
GREEDY = SamplingOptions(max_tokens=24, ignore_eos=True, width=8)
COLD = SamplingOptions(max_tokens=24, ignore_eos=True, width=8, cache_prompt=False)


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 31 + salt * 17 + (i * i) % 13) % 350 for i in range(n)]


def assert_same(warm: pydflash.GenerationResult, cold: pydflash.GenerationResult) -> None:
    assert warm.token_ids == cold.token_ids
    assert (warm.text, warm.finish_reason) == (cold.text, cold.finish_reason)
    assert (warm.stats.accepted, warm.stats.proposed) == (cold.stats.accepted, cold.stats.proposed)


@pytest.mark.parametrize("draft", [None, "d-part", "d-swa"])
def test_a_conversation_reads_only_what_is_new(make_engine: EngineMaker, draft: str | None) -> None:
    """Ten turns; each text, and each acceptance, is that of a cold run of the turn."""
    engine = make_engine(draft, n_ctx=1024, prefill_chunk=64, prefix_interval=64)
    fresh = make_engine(draft, n_ctx=1024, prefill_chunk=64, prefix_cache=False)
    ids: list[int] = []
    for turn in range(10):
        before = len(ids)
        ids += prompt(30 + 7 * (turn % 3), turn)
        warm = engine.generate(ids, GREEDY)
        assert_same(warm, fresh.generate(ids, COLD))
        # All but the last token of the answer before was evaluated when it was drawn.
        assert warm.stats.cached_tokens == max(before - 1, 0)
        assert warm.stats.evaluated_tokens == len(ids) - max(before - 1, 0)
        assert warm.stats.prefix_source == ("live" if turn else "none")
        ids += warm.token_ids
    assert warm.to_dict()["stats"]["evaluated_tokens"] == warm.stats.evaluated_tokens  # type: ignore[index]


def test_conversations_take_turns(make_engine: EngineMaker) -> None:
    """Three of them on one engine: each is found in the cache, none is read again."""
    engine = make_engine(n_ctx=768, prefill_chunk=64)
    fresh = make_engine(n_ctx=768, prefill_chunk=64, prefix_cache=False)
    chats = [prompt(40, salt) for salt in range(3)]
    for turn in range(4):
        for salt, ids in enumerate(chats):
            before = len(ids) if turn else 0
            if turn:
                ids += prompt(20, 10 * turn + salt)
            warm = engine.generate(ids, GREEDY)
            assert_same(warm, fresh.generate(ids, COLD))
            assert warm.stats.prefix_source == ("memory" if turn else "none")
            assert warm.stats.cached_tokens == max(before - 1, 0)
            ids += warm.token_ids
    stats = engine.prefix_cache.stats  # type: ignore[union-attr]
    assert (stats.lookups, stats.hits) == (12, 9)
    assert stats.n_bytes == sum(snapshot.allocated_bytes for snapshot in engine.snapshots)


def test_long_then_short_then_long(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=1024)
    long, short = prompt(500), prompt(20, 4)
    first = engine.generate(long, GREEDY)
    engine.generate(short, GREEDY)
    again = engine.generate(long, GREEDY)
    assert again.token_ids == first.token_ids
    assert again.stats.cached_tokens == 500  # with the logits behind it: nothing is evaluated
    assert again.stats.evaluated_tokens == 0
    assert (again.stats.accepted, again.stats.proposed) == (first.stats.accepted, first.stats.proposed)


def test_the_same_prompt_swapped_out_and_in(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine(n_ctx=512)
    ids = prompts[0]
    first = engine.generate(ids, GREEDY)
    second = engine.generate(ids, GREEDY)
    for salt in range(1, 4):
        engine.generate(prompt(60, salt), GREEDY)
    third = engine.generate(ids, GREEDY)
    assert first.token_ids == second.token_ids == third.token_ids
    assert first.stats.accepted == second.stats.accepted == third.stats.accepted > 0


def test_a_shorter_prompt_than_what_is_stored(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=1024, prefill_chunk=64, prefix_interval=128)
    fresh = make_engine(n_ctx=1024, prefill_chunk=64, prefix_cache=False)
    long = prompt(700)
    engine.generate(long, GREEDY)
    for ids, cached in ((long[:300], 256), (long[:300] + prompt(50, 3), 300), (long[:100], 0), (long[:256], 128)):
        warm = engine.generate(ids, GREEDY)
        assert_same(warm, fresh.generate(ids, COLD))
        assert warm.stats.cached_tokens == cached
    assert warm.stats.prefix_source == "memory"
    alone = make_engine(n_ctx=1024)
    alone.generate(prompt(50), GREEDY)
    short = alone.generate(prompt(20), GREEDY)
    assert (short.stats.prefix_source, short.stats.prefix_reason) == ("none", "longer than the prompt")
    other = alone.generate([99, *prompt(20)], GREEDY)
    assert (other.stats.prefix_source, other.stats.prefix_reason) == ("none", "no common prefix")
    fork = alone.generate([*prompt(20)[:10], 99], GREEDY)
    assert fork.stats.prefix_reason == "nothing stored at or before the common prefix"


def test_snapshots_do_not_change_the_pieces_of_a_prompt(make_engine: EngineMaker) -> None:
    """Also bit for bit: log-probabilities of a first run with and without snapshots on the way."""
    options = SamplingOptions(max_tokens=8, ignore_eos=True, width=8, logprobs=3)
    some = make_engine(n_ctx=1024, prefill_chunk=64, prefix_interval=64)
    none = make_engine(n_ctx=1024, prefill_chunk=64, prefix_cache=False)
    for n in (63, 64, 65, 128, 500):
        warm, cold = some.generate(prompt(n, n), options), none.generate(prompt(n, n), options)
        assert warm.logprobs == cold.logprobs
    positions = {snapshot.position for snapshot in some.snapshots}
    assert {64, 128, 192, 256, 320, 384, 448, 500, 507} <= positions


def test_message_boundaries_are_kept_at_the_chunk_before_them(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=1024)
    start = 350
    sequence = SequencePrefix(engine.decoder, engine.prefix_cache, chunk=64, interval=4096, message_ids=[start])
    ids = [start, *prompt(199), start, *prompt(199, 1), start, *prompt(20, 2)]
    sequence.begin(ids)
    assert sequence.stages(ids, 0) == (192, 384)
    assert sequence.stages(ids, 100) == (164, 356)
    assert sequence.stages(ids, 399) == ()
    assert sequence.stages(ids[:64], 0) == ()
    sequence.begin(ids, use=False)
    assert sequence.stages(ids, 0) == ()


def test_tokens_behind_the_end_are_never_kept(make_engine: EngineMaker) -> None:
    """A stop token in the middle of an accepted block: what is kept is what was said, and all of it serves."""
    engine = make_engine(n_ctx=512)
    plain = engine.generate(prompt(30), SamplingOptions(max_tokens=40, ignore_eos=True, width=8, cache_prompt=False))
    hits = 0
    for n, stop in enumerate(plain.token_ids[2:30], 2):
        if stop in plain.token_ids[:n]:
            continue
        engine.prefix_cache.clear()  # type: ignore[union-attr]
        decoder = engine.decoder
        sequence = SequencePrefix(decoder, engine.prefix_cache)
        assert sequence.begin(prompt(30)).n == 0
        decoder.begin(SamplingOptions(), stop_ids=[stop])
        drawn = list(decoder.prefill(prompt(30), 40).tokens)
        sequence.checkpoint()
        while drawn[-1] != stop:
            drawn += decoder.step(8, 40 - len(drawn)).tokens
        decoder.settle()
        assert drawn == list(plain.token_ids[: n + 1])
        assert sequence.finish([*prompt(30), *drawn])
        kept = max(engine.snapshots, key=lambda snapshot: snapshot.position)
        assert kept.position == 30 + len(drawn) - 1
        assert kept.tokens.tolist() == [*prompt(30), *drawn[:-1]]
        turn = [*prompt(30), *drawn, 7, 8]
        assert SequencePrefix(decoder, engine.prefix_cache).begin(turn).n == kept.position
        hits += 1
    assert hits > 10


@pytest.mark.parametrize("width", [1, 8])
def test_tokens_behind_a_stop_text_are_never_kept(make_engine: EngineMaker, width: int) -> None:
    engine = make_engine(n_ctx=512)
    base = SamplingOptions(max_tokens=60, ignore_eos=True, width=width, cache_prompt=False)
    text = engine.generate(prompt(30), base).text
    checked = 0
    for begin in range(3, len(text) - 8, 7):
        stop = text[begin : begin + 5]
        if text.find(stop) != begin:
            continue
        engine.prefix_cache.clear()  # type: ignore[union-attr]
        options = SamplingOptions(max_tokens=60, ignore_eos=True, width=width, stop=(stop,))
        result = engine.generate(prompt(30), options)
        assert result.stop_text == stop
        whole = [*prompt(30), *result.token_ids]
        for snapshot in engine.snapshots:
            assert snapshot.tokens.tolist() == whole[: snapshot.position]
        again = engine.generate([*whole, 5], SamplingOptions(max_tokens=4, ignore_eos=True, width=width))
        cold = engine.generate(
            [*whole, 5], SamplingOptions(max_tokens=4, width=width, cache_prompt=False, ignore_eos=True)
        )
        assert again.token_ids == cold.token_ids
        checked += 1
    assert checked > 3


def test_cache_prompt_false_takes_nothing_and_leaves_nothing(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=512)
    engine.generate(prompt(60), GREEDY)
    n = len(engine.snapshots)
    cold = engine.generate(prompt(60), COLD)
    assert (cold.stats.cached_tokens, cold.stats.prefix_source) == (0, "off")
    engine.generate(prompt(90, 1), COLD)
    assert len(engine.snapshots) == n
    longer = engine.generate([*prompt(90, 1), 5, 6], GREEDY)
    assert longer.stats.cached_tokens == 0
    off = make_engine(n_ctx=512, prefix_cache=False)
    assert off.prefix_cache is None
    assert off.snapshots == ()
    first = off.generate(prompt(60), GREEDY)
    second = off.generate([*prompt(60), *first.token_ids, 9], GREEDY)
    assert second.stats.prefix_source == "live"  # what the sequence holds costs nothing to use


def test_after_a_failure_nothing_half_done_is_used(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=512, prefill_chunk=32)
    wanted = engine.generate(prompt(200), COLD).token_ids

    def stop(progress: pydflash.Progress) -> None:
        if progress.done >= 64:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        engine.generate(prompt(200), GREEDY, progress=stop)
    result = engine.generate(prompt(200), GREEDY)
    assert result.token_ids == wanted
    assert result.stats.prefix_source == "none"


def test_a_cancelled_prompt_is_worth_what_was_read(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=512, prefill_chunk=32)
    wanted = engine.generate(prompt(200), COLD).token_ids
    reports: list[tuple[int, int]] = []

    def cancel(progress: pydflash.Progress) -> None:
        reports.append((progress.done, progress.total))
        engine.cancel()

    assert engine.generate(prompt(200), GREEDY, progress=cancel).finish_reason == "cancelled"
    assert all(total == 200 for _, total in reports)
    again = engine.generate(prompt(200), GREEDY)
    assert again.token_ids == wanted


def test_a_stream_that_is_closed_early_leaves_a_usable_sequence(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=512)
    wanted = engine.generate(prompt(50), COLD).token_ids
    stream = engine.stream(prompt(50), GREEDY)
    first = [*next(stream).token_ids, *next(stream).token_ids]
    stream.close()
    assert tuple(first) == wanted[: len(first)]
    longer = engine.generate([*prompt(50), *wanted], SamplingOptions(max_tokens=5, ignore_eos=True, width=8))
    cold = engine.generate(
        [*prompt(50), *wanted], SamplingOptions(max_tokens=5, ignore_eos=True, width=8, cache_prompt=False)
    )
    assert longer.token_ids == cold.token_ids


def test_what_was_changed_by_hand_is_not_gone_on_from(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=512, prefix_cache=False)
    first = engine.generate(prompt(50), GREEDY)
    ids = [*prompt(50), *first.token_ids, 4]
    wanted = engine.generate(ids, COLD).token_ids
    engine.generate(prompt(50), GREEDY)
    position = engine.cache.position
    engine.cache.reset()
    engine.cache.forward(prompt(position, 9))
    result = engine.generate(ids, GREEDY)
    assert result.stats.cached_tokens == 0
    assert result.token_ids == wanted


def test_rewind_and_go_on(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=512, prefill_chunk=64, prefix_interval=64)
    answer = engine.generate(prompt(200), GREEDY)
    whole = [*prompt(200), *answer.token_ids]
    for position, replayed in ((210, 10), (200, 0), (150, 22), (64, 0), (10, 10), (0, 0)):
        engine.generate(whole, SamplingOptions(max_tokens=1, ignore_eos=True))
        assert engine.rewind(position) == replayed
        assert engine.cache.position == position
        assert engine.decoder.tokens == whole[:position]
        ids = [*whole[:position], 5, 6]
        warm = engine.generate(ids, GREEDY)
        assert warm.stats.cached_tokens == position
        assert_same(warm, engine.generate(ids, COLD))
    with pytest.raises(pydflash.InvalidArgumentError, match="position"):
        engine.rewind(10_000)
    stream = engine.stream(prompt(5), GREEDY)
    next(stream)
    with pytest.raises(pydflash.BusyError):
        engine.rewind(1)
    stream.close()


def test_a_small_budget_drops_the_oldest_and_never_a_parent(make_engine: EngineMaker) -> None:
    roomy = make_engine(n_ctx=512)
    roomy.generate(prompt(100), GREEDY)
    one = max(snapshot.allocated_bytes for snapshot in roomy.snapshots)
    engine = make_engine(n_ctx=512, prefix_bytes=6 * one)
    rng = random.Random(3)
    wanted: dict[int, tuple[int, ...]] = {}
    for _ in range(40):
        salt = rng.randrange(8)
        result = engine.generate(prompt(80, salt), GREEDY)
        assert wanted.setdefault(salt, result.token_ids) == result.token_ids
        kept = engine.snapshots
        assert sum(snapshot.allocated_bytes for snapshot in kept) <= 6 * one
        for snapshot in kept:
            assert snapshot.parent is None or snapshot.parent in kept
    stats = engine.prefix_cache.stats  # type: ignore[union-attr]
    assert stats.evicted > 5
    assert stats.hits > 5
    assert stats.n_bytes == sum(snapshot.allocated_bytes for snapshot in engine.snapshots) <= 6 * one
    tiny = make_engine(n_ctx=512, prefix_bytes=1000)
    assert tiny.generate(prompt(80, 1), GREEDY).token_ids == wanted.get(
        1, tiny.generate(prompt(80, 1), GREEDY).token_ids
    )
    assert tiny.snapshots == ()
    assert tiny.prefix_cache.stats.too_large > 0  # type: ignore[union-attr]


def test_sequences_of_several_threads_share_one_cache(
    f32_drafter: Callable[[str], pydflash.DraftModel],
) -> None:
    """What a server does: several caches and decoders over the same models, one PrefixCache."""
    draft = f32_drafter("d-part")

    def sequence() -> tuple[pydflash.TargetCache, pydflash.DraftContext, pydflash.Decoder]:
        cache = pydflash.TargetCache(draft.target, 512, "f32", "f32", capture_layers=draft.config.target_layer_ids)
        context = pydflash.DraftContext(draft, "f32", "f32")
        return cache, context, pydflash.Decoder(cache, context)

    def answer(decoder: pydflash.Decoder, prefix: SequencePrefix, ids: list[int], use: bool) -> list[int]:
        n = prefix.begin(ids, use=use).n
        decoder.begin(SamplingOptions(ignore_eos=True))
        drawn = list(decoder.prefill(ids[n:], 16).tokens)
        prefix.checkpoint()
        while len(drawn) < 16:
            drawn += decoder.step(8, 16 - len(drawn)).tokens
        decoder.settle()
        prefix.finish([*ids, *drawn])
        return drawn

    handles: list[Any] = []
    parts = [sequence() for _ in range(3)]
    for made in parts:
        handles += made
    shared = PrefixCache(state_key_of_cache(parts[0][0], parts[0][1]), max_bytes=3 << 20)
    wanted: dict[int, list[int]] = {}
    for salt in range(6):
        wanted[salt] = answer(parts[0][2], SequencePrefix(parts[0][2], None), prompt(60, salt), use=False)
    failures: list[object] = []

    def work(decoder: pydflash.Decoder, seed: int) -> None:
        rng = random.Random(seed)
        prefix = SequencePrefix(decoder, shared)
        try:
            for _ in range(15):
                salt = rng.randrange(6)
                got = answer(decoder, prefix, prompt(60, salt), use=True)
                if got != wanted[salt]:
                    failures.append((salt, got))
        except Exception as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(decoder, i)) for i, (_, _, decoder) in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert shared.stats.hits > 20
    for handle in reversed(handles):
        handle.close()


def test_snapshots_on_the_device(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(n_ctx=512, prefix_place="device", prefix_directory=tmp_path)
    first = engine.generate(prompt(80), GREEDY)
    assert all(snapshot.describe()["on_device"] for snapshot in engine.snapshots)
    engine.generate(prompt(30, 1), GREEDY)
    again = engine.generate(prompt(80), GREEDY)
    assert (again.token_ids, again.stats.prefix_source) == (first.token_ids, "memory")
    engine.prefix_cache.flush()  # type: ignore[union-attr]
    other = make_engine(n_ctx=512, prefix_directory=tmp_path)
    assert other.generate(prompt(80), GREEDY).stats.prefix_source == "disk"


def test_options_are_checked() -> None:
    for field, value in (
        ("prefix_cache", 1),
        ("prefix_bytes", -1),
        ("prefix_place", "disk"),
        ("prefix_directory", 3),
        ("prefix_directory", ""),
        ("prefix_directory_bytes", -1),
        ("prefix_interval", 0),
        ("save_directory", b"x"),
    ):
        with pytest.raises(pydflash.InvalidArgumentError, match=field):
            EngineOptions(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(pydflash.InvalidArgumentError, match="cache_prompt"):
        SamplingOptions(cache_prompt=1)  # type: ignore[arg-type]


def test_the_built_in_pair_begins_turn_ten_at_once() -> None:
    """Time to the first token, in CPU time of this process: other programs on the machine do not count."""
    question = "Go on, and say what the next words of the list are."
    with (
        Engine.open(options=EngineOptions(n_ctx=3072, n_threads=1)) as engine,
        Engine.open(options=EngineOptions(n_ctx=3072, n_threads=1, prefix_cache=False)) as cold,
    ):
        session = engine.session()
        options = SamplingOptions(max_tokens=12, width=8)
        session.ask("Read this: " + " ".join(f"word{i % 97}" for i in range(480)), options)
        warm = []
        for _ in range(9):
            begun = time.process_time()
            with closing(session.stream(question, options)) as events:
                next(events)
                warm.append(time.process_time() - begun)
                list(events)
            assert session.stats is not None
            assert session.stats.evaluated_tokens < 40
            assert session.stats.prefix_source == "live"
        ids = session.tokens[: session.stats.prompt_tokens]
        begun = time.process_time()
        with closing(cold.stream(ids, options)) as events:
            next(events)
        assert (time.process_time() - begun) / sorted(warm)[2] >= 20
