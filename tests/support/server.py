"""``pydflash serve`` in a process of its own, as users start it."""

import re
import signal
import subprocess
import sys
import threading
import time

import httpx

N_CTX = 1024
SLOTS = 4


class Server:
    """``pydflash serve`` on a free port. ``url`` is set once it listens; ``wait_ready()`` waits for the models."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-P", "-c", "from pydflash.cli import main; main()", "-vv", "serve", "--port", "0"]
        common = ["--threads", "1", "--ctx-size", str(N_CTX), "--temp", "0", "--ubatch-size", "64"]
        self.process = subprocess.Popen([*command, *common, *options], stderr=subprocess.PIPE, text=True, cwd="/")
        self.lines: list[str] = []
        self._listening = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(60), self.log
        assert self.url, self.log
        self._listening_at = time.monotonic()
        self.load_seconds = 0.0  # from listening to ready, the first time

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on (\S+)", line)
            if found:
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, seconds: float = 120.0) -> "Server":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if httpx.get(f"{self.url}/health", timeout=30).status_code == 200:
                self.load_seconds = self.load_seconds or time.monotonic() - self._listening_at
                return self
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{self.log}")

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300, **options)  # type: ignore[arg-type]

    def engine_pid(self) -> int:
        return int(httpx.get(f"{self.url}/props", timeout=30).json()["engine_pid"])

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until no slot runs anything."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not any(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots", timeout=30).json()):
                return
            time.sleep(0.02)
        raise AssertionError("slots are still busy")

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status
