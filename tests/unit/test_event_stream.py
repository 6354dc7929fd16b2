"""Server-sent events: pings, errors first and later, clients that leave."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pydflash.server.errors import ApiError
from pydflash.server.streams import EventStream, dumps, event

Chunks = Callable[[], AsyncGenerator[bytes]]


def run(chunks: Chunks, *, ping: float = 0.0, leave_after: float | None = None) -> list[dict[str, Any]]:
    """What is sent to a client that leaves after so many seconds, or never."""

    async def serve() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60.0 if leave_after is None else leave_after)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        await EventStream(chunks(), ping_seconds=ping)({"type": "http"}, receive, send)
        return sent

    return asyncio.run(serve())


def bodies(sent: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


def test_events_are_lines_of_compact_json() -> None:
    assert event({"a": "é\n", "b": [1, None]}) == 'data: {"a":"é\\n","b":[1,null]}\n\n'.encode()
    assert event({}, "done") == b"event: done\ndata: {}\n\n"
    assert dumps({"a": 1.5}) == '{"a":1.5}'


def test_chunks_are_sent_as_they_come_and_silence_is_filled() -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        yield b"1"
        await asyncio.sleep(0.25)
        yield b"2"

    sent = run(chunks, ping=0.05)
    assert sent[0]["status"] == 200
    received = bodies(sent)
    assert received[0] == b"1"
    assert received[-2:] == [b"2", b""]
    assert len(received) >= 5
    assert set(received[1:-2]) == {b":\n\n"}
    assert [message.get("more_body") for message in sent[1:]] == [True] * (len(received) - 1) + [False]
    assert bodies(run(chunks)) == [b"1", b"2", b""]


def test_a_first_error_is_an_ordinary_response() -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        raise ApiError(429, "full", retry_after=2)
        yield b""

    start, body = run(chunks)
    assert start["status"] == 429
    assert (b"retry-after", b"2") in start["headers"]
    assert b"rate_limit_error" in body["body"]


def test_a_later_error_is_an_event_and_the_end() -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        yield b"1"
        raise ApiError(503, "gone")

    received = bodies(run(chunks))
    assert received[0] == b"1"
    assert received[1] == event(ApiError(503, "gone").body)
    assert received[2:] == [b""]


def test_what_makes_the_chunks_is_ended_when_the_client_leaves() -> None:
    ended: list[str] = []

    async def waiting() -> AsyncGenerator[bytes]:
        try:
            yield b"1"
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    async def busy() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.001)
        finally:
            ended.append("busy")

    assert bodies(run(waiting, leave_after=0.1)) == [b"1"]
    assert set(bodies(run(busy, leave_after=0.1))) == {b"x"}
    assert ended == ["waiting", "busy"]
