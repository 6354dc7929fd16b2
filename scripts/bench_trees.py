#!/usr/bin/env python3
"""Accepted length and speed of chains and trees, prompt by prompt.

Greedy, every prompt with every shape in turn, so that a busy machine slows all of them. Prints one JSON object for each
prompt and shape to --out, and a table: tokens a step, tokens a second, the share of prompts on which a tree accepted at
least what the chain of 16 did, and whether every text was the same.

    python scripts/bench_trees.py --max-tokens 96 --threads 1 --out trees.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydflash import Engine, EngineOptions, SamplingOptions

SHAPES: dict[str, dict[str, int]] = {
    "plain": {"width": 1},
    "chain 4": {"width": 4},
    "chain 16": {"width": 16},
    "tree 8": {"tree": 8},
    "tree 16": {"tree": 16},
    "tree 22": {"tree": 22},
    "tree 32": {"tree": 32},
    "tree 64": {"tree": 64},
    "chosen": {},
}
PROMPTS = Path(__file__).resolve().parent / "prompts.json"


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each prompt and shape."""
    rows: list[dict[str, object]] = []
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))["prompts"][:: args.every]
    # Two engines: the one that chooses knows the automatic sizes, the other takes any.
    options = {"n_ctx": args.ctx_size, "n_threads": args.threads, "device": args.device}
    with (
        Engine.open(args.model, args.draft, EngineOptions(tree=64, **options)) as fixed,
        Engine.open(args.model, args.draft, EngineOptions(tree="auto", **options)) as auto,
        args.out.open("w", encoding="utf-8") as out,
    ):
        for prompt in prompts:
            text = prompt["text"]
            ids = fixed.encode([{"role": "user", "content": text}] if prompt["kind"] == "chat" else text)
            plain: tuple[int, ...] | None = None
            for shape, choice in SHAPES.items():
                engine = fixed if choice else auto
                result = engine.generate(
                    ids, SamplingOptions(max_tokens=args.max_tokens, ignore_eos=True, seed=1, **choice)
                )
                plain = result.token_ids if plain is None else plain
                stats = result.stats
                row: dict[str, object] = {"id": prompt["id"], "kind": prompt["kind"], "shape": shape}
                row |= {"tokens": stats.emitted - 1, "steps": stats.steps, "ms": stats.total_ms - stats.prefill_ms}
                row |= {"same_text": result.token_ids == plain}
                row |= {"trees": dict(stats.trees), "widths": dict(stats.widths)}
                row |= {name: getattr(stats, name) for name in ("draft_ms", "verify_ms", "commit_ms")}
                rows.append(row)
                print(json.dumps(row), file=out, flush=True)
    return rows


def length(rows: list[dict[str, object]]) -> float:
    """Tokens a step over all rows."""
    return sum(int(str(row["tokens"])) for row in rows) / max(1, sum(int(str(row["steps"])) for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file; the built-in pair by default")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--ctx-size", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt only")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--out", type=Path, default=Path("trees.jsonl"))
    rows = measure(parser.parse_args())
    kinds = sorted({str(row["kind"]) for row in rows})
    chain = {row["id"]: length([row]) for row in rows if row["shape"] == "chain 16"}
    print(f"{'shape':10} {'tokens/step':>11} {'tok/s':>7} {'>= chain':>9} {'same':>5}  " + "  ".join(kinds))
    for shape in SHAPES:
        mine = [row for row in rows if row["shape"] == shape]
        at_least = sum(length([row]) >= chain[row["id"]] for row in mine)
        speed = sum(int(str(row["tokens"])) for row in mine) / sum(float(str(row["ms"])) for row in mine) * 1e3
        by_kind = "  ".join(f"{length([row for row in mine if row['kind'] == kind]):.2f}" for kind in kinds)
        same = sum(bool(row["same_text"]) for row in mine)
        shares = f"{at_least:5}/{len(mine):<3} {same:2}/{len(mine):<2}"
        print(f"{shape:10} {length(mine):11.3f} {speed:7.1f} {shares}  {by_kind}")


if __name__ == "__main__":
    main()
