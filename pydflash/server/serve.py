"""A server from its options to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from pydflash.errors import DeviceError
from pydflash.server.app import make_app
from pydflash.server.options import ServerOptions
from pydflash.server.process import EngineFailedError
from pydflash.server.service import Service

log = logging.getLogger(__name__)


async def serve(
    options: ServerOptions,
    *,
    on_listening: Callable[[str], object] = lambda _: None,
    on_ready: Callable[[Service], object] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, Ctrl-C or ``stop``; then finish what runs, for ``options.drain_seconds`` at most.

    The port is open while the models load; requests get 503 until then.

    Args:
        on_listening: called with the address once the port is open.
        on_ready: called once the models are open.

    Raises:
        NotFoundError, FormatError, UnsupportedModelError: the model file cannot be used.
        DeviceError: the address cannot be used, or the engine ended while it opened the models.
        PydflashError: another reason why the models cannot be opened.
    """
    service = Service(options)
    listener = _listen(options)
    try:
        config = uvicorn.Config(
            make_app(service),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            ws="none",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(int(options.drain_seconds), 1),
        )
        server = _Server(config)
        host, port = listener.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        failure: list[EngineFailedError] = []
        tasks = [asyncio.create_task(_start(service, server, on_ready, failure))]
        if stop is not None:
            tasks.append(asyncio.create_task(_stop_with(stop, server)))
        try:
            await server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.process.stop()
        if failure:
            raise failure[0].cause
    finally:
        listener.close()


def _listen(options: ServerOptions) -> socket.socket:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((options.host, options.port))
            listener.listen(2048)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise DeviceError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error
    return listener


async def _start(
    service: Service, server: _Server, on_ready: Callable[[Service], object], failure: list[EngineFailedError]
) -> None:
    try:
        await service.process.start()
    except EngineFailedError as error:
        failure.append(error)
        server.should_exit = True
    else:
        on_ready(service)


async def _stop_with(stop: asyncio.Event, server: _Server) -> None:
    await stop.wait()
    server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server, ending with status 0 after SIGTERM; a second signal ends it at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        names = (signal.SIGINT, signal.SIGTERM)
        for name in names:
            loop.add_signal_handler(name, self._end)
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(name)

    def _end(self) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            log.info("finishing what runs")
            self.should_exit = True
