#!/usr/bin/env python3
"""llama.cpp's DFlash on the built-in pair: how many drafts it accepts, and how fast it is.

    python demo_llama_cpp.py acceptance PAIR OUT.json [--reference demo-reference.json]
    python demo_llama_cpp.py speed PAIR [--threads 2] [--repeats 3]

acceptance: both files widened to f32, f32 K/V, flash attention off, greedy, 192 tokens or up to the end of the turn,
15 drafts a step. A step's accepted length is the number of tokens it adds (accepted drafts and the target's own
token); the first token of an answer comes from the prompt and belongs to no step. With --reference the texts and
accepted lengths are held against the exact loop of demo_goldens.py. speed: the files as shipped, llama.cpp's
defaults, best of the repeats.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from importlib.metadata import version
from typing import Any

from oracle_inputs import prompt_set, prompt_text
from server_peer import LlamaServer
from tokenizers import Tokenizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
from support.models import upcast_gguf

NEW_TOKENS = 192
N_MAX = 15


def prompt_ids(pair: pathlib.Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    return {p["id"]: tokenizer.encode(prompt_text(p), add_special_tokens=False).ids for p in prompt_set()}


def accepted_length(rows: list[dict[str, Any]]) -> float:
    """Tokens per verify step over several prompts."""
    return sum(row["tokens_in_steps"] for row in rows) / sum(row["steps"] for row in rows)


def acceptance(pair: pathlib.Path, out: pathlib.Path, reference: pathlib.Path | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        target = upcast_gguf(pair / "target-q8_0.gguf", pathlib.Path(place, "target.gguf"))
        draft = upcast_gguf(pair / "draft-bf16.gguf", pathlib.Path(place, "draft.gguf"))
        server = LlamaServer(str(target), str(draft), n_max=N_MAX)
        kinds = {p["id"]: p["kind"] for p in prompt_set()}
        rows = []
        for name, ids in prompt_ids(pair).items():
            answer = server.complete(ids, NEW_TOKENS)
            timings = answer["timings"]
            n_tokens, n_accepted = answer["tokens_predicted"], timings["draft_n_accepted"]
            row = {
                "id": name,
                "kind": kinds[name],
                "n_prompt": len(ids),
                "stop": answer["stop_type"],
                "drafted": timings["draft_n"],
                "accepted": n_accepted,
                "tokens_in_steps": n_tokens - 1,
                "steps": n_tokens - 1 - n_accepted,
                "tokens": answer["tokens"],
            }
            row["accepted_length"] = round(accepted_length([row]), 4)
            rows.append(row)
            print(f"{name}: {n_tokens} tokens ({row['stop']}), drafted {row['drafted']}, accepted {n_accepted}")
    if reference is not None:
        compare(rows, json.loads(reference.read_text()))
    totals = {kind: round(accepted_length([r for r in rows if r["kind"] == kind]), 4) for kind in kinds.values()}
    totals["all"] = round(accepted_length(rows), 4)
    head = {
        "command": "demo_llama_cpp.py acceptance",
        "xllamacpp": version("xllamacpp"),
        "setting": "f32 weights and K/V, flash attention off, greedy, one thread",
        "new_tokens": NEW_TOKENS,
        "n_max": N_MAX,
        "accepted_length": totals,
    }
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    out.write_text(json.dumps(head)[:-1] + f', "prompts": [\n{lines}\n]}}\n')
    print(totals)


def compare(rows: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    for row, exact in zip(rows, reference["prompts"], strict=True):
        texts = list(zip(row["tokens"], exact["tokens"], strict=False))
        departs = next((i for i, (a, b) in enumerate(texts) if a != b), None)
        print(
            f"{row['id']}: {len(row['tokens'])} and {len(exact['tokens'])} tokens, texts depart at {departs}; "
            f"accepted length {row['accepted_length']} and {exact['accepted_length']}"
        )


def speed(pair: pathlib.Path, threads: int, repeats: int) -> None:
    target, draft = str(pair / "target-q8_0.gguf"), str(pair / "draft-bf16.gguf")
    by_kind: dict[str, list[list[int]]] = {}
    for prompt, ids in zip(prompt_set(), prompt_ids(pair).values(), strict=True):
        by_kind.setdefault(prompt["kind"], []).append(ids)
    long_prompt = [i for rows in by_kind.values() for ids in rows for i in ids][:512]
    for n_max in (0, 15, 7, 3):
        label = f"n_max {n_max}" if n_max else "alone"
        server = LlamaServer(target, draft if n_max else None, n_max=n_max, threads=threads, exact=False)
        server.complete(long_prompt[:32], 16)
        if not n_max:
            best = max(server.complete(long_prompt, 1)["timings"]["prompt_per_second"] for _ in range(repeats))
            print(f"prefill of {len(long_prompt)}: {best:.0f} tok/s", flush=True)
        for kind, prompts in by_kind.items():
            rates = []
            for _ in range(repeats):
                timings = [server.complete(ids, NEW_TOKENS)["timings"] for ids in prompts]
                seconds = sum(t["predicted_ms"] for t in timings) / 1e3
                rates.append(sum(t["predicted_n"] for t in timings) / seconds)
            print(f"{label}, {kind}: best {max(rates):.1f} tok/s, all {[round(r, 1) for r in rates]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    first = modes.add_parser("acceptance")
    first.add_argument("pair", type=pathlib.Path)
    first.add_argument("out", type=pathlib.Path)
    first.add_argument("--reference", type=pathlib.Path)
    second = modes.add_parser("speed")
    second.add_argument("pair", type=pathlib.Path)
    second.add_argument("--threads", type=int, default=2)
    second.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.mode == "acceptance":
        acceptance(args.pair, args.out, args.reference)
    else:
        speed(args.pair, args.threads, args.repeats)


if __name__ == "__main__":
    main()
