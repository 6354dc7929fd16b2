"""Progress reports: what they say, how often they come, and what an exception in one does."""

import itertools
import time

import pytest

import pydflash
from pydflash import Progress


def test_reports_of_a_forward(cache: pydflash.TargetCache) -> None:
    reports: list[Progress] = []
    cache.forward([1] * 100, chunk=10, progress=reports.append)
    assert reports[0].done == 0
    assert reports[-1] == Progress(100, 100)
    assert reports[-1].fraction == 1.0
    assert {report.total for report in reports} == {100}
    assert [report.done for report in reports] == sorted({report.done for report in reports})
    with pytest.raises(AttributeError):
        reports[0].done = 5  # type: ignore[misc]


def test_at_most_twenty_reports_a_second(target: pydflash.TargetModel) -> None:
    moments: list[float] = []
    with pydflash.TargetCache(target, 2048) as cache:
        begun = time.monotonic()
        cache.forward([1] * 600, chunk=2, progress=lambda _: moments.append(time.monotonic()))
        seconds = time.monotonic() - begun
    assert 2 <= len(moments) <= 2 + 20 * seconds
    # The report at the end comes whenever the end is.
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments[:-1])]
    assert all(gap >= 0.049 for gap in gaps)


def test_reports_while_loading() -> None:
    reports: list[Progress] = []
    with pydflash.TargetModel.open(progress=reports.append):
        assert reports
        assert {report.total for report in reports} == {1000}
        assert reports[-1].done == 1000


class OwnError(Exception):
    pass


@pytest.mark.parametrize("kind", [OwnError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_an_exception_is_raised_as_itself(cache: pydflash.TargetCache, kind: type[BaseException]) -> None:
    failure = kind("mine")

    def progress(report: Progress) -> None:
        if report.done >= 20:
            raise failure

    # Reports are rare, so one that fails in the middle is brought about by slow work.
    def slow(report: Progress) -> None:
        time.sleep(0.06)
        progress(report)

    with pytest.raises(kind) as caught:
        cache.forward([1] * 100, chunk=10, progress=slow)
    assert caught.value is failure
    assert cache.position == 20
    cache.forward([1] * 5)
    assert cache.position == 25


def test_an_exception_in_the_last_report_is_not_lost(cache: pydflash.TargetCache) -> None:
    def progress(report: Progress) -> None:
        if report.done == report.total:
            raise OwnError

    with pytest.raises(OwnError):
        cache.forward([1] * 10, progress=progress)
    assert cache.position == 10


def test_an_exception_while_loading() -> None:
    def progress(_: Progress) -> None:
        raise OwnError

    with pytest.raises(OwnError):
        pydflash.TargetModel.open(progress=progress)


def test_an_exception_in_a_decoders_prefill(target: pydflash.TargetModel) -> None:
    def progress(report: Progress) -> None:
        time.sleep(0.06)
        if report.done >= 30:
            raise OwnError

    with (
        pydflash.TargetCache(target, 512, capture_layers=()) as cache,
        pydflash.Decoder(cache, prefill_chunk=10) as decoder,
    ):
        decoder.begin()
        with pytest.raises(OwnError):
            decoder.prefill([1] * 100, 10, progress)
        assert decoder.position == 30
        assert decoder.prefill([2, 3], 10).tokens
        assert decoder.tokens[:32] == [1] * 30 + [2, 3]
