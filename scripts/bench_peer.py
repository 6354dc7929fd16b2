"""llama.cpp on the same files: its llama-bench for plain decoding and prefill, its server for DFlash."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from statistics import median
from typing import Any

_START_SECONDS = 300


def bench(folder: Path, target: Path, arguments: list[str], gpu_layers: int) -> list[dict[str, Any]]:
    """Rows of llama-bench as it writes them in JSON: n_prompt, n_gen, n_depth, avg_ts, stddev_ts ..."""
    command = [str(folder / "llama-bench"), "-m", str(target), "-ngl", str(gpu_layers), "-fa", "1", "-o", "json"]
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def plain(
    folder: Path, target: Path, contexts: tuple[int, ...], prefills: tuple[int, ...], n_tokens: int, gpu_layers: int
) -> dict[str, list[dict[str, float]]]:
    """Tokens per second of decoding behind each context, and of prefills."""
    prompts = bench(folder, target, ["-p", numbers(prefills), "-n", "0", "-r", "3"], gpu_layers)
    decode = ["-p", "0", "-n", str(n_tokens), "-d", numbers(contexts), "-r", "2"]
    tokens = bench(folder, target, decode, gpu_layers)
    return {
        "prefill": [{"tokens": row["n_prompt"], "tok_s": row["avg_ts"]} for row in prompts],
        "autoregressive": [{"context": row["n_depth"], "tok_s": row["avg_ts"]} for row in tokens],
    }


@contextmanager
def server(
    folder: Path, target: Path, draft: Path, n_max: int, n_ctx: int, gpu_layers: int, log: Path
) -> Iterator[str]:
    """A running llama-server; yields its address."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    layers = str(gpu_layers)
    command = [str(folder / "llama-server"), "-m", str(target), "-md", str(draft), "--spec-type", "draft-dflash"]
    command += ["--spec-draft-n-max", str(n_max), "--spec-draft-n-min", "0", "-ngl", layers, "--spec-draft-ngl", layers]
    command += ["-c", str(n_ctx), "-np", "1", "-fa", "on", "-fit", "off", "--cache-ram", "0", "--no-ui"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(address, process, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}: {log.read_text()[-1000:]}")
        try:
            with urllib.request.urlopen(address + "/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise RuntimeError(f"llama-server was not ready after {_START_SECONDS} s: {log.read_text()[-1000:]}")


def complete(address: str, ids: list[int], n_new: int) -> dict[str, Any]:
    """Timings of one greedy completion."""
    body = {"prompt": ids, "n_predict": n_new, "temperature": 0.0, "cache_prompt": False}
    data = json.dumps(body).encode()
    request = urllib.request.Request(address + "/completion", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        timings: dict[str, Any] = json.loads(answer.read())["timings"]
    return timings


def drafted(
    folder: Path, target: Path, draft: Path, n_max: int, prompts: list[list[int]], n_new: int, gpu_layers: int,
    log: Path,
) -> dict[str, float | int | str]:  # fmt: skip
    """Median speed of greedy completions with up to n_max drafts a step; the first prompt warms up."""
    n_ctx = len(prompts[0]) + n_new + 64
    with server(folder, target, draft, n_max, n_ctx, gpu_layers, log) as address:
        timings = [complete(address, ids, n_new) for ids in prompts][1:]
    rates, step_times = [], []
    for t in timings:
        rates.append(t["predicted_per_second"])
        n_steps = t["predicted_n"] - 1 - t.get("draft_n_accepted", 0)
        step_times.append(t["predicted_ms"] / max(1, n_steps))
    last = timings[-1]
    return {
        "draft": draft.name,
        "n_max": n_max,
        "tok_s": median(rates),
        "step_ms": median(step_times),
        "proposed": last.get("draft_n", 0),
        "accepted": last.get("draft_n_accepted", 0),
    }
