"""A generation that fails is an error, never an answer that ends with "stop", and leaves its slot usable."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import pydflash
from pydflash.decoder import Decoder
from pydflash.sequence import builtin_drafter_of, open_drafter, open_sequence
from pydflash.server.errors import from_failure
from pydflash.server.messages import Done, Failure, FromWorker, Piece, Submit
from pydflash.server.scheduler import Scheduler
from pydflash.server.slot import Slot
from pydflash.text import Tokenizer

IDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    options = pydflash.EngineOptions(n_threads=1, n_ctx=512)
    with ExitStack() as resources:
        target = resources.enter_context(pydflash.TargetModel.open(n_threads=1))
        path = builtin_drafter_of(target)
        assert path is not None
        draft = resources.enter_context(open_drafter(path, target, options))
        sequence = open_sequence(target, draft, options, resources)
        yield Slot(0, sequence, Tokenizer.from_metadata(target.metadata), options, None)


def run(scheduler: Scheduler, sent: list[FromWorker], request: int) -> Done | Failure:
    options = pydflash.SamplingOptions(max_tokens=40, ignore_eos=True, seed=1, width=16)
    scheduler.submit(Submit(id=request, ids=IDS, options=options, cache_prompt=False), None)
    while True:
        scheduler.advance()
        for message in sent:
            if isinstance(message, Done | Failure) and message.id == request:
                return message


def failing(message: str) -> Callable[..., object]:
    def fail(*_args: object, **_options: object) -> object:
        raise pydflash.DeviceError(message)

    return fail


@pytest.mark.parametrize("method", ["begin", "prefill", "step"])
def test_a_failure_of_the_engine_is_told(slot: Slot, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    sent: list[FromWorker] = []
    scheduler = Scheduler([slot], sent.append)
    before = run(scheduler, sent, 1)
    assert isinstance(before, Done)
    with monkeypatch.context() as broken:
        broken.setattr(Decoder, method, failing("the drafter's device is gone"))
        failed = run(scheduler, sent, 2)
    assert isinstance(failed, Failure)
    assert (failed.id, failed.error, failed.message) == (2, "DeviceError", "the drafter's device is gone")
    error = from_failure(failed.error, failed.message)
    assert (error.code, error.kind) == (500, "server_error")
    assert "the drafter's device is gone" in error.message
    assert not any(isinstance(m, Done) and m.id == 2 for m in sent)
    assert all(m.event.finish_reason is None for m in sent if isinstance(m, Piece))
    assert slot.held == ()
    after = run(scheduler, sent, 3)
    assert isinstance(after, Done)
    assert [m.event.text for m in sent if isinstance(m, Piece) and m.id == 3] == [
        m.event.text for m in sent if isinstance(m, Piece) and m.id == 1
    ]


def test_a_failure_in_the_middle_gives_no_end(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent stands; nothing claims that the answer is complete, or goes on without drafts in silence."""
    sent: list[FromWorker] = []
    scheduler = Scheduler([slot], sent.append)
    steps = 0
    step = Decoder.step

    def third_fails(self: Decoder, *args: object, **options: object) -> object:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise pydflash.DeviceError("lost")
        return step(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "step", third_fails)
    failed = run(scheduler, sent, 5)
    assert isinstance(failed, Failure)
    assert steps == 3
    assert not any(isinstance(m, Done) for m in sent)
    assert all(m.event.finish_reason is None for m in sent if isinstance(m, Piece))
