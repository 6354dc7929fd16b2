"""The engine's process seen from the server: started, watched, started again, and asked for answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final

from pydflash import errors
from pydflash.errors import DeviceError, PydflashError
from pydflash.server.errors import ApiError, engine_lost, from_failure, loading
from pydflash.server.messages import (
    Cancel,
    Done,
    Failure,
    FromWorker,
    Piece,
    PromptProgress,
    Ready,
    SlotAction,
    SlotAnswer,
    Status,
    Stop,
    Submit,
    ToWorker,
    WorkerSetup,
)

log = logging.getLogger(__name__)

Part = Piece | PromptProgress | Done

_FAST_DEATH: Final = 10.0
_LAST_DELAY: Final = 30.0


class EngineFailedError(DeviceError):
    """The models could not be opened. ``cause`` is the exception of the engine's process."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        kind = getattr(errors, error, DeviceError)
        self.cause: PydflashError = kind.from_native(message)


class Answer:
    """The parts of one answer as they come. Closing it early cancels the request.

    ``async for`` gives PromptProgress, Piece and at last Done. Used by one task of the event loop.
    """

    def __init__(self, process: EngineProcess, submit: Submit, limit: int) -> None:
        self.submit = submit
        self.over = False  # nothing more will come from the engine
        self._process = process
        self._limit = limit
        self._parts: deque[Part] = deque()
        self._error: ApiError | None = None
        self._arrived = asyncio.Event()

    def put(self, part: Part) -> None:
        """Called on the event loop. Nothing more is kept once the answer has failed."""
        if self._error is not None:
            self.over = self.over or isinstance(part, Done)
            return
        if isinstance(part, PromptProgress) and self._parts and isinstance(self._parts[-1], PromptProgress):
            self._parts[-1] = part  # only the newest is of interest
        else:
            self._parts.append(part)
        if isinstance(part, Done):
            self.over = True
        elif len(self._parts) > self._limit:
            log.warning("request %d is cancelled: %d pieces wait for its reader", self.submit.id, len(self._parts))
            self._parts.clear()
            self._process.cancel(self)
            self.fail(ApiError(408, f"the answer was not read: more than {self._limit} pieces waited"))
        self._arrived.set()

    def fail(self, error: ApiError) -> None:
        """Called on the event loop: parts that came before are still given out."""
        if self._error is None:
            self._error = error
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Part]:
        return self._read()

    async def _read(self) -> AsyncIterator[Part]:
        while True:
            while self._parts:
                part = self._parts.popleft()
                yield part
                if isinstance(part, Done):
                    return
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        """The answer is not wanted any more. Idempotent."""
        if not self.over:
            self._process.cancel(self)


