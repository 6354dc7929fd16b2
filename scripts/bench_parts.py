"""What bench_gpu.py measures of pydflash, section by section; each returns plain values for the report.

Times are wall clock, in milliseconds unless a name says otherwise; a value is the median of its measurements.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
from bench_report import Row

import pydflash

_PARTS = ("draft_ms", "verify_ms", "accept_ms", "commit_ms", "append_ms")
_WARM_TOKENS = 8  # tokens decoded before a measurement: graphs are built and captured


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure.

    Attributes:
        contexts, prefills: prompt tokens; a context of 0 means short_prompt of them.
        widths: rows of a step; n_steps of each are measured.
        trees: proposals of a step that form a tree; measured like the widths.
        rates: shares of accepted proposals of the requests in between all and none.
        n_new: tokens of a request, and of plain decoding behind a short prompt; n_tokens behind a long one.
    """

    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    widths: tuple[int, ...]
    trees: tuple[int, ...]
    rates: tuple[float, ...]
    short_prompt: int
    n_new: int
    n_tokens: int
    n_steps: int
    repeats: int
    prefill_chunk: int

    @property
    def capacity(self) -> int:
        """Tokens of the longest measurement."""
        step_rows = (self.n_steps + 8) * max(self.widths) + max(self.trees, default=0)
        decode = _WARM_TOKENS + self.repeats * max(self.n_tokens, self.n_new)
        return max(*self.contexts, *self.prefills, self.short_prompt) + max(step_rows * 2, decode) + 64


