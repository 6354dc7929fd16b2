#!/usr/bin/env python3
"""Hold the committed goldens against llama.cpp, through the prebuilt wheel `xllamacpp`.

    python compare_with_llama_cpp.py logits FILE.gguf GOLDEN.npz [--positions 96]
    python compare_with_llama_cpp.py steps TARGET.gguf DRAFT.gguf GOLDEN.json
    python compare_with_llama_cpp.py record FILE.gguf GOLDEN.npz OUT.npz [--sequences 2]

logits: log-probabilities after every prefix of every golden sequence; they fix the logits up to one constant a row,
so logits relative to the row's largest are compared. steps: greedy text, and drafted and accepted counts, of a
speculative run. Both print one line a sequence and a RESULT line. Use an f32 file (requantize.py --type f32) to see
float32 rounding only; with another type the figures show that type's rounding. record: writes llama.cpp's
log-probabilities for a quantised file, at the ids and columns of a golden, with the file's SHA-256: another engine
reading the same bytes has to come close to them.
"""

import argparse
import hashlib
import json
import pathlib
import sys

import numpy as np
from reference_target import thin_out
from server_peer import LlamaServer


def compare_logits(file: str, golden_path: str, positions: int) -> bool:
    server = LlamaServer(file)
    golden = np.load(golden_path)
    n_vocab = int(max(golden["ids"].max(), golden["columns"].max(), golden["top_ids"].max())) + 1
    worst, equal, total = 0.0, 0, 0
    for row, ids in enumerate(golden["ids"]):
        row_worst, row_equal = 0.0, 0
        steps = range(min(positions, len(ids)))
        for t in steps:
            found = server.next_logprobs(ids[: t + 1].tolist(), min(n_vocab, 2048))
            top = int(golden["argmax"][row, t])
            best = float(golden["top_logits"][row, t, 0])
            stored = list(zip(golden["top_ids"][row, t], golden["top_logits"][row, t], strict=True))
            stored += list(zip(golden["columns"], golden["column_logits"][row, t], strict=True))
            for token, logit in stored:
                if int(token) in found:
                    row_worst = max(row_worst, abs((found[int(token)] - found[top]) - (float(logit) - best)))
            row_equal += max(found, key=found.__getitem__) == top
        print(f"sequence {row}: {len(steps)} positions, max |diff| {row_worst:.2e}, argmax {row_equal}/{len(steps)}")
        worst, equal, total = max(worst, row_worst), equal + row_equal, total + len(steps)
    print(f"RESULT {file}: max |diff| {worst:.2e}, argmax {equal}/{total}")
    return equal == total


def record(file: str, golden_path: str, out: pathlib.Path, sequences: int) -> None:
    server = LlamaServer(file)
    golden = np.load(golden_path)
    ids, n_vocab = golden["ids"][:sequences], server.n_vocab
    logprobs = np.empty((*ids.shape, n_vocab), dtype=np.float32)
    for row, t in np.ndindex(*ids.shape):
        found = server.next_logprobs(ids[row, : t + 1].tolist(), n_vocab)
        logprobs[row, t, list(found)] = list(found.values())
        if len(found) != n_vocab:
            raise SystemExit(f"{len(found)} log-probabilities for {n_vocab} ids")
    digest = np.array(hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest())
    np.savez_compressed(out, ids=ids, sha256=digest, **thin_out(logprobs, golden["columns"]))
    print(f"{out}: {out.stat().st_size} bytes")


def compare_steps(target: str, draft: str, golden_path: str) -> bool:
    golden = json.loads(pathlib.Path(golden_path).read_text(encoding="utf-8"))
    server = LlamaServer(target, draft, n_max=len(golden["cases"][0]["steps"][0][1]))
    good = True
    for case in golden["cases"]:
        want = case["greedy"]
        answer = server.complete(case["prompt"], len(want))
        timings = answer["timings"]
        accepted = sum(step[2] - 1 for step in case["steps"])
        same = answer["tokens"] == want
        print(
            f"{len(case['prompt'])} + {len(want)} tokens, text equal: {same}; llama.cpp drafted {timings['draft_n']} "
            f"accepted {timings['draft_n_accepted']}; golden {len(case['steps'])} steps accepted {accepted}"
        )
        good &= same and timings["draft_n_accepted"] == accepted
    print(f"RESULT {draft}: {'equal' if good else 'DIFFERENT'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    logits = modes.add_parser("logits")
    logits.add_argument("file")
    logits.add_argument("golden")
    logits.add_argument("--positions", type=int, default=96)
    steps = modes.add_parser("steps")
    steps.add_argument("target")
    steps.add_argument("draft")
    steps.add_argument("golden")
    recorded = modes.add_parser("record")
    recorded.add_argument("file")
    recorded.add_argument("golden")
    recorded.add_argument("out", type=pathlib.Path)
    recorded.add_argument("--sequences", type=int, default=2)
    args = parser.parse_args()
    if args.mode == "record":
        record(args.file, args.golden, args.out, args.sequences)
        return 0
    if args.mode == "logits":
        return 0 if compare_logits(args.file, args.golden, args.positions) else 1
    return 0 if compare_steps(args.target, args.draft, args.golden) else 1


if __name__ == "__main__":
    sys.exit(main())
