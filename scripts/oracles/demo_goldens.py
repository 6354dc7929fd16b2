#!/usr/bin/env python3
"""Golden numbers of the built-in pair, by transformers and the reference package `dflash` in float32.

    python demo_goldens.py PAIR OUT

PAIR holds target/ and draft/ (Hugging Face folders) and target-q8_0.gguf. The target's numbers are those of the q8_0
file, widened to f32, so that they are the truth for the file that is shipped. OUT gets

    target-demo.npz         TargetGolden of six prompts, each followed by its greedy text
    target-demo-hf.npz      the same ids through the unquantised folder: shows what q8_0 costs
    block-demo-ID.npz       BlockGolden of three prompts: the first block, and one sixteen tokens later
    demo-steps.json         StepGolden of six prompts
    demo-reference.json     tokens and accepted lengths of the whole prompt set by the exact loop
"""

import argparse
import json
import pathlib
from typing import Any

import numpy as np
from oracle_inputs import encode, prompt_set, prompt_text, sample_columns
from reference_draft import decode, draft_block, features_of, greedy, load_draft
from reference_target import load_target, run_target, thin_out
from transformers import AutoTokenizer

LENGTH = 96
NEW_TOKENS = 192
STEP_TOKENS = 64
TARGET_PROMPTS = ("code-quicksort", "code-cache", "code-graph", "chat-factorial", "chat-primes", "chat-matrix")
BLOCK_PROMPTS = ("code-quicksort", "prose-algorithm", "chat-primes")
STEP_PROMPTS = ("code-quicksort", "code-unittest", "prose-module", "prose-parameters", "chat-merge", "chat-date")


def write_target(target: Any, plain: Any, prompts: dict[str, list[int]], out: pathlib.Path) -> None:
    ids = []
    for name in TARGET_PROMPTS:
        text = prompts[name]
        ids.append((text + greedy(target, text, max(0, LENGTH - len(text))))[:LENGTH])
    rows = np.array(ids, dtype=np.int32)
    for model, name, n_columns in ((target, "target-demo", 64), (plain, "target-demo-hf", 16)):
        logits = np.stack([run_target(model, row).logits[0].numpy() for row in rows])
        columns = sample_columns(logits.shape[-1], n_columns)
        np.savez_compressed(out / f"{name}.npz", ids=rows, **thin_out(logits, columns))
        print(f"{name}.npz: {(out / f'{name}.npz').stat().st_size} bytes")


def write_block(target: Any, draft: Any, prompt: list[int], path: pathlib.Path) -> None:
    ids = np.array(prompt + greedy(target, prompt, 17), dtype=np.int32)
    contexts = np.array([len(prompt), len(prompt) + 16], dtype=np.int32)
    hidden_states = run_target(target, ids).hidden_states
    blocks = [draft_block(target, draft, features_of(draft, hidden_states, int(c)), int(ids[c])) for c in contexts]
    logits = np.stack([rows[0].numpy() for _, rows in blocks])
    np.savez_compressed(
        path,
        ids=ids,
        contexts=contexts,
        anchors=ids[contexts],
        mask_id=np.int32(draft.mask_token_id),
        block_size=np.int32(draft.block_size),
        **thin_out(logits, sample_columns(logits.shape[-1])),
    )
    print(f"{path.name}: {path.stat().st_size} bytes")


def write_steps(target: Any, draft: Any, prompts: dict[str, list[int]], out: pathlib.Path) -> None:
    cases = []
    for name in STEP_PROMPTS:
        run = decode(target, draft, prompts[name], STEP_TOKENS)
        if run["text"] != greedy(target, prompts[name], STEP_TOKENS):
            raise SystemExit(f"{name}: speculative text differs from greedy text")
        top = run["first"].topk(5, dim=-1)
        values = [[round(v, 5) for v in row] for row in top.values.tolist()]
        first = {"ids": top.indices.tolist(), "logits": values}
        cases.append({"prompt": prompts[name], "greedy": run["text"], "steps": run["steps"], "first": first})
        print(f"{name}: {len(run['steps'])} steps, smallest gap {min(run['gaps']):.1e}", flush=True)
    golden = {
        "block_size": draft.block_size,
        "mask": draft.mask_token_id,
        "target_layer_ids": draft.target_layer_ids,
        "cases": cases,
    }
    (out / "demo-steps.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def write_reference(target: Any, draft: Any, prompts: dict[str, list[int]], stop: int, out: pathlib.Path) -> None:
    rows = []
    for name, ids in prompts.items():
        run = decode(target, draft, ids, NEW_TOKENS, (stop,))
        produced = [step[2] for step in run["steps"]]
        row = {
            "id": name,
            "n_prompt": len(ids),
            "tokens": run["text"],
            "produced": produced,
            "accepted_length": round(sum(produced) / len(produced), 4),
            "smallest_gap": min(run["gaps"]),
        }
        rows.append(row)
        print(f"{name}: {len(run['text'])} tokens, accepted length {row['accepted_length']}", flush=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps({"new_tokens": NEW_TOKENS, "block_size": draft.block_size, "stop_id": stop})[:-1]
    (out / "demo-reference.json").write_text(f'{head}, "prompts": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    folder = str(args.pair / "target")
    target = load_target(folder, args.pair / "target-q8_0.gguf")
    draft = load_draft(str(args.pair / "draft"), target.config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = {p["id"]: encode(tokenizer, prompt_text(p)) for p in prompt_set()}
    write_target(target, load_target(folder), prompts, args.out)
    for name in BLOCK_PROMPTS:
        write_block(target, draft, prompts[name], args.out / f"block-demo-{name}.npz")
    write_steps(target, draft, prompts, args.out)
    write_reference(target, draft, prompts, target.config.eos_token_id, args.out)


if __name__ == "__main__":
    main()