class EngineProcess:
    """Owns the process. All methods belong to the event loop's thread, except where they say otherwise."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        max_queue: int,
        max_buffer: int,
        on_done: Callable[[Done], None] = lambda _: None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ready: Ready | None = None
        self.status = Status()
        self.restarts = 0
        self._setup = setup
        self._limit = setup.n_slots + max_queue
        self._max_buffer = max_buffer
        self._on_done = on_done
        self._on_failure = on_failure
        self._ids = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._actions: dict[int, asyncio.Future[SlotAnswer]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._generation = 0
        self._changed = asyncio.Event()
        self._fatal: EngineFailedError | None = None
        self._stopping = False
        self._started_at = 0.0
        self._delay = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def n_running(self) -> int:
        """Requests that are not over, waiting ones included."""
        return len(self._answers)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until the models are open.

        Raises:
            EngineFailedError: they cannot be opened.
        """
        self._loop = asyncio.get_running_loop()
        self._spawn()
        while self.ready is None:
            if self._fatal is not None:
                raise self._fatal
            self._changed.clear()
            await self._changed.wait()

    def submit(self, submit: Submit) -> Answer:
        """Send a request; its id is given here.

        Raises:
            ApiError: 503 while there is no engine, 429 when too many requests wait.
        """
        if self.ready is None or self._stopping:
            raise loading()
        if len(self._answers) >= self._limit:
            raise ApiError(429, f"{len(self._answers)} requests run or wait, at most {self._limit} may", retry_after=1)
        answer = Answer(self, replace(submit, id=next(self._ids)), self._max_buffer)
        self._answers[answer.submit.id] = answer
        self._send(answer.submit)
        return answer

    def submitted(self, request: int) -> Submit | None:
        """The request with this id, while it runs or waits."""
        answer = self._answers.get(request)
        return None if answer is None else answer.submit

    def cancel(self, answer: Answer) -> None:
        """End a request; the engine's last word on it is still awaited, for the books."""
        if self._answers.get(answer.submit.id) is answer:
            self._send(Cancel(answer.submit.id))

    async def act(self, slot: int, action: str, name: str = "") -> SlotAnswer:
        """Save, restore or erase a slot as soon as it is idle.

        Raises:
            ApiError: it failed, or there is no engine.
        """
        if self.ready is None:
            raise loading()
        request = SlotAction(next(self._ids), slot, action, name)
        future: asyncio.Future[SlotAnswer] = asyncio.get_running_loop().create_future()
        self._actions[request.id] = future
        self._send(request)
        answer = await future
        if answer.error:
            raise from_failure(answer.error, answer.message)
        return answer

    async def stop(self) -> None:
        """End the process. Idempotent."""
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        process, connection = self._process, self._connection
        if process is None or connection is None:
            return
        self._generation += 1
        self.ready = None
        try:
            connection.send(Stop())
        except OSError:
            log.debug("the engine was gone already")
        try:
            await asyncio.to_thread(process.wait, 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        self._close_connection(connection)
        self._process = None
        self._lose_all()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._generation += 1
        self._started_at = time.monotonic()
        # -P: a folder of this name in the current directory is not meant.
        command = [sys.executable, "-P", "-m", "pydflash.server.worker", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(self._setup)
        reader = threading.Thread(
            target=self._read, args=(self._connection, self._generation), daemon=True, name="engine-reader"
        )
        reader.start()

    def _read(self, connection: Connection, generation: int) -> None:
        """On a thread of its own: hand messages to the event loop."""
        loop = self._loop
        if loop is None:
            return
        try:
            while True:
                message = connection.recv()
                loop.call_soon_threadsafe(self._take, message, generation)
        except (EOFError, OSError):
            try:
                loop.call_soon_threadsafe(self._lost, generation)
            except RuntimeError:
                log.debug("the event loop was closed before the engine")

    def _take(self, message: FromWorker, generation: int) -> None:
        if generation != self._generation:
            return
        if isinstance(message, Piece | PromptProgress):
            answer = self._answers.get(message.id)
            if answer is not None:
                answer.put(message)
            return
        if isinstance(message, Status):
            self.status = message
            return
        if isinstance(message, Done):
            self._on_done(message)
            answer = self._answers.pop(message.id, None)
            if answer is not None:
                answer.put(message)
        elif isinstance(message, Failure):
            self._on_failure(message.error)
            answer = self._answers.pop(message.id, None)
            if answer is not None:
                answer.over = True
                answer.fail(from_failure(message.error, message.message))
        elif isinstance(message, SlotAnswer):
            future = self._actions.pop(message.id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Ready):
            log.info("the engine is ready after %.1f s", time.monotonic() - self._started_at)
            self.ready = message
        else:
            self._fatal = EngineFailedError(message.error, message.message)
        self._changed.set()

    def _lost(self, generation: int) -> None:
        """The process of this generation ended."""
        if generation != self._generation or self._process is None:
            return
        lived = time.monotonic() - self._started_at
        was_ready, self.ready = self.ready is not None, None
        self.status = Status()
        process, connection = self._process, self._connection
        self._process = None
        if connection is not None:
            self._close_connection(connection)
        self._lose_all()
        try:
            process.wait(1.0)  # its socket is closed, so it has all but ended
        except subprocess.TimeoutExpired:
            process.kill()
        if self._stopping:
            return
        if not was_ready and self._fatal is None and self.restarts == 0:
            self._fatal = EngineFailedError("DeviceError", "the engine's process ended while it opened the models")
        if self._fatal is not None and self.restarts == 0:
            self._changed.set()
            return
        self._fatal = None
        self.restarts += 1
        self._delay = min(max(2 * self._delay, 0.5), _LAST_DELAY) if lived < _FAST_DEATH and not was_ready else 0.0
        log.error("the engine's process ended unexpectedly; it is started again in %.1f s", self._delay)
        self._restarting = asyncio.get_running_loop().create_task(self._restart(process))

    async def _restart(self, old: subprocess.Popen[bytes]) -> None:
        await asyncio.to_thread(old.wait)
        if self._delay:
            await asyncio.sleep(self._delay)
        try:
            self._spawn()
        except OSError as error:
            log.error("the engine cannot be started: %s", error)
            self._delay = min(max(2 * self._delay, 0.5), _LAST_DELAY)
            self._restarting = asyncio.get_running_loop().create_task(self._restart(old))

    def _lose_all(self) -> None:
        for answer in self._answers.values():
            answer.over = True
            answer.fail(engine_lost())
            self._on_failure("EngineLost")
        self._answers.clear()
        for future in self._actions.values():
            if not future.done():
                future.set_exception(engine_lost())
        self._actions.clear()
        self._changed.set()

    def _send(self, message: ToWorker) -> None:
        connection = self._connection
        if connection is None:
            raise loading()
        try:
            connection.send(message)
        except (OSError, ValueError) as error:
            # The reader thread will find that the process is gone, and tell every request.
            log.debug("the engine does not listen: %s", error)

    def _close_connection(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
        try:
            connection.close()
        except (OSError, PydflashError) as error:
            log.debug("closing the connection: %s", error)
