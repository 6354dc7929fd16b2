"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pydflash.cli.terminal import progress_bar
from pydflash.engine import Engine
from pydflash.errors import InvalidArgumentError
from pydflash.options import CacheType, EngineOptions, SamplingOptions

_MODEL = "Model"
_SAMPLING = "Sampling"

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        envvar="PYDFLASH_MODEL",
        help="GGUF file; the built-in model by default.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        envvar="PYDFLASH_DRAFT",
        metavar="auto|none|PATH",
        rich_help_panel=_MODEL,
        help="Drafter: a GGUF file or a Hugging Face folder. auto: the built-in one for the built-in model.",
    ),
]
CtxSize = Annotated[
    int,
    typer.Option("--ctx-size", "-c", min=2, help="Most tokens of prompt and answer together.", rich_help_panel=_MODEL),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        envvar="PYDFLASH_DEVICE",
        help="cpu, auto, cuda, cuda:1, or a name from `pydflash devices`.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[
    int, typer.Option("--threads", "-t", min=0, help="CPU threads; 0: one per core, up to 16.", rich_help_panel=_MODEL)
]
TypeK = Annotated[CacheType, typer.Option("--cache-type-k", help="Storage of keys.", rich_help_panel=_MODEL)]
TypeV = Annotated[CacheType, typer.Option("--cache-type-v", help="Storage of values.", rich_help_panel=_MODEL)]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        min=1,
        max=64,
        rich_help_panel=_MODEL,
        show_default=False,
        help="Rows of each verify forward; 1 decodes without drafting. Chosen by measured cost by default.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        min=1,
        help="Most tokens of an answer; until the context is full by default.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "--temp", help="0: the likeliest token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option("--top-k", help="0: off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option("--top-p", help="1: off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option("--min-p", help="0: off.", rich_help_panel=_SAMPLING)]
TypicalP = Annotated[float, typer.Option("--typical-p", help="1: off.", rich_help_panel=_SAMPLING)]
RepeatPenalty = Annotated[float, typer.Option("--repeat-penalty", help="1: off.", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", help="0: off.", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", help="0: off.", rich_help_panel=_SAMPLING)]
PenaltyLastN = Annotated[
    int, typer.Option("--penalty-last-n", help="Tokens that penalties look at; -1: all.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", "-s", help="Drawn by default.", rich_help_panel=_SAMPLING, show_default=False),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=NUMBER",
        rich_help_panel=_SAMPLING,
        show_default=False,
        help="Added to the logit of a token, -inf forbids it; may be repeated.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="Text that ends the answer; may be repeated.", rich_help_panel=_SAMPLING, show_default=False
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the model's end token.", rich_help_panel=_SAMPLING)
]
System = Annotated[str | None, typer.Option("--system", help="System message of a chat.", show_default=False)]


def engine_options(
    ctx_size: int = 4096, device: str = "cpu", threads: int = 0, type_k: CacheType = "f16", type_v: CacheType = "f16"
) -> EngineOptions:
    return EngineOptions(n_ctx=ctx_size, device=device, n_threads=threads, k_type=type_k, v_type=type_v)


def draft_path(draft: str) -> str | None:
    """What Engine.open() takes for --draft."""
    return None if draft == "none" else draft


def open_engine(model: Path | None, draft: str, options: EngineOptions) -> Engine:
    """Load the models, with a progress bar on a terminal."""
    with progress_bar("loading") as progress:
        return Engine.open(model, draft_path(draft), options, progress=progress)


def logit_bias(entries: Sequence[str] | None) -> dict[int, float]:
    """ID=NUMBER entries as a mapping."""
    bias: dict[int, float] = {}
    for entry in entries or ():
        token, _, number = entry.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            raise InvalidArgumentError("--logit-bias", entry, "ID=NUMBER, for example 42=-1.5") from None
    return bias


def sampling_options(
    *,
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    repeat_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    penalty_last_n: int,
    seed: int | None,
    bias: Sequence[str] | None,
    stop: Sequence[str] | None,
    ignore_eos: bool,
    width: int | None,
    logprobs: int | None = None,
) -> SamplingOptions:
    return SamplingOptions(
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
        logit_bias=logit_bias(bias),
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        width=width,
        logprobs=logprobs,
    )
