"""Answers on the wire: JSON, server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pydflash.server.errors import ApiError, from_exception

_T = TypeVar("_T")

DONE: Final = b"data: [DONE]\n\n"
CLIENT_GONE: Final = 499


class ClientGone(Exception):  # noqa: N818 - nothing failed
    """The client closed the connection: nobody is left to be told anything."""


def dumps(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(value: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {dumps(value)}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """An error behind the beginning of a stream, as llama.cpp sends it."""
    return event(error.body)


def error_response(error: ApiError, body: Mapping[str, object] | None = None) -> Response:
    """An error as the whole answer."""
    return JSONResponse(dict(error.body if body is None else body), status_code=error.code, headers=error.headers)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the work; it is cancelled when the client goes away. The request's body must have been read.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, gone)


class EventStream(Response):
    """A stream of events. An error before the first one becomes an ordinary response.

    Args:
        chunks: encoded events; closed when the client goes away.
        ping_seconds: a comment line is sent after so long a silence; 0: never.
        on_error: encodes an error that comes later.
        error_body: the body of one that comes first.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        *,
        ping_seconds: float,
        on_error: Callable[[ApiError], bytes] = error_event,
        error_body: Callable[[ApiError], Mapping[str, object]] = lambda error: error.body,
    ) -> None:
        super().__init__(status_code=200, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._ping = ping_seconds if ping_seconds > 0 else None
        self._on_error = on_error
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_until_gone(receive))
        following = asyncio.create_task(self._next())
        begun = False
        try:
            while True:
                done, _ = await asyncio.wait({gone, following}, timeout=self._ping, return_when=asyncio.FIRST_COMPLETED)
                if gone in done:
                    scope.setdefault("state", {})["gone"] = True
                    return
                chunk: bytes | None = b":\n\n"
                ended = False
                if following in done:
                    try:
                        chunk = following.result()
                    except Exception as failure:  # noqa: BLE001 - the client is told
                        error = from_exception(failure)
                        if not begun:
                            response = error_response(error, self._error_body(error))
                            await response(scope, receive, send)
                            return
                        chunk, ended = self._on_error(error), True
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": chunk or b"", "more_body": chunk is not None})
                if chunk is None:
                    return
                if ended:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                if following in done:
                    following = asyncio.create_task(self._next())
        finally:
            await _end(gone, following)
            await self._chunks.aclose()

    async def _next(self) -> bytes | None:
        return await anext(self._chunks, None)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
