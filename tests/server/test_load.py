"""The load script, small: more clients than slots, and no request fails."""

import re
import subprocess
import sys
from pathlib import Path

from support.server import Server

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "load_server.py"


def test_sixteen_clients_and_forty_requests(server: Server) -> None:
    command = [sys.executable, str(SCRIPT), "--url", server.url, "--clients", "16", "--requests", "40"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.match(r"40 requests of 16 clients in [\d.]+ s: 0 failed", result.stdout)
    assert re.search(r"whole answer p50 +[\d.]+ s  p90 +[\d.]+ s", result.stdout)


def test_failures_are_told() -> None:
    command = [sys.executable, str(SCRIPT), "--url", "http://127.0.0.1:1", "--clients", "2", "--requests", "2"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "2 failed" in result.stdout
