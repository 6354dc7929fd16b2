"""Streams: what events carry, closing them early, cancelling, interrupts."""

import signal
import threading
import time
from collections.abc import Callable

import pytest

from pydflash import BusyError, Cancelled, ClosedError, Engine, Progress, SamplingOptions

EngineMaker = Callable[..., Engine]
OPTIONS = SamplingOptions(max_tokens=40, ignore_eos=True, width=8, seed=1)


def test_events_join_to_the_result(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    for prompt in prompts:
        options = SamplingOptions(max_tokens=40, ignore_eos=True, width=8, seed=3, logprobs=2, temperature=0.5)
        events = list(engine.stream(prompt, options))
        result = engine.generate(prompt, options)
        assert "".join(event.text for event in events) == result.text
        assert tuple(i for event in events for i in event.token_ids) == result.token_ids
        assert tuple(entry for event in events for entry in event.logprobs or ()) == result.logprobs
        *before, last = events
        assert all(event.finish_reason is None and event.stats is None and event.seed is None for event in before)
        assert (last.finish_reason, last.seed, last.stop_text) == ("length", 3, None)
        assert last.stats is not None
        assert last.stats.emitted == 40
        assert sum(flag for event in events for flag in event.accepted) == last.stats.accepted
        assert all(len(event.accepted) == len(event.token_ids) for event in events)
        assert len(events) <= last.stats.steps + 2


def test_stats_add_up(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    assert engine.stats is None
    result = engine.generate(prompts[0], OPTIONS)
    stats = result.stats
    assert engine.stats == stats
    assert stats.prompt_tokens == len(prompts[0])
    assert stats.cached_tokens == 0
    assert sum(stats.widths.values()) == stats.steps
    assert stats.emitted == 40 == 1 + stats.steps + stats.accepted
    assert stats.mean_accepted_length == pytest.approx(39 / stats.steps)
    assert stats.proposed == sum((width - 1) * n for width, n in stats.widths.items())
    spent = stats.draft_ms + stats.verify_ms + stats.accept_ms + stats.commit_ms + stats.append_ms + stats.prefill_ms
    assert 0 < spent <= stats.total_ms
    assert stats.tokens_per_second > 0
    assert stats.drafter == "on"


def test_closing_a_stream_early_leaves_the_engine_usable(
    make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    engine = make_engine()
    for n_events in range(5):
        events = engine.stream(prompts[0], OPTIONS)
        taken = [next(events) for _ in range(n_events)]
        events.close()
        emitted = [i for event in taken for i in event.token_ids]
        if emitted:
            held = engine.decoder.tokens
            # Up to three tokens may wait for the rest of a character.
            assert prompts[0] + emitted == held[: len(prompts[0]) + len(emitted)]
            assert held == (prompts[0] + greedy[0])[: len(held)]
            assert len(held) <= len(prompts[0]) + len(emitted) + 3
            assert engine.decoder.position == len(held) - 1
        assert list(engine.generate(prompts[1], OPTIONS).token_ids) == greedy[1][:40]


def test_a_dropped_stream_frees_the_engine(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    for _ in engine.stream(prompts[0], OPTIONS):
        break
    assert len(engine.generate(prompts[0], OPTIONS).token_ids) == 40


def test_an_open_stream_keeps_the_engine_busy(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    events = engine.stream(prompts[0], OPTIONS)
    first = next(events)
    with pytest.raises(BusyError, match="still open"):
        engine.generate(prompts[1], OPTIONS)
    rest = list(events)
    assert sum(len(event.token_ids) for event in [first, *rest]) == 40
    assert len(engine.generate(prompts[1], OPTIONS).token_ids) == 40


def test_cancel_between_events(make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]]) -> None:
    engine = make_engine()
    events = engine.stream(prompts[0], OPTIONS)
    got = [next(events), next(events)]
    engine.cancel()
    got += list(events)
    ids = [i for event in got for i in event.token_ids]
    assert got[-1].finish_reason == "cancelled"
    assert got[-1].stats is not None
    assert ids == greedy[0][: len(ids)]
    assert len(ids) < 40
    assert engine.decoder.tokens == prompts[0] + ids
    assert list(engine.generate(prompts[0], OPTIONS).token_ids) == greedy[0][:40]


def test_cancel_from_another_thread(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine(n_ctx=4096)
    timer = threading.Timer(0.3, engine.cancel)
    timer.start()
    begun = time.perf_counter()
    result = engine.generate(prompts[0], SamplingOptions(ignore_eos=True))
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < 4000
    assert time.perf_counter() - begun < 5.0
    timer.join()


def test_cancel_during_the_prompt(make_engine: EngineMaker) -> None:
    engine = make_engine(n_ctx=4096, prefill_chunk=16)
    done: list[int] = []

    def progress(report: Progress) -> None:
        done.append(report.done)
        if report.done > 0:
            engine.cancel()

    result = engine.generate(list(range(300)) * 10, SamplingOptions(max_tokens=5), progress=progress)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == ()
    assert result.text == ""
    assert max(done) < 3000
    assert engine.generate([1, 2, 3], SamplingOptions(max_tokens=5, ignore_eos=True)).finish_reason == "length"


def test_cancel_without_a_request_does_nothing(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    engine.cancel()
    assert engine.generate(prompts[0], OPTIONS).finish_reason == "length"


def test_an_exception_from_progress_comes_out_as_itself(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    class EnoughError(Exception):
        pass

    def progress(_report: Progress) -> None:
        raise EnoughError

    engine = make_engine()
    with pytest.raises(EnoughError):
        engine.generate(prompts[0], OPTIONS, progress=progress)
    assert len(engine.generate(prompts[0], OPTIONS).token_ids) == 40


def test_ctrl_c_ends_a_request_and_no_more(
    make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    engine = make_engine(n_ctx=4096)
    main = threading.main_thread().ident
    assert main is not None
    for delay in (0.05, 0.2, 0.4):
        timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        begun = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts[0], SamplingOptions(ignore_eos=True))
        timer.join()
        assert time.perf_counter() - begun < delay + 2.0
        assert list(engine.generate(prompts[1], OPTIONS).token_ids) == greedy[1][:40]


def test_close_ends_an_open_stream(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    events = engine.stream(prompts[0], OPTIONS)
    next(events)
    engine.close()
    assert list(events) == []
    late = None
    with pytest.raises(ClosedError):
        late = engine.stream(prompts[0], OPTIONS)
    assert late is None


def test_close_waits_for_a_request_of_another_thread(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine(n_ctx=4096)
    finished: list[str] = []

    def run() -> None:
        finished.append(engine.generate(prompts[0], SamplingOptions(ignore_eos=True)).finish_reason)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    engine.close()
    thread.join(10)
    assert finished == ["cancelled"]
    assert engine.closed


def test_closing_from_inside_a_request_is_refused(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    with pytest.raises(BusyError, match="inside a request"):
        engine.generate(prompts[0], OPTIONS, progress=lambda _report: engine.close())
    assert len(engine.generate(prompts[0], OPTIONS).token_ids) == 40


def test_a_decoder_that_was_cancelled_by_hand(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    events = engine.stream(prompts[0], OPTIONS)
    next(events)
    engine.decoder.cancel()
    assert list(events)[-1].finish_reason == "cancelled"
    with pytest.raises(Cancelled):
        engine.decoder.step(1, 1)
