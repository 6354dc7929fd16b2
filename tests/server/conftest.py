"""A server of the built-in pair in a process of its own, as users start it, and what it has to agree with."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.server import N_CTX, SLOTS, Server

import pydflash


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server("--metrics", "--parallel", str(SLOTS), "--seed", "7").wait_ready()
    yield running
    status = running.stop()
    assert status == 0, running.log
    assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Server]]:
    """Further servers, stopped at the end if the test did not stop them."""
    made: list[Server] = []

    def begin(*options: str) -> Server:
        made.append(Server(*options))
        return made[-1]

    yield begin
    for running in made:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def engine() -> Iterator[pydflash.Engine]:
    """The same models in this process, for answers that the server's have to equal."""
    with pydflash.Engine.open(options=pydflash.EngineOptions(n_threads=1, n_ctx=N_CTX)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Client libraries must not be sent elsewhere by the environment, nor read a user's settings."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("OPENAI_", "ANTHROPIC_", "LITELLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
