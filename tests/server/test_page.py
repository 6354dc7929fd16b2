"""The page at /, as a headless Chromium shows it; skipped where there is none."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server import Server

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.findall(r"https?://|//cdn|<link|<img|src=", response.text)
    assert http.get("/index.html").text == response.text


class Page:
    """One tab, driven over the browser's debugging socket."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._n = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._n += 1
        self._socket.send(json.dumps({"id": self._n, "method": method, "params": parameters}))
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._n:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def value(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self.value(script)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}\n{self.value('document.body.innerText')}")


@pytest.fixture
def page(server: Server, tmp_path: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    sync_client = pytest.importorskip("websockets.sync.client")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path / 'profile'}", "about:blank"]
    browser = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert browser.stderr is not None
        found = None
        for line in browser.stderr:
            found = re.search(r"listening on ws://([^/]+)/", line)
            if found:
                break
        assert found, "the browser did not start"
        [tab] = [tab for tab in httpx.get(f"http://{found[1]}/json", timeout=30).json() if tab["type"] == "page"]
        with sync_client.connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            page.call("Page.enable")
            page.call("Page.navigate", url=server.url)
            yield page
    finally:
        browser.terminate()
        browser.wait(30)
        browser.stderr.close()


def test_a_chat_in_the_browser(page: Page) -> None:
    page.wait("document.querySelectorAll('#slots tr').length === 4")
    assert "4 slots" in page.wait("document.getElementById('model').textContent")
    page.value("document.getElementById('max_tokens').value = 120")
    page.value(
        "document.getElementById('input').value = 'Write a Python function that adds two numbers.';"
        "document.getElementById('form').requestSubmit()"
    )
    page.wait("document.querySelector('.answer .text').dataset.done === 'yes'")
    text = page.value("document.querySelector('.answer .text').textContent")
    assert text.startswith("```python\ndef ")
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s", page.value("document.querySelector('.answer .who').textContent"))
    assert page.value("document.getElementById('line').getAttribute('points').split(' ').length") > 3
    assert "tokens/s" in page.value("document.getElementById('speed').textContent")
    # A second turn with drafts in every step: what was accepted is shaded.
    page.value("document.getElementById('proposals').value = 15")
    page.value(
        "document.getElementById('input').value = 'Write a Python function that reverses a string.';"
        "document.getElementById('form').requestSubmit()"
    )
    page.wait("document.querySelectorAll('.answer .text')[1]?.dataset.done === 'yes'")
    shaded = page.value("document.querySelectorAll('.accepted').length")
    counted = page.value("[...document.querySelectorAll('.answer .who')].map((e) => e.textContent).join()")
    accepted = [int(n) for n in re.findall(r"(\d+) of \d+ proposals", counted)]
    assert accepted[-1] > 0
    assert shaded > 0
    # The second turn went on from the first one.
    page.wait("/hits/.test(document.getElementById('cache').textContent)")
    rows = "[...document.querySelectorAll('#cache tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    kept = dict(page.value(rows))
    assert re.fullmatch(r"\d+ of [1-9]\d*", kept["hits"])
    assert re.fullmatch(r"[1-9]\d*, [\d.]+ MiB of [\d.]+ MiB", kept["snapshots"])


def test_stopping_in_the_browser_frees_the_slot(page: Page, server: Server) -> None:
    page.wait("document.querySelectorAll('#slots tr').length === 4")
    page.value("document.getElementById('max_tokens').value = 900")
    page.value("document.getElementById('input').value = 'x'; document.getElementById('form').requestSubmit()")
    page.wait(
        "document.querySelector('.answer .text')?.textContent.length > 0 || document.getElementById('stop').disabled"
    )
    page.value("document.getElementById('stop').click()")
    page.wait("document.getElementById('stop').disabled")
    server.wait_idle(10)
