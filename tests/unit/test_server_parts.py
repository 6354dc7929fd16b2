"""Parts of the server that need no model: options, fields, answers that nobody reads."""

import asyncio
from typing import Any

import pytest

from pydflash.errors import InvalidArgumentError, NotFoundError
from pydflash.options import SamplingOptions
from pydflash.results import StreamEvent
from pydflash.server.errors import ApiError, from_exception, from_failure
from pydflash.server.fields import SamplingFields, check_fields, max_tokens
from pydflash.server.messages import Done, Piece, PromptProgress, RequestTimes, Submit
from pydflash.server.options import ServerOptions
from pydflash.server.process import Answer


class Process:
    """Notes what an answer asks of its process."""

    def __init__(self) -> None:
        self.cancelled: list[Answer] = []

    def cancel(self, answer: Answer) -> None:
        self.cancelled.append(answer)


def answer(limit: int) -> tuple[Answer, Process]:
    process: Any = Process()
    return Answer(process, Submit(id=1, ids=(1,), options=SamplingOptions(seed=1)), limit), process


def piece(text: str) -> Piece:
    return Piece(1, 0, StreamEvent(text=text))


DONE = Done(
    id=1,
    slot=0,
    event=StreamEvent(text="", finish_reason="stop"),
    times=RequestTimes(queue_ms=0.0, prompt_ms=0.0, predicted_ms=0.0),
)


def test_an_answer_that_nobody_reads_is_cancelled() -> None:
    async def run() -> None:
        made, process = answer(3)
        for i in range(3):
            made.put(piece(str(i)))
        assert process.cancelled == []
        made.put(piece("3"))
        assert process.cancelled == [made]
        for i in range(100):
            made.put(piece(str(i)))
        assert len(made._parts) == 0
        assert process.cancelled == [made]
        with pytest.raises(ApiError, match="not read") as failure:
            await anext(aiter(made))
        assert failure.value.code == 408

    asyncio.run(run())


def test_parts_come_in_order_and_a_failure_behind_them() -> None:
    async def run() -> None:
        made, process = answer(10)
        for part in (PromptProgress(1, 0, 9, 0, 4, 1.0), PromptProgress(1, 0, 9, 0, 9, 2.0), piece("a"), piece("b")):
            made.put(part)
        made.fail(ApiError(503, "gone"))
        parts = aiter(made)
        assert [await anext(parts) for _ in range(3)] == [PromptProgress(1, 0, 9, 0, 9, 2.0), piece("a"), piece("b")]
        with pytest.raises(ApiError, match="gone"):
            await anext(parts)
        made.close()
        assert process.cancelled == [made]
        whole, process = answer(10)
        whole.put(piece("a"))
        whole.put(DONE)
        assert [part async for part in whole][-1] is DONE
        whole.close()
        assert process.cancelled == []

    asyncio.run(run())


@pytest.mark.parametrize(
    "options",
    [
        {"n_slots": 0},
        {"port": 65536},
        {"max_queue": -1},
        {"max_body": 10},
        {"api_keys": [""]},
        {"api_keys": ["schlüssel"]},
        {"api_keys": ["a\nb"]},
        {"metrics": 1},
        {"ping_seconds": -1.0},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ServerOptions(**options)
    with pytest.raises(TypeError):
        ServerOptions(no_such=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_which_hosts_are_this_machine(host: str, local: bool) -> None:
    assert ServerOptions(host=host).is_loopback is local


def test_every_kind_of_failure_has_a_status() -> None:
    assert from_exception(InvalidArgumentError("x", 1, "2")).code == 400
    assert from_exception(NotFoundError("no file")).code == 400
    assert from_exception(RuntimeError("secret")).code == 500
    assert "secret" not in from_exception(RuntimeError("secret")).message
    assert from_failure("DeviceError", "x").code == 500
    assert from_failure("SomethingNew", "x").code == 500
    assert ApiError(429, "x", retry_after=3).headers == {"Retry-After": "3"}


def test_limits_of_an_answer() -> None:
    assert max_tokens(check_fields(SamplingFields, {})) is None
    assert max_tokens(check_fields(SamplingFields, {"n_predict": -1})) == -1
    assert max_tokens(check_fields(SamplingFields, {"n_predict": 5, "max_tokens": None})) == 5
    for value in (0, -2):
        with pytest.raises(ApiError):
            max_tokens(check_fields(SamplingFields, {"max_tokens": value}))


def test_a_neutral_value_is_compared_as_what_it_is() -> None:
    check_fields(SamplingFields, {"xtc_threshold": 0.10000000149011612, "mirostat": 0, "post_sampling_probs": False})
    for fields in ({"mirostat": False}, {"post_sampling_probs": 0}, {"xtc_threshold": 0.2}, {"samplers": ["top_k"]}):
        with pytest.raises(ApiError, match="not supported"):
            check_fields(SamplingFields, fields)
