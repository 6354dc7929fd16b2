"""pydflash bench"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pydflash.cli import flags
from pydflash.cli.bench_prompts import BUILT_IN, BenchPrompt, load_prompts
from pydflash.cli.llama_cpp import LlamaServer
from pydflash.cli.terminal import error_console, rate
from pydflash.engine import Engine
from pydflash.errors import InvalidArgumentError
from pydflash.options import SamplingOptions
from pydflash.results import GenerationResult, GenerationStats

_SEED = 1
_GREEDY, _SAMPLED = 0.0, 1.0


@dataclass(slots=True)
class Row:
    """One line of the table: medians over the repeats.

    Attributes:
        engine: "pydflash" or "llama.cpp".
        test: "prefill", "decode", or the kind of prompts with the temperature.
        mode: "-", "autoregressive" or "speculative".
        rates: tokens per second of each repeat.
        ratio: median over the turns of the ratio to the row it is compared with, named by ``ratio_to``.
        mean_accepted_length: tokens a step, over all prompts and repeats.
        widths: steps by width.
    """

    engine: str
    test: str
    mode: str
    rates: list[float] = field(default_factory=list)
    ratio: float | None = None
    ratio_to: str | None = None
    mean_accepted_length: float | None = None
    widths: dict[int, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return median(self.rates)

    def compare(self, other: Row, name: str) -> None:
        """Note how much faster this is than another row. Runs of one turn are compared, so that load matters less."""
        self.ratio = median(ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=True))
        self.ratio_to = name

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(slots=True)
class _Total:
    """Tokens after the first, steps and decode time of several requests."""

    tokens: int = 0
    steps: int = 0
    ms: float = 0.0
    widths: dict[int, int] = field(default_factory=dict)

    def add(self, stats: GenerationStats) -> None:
        self.tokens += stats.emitted - 1
        self.steps += stats.steps
        self.ms += stats.total_ms - stats.prefill_ms
        for width, n in stats.widths.items():
            self.widths[width] = self.widths.get(width, 0) + n


def bench(
    model: flags.Model = None,
    draft: flags.Draft = "auto",
    ctx_size: flags.CtxSize = 4096,
    device: flags.Device = "cpu",
    threads: flags.Threads = 0,
    cache_type_k: flags.TypeK = "f16",
    cache_type_v: flags.TypeV = "f16",
    width: flags.Width = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", min=1, help="Length of the prefill test.")
    ] = 512,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Tokens decoded for each prompt.")] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Runs of each test, after one to warm up.")
    ] = 3,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON file with prompts instead of the built-in ones.", show_default=False)
    ] = None,
    vs_llama_cpp: Annotated[
        bool, typer.Option("--vs-llama-cpp", help="Run llama.cpp on the same file in turn (needs xllamacpp; CPU).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill, decoding, and what the drafter gains on code, prose and chat, greedy and at temperature 1.

    Runs that are compared take turns, so that a busy machine slows both. Figures are medians over the repeats.

    \b
    Examples:
      pydflash bench
      pydflash bench --vs-llama-cpp --threads 2
      pydflash bench --model big.gguf --draft drafter.gguf --device cuda --prompts prompts.json --json
    """
    n_threads = threads or min(os.cpu_count() or 1, 16)
    if vs_llama_cpp and device != "cpu":
        raise InvalidArgumentError("--device", device, "cpu together with --vs-llama-cpp")
    chosen = BUILT_IN if prompts is None else load_prompts(prompts)
    options = flags.engine_options(ctx_size, device, n_threads, cache_type_k, cache_type_v)
    with ExitStack() as resources:
        engine = resources.enter_context(flags.open_engine(model, draft, options))
        peer: LlamaServer | None = None
        if vs_llama_cpp:
            peer = LlamaServer(
                engine.target.path, n_ctx=ctx_size, n_threads=n_threads, k_type=cache_type_k, v_type=cache_type_v
            )
            resources.enter_context(peer)
        run = _Bench(engine, peer, chosen, prompt_tokens, max_tokens, repeats, width)
        rows = list(run.rows(quiet=as_json))
    if as_json:
        print(json.dumps({**run.facts(n_threads), "rows": [row.to_dict() for row in rows]}))
    else:
        _print(rows)


