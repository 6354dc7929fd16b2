"""What commands show besides their result: progress, a summary line, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pydflash.results import GenerationStats
from pydflash.results import Progress as Done


def error_console() -> Console:
    """Standard error, looked up anew because tests and shells replace it."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[Done], None] | None]:
    """A function for ``progress=`` that draws a bar; None where standard error is no terminal."""
    console = error_console()
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def report(done: Done) -> None:
            bar.update(task, total=done.total, completed=done.done)

        yield report


def summary(stats: GenerationStats) -> str:
    """One line about a request: speed, and how much was drafted and accepted."""
    prefill = stats.prompt_tokens - stats.cached_tokens
    parts = [
        f"{stats.emitted} tokens at {stats.tokens_per_second:.1f} tok/s",
        f"prompt {prefill} tokens at {rate(prefill, stats.prefill_ms):.0f} tok/s",
    ]
    if stats.proposed:
        share = stats.accepted / stats.proposed
        parts.append(
            f"drafted {stats.proposed}, accepted {stats.accepted} ({share:.0%}), "
            f"{stats.mean_accepted_length:.2f} tokens a step"
        )
    if stats.drafter != "on":
        parts.append(f"drafter {stats.drafter}" if stats.drafter == "off" else f"drafter: {stats.drafter}")
    if stats.widths:
        parts.append("widths " + " ".join(f"{width}:{n}" for width, n in stats.widths.items()))
    return "; ".join(parts)


def rate(n: int, ms: float) -> float:
    """n things in ms milliseconds, per second; 0 for no time at all."""
    return n / ms * 1e3 if ms > 0 else 0.0


def size(n_bytes: int) -> str:
    """Bytes for people: 3.2 MiB."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
