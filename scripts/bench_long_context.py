#!/usr/bin/env python3
"""Acceptance and drafting time against the length of the context, at tiny size on one CPU thread.

    python scripts/bench_long_context.py TARGET.gguf DRAFT.gguf --prompt IDS.json [--contexts 1024 8192 32768 130816]
        [--slack 64] [--full-rows 8192] [--k-type f32] [--v-type f32] [--draft-type f32]

Random tokens fill the context up to the given length, then comes the prompt (a JSON list of ids, or the first case's
prompt of a golden file of steps), and 65 tokens are decoded greedily with all proposals of a block. The ring of a
sliding layer holds window, block and slack, so --slack varies it apart from the window. In docs/performance.md the pair
is nano with a short memory and d-long of tests/data, both as float32 (tests/model/test_long_context.py makes them).
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np

import pydflash
from pydflash import SamplingOptions

_TOKENS = 65


def prompt_of(path: Path) -> list[int]:
    value = json.loads(path.read_text(encoding="utf-8"))
    return list(value if isinstance(value, list) else value["cases"][0]["prompt"])


def measure(
    target: pydflash.TargetModel, draft: pydflash.DraftModel, n: int, prompt: list[int], args: argparse.Namespace
) -> str:
    filler = np.random.default_rng(0).integers(0, 256, n - len(prompt)).tolist()
    with (
        pydflash.TargetCache(
            target, n + 128, args.k_type, args.v_type, capture_layers=draft.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(
            draft, args.draft_type, args.draft_type, full_rows=args.full_rows, slack=args.slack
        ) as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        decoder.begin(SamplingOptions(temperature=0.0), stop_ids=[])
        begun = time.perf_counter()
        out = list(decoder.prefill(filler + prompt, _TOKENS).tokens)
        prefill = time.perf_counter() - begun
        steps, draft_ms, verify_ms = 0, [], []
        while len(out) < _TOKENS:
            step = decoder.step(draft.config.block_size, _TOKENS - len(out))
            out += step.tokens
            steps += 1
            if step.n_proposed:
                draft_ms.append(step.draft_ms)
                verify_ms.append(step.verify_ms)
        return (
            f"{n:8d} {(_TOKENS - 1) / steps:7.3f} {min(draft_ms):9.3f} {median(draft_ms):9.3f} {min(verify_ms):9.3f} "
            f"{context.state.memory_bytes / 1024:9.1f} {prefill:9.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompt", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 130816])
    parser.add_argument("--slack", type=int, default=64)
    parser.add_argument("--full-rows", type=int, default=8192)
    parser.add_argument("--k-type", default="f32")
    parser.add_argument("--v-type", default="f32")
    parser.add_argument("--draft-type", default="f32")
    args = parser.parse_args()
    prompt = prompt_of(args.prompt)
    with (
        pydflash.TargetModel.open(args.target, n_threads=1) as target,
        pydflash.DraftModel.open(args.draft, target) as draft,
    ):
        print(f"windows {draft.config.windows}, slack {args.slack}, full rows {args.full_rows}")
        print(" context  tokens  draft ms    median verify ms   context  prefill")
        print("          a step     least                least       KiB        s")
        for n in args.contexts:
            print(measure(target, draft, n, prompt, args), flush=True)


if __name__ == "__main__":
    main()