@dataclass(slots=True)
class _Bench:
    engine: Engine
    peer: LlamaServer | None
    prompts: Sequence[BenchPrompt]
    prompt_tokens: int
    max_tokens: int
    repeats: int
    width: int | None

    def __post_init__(self) -> None:
        n_ctx = self.engine.options.n_ctx
        longest = max([self.prompt_tokens, *(len(self._ids(prompt)) for prompt in self.prompts)])
        if longest + self.max_tokens > n_ctx:
            raise InvalidArgumentError("--ctx-size", n_ctx, f">= {longest + self.max_tokens} for these tests")

    def facts(self, n_threads: int) -> dict[str, object]:
        draft = self.engine.draft
        return {
            "model": str(self.engine.target.path),
            "draft": None if draft is None else str(draft.path),
            "device": self.engine.target.device,
            "threads": n_threads,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
        }

    def rows(self, *, quiet: bool) -> Iterator[Row]:
        """Measure, with a word on standard error about what is running."""
        with error_console().status("measuring") if not quiet else ExitStack():
            yield from self._plain()
            if self.engine.draft is not None:
                for kind in dict.fromkeys(prompt.kind for prompt in self.prompts):
                    for temperature in (_GREEDY, _SAMPLED):
                        yield from self._speculative(kind, temperature)

    def _plain(self) -> Iterator[Row]:
        """Prefill and plain decoding, ours and llama.cpp's in turn."""
        n_vocab = self.engine.target.n_vocab
        ids = [(i * 7919 + 13) % n_vocab for i in range(self.prompt_tokens)]
        short = self._ids(self.prompts[0])
        prefill, decode = Row("pydflash", "prefill", "-"), Row("pydflash", "decode", "autoregressive")
        their_prefill, their_decode = Row("llama.cpp", "prefill", "-"), Row("llama.cpp", "decode", "autoregressive")
        for repeat in range(-1, self.repeats):
            read = self._generate(ids, 1, width=1).stats
            theirs = None if self.peer is None else self.peer.complete(ids, 1)
            written = self._generate(short, self.max_tokens, width=1).stats
            their_text = None if self.peer is None else self.peer.complete(short, self.max_tokens)
            if repeat < 0:
                continue
            prefill.rates.append(rate(read.prompt_tokens, read.prefill_ms))
            decode.rates.append(written.tokens_per_second)
            if theirs is not None and their_text is not None:
                their_prefill.rates.append(theirs.prefill)
                their_decode.rates.append(their_text.decode)
        for ours, other in ((prefill, their_prefill), (decode, their_decode)):
            if other.rates:
                ours.compare(other, "llama.cpp")
                yield from (ours, other)
            else:
                yield ours

    def _speculative(self, kind: str, temperature: float) -> Iterator[Row]:
        """Plain and drafted decoding of all prompts of a kind, in turn."""
        test = f"{kind}, {'greedy' if temperature == _GREEDY else f'T={temperature:g}'}"
        plain, drafted = Row("pydflash", test, "autoregressive"), Row("pydflash", test, "speculative")
        everything = _Total()
        chosen = [self._ids(prompt) for prompt in self.prompts if prompt.kind == kind]
        for repeat in range(-1, self.repeats):
            totals = (_Total(), _Total())
            for ids in chosen:
                for total, width in zip(totals, (1, self.width), strict=True):
                    total.add(self._generate(ids, self.max_tokens, width=width, temperature=temperature).stats)
            if repeat < 0:
                continue
            for row, total in zip((plain, drafted), totals, strict=True):
                row.rates.append(rate(total.tokens, total.ms))
            everything.tokens += totals[1].tokens
            everything.steps += totals[1].steps
            for width, n in totals[1].widths.items():
                everything.widths[width] = everything.widths.get(width, 0) + n
        drafted.mean_accepted_length = everything.tokens / everything.steps
        drafted.widths = dict(sorted(everything.widths.items()))
        drafted.compare(plain, "autoregressive")
        yield from (plain, drafted)

    def _generate(
        self, ids: Sequence[int], max_tokens: int, *, width: int | None, temperature: float = _GREEDY
    ) -> GenerationResult:
        options = SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=_SEED,
            ignore_eos=True,
            width=width,
            cache_prompt=False,  # reading the prompt is what is measured
        )
        return self.engine.generate(ids, options)

    def _ids(self, prompt: BenchPrompt) -> tuple[int, ...]:
        if prompt.kind == "chat" and self.engine.chat_template is not None:
            return self.engine.encode([{"role": "user", "content": prompt.text}])
        return self.engine.encode(prompt.text)


def _print(rows: Sequence[Row]) -> None:
    table = Table("test", "engine", "mode", "tok/s", "ratio", "tokens a step", "widths")
    for row in rows:
        table.add_row(
            row.test,
            row.engine,
            row.mode,
            f"{row.tokens_per_second:.1f}",
            "" if row.ratio is None else f"{row.ratio:.2f} x {row.ratio_to}",
            "" if row.mean_accepted_length is None else f"{row.mean_accepted_length:.2f}",
            " ".join(f"{width}:{n}" for width, n in row.widths.items()),
        )
    Console().print(table)
