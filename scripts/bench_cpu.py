#!/usr/bin/env python3
"""What a step of each width costs on one CPU thread, in processor time, and how many tokens it emits.

    python scripts/bench_cpu.py [--widths 1 2 4 8 16] [--repeats 2] [--file-layout]

The built-in pair continues the prompts of kind "code" in prompts.json, width after width in turn, greedily. Processor
time is little disturbed by other programs; the lower quartile of the steps is printed. "rate" is tokens for processor
time compared with the first width. --file-layout computes from the mapped file instead of packed weights.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pydflash
from pydflash import SamplingOptions, builtin
from pydflash.text.tokenizer import Tokenizer

_PARTS = ("append_ms", "draft_ms", "verify_ms", "commit_ms")


def quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--file-layout", action="store_true")
    args = parser.parse_args()
    texts = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))["prompts"]
    with ExitStack() as stack:
        target = stack.enter_context(
            pydflash.TargetModel.open(builtin.target_path(), n_threads=1, pack_weights=not args.file_layout)
        )
        draft = stack.enter_context(pydflash.DraftModel.open(builtin.draft_path(), target, weights="q8_0"))
        cache = stack.enter_context(pydflash.TargetCache(target, 1024, capture_layers=draft.config.target_layer_ids))
        context = stack.enter_context(pydflash.DraftContext(draft))
        decoder = stack.enter_context(pydflash.Decoder(cache, context))
        tokenizer = Tokenizer.from_metadata(target.metadata)
        prompts = [tokenizer.encode(prompt["text"]) for prompt in texts if prompt["kind"] == "code"]
        cost: dict[int, list[float]] = {width: [] for width in args.widths}
        parts: dict[int, list[list[float]]] = {width: [] for width in args.widths}
        tokens = dict.fromkeys(args.widths, 0)
        rates: dict[int, list[float]] = {width: [] for width in args.widths}
        for repeat in range(-1, args.repeats):  # the first one builds graphs
            spent = dict.fromkeys(args.widths, 0.0)
            emitted = dict.fromkeys(args.widths, 0)
            for prompt in prompts:
                for width in args.widths:
                    decoder.reset()
                    decoder.begin(SamplingOptions(), stop_ids=[])
                    decoder.prefill(prompt, args.tokens)
                    left = args.tokens
                    while left > 0:
                        begun = time.process_time()
                        result = decoder.step(width, left)
                        ms = (time.process_time() - begun) * 1e3
                        left -= len(result.tokens)
                        spent[width] += ms
                        emitted[width] += len(result.tokens)
                        if repeat >= 0 and result.width == width:
                            cost[width].append(ms)
                            parts[width].append([getattr(result, part) for part in _PARTS])
                            tokens[width] += len(result.tokens)
            if repeat >= 0:
                for width in args.widths:
                    rates[width].append(emitted[width] / spent[width])
    print("width  cpu ms  tokens  rate   of it wall ms: " + "  ".join(part[:-3] for part in _PARTS))
    for width in args.widths:
        rate = median(a / b for a, b in zip(rates[width], rates[args.widths[0]], strict=True))
        columns = "  ".join(f"{quartile(column):6.3f}" for column in zip(*parts[width], strict=True))
        print(
            f"{width:5d} {quartile(cost[width]):7.2f} {tokens[width] / len(cost[width]):7.2f}  {rate:4.2f}  {columns}"
        )


if __name__ == "__main__":
    main()
