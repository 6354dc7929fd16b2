"""Ctrl-C stops a long call within one chunk of its work and leaves the object usable."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import pydflash
from pydflash import Progress

CHUNK = 32
# Far more than is done before the signal comes.
PROMPT = [1 + i % 4000 for i in range(60000)]


@pytest.fixture
def cache(target: pydflash.TargetModel) -> Iterator[pydflash.TargetCache]:
    with pydflash.TargetCache(target, 65536, capture_layers=()) as cache:
        yield cache


def interrupted_after(call: Callable[[], object], seconds: float = 0.2) -> float:
    """Seconds from the signal to the KeyboardInterrupt that comes out of the call."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        return time.monotonic() - sent[0]
    finally:
        timer.join()


def test_a_forward_without_a_callback(cache: pydflash.TargetCache) -> None:
    assert interrupted_after(lambda: cache.forward(PROMPT, "none", chunk=CHUNK)) < 1.0
    done = cache.position
    assert 0 < done < len(PROMPT)
    assert done % CHUNK == 0
    assert cache.forward([1, 2, 3]).logits.shape == (1, 4096)
    assert cache.position == done + 3


def test_a_forward_with_a_callback(cache: pydflash.TargetCache) -> None:
    reports: list[Progress] = []
    assert interrupted_after(lambda: cache.forward(PROMPT, "none", chunk=CHUNK, progress=reports.append)) < 1.0
    assert reports
    cache.forward([1])


def test_a_prefill(target: pydflash.TargetModel, cache: pydflash.TargetCache) -> None:
    with pydflash.Decoder(cache, prefill_chunk=CHUNK) as decoder:
        decoder.begin()
        assert interrupted_after(lambda: decoder.prefill(PROMPT, 10)) < 1.0
        done = decoder.position
        assert 0 < done < len(PROMPT)
        assert decoder.prefill([5], 10).tokens
        assert decoder.position == done + 1
        assert decoder.step(1, 9).tokens


def test_steps(target: pydflash.TargetModel, cache: pydflash.TargetCache) -> None:
    with pydflash.Decoder(cache) as decoder:
        decoder.begin(pydflash.SamplingOptions(ignore_eos=True))
        decoder.prefill([5, 6], 1 << 20)

        def steps() -> None:
            while True:
                decoder.step(1, 1 << 20)

        assert interrupted_after(steps) < 1.0
        assert decoder.step(1, 10).tokens
        assert decoder.stats.steps == len(decoder.tokens) - 3


def test_many_interrupts_leave_no_lock_behind(cache: pydflash.TargetCache) -> None:
    for i in range(30):
        interrupted_after(lambda: [cache.forward([1, 2], "none") for _ in range(100000)], 0.003 + 0.0017 * i)
        other: list[int] = []
        thread = threading.Thread(target=lambda other=other: other.append(cache.position))
        thread.start()
        thread.join(10)
        assert other, "another thread could not get the lock"
        if cache.position > 30000:
            cache.reset()
