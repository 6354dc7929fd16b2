"""Prompts that `pydflash bench` measures on when no file names others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from pydflash.errors import FormatError, NotFoundError

PromptKind: TypeAlias = Literal["code", "prose", "chat"]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A text to continue, or for kind "chat" one user message."""

    kind: PromptKind
    text: str


BUILT_IN = (
    BenchPrompt("code", "def quicksort(items):\n    if len(items) <= 1:\n        return items\n"),
    BenchPrompt(
        "code", 'class Account:\n    """A balance that never falls below zero."""\n\n    def __init__(self):\n'
    ),
    BenchPrompt("prose", '"""Helpers for reading tables of measurements.\n\nEach row of a table holds one'),
    BenchPrompt("prose", "# The cache is emptied as soon as the last reader has left, because\n# "),
    BenchPrompt("chat", "Write a Python function that reverses a list."),
    BenchPrompt("chat", "Write a Python function that counts the lines of a file."),
)


def load_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Prompts from a JSON file: {"prompts": [{"kind": "code", "text": "..."}, ...]}.

    Raises:
        NotFoundError: no such file. FormatError: it holds something else.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["prompts"]
        prompts = tuple(BenchPrompt(entry["kind"], str(entry["text"])) for entry in entries)
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f'{path}: not of the form {{"prompts": [{{"kind": ..., "text": ...}}]}}') from error
    for prompt in prompts:
        if prompt.kind not in get_args(PromptKind):
            raise FormatError(f"{path}: kind {prompt.kind!r}, expected one of {', '.join(get_args(PromptKind))}")
    return prompts
