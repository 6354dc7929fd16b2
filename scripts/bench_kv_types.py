#!/usr/bin/env python3
"""What quantised keys and values cost in acceptance, on texts that stay the same.

    python scripts/bench_kv_types.py [--prompts 10] [--tokens 96]

The built-in pair on one CPU thread. Each prompt is continued greedily with f16 keys and values. Then the text is read
again with each pair of types, and the drafter proposes along it as it would while decoding: a step counts the proposals
that agree with the text, and one token more.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import pydflash
from pydflash import SamplingOptions, builtin
from pydflash.text.tokenizer import Tokenizer

_TYPES = (("f16", "f16"), ("f16", "q8_0"), ("f16", "q4_0"), ("q8_0", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))


def continued(target: pydflash.TargetModel, prompt: list[int], n: int) -> list[int]:
    with pydflash.TargetCache(target, 1024, "f16", "f16") as cache, pydflash.Decoder(cache) as decoder:
        decoder.begin(SamplingOptions(temperature=0.0), stop_ids=[])
        text = list(decoder.prefill(prompt, n).tokens)
        while len(text) < n:
            text += decoder.step(1, n - len(text)).tokens
        return text


def steps_along(
    target: pydflash.TargetModel, draft: pydflash.DraftModel, prompt: list[int], text: list[int], types: tuple[str, str]
) -> int:
    """Steps that the text takes when cache and context store these types."""
    k, draft_k = types
    ids = prompt + text
    with (
        pydflash.TargetCache(target, 1024, k, k, capture_layers=draft.config.target_layer_ids) as cache,
        pydflash.DraftContext(draft, draft_k, draft_k) as context,
    ):
        cache.forward(np.array(prompt), logits="none")
        for token in text:  # as while decoding, one by one
            cache.forward(np.array([token]), logits="none")
        position, steps = len(prompt), 0
        while position + 1 < len(ids):
            context.append(cache, context.cursor, position)
            proposals = context.propose(ids[position]).ids.tolist()
            wanted = ids[position + 1 :]
            agreed = next((i for i, (a, b) in enumerate(zip(proposals, wanted, strict=False)) if a != b), None)
            position += 1 + (min(len(proposals), len(wanted)) if agreed is None else agreed)
            steps += 1
        return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    prompts = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))["prompts"]
    with (
        pydflash.TargetModel.open(builtin.target_path(), n_threads=1) as target,
        pydflash.DraftModel.open(builtin.draft_path(), target) as draft,
    ):
        tokenizer = Tokenizer.from_metadata(target.metadata)
        ids = [tokenizer.encode(prompt["text"]) for prompt in prompts[: args.prompts]]
        texts = [continued(target, prompt, args.tokens) for prompt in ids]
        n = len(texts) * (args.tokens - 1)
        first = 0.0
        print("cache   context  tokens a step  against f16")
        for types in _TYPES:
            length = n / sum(
                steps_along(target, draft, prompt, text, types) for prompt, text in zip(ids, texts, strict=True)
            )
            first = first or length
            print(f"{types[0]:7s} {types[1]:7s} {length:14.3f} {100 * (length / first - 1):+11.1f} %", flush=True)


if __name__ == "__main__":
    main()
