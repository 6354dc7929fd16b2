"""Threads: calls leave the GIL, objects are used by one thread at a time, cancel() works from any."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pydflash
from pydflash import Progress

LONG = [1 + i % 4000 for i in range(3000)]


@pytest.fixture
def long_cache(target: pydflash.TargetModel) -> Iterator[pydflash.TargetCache]:
    with pydflash.TargetCache(target, 8192, capture_layers=()) as cache:
        yield cache


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


class Started:
    """A progress callback that tells when a call is inside."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, _: Progress) -> None:
        self.event.set()


def ticks_per_second(stop: Callable[[], bool]) -> float:
    """How often a thread that needs the GIL for an instant every millisecond gets it, until stop()."""
    begun = time.perf_counter()
    n = 0
    while not stop():
        time.sleep(0.001)
        n += 1
    return n / (time.perf_counter() - begun)


def hash_without_the_gil(seconds: float) -> None:
    data = bytes(1 << 24)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.sha256(data)


def test_other_python_threads_run_during_a_call(long_cache: pydflash.TargetCache) -> None:
    def share() -> float:
        # Idle as far as the GIL goes: one other thread computes, as during the call, but never needs it.
        with ThreadPoolExecutor(1) as pool:
            idle = ticks_per_second(pool.submit(hash_without_the_gil, 0.7).done)
        long_cache.reset()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(long_cache.forward, LONG[:1500], "none")
            busy = ticks_per_second(call.done)
            call.result()
        return busy / idle

    # A call that kept the GIL would give a share near 0. Other programs make it vary, so the best of some counts.
    shares = []
    for _ in range(6):
        shares.append(share())
        if shares[-1] >= 0.8:
            break
    assert max(shares) >= 0.8, shares


def test_a_second_thread_waits(cache: pydflash.TargetCache) -> None:
    n_threads, n_calls = 4, 5
    barrier = threading.Barrier(n_threads)

    def work(_: int) -> None:
        barrier.wait()
        for _ in range(n_calls):
            cache.forward([1, 2, 3])

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(work, range(n_threads)))
    assert cache.position == n_threads * n_calls * 3


def test_caches_of_one_model_work_side_by_side(target: pydflash.TargetModel) -> None:
    prompts = [[7 + i, 50, 60 + i, 9, 1000 + i] for i in range(6)]

    def logits(ids: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        with pydflash.TargetCache(target, 64) as cache:
            return cache.forward(ids, "all").logits

    expected = [logits(ids) for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(logits, prompts))
    for left, right in zip(expected, got, strict=True):
        assert np.array_equal(left, right)


def test_calling_back_into_the_busy_object_is_refused_and_harmless(cache: pydflash.TargetCache) -> None:
    seen: list[BaseException] = []

    def progress(report: Progress) -> None:
        for call in (lambda: cache.position, lambda: cache.forward([1]), lambda: cache.verify([1])):
            with pytest.raises(pydflash.BusyError) as caught:
                call()
            seen.append(caught.value)

    cache.forward([1, 2, 3], progress=progress)
    assert seen
    assert cache.position == 3


def test_closing_in_a_callback_is_safe(target: pydflash.TargetModel) -> None:
    cache = pydflash.TargetCache(target, 512)
    cache.forward([1] * 400, chunk=100, progress=lambda _: cache.close())
    assert cache.closed
    with pytest.raises(pydflash.ClosedError):
        cache.forward([1])


def test_cancel_from_another_thread(long_cache: pydflash.TargetCache) -> None:
    started = Started()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(long_cache.forward, LONG, "none", chunk=64, progress=started)
        assert started.event.wait(60)
        long_cache.cancel()
        with pytest.raises(pydflash.Cancelled) as caught:
            call.result()
    assert caught.value.status == -3
    done = long_cache.position
    assert done < len(LONG)
    assert done % 64 == 0
    long_cache.forward(LONG[:10], "none")
    assert long_cache.position == done + 10


def test_a_cancelled_decoder_goes_on_after_begin(target: pydflash.TargetModel) -> None:
    with pydflash.TargetCache(target, 8192, capture_layers=()) as cache, pydflash.Decoder(cache) as decoder:
        decoder.begin()
        started = Started()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(decoder.prefill, LONG, 10, started)
            assert started.event.wait(60)
            decoder.cancel()
            with pytest.raises(pydflash.Cancelled):
                call.result()
        assert decoder.position < len(LONG)
        with pytest.raises(pydflash.Cancelled):
            decoder.prefill([1], 10)
        decoder.begin()
        decoder.prefill([1, 2], 10)
        decoder.cancel()
        with pytest.raises(pydflash.Cancelled):
            decoder.step(1, 10)
        decoder.begin()
        assert len(decoder.step(1, 10).tokens) == 1


def test_cancel_of_an_idle_or_closed_object_does_nothing(target: pydflash.TargetModel) -> None:
    cache = pydflash.TargetCache(target, 64)
    cache.cancel()
    cache.forward([1])
    cache.close()
    cache.cancel()


def test_close_waits_for_the_call_inside(target: pydflash.TargetModel) -> None:
    cache = pydflash.TargetCache(target, 8192, capture_layers=())
    started = Started()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(cache.forward, LONG[:2000], progress=started)
        assert started.event.wait(60)
        cache.close()
        assert call.done() or call.result(1) is not None
        assert call.result().logits.shape == (1, 4096)
    with pytest.raises(pydflash.ClosedError):
        cache.forward([1])


def test_close_from_many_threads(target: pydflash.TargetModel) -> None:
    for _ in range(20):
        cache = pydflash.TargetCache(target, 64)
        barrier = threading.Barrier(4)

        def work(cache: pydflash.TargetCache = cache, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            cache.cancel()
            cache.close()

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work) for _ in range(4)]:
                future.result()
        assert cache.closed


def test_repr_does_not_wait(long_cache: pydflash.TargetCache) -> None:
    started = Started()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(long_cache.forward, LONG, "none", progress=started)
        assert started.event.wait(60)
        text = repr(long_cache)
        assert not call.done()
        long_cache.cancel()
        with pytest.raises(pydflash.Cancelled):
            call.result()
    assert text.endswith(", in use>")


def test_a_decoder_and_its_cache_take_turns(target: pydflash.TargetModel, drafter: pydflash.DraftModel) -> None:
    layers = drafter.config.target_layer_ids
    with (
        pydflash.TargetCache(target, 512, capture_layers=layers) as cache,
        pydflash.DraftContext(drafter) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        decoder.begin()
        decoder.prefill([1, 2, 3], 200)
        done = threading.Event()

        def look() -> int:
            n = 0
            while not done.is_set():
                begin, end = cache.feature_range
                assert cache.position >= begin
                assert np.isfinite(cache.features(max(begin, end - 1), end)).all()
                assert decoder.stats.emitted >= 1
                assert context.cursor >= 0
                n += 1
            return n

        with ThreadPoolExecutor(2) as pool:
            lookers = [pool.submit(look) for _ in range(2)]
            try:
                while decoder.stats.emitted < 100:
                    decoder.step(16, 100)
            finally:
                done.set()
            assert all(looker.result() > 0 for looker in lookers)
