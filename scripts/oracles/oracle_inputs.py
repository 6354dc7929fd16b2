"""The fixed inputs of the oracle scripts: prompts, token sequences and vocabulary columns."""

import json
import pathlib
import zlib
from typing import Any

import numpy as np

TINY_PROMPTS = (
    "Explain in one line what a stack is.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Straße, café, 世界, हिन्दी, 2048 + 7.5 they'll \U0001f642",
    "Rain fell on the harbour all night, and in the morning",
)
PROMPT_SET = pathlib.Path(__file__).resolve().parents[1] / "prompts.json"


def user_turn(text: str) -> str:
    """One user message and the opening of the reply, in the ChatML frame of the Qwen models."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def encode(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def tiny_prompt_ids(tokenizer: Any) -> list[list[int]]:
    return [encode(tokenizer, user_turn(text)) for text in TINY_PROMPTS]


def token_rows(tokenizer: Any, n_vocab: int, length: int) -> np.ndarray:
    """int32 [4, length]: each tiny prompt, filled up with uniformly random ids (specials and unused ids too)."""
    rows = []
    for row, ids in enumerate(tiny_prompt_ids(tokenizer)):
        noise = np.random.default_rng(1000 + row).integers(0, n_vocab, length)
        rows.append(np.concatenate([ids, noise])[:length])
    return np.array(rows, dtype=np.int32)


def sample_columns(n_vocab: int, count: int = 64) -> np.ndarray:
    """int32 [count], sorted: the vocabulary columns whose logits are stored in full."""
    return np.sort(np.random.default_rng(n_vocab).permutation(n_vocab)[:count]).astype(np.int32)


def prompt_set() -> list[dict[str, str]]:
    """The prompts that acceptance and speed are measured on; each has `id`, `kind` and `text`."""
    prompts: list[dict[str, str]] = json.loads(PROMPT_SET.read_text(encoding="utf-8"))["prompts"]
    return prompts


def prompt_text(prompt: dict[str, str]) -> str:
    """What is tokenised: the text itself, or for kind "chat" the text as a user turn."""
    return user_turn(prompt["text"]) if prompt["kind"] == "chat" else prompt["text"]


def named_rng(name: str, seed: int) -> np.random.Generator:
    """A generator that depends on a tensor's name only, so that adding tensors changes no other."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
