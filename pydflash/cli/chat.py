"""pydflash chat"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pydflash.cli import flags
from pydflash.cli.generate import print_stream
from pydflash.cli.terminal import error_console, summary
from pydflash.engine import Engine, Message
from pydflash.errors import CapacityError, InvalidArgumentError
from pydflash.options import SamplingOptions

_HELP = "/reset forgets the conversation, /stats shows the last answer's figures, /exit (or Ctrl-D) leaves."


def chat(
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
    system: flags.System = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance after each answer.")] = False,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, /exit the conversation.

    \b
    Examples:
      pydflash chat
      pydflash chat --model big.gguf --draft drafter.gguf --temperature 0.7 --system "Answer in one sentence."
      printf 'Write a function.\\nShorter, please.\\n' | pydflash chat --max-tokens 100
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
        ignore_eos=False,
        width=width,
    )
    with flags.open_engine(
        model, draft, flags.engine_options(ctx_size, device, threads, cache_type_k, cache_type_v)
    ) as engine:
        if engine.chat_template is None:
            raise InvalidArgumentError("--model", str(engine.target.path), "a model with a chat template")
        if sys.stdin.isatty():
            error_console().print(_HELP, markup=False)
        _converse(engine, options, system, stats)


def _converse(engine: Engine, options: SamplingOptions, system: str | None, stats: bool) -> None:
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    history = list(opening)
    while (text := _ask()) is not None:
        command = text.strip()
        if command == "/exit":
            return
        if command == "/reset":
            history = list(opening)
        elif command == "/stats":
            _tell(summary(engine.stats) if engine.stats else "no answer yet")
        elif command.startswith("/"):
            _tell(_HELP)
        elif command:
            history = _answer(engine, options, [*history, {"role": "user", "content": text}], stats)


def _answer(engine: Engine, options: SamplingOptions, history: list[Message], stats: bool) -> list[Message]:
    """Answer the last message; the history with the answer, or without the message where there is no answer."""
    shown: list[str] = []
    try:
        result = print_stream(engine, history, options, shown)
        if stats:
            _tell(summary(result.stats))
    except KeyboardInterrupt:
        print()
    except CapacityError as error:
        _tell(f"{error.message}; /reset starts anew")
        return history[:-1]
    return [*history, {"role": "assistant", "content": "".join(shown)}]


def _ask() -> str | None:
    """The next line of the user; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


def _tell(text: str) -> None:
    error_console().print(text, markup=False)
