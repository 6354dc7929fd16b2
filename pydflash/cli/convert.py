"""pydflash convert"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pydflash import builtin
from pydflash.cli import flags
from pydflash.cli.terminal import progress_bar, size
from pydflash.draft_conversion import DraftType, convert_draft


def convert(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder of a drafter.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="GGUF file to make.", show_default=False)],
    model: flags.Model = None,
    outtype: Annotated[DraftType, typer.Option(help="Storage of the matrices.")] = "bf16",
) -> None:
    """Write a DFlash drafter as a GGUF file, in the form that llama.cpp reads too.

    --model is the target that the drafter belongs to: its tokenizer goes into the file. Targets themselves are not
    converted; llama.cpp's converter does that.

    \b
    Examples:
      pydflash convert Qwen3.5-27B-DFlash drafter.gguf --model Qwen3.5-27B-Q4_K_M.gguf
      pydflash convert Qwen3.5-27B-DFlash drafter-q8_0.gguf --model Qwen3.5-27B-Q4_K_M.gguf --outtype q8_0
    """
    target = builtin.target_path() if model is None else model
    with progress_bar("converting") as progress:
        made = convert_draft(folder, out, target, outtype, progress=progress)
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(made.types.items()))
    print(f"{made.path}: {size(made.n_bytes)}, tensors: {kinds}")
