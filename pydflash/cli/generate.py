"""pydflash generate"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import chain
from typing import Annotated

import typer

from pydflash.cli import flags
from pydflash.cli.terminal import error_console, progress_bar, summary
from pydflash.engine import Engine, Message, Prompt
from pydflash.generate import collect
from pydflash.options import SamplingOptions
from pydflash.results import GenerationResult, StreamEvent

# Prompts shorter than this are evaluated before a bar could be read.
_LONG_PROMPT = 2048


def generate(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False)
    ],
    model: flags.Model = None,
    draft: flags.Draft = "auto",
    ctx_size: flags.CtxSize = 4096,
    device: flags.Device = "cpu",
    threads: flags.Threads = 0,
    cache_type_k: flags.TypeK = "f16",
    cache_type_v: flags.TypeV = "f16",
    width: flags.Width = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = 0.0,
    top_k: flags.TopK = 0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    typical_p: flags.TypicalP = 1.0,
    repeat_penalty: flags.RepeatPenalty = 1.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    penalty_last_n: flags.PenaltyLastN = 64,
    seed: flags.Seed = None,
    logit_bias: flags.LogitBias = None,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="With --json: log-probabilities of so many likeliest tokens.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put PROMPT through the model's chat template.")] = False,
    system: flags.System = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is complete.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance to standard error.")] = False,
) -> None:
    """Continue a text.

    \b
    Examples:
      pydflash generate "def quicksort(items):" --max-tokens 120
      pydflash generate "Write a Python function that reverses a string." --chat --stats
      pydflash generate - --model big.gguf --draft drafter.gguf --temperature 0.8 --seed 7 < prompt.txt
      pydflash generate "import os" --json --logprobs 3 | jq .token_ids
    """
    options = flags.sampling_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        penalty_last_n=penalty_last_n,
        seed=seed,
        bias=logit_bias,
        stop=stop,
        ignore_eos=ignore_eos,
        width=width,
        logprobs=logprobs,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    given: Prompt = _messages(text, system) if chat or system is not None else text
    with flags.open_engine(
        model, draft, flags.engine_options(ctx_size, device, threads, cache_type_k, cache_type_v)
    ) as engine:
        result = engine.generate(given, options) if as_json else print_stream(engine, given, options)
    if as_json:
        print(result.to_json())
    if stats:
        error_console().print(summary(result.stats), markup=False)


def _messages(text: str, system: str | None) -> list[Message]:
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def print_stream(
    engine: Engine, prompt: Prompt, options: SamplingOptions, shown: list[str] | None = None
) -> GenerationResult:
    """Write an answer to standard output as it comes. ``shown`` receives the pieces, also of one that is broken off."""
    ids = engine.encode(prompt)
    is_long = len(ids) > _LONG_PROMPT
    with progress_bar("prompt") if is_long else nullcontext() as progress:
        events = engine.stream(ids, options, progress=progress)
        first = next(events)

    def written() -> Iterator[StreamEvent]:
        for event in chain((first,), events):
            sys.stdout.write(event.text)
            sys.stdout.flush()
            if shown is not None:
                shown.append(event.text)
            yield event

    with closing(events):
        result = collect(written())
    print(flush=True)
    return result
