#!/usr/bin/env python3
"""Write a target and drafters of a real size with made-up weights, as GGUF files for pydflash and llama.cpp.

    python make_random_pair.py FOLDER --size 27B --acceptance all none

FOLDER gets target.gguf (Q4_K and Q6_K, mixed as in files of the kind Q4_K_M) and for each acceptance and window a
drafter (Q8_0), such as draft-all.gguf, draft-none.gguf, draft-all-w2048.gguf. A step costs what it costs with trained
weights of that size; the text is noise.

How acceptance is fixed. Half of the hidden dimensions, the *vote* dimensions, hold the same pattern in every embedding
row, and no layer adds to them: the rows of the output projections that end there are zero. Only they reach the output
head, whose row of one token, the favourite, points along the pattern. Norm weights hide the vote dimensions from the
layers, which work on the other half as on any hidden state.
    all   target and drafter both give the favourite, always: every proposal is accepted.
    none  the drafter's final norm is negated, so it never gives the favourite: nothing is accepted.
    RATE  a number such as 0.8: as `all` in greedy decoding; sampling at temperature 1 draws the favourite with this
          probability, so that a verified proposal is accepted with it.

--degenerate no: ordinary scales everywhere, so that each position has a distribution of its own; then the drafter knows
nothing of the target. For comparing outputs.

A mixture of experts reads fewer experts in a wide step of the first kind of pair than with real text, since the rows
hold the same token and choose nearly the same experts; forwards of random ids, or of an ordinary pair, read more.
"""

import argparse
import math
import time
from pathlib import Path

from pair_blocks import Q4_K, Q8_0, Floats, float_tensor, write_gguf
from pair_keys import Vocabulary, draft_keys, target_keys
from pair_sizes import SIZES
from pair_weights import GATE_TYPES, Mix, Weights, draft_layer, target_ends, target_layer

_CERTAIN = 25.0  # by how much the favourite's logit exceeds the logarithm of the vocabulary


def write_target(
    path: Path, label: str, n_vote: int, margin: float, mix: Mix, seed: int, vocabulary: Vocabulary
) -> Floats:
    """Returns the weights of the final norm."""
    size = SIZES[label][0]
    w = Weights(size.n_embd, 2 * size.n_layer, n_vote, Q4_K, seed)
    ends = target_ends(w, size, vocabulary.favourite, margin)
    tensors = [*ends.tensors, float_tensor("output_norm.weight", ends.final_norm)]
    for layer in range(size.n_layer):
        tensors += target_layer(w, size, layer, mix)
    write_gguf(path, target_keys(path, label, size, vocabulary, mix.more_bits), tensors)
    return ends.final_norm


def write_draft(
    path: Path, label: str, window: int, n_vote: int, final_norm: Floats, seed: int, vocabulary: Vocabulary
) -> None:
    target, draft = SIZES[label]
    w = Weights(target.n_embd, 2 * draft.n_layer, n_vote, Q8_0, seed)
    tensors = [
        w.into("fc.weight", target.n_embd, n_in=draft.n_taps * target.n_embd),
        w.vector("enc.output_norm.weight", target.n_embd),
        float_tensor("output_norm.weight", final_norm),
    ]
    for layer in range(draft.n_layer):
        tensors += draft_layer(w, draft, f"blk.{layer}.")
    write_gguf(path, draft_keys(path, label, target, draft, window, vocabulary), tensors)


def acceptance(text: str) -> str:
    """A word of the command line, checked."""
    if text in ("all", "none"):
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0.0 < rate < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}, want all, none, or a rate between 0 and 1")
    return text


def make_pair(
    folder: Path,
    label: str,
    accept: list[str],
    windows: list[int],
    *,
    degenerate: bool = True,
    mix: Mix | None = None,
    seed: int = 0,
) -> list[Path]:
    """Write the files; returns their paths, the target's first."""
    rates = [float(word) for word in accept if word not in ("all", "none")]
    if len(rates) > 1:
        raise ValueError(f"rates {rates}: the target holds one rate, want at most one")
    size = SIZES[label][0]
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary.of(size.n_vocab)
    n_vote = size.n_embd // 2 // 256 * 256 if degenerate else 0
    spread = math.log(size.n_vocab - 1)
    margin = spread + (math.log(rates[0] / (1 - rates[0])) if rates else _CERTAIN)
    paths = [folder / "target.gguf"]
    final_norm = write_target(paths[0], label, n_vote, margin, mix or Mix(), seed, vocabulary)
    for word in accept if degenerate else ["ordinary"]:
        for window in windows:
            path = folder / (f"draft-{word}-w{window}.gguf" if window else f"draft-{word}.gguf")
            norm = -final_norm if word == "none" else final_norm
            write_draft(path, label, window, n_vote, norm, seed + 1, vocabulary)
            paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--acceptance", type=acceptance, nargs="+", default=["all"], metavar="all|none|RATE")
    parser.add_argument(
        "--window", type=int, nargs="+", default=[0], help="of all drafter layers but the last; 0: full attention"
    )
    parser.add_argument("--degenerate", choices=["yes", "no"], default="yes")
    parser.add_argument("--mix", choices=["q4_k_m", "q4_k_s"], default="q4_k_m", help="default: %(default)s")
    parser.add_argument(
        "--gate-type", choices=GATE_TYPES, default="q8_0", help="of ssm_alpha and ssm_beta; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    paths = make_pair(
        args.folder,
        args.size,
        args.acceptance,
        args.window,
        degenerate=args.degenerate == "yes",
        mix=Mix(more_bits=args.mix == "q4_k_m", gates=GATE_TYPES[args.gate_type]),
        seed=args.seed,
    )
    for path in paths:
        print(f"{path}: {path.stat().st_size / 1e9:.3f} GB")
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
