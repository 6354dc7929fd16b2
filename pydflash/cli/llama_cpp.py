"""llama.cpp beside us: its server, from the prebuilt wheel ``xllamacpp``, in a process of its own.

A line of JSON goes in for each request and one comes out. The process runs this file with the same interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from pydflash.errors import DeviceError, NotFoundError

_READY = "ready"


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one request: tokens per second, and how much was drafted and accepted."""

    prefill: float
    decode: float
    n_tokens: int
    drafted: int
    accepted: int


class LlamaServer:
    """llama.cpp with one model, idle between requests. A context manager.

    Raises:
        NotFoundError: ``xllamacpp`` is not installed.
        DeviceError: llama.cpp cannot load the files.
    """

    def __init__(
        self,
        model: Path,
        *,
        n_ctx: int,
        n_threads: int,
        k_type: str,
        v_type: str,
        draft: Path | None = None,
        n_draft: int = 0,
    ) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise NotFoundError("--vs-llama-cpp needs the package xllamacpp: pip install xllamacpp")
        settings = {
            "model": str(model),
            "draft": None if draft is None else str(draft),
            "n_draft": n_draft,
            "n_ctx": n_ctx,
            "n_threads": n_threads,
            "k_type": k_type,
            "v_type": v_type,
        }
        # -P: a folder of this name in the current directory is not meant.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._requests = cast("IO[str]", self._process.stdin)
        self._answers = cast("IO[str]", self._process.stdout)
        if self._read() != _READY:
            self.close()
            raise DeviceError("llama.cpp did not start; it may not know a model of this kind")

    def complete(self, ids: Sequence[int], n_predict: int) -> Timing:
        """Evaluate a prompt from scratch and decode greedily, past stop tokens."""
        try:
            self._requests.write(json.dumps({"prompt": list(ids), "n_predict": n_predict}) + "\n")
            self._requests.flush()
            timings = json.loads(self._read())
        except (OSError, ValueError):
            raise DeviceError("llama.cpp ended while it answered") from None
        return Timing(
            prefill=timings["prompt_per_second"],
            decode=timings["predicted_per_second"],
            n_tokens=timings["predicted_n"],
            drafted=timings.get("draft_n", 0),
            accepted=timings.get("draft_n_accepted", 0),
        )

    def _read(self) -> str:
        return self._answers.readline().strip()

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve() -> None:
    """The process itself: start the server, then answer lines until there are no more."""
    import xllamacpp  # type: ignore[import-untyped]

    settings = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = settings["n_ctx"], 1, 512, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["n_threads"]
    params.verbosity, params.warmup = 0, True
    kinds = {side: getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings[side]}".upper()) for side in ("k_type", "v_type")}
    params.cache_type_k, params.cache_type_v = kinds["k_type"], kinds["v_type"]
    if settings["draft"]:
        speculative = params.speculative
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        speculative.draft.mparams.path = settings["draft"]
        speculative.draft.n_max, speculative.draft.n_min, speculative.draft.p_min = settings["n_draft"], 0, 0.0
    server = xllamacpp.Server(params)
    print(_READY, flush=True)
    for line in sys.stdin:
        body = {**json.loads(line), "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(  # noqa: S310 - our own server on the loopback interface
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:  # noqa: S310
            print(json.dumps(json.loads(answer.read())["timings"]), flush=True)
