"""Keys, limits, clients that leave or stall, an engine that dies, and the end."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from support.http import LONG, Stream
from support.models import DRAFTERS
from support.server import Server

StartServer = Callable[..., Server]


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_keys(start: StartServer) -> None:
    """Health needs none, all else one of them; a request without is refused before anything is read."""
    server = start(
        "--parallel", "1", "--api-key", "first,second", "--max-body", "4096", "--cors-origins", "http://a.example"
    )
    server.wait_ready()
    with server.client() as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "first"},
            {"X-Api-Key": "firs"},
        ):
            for method, path in (("GET", "/v1/models"), ("POST", "/completion"), ("GET", "/metrics"), ("GET", "/no")):
                response = http.request(method, path, headers=headers)
                assert response.status_code == 401, (path, headers)
                assert response.json()["error"]["type"] == "authentication_error"
        assert http.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer first"}, {"X-Api-Key": "second"}, {"authorization": "bearer second"}):
            assert http.get("/v1/models", headers=headers).status_code == 200
        assert http.get("/health").status_code == 200
        assert http.get("/").status_code == 200
        key = {"X-Api-Key": "first"}
        big = {"prompt": "x" * 5000, "n_predict": 1}
        assert http.post("/completion", json=big, headers=key).status_code == 413
        chunked = http.post("/completion", content=iter([b"{" + b" " * 5000, b" " * 5000]), headers=key)
        assert chunked.status_code == 413
        assert chunked.json()["error"]["type"] == "invalid_request_error"
        answer = http.options("/completion", headers={"Origin": "http://a.example"})
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "http://b.example"}).headers
        assert http.get("/metrics", headers=key).status_code == 501
    assert "first" not in server.log
    assert server.stop() == 0


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    """Within a step or a chunk, whether it read a stream or waited for a whole answer, also in the queue."""
    cancelled = metric(server, 'pydflash:requests_total{finish="cancelled"}')
    for stream in (True, False):
        connections = [Stream(server.url, n_predict=900, ignore_eos=True, stream=stream) for _ in range(7)]
        if stream:
            connections[0].read_some()
        time.sleep(0.5)
        for connection in connections:
            connection.close()
        begun = time.monotonic()
        server.wait_idle(20)
        assert time.monotonic() - begun < 5
    assert metric(server, 'pydflash:requests_total{finish="cancelled"}') - cancelled == 14
    assert httpx.post(f"{server.url}/completion", json={"prompt": "x", "n_predict": 2}, timeout=60).status_code == 200


def test_a_slow_reader_stalls_nobody(start: StartServer) -> None:
    server = start("--parallel", "2").wait_ready()
    # A small window and answers with many fields: the connection is full long before the answer ends.
    slow = Stream(server.url, window=4096, n_predict=950, ignore_eos=True, stream=True, n_probs=20)
    slow.read_some()
    with server.client() as http:
        begun = time.monotonic()
        for _ in range(4):
            assert http.post("/completion", json={"prompt": "import os\n", "n_predict": 8}).status_code == 200
        assert time.monotonic() - begun < 60
        deadline = time.monotonic() + 60
        while any(slot["is_processing"] for slot in http.get("/slots").json()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # The engine is done with it; the rest waits for the reader and is complete.
    assert slow.read_all().count(b'"stop":true') == 1
    slow.close()
    assert server.stop() == 0


def test_health_answers_while_a_long_prompt_is_read(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool, server.client() as http:
        work = pool.submit(
            httpx.post,
            f"{server.url}/completion",
            json={"prompt": LONG, "n_predict": 1, "cache_prompt": False},
            timeout=60,
        )
        slowest = 0.0
        while not work.done():
            begun = time.monotonic()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
        assert work.result().status_code == 200
        assert slowest < 1.0


def test_others_step_between_the_chunks_of_a_long_prompt(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        stream = Stream(server.url, n_predict=600, ignore_eos=True, stream=True, **{"speculative.n_max": 0})
        stream.read_some()
        before = stream.count()
        body = {"prompt": LONG, "n_predict": 1, "cache_prompt": False}
        long = pool.submit(httpx.post, f"{server.url}/completion", json=body, timeout=60)
        assert long.result().status_code == 200
        stream.read_some()
        # 64 tokens a chunk, so that there is a step in between for each of them.
        chunks = long.result().json()["tokens_evaluated"] // 64
        assert stream.count() - before >= chunks - 2 > 3
        stream.close()


def test_a_queue_that_is_full_is_an_error(start: StartServer) -> None:
    server = start("--parallel", "1", "--max-queue", "2").wait_ready()
    running = [Stream(server.url, n_predict=900, ignore_eos=True, stream=True) for _ in range(3)]
    with server.client() as http:
        deadline = time.monotonic() + 30
        while (response := http.post("/completion", json={"prompt": "x", "n_predict": 1})).status_code == 200:
            assert time.monotonic() < deadline
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
        assert http.get("/slots?fail_on_no_slot=1").status_code == 503
        for stream in running:
            stream.close()
        server.wait_idle()
        assert http.post("/completion", json={"prompt": "x", "n_predict": 1}).status_code == 200
    assert server.stop() == 0


def test_sigterm_lets_running_requests_finish(start: StartServer) -> None:
    server = start("--parallel", "2").wait_ready()
    with ThreadPoolExecutor(4) as pool:
        body = {"prompt": "import os\n", "n_predict": 80, "ignore_eos": True}
        work = [pool.submit(httpx.post, f"{server.url}/completion", json=body, timeout=120) for _ in range(4)]
        deadline = time.monotonic() + 30
        while not all(slot["is_processing"] for slot in httpx.get(f"{server.url}/slots", timeout=30).json()):
            assert time.monotonic() < deadline
        engine = server.engine_pid()
        assert server.stop() == 0
        assert [task.result().json()["tokens_predicted"] for task in work] == [80] * 4
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_an_engine_that_dies_under_load_is_started_again(server: Server) -> None:
    """Every client hears of it, and the next request works within 5 s more than loading takes."""
    outcomes: list[str] = []
    lock = threading.Lock()

    def ask(i: int) -> None:
        body = {"prompt": f"import os\n# {i}\n", "n_predict": 700, "ignore_eos": True, "stream": i % 2 == 0}
        with httpx.Client(base_url=server.url, timeout=120) as client:
            response = client.post("/completion", json=body)
        with lock:
            if response.status_code == 503:
                assert response.json()["error"]["type"] == "unavailable_error"
                assert int(response.headers["retry-after"]) >= 1
                outcomes.append("refused")
            else:
                assert response.status_code == 200
                assert b"unavailable_error" in response.content, response.content[-300:]
                outcomes.append("ended in the stream")

    with ThreadPoolExecutor(10) as pool:
        work = [pool.submit(ask, i) for i in range(10)]
        deadline = time.monotonic() + 30
        while not all(slot["is_processing"] for slot in httpx.get(f"{server.url}/slots", timeout=30).json()):
            assert time.monotonic() < deadline
        engine = server.engine_pid()
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        for task in work:
            task.result()
    assert len(outcomes) == 10
    response = httpx.get(f"{server.url}/health", timeout=30)
    if response.status_code != 200:
        assert response.json()["error"]["message"] == "Loading model"
        assert "retry-after" in response.headers
    server.wait_ready()
    assert server.engine_pid() != engine
    body = {"prompt": "import os\n", "n_predict": 4}
    assert httpx.post(f"{server.url}/completion", json=body, timeout=60).json()["tokens_predicted"] == 4
    assert time.monotonic() - killed < 5 + server.load_seconds
    assert metric(server, "pydflash:engine_restarts") == 1


def test_the_engine_ends_with_the_server(start: StartServer) -> None:
    server = start("--parallel", "1").wait_ready()
    engine = server.engine_pid()
    server.process.kill()
    server.stop()
    deadline = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(engine, 0)
            time.sleep(0.05)
        raise AssertionError("the engine is still there")


@pytest.mark.parametrize(
    ("options", "status", "part"),
    [
        (("--model", "/no/such/file.gguf"), 2, "no/such/file"),
        (("--draft", "/no/such/drafter"), 2, "no/such/drafter"),
        # Of a target with another hidden size and vocabulary.
        (("--draft", str(DRAFTERS / "full-bf16.gguf")), 2, ""),
        (("--model", str(DRAFTERS / "full-bf16.gguf")), 2, ""),
        (("--device", "cuda:7"), 2, "cuda:7"),
    ],
)
def test_models_that_cannot_be_opened_end_the_server(options: tuple[str, ...], status: int, part: str) -> None:
    """A clear message and a status, not a server that never becomes ready."""
    server = _failed(options)
    assert server.process.wait(60) == status, server.log
    assert "pydflash: " in server.log
    assert part in server.log
    assert "Traceback" not in server.log
    server.stop()


def _failed(options: tuple[str, ...]) -> Server:
    server = Server.__new__(Server)
    with suppress(AssertionError):
        server.__init__("--parallel", "1", *options)  # type: ignore[misc]
    server._reader.join(60)
    return server


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = _failed(("--port", str(taken.getsockname()[1])))
        assert server.process.wait(60) == 1
        assert "cannot listen on 127.0.0.1" in server.log
        server.stop()