class Prompts:
    """Random token ids that end nothing and are no special tokens of a made-up vocabulary."""

    def __init__(self, target: pydflash.TargetModel, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        high = int(0.95 * target.n_vocab)
        self._ids = np.array([i for i in range(min(300, high // 2), high) if i not in target.stop_ids], np.int32)

    def take(self, n: int) -> npt.NDArray[np.int32]:
        return self._rng.choice(self._ids, n)


@dataclass(frozen=True)
class Loop:
    """A decoder and what it decodes with."""

    decoder: pydflash.Decoder
    cache: pydflash.TargetCache
    context: pydflash.DraftContext | None

    def start(self, ids: npt.NDArray[np.int32]) -> float:
        """A fresh sequence; returns the time of the prefill."""
        self.decoder.reset()
        self.decoder.begin(pydflash.SamplingOptions(), [])
        began = time.perf_counter()
        self.decoder.prefill(ids, 1 << 30)
        return (time.perf_counter() - began) * 1e3

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        self.decoder.settle()


@contextmanager
def open_loop(target: pydflash.TargetModel, draft: pydflash.DraftModel | None, plan: Plan) -> Iterator[Loop]:
    with ExitStack() as stack:
        layers = () if draft is None else draft.config.target_layer_ids
        rows = max([16, *(n + 1 for n in plan.trees)])
        cache = pydflash.TargetCache(target, plan.capacity, max_verify=rows, capture_layers=layers)
        stack.enter_context(cache)
        context = mirror = None
        if draft is not None:
            context = stack.enter_context(pydflash.DraftContext(draft))
            if draft.device != target.device:
                mirror = pydflash.DraftFeatureMirror(draft, capacity=cache.feature_capacity, dtype="f16")
                stack.enter_context(mirror)
        decoder = pydflash.Decoder(cache, context, mirror, prefill_chunk=plan.prefill_chunk)
        yield Loop(stack.enter_context(decoder), cache, context)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def autoregressive(loop: Loop, plan: Plan, prompts: Prompts) -> list[Row]:
    """Plain decoding behind prompts of several lengths."""
    rows: list[Row] = []
    for context in plan.contexts:
        loop.start(prompts.take(context or plan.short_prompt))
        n_tokens = plan.n_tokens if context else plan.n_new
        for _ in range(_WARM_TOKENS):
            loop.decoder.step(1, 1 << 30)
        rates, steps = [], []
        for _ in range(plan.repeats):
            times = [timed(lambda: loop.decoder.step(1, 1 << 30)) for _ in range(n_tokens)]
            rates.append(n_tokens / sum(times) * 1e3)
            steps += times
        rows.append({"context": context, "tok_s": median(rates), "best_tok_s": max(rates), "step_ms": median(steps)})
    return rows


def prefill(loop: Loop, plan: Plan, prompts: Prompts) -> list[Row]:
    """Prompt tokens per second."""
    rows: list[Row] = []
    for n in plan.prefills:
        ids = prompts.take(n)
        loop.start(ids)
        rates = [n / loop.start(ids) * 1e3 for _ in range(plan.repeats)]
        rows.append({"tokens": n, "tok_s": median(rates), "best_tok_s": max(rates)})
    return rows


def steps(loop: Loop, plan: Plan, prompts: Prompts) -> list[Row]:
    """Steps of fixed width, as the decoder reports their parts.

    Work is queued, so a part's time is what the host waited in it: what a draft costs the device is in verify_ms, where
    its result is first needed, and a commit's in the step behind it. gap_ms is the wall clock minus all parts.
    """
    rows: list[Row] = []
    trees = () if loop.context is None else plan.trees
    for width, tree in [*((width, 0) for width in plan.widths), *((n + 1, n) for n in trees)]:

        def step(width: int = width, tree: int = tree) -> pydflash.StepResult:
            return loop.decoder.step_tree(tree, 1 << 30) if tree else loop.decoder.step(width, 1 << 30)

        loop.start(prompts.take(plan.short_prompt))
        for _ in range(4):
            step()
        walls, parts, emitted, accepted = [], [], 0, 0
        before = pydflash.work_counters()
        for _ in range(plan.n_steps):
            began = time.perf_counter()
            result = step()
            walls.append((time.perf_counter() - began) * 1e3)
            parts.append([getattr(result, name) for name in _PARTS])
            emitted, accepted = emitted + len(result.tokens), accepted + result.n_accepted
        after = pydflash.work_counters()
        row: Row = {"width": width, "tree": tree, "wall_ms": median(walls), "slowest_ms": max(walls)}
        row |= {name: median(column) for name, column in zip(_PARTS, zip(*parts, strict=True), strict=True)}
        row["gap_ms"] = median(wall - sum(part) for wall, part in zip(walls, parts, strict=True))
        row["tokens_per_step"] = emitted / plan.n_steps
        row["accepted_per_step"] = accepted / plan.n_steps
        for name in ("graphs_built", "buffers_allocated", "graphs_computed", "bytes_to_device", "bytes_to_host"):
            row[name] = (getattr(after, name) - getattr(before, name)) / plan.n_steps
        rows.append(row)
    return rows


def isolated_parts(loop: Loop, plan: Plan, prompts: Prompts, contexts: tuple[int, ...]) -> list[Row]:
    """Each part alone, waiting for the device behind it: what it costs, host and device together.

    The rows that are verified are random ids, so that a mixture of experts reads what text would make it read.
    """
    rows: list[Row] = []
    if loop.context is None:
        return rows
    for n in contexts:
        for width in plan.widths if n == contexts[0] else plan.widths[-1:]:
            loop.start(prompts.take(n or plan.short_prompt))
            loop.wait()
            columns = [_one_round(loop, loop.context, prompts.take(width)) for _ in range(3 + plan.n_steps // 2)][3:]
            names = ("draft_ms", "verify_ms", "commit_ms", "append_ms")
            times = dict(zip(names, map(median, zip(*columns, strict=True)), strict=True))
            rows.append({"context": n, "width": width, **times, "sum_ms": sum(times.values())})
    return rows


def _one_round(
    loop: Loop, context: pydflash.DraftContext, ids: npt.NDArray[np.int32]
) -> tuple[float, float, float, float]:
    begin, end = loop.cache.position, loop.cache.position + len(ids)
    draft = timed(lambda: context.propose(int(ids[0])))
    verify = timed(lambda: loop.cache.verify(ids, logits=False))
    commit = timed(lambda: loop.cache.commit(len(ids)))

    def append() -> None:
        if context.model.device == loop.cache.model.device:
            context.append(loop.cache, begin, end)
            loop.wait()
        else:
            context.append_host(loop.cache.features(begin, end), begin)

    return draft, verify, commit, timed(append)


def request(
    engine: pydflash.Engine, ids: npt.NDArray[np.int32], options: pydflash.SamplingOptions
) -> tuple[float, float | None, pydflash.GenerationStats]:
    """Tokens per second behind the first one: of the whole answer and of its first 100; and the statistics."""
    n, first, at_100 = 0, 0.0, None
    stats: pydflash.GenerationStats | None = None
    for event in engine.stream(ids, options):
        now = time.perf_counter()
        if event.token_ids and n == 0:
            first, n_first = now, len(event.token_ids)
        n += len(event.token_ids)
        if at_100 is None and n >= 100:
            at_100 = (n - n_first) / (now - first)
        stats = event.stats
    if stats is None or n < 2:
        raise RuntimeError(f"the request ended after {n} tokens without statistics")
    return stats.tokens_per_second, at_100, stats


def requests(
    engine: pydflash.Engine, plan: Plan, prompts: Prompts, name: str, options: pydflash.SamplingOptions
) -> Row:
    """Whole requests through the engine; the first one, which builds graphs, does not count."""
    rates, early = [], []
    stats: pydflash.GenerationStats | None = None
    for _ in range(1 + plan.repeats):
        rate, at_100, stats = request(engine, prompts.take(plan.short_prompt), options)
        rates.append(rate)
        early.append(at_100)
    assert stats is not None
    found = [rate for rate in early[1:] if rate is not None]
    most = sorted(stats.widths.items(), key=lambda item: -item[1])[:4]
    widths = " ".join(f"{width}:{n}" for width, n in sorted(most)) + (" ..." if len(stats.widths) > 4 else "")
    return {
        "name": name,
        "tok_s": median(rates[1:]),
        "tok_s_at_100": median(found) if found else None,
        "first_request_tok_s": rates[0],
        "accepted_length": stats.mean_accepted_length,
        "accepted": stats.accepted,
        "proposed": stats.proposed,
        "widths": widths,
    }


def temperature_for(logits: npt.NDArray[np.float32], rate: float) -> float:
    """The temperature at which the likeliest token is drawn with probability `rate`."""
    below = (logits - logits.max()).astype(np.float64)
    low, high = 1e-3, 1e4
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if 1.0 / np.exp(below / middle).sum() > rate else (low, middle)
    return low


def favourite_logits(loop: Loop, prompts: Prompts) -> npt.NDArray[np.float32] | None:
    """Logits that stand for every position of a made-up pair; None for a model that has no favourite token."""
    rows = loop_logits(loop, prompts)
    favourite = rows.argmax(-1)
    spread = np.partition(rows, -2, axis=-1)[:, -2] - np.median(rows, axis=-1)
    return rows[-1] if len(set(favourite.tolist())) == 1 and float(spread.max()) < 1e-2 else None


def loop_logits(loop: Loop, prompts: Prompts) -> npt.NDArray[np.float32]:
    loop.decoder.reset()
    return loop.cache.forward(prompts.take(8), logits="all").logits
