#!/usr/bin/env python3
"""Compare speculative with plain decoding of the built-in pair, token for token.

    python scripts/check_lossless.py [--prompts 200] [--tokens 256] [--temperature 0] [--f32 yes|no] [--widths 16 4]
                                     [--start 0]

Prompts are 24 to 96 tokens from seeded places of the standard library's sources, and prompt n is drawn with seed n.
With --f32 yes both models are widened to float32 and K/V is f32, so that nothing but the order of summation can differ
between row counts. --start leaves out the prompts before it: --start 50 --prompts 50 is the second quarter of a run
of 200. Prints the prompts that differ with the place, and one line of totals; exits 1 if any differs.
"""

import argparse
import random
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.models import upcast_gguf

import pydflash
from pydflash import SamplingOptions, builtin
from pydflash.text.tokenizer import Tokenizer


def prompts_of(tokenizer: Tokenizer, n: int) -> list[list[int]]:
    """Token ids of n places in the standard library."""
    rng = random.Random(20)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    prompts: list[list[int]] = []
    while len(prompts) < n:
        text = rng.choice(files).read_text(encoding="utf-8", errors="replace")
        start = rng.randrange(max(1, len(text) - 2000))
        ids = tokenizer.encode(text[start : start + 1200], parse_special=False)
        length = rng.randrange(24, 97)
        if len(ids) >= length:
            prompts.append(list(ids[:length]))
    return prompts


def generate(decoder: pydflash.Decoder, prompt: list[int], n: int, width: int, options: SamplingOptions) -> list[int]:
    decoder.reset()
    decoder.begin(options, stop_ids=[])
    tokens = list(decoder.prefill(prompt, n).tokens)
    while len(tokens) < n:
        tokens += decoder.step(width, n - len(tokens)).tokens
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--f32", choices=["yes", "no"], default="yes")
    parser.add_argument("--widths", type=int, nargs="+", default=[16])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.start < 0 or args.prompts < 1:
        parser.error(f"--start {args.start} --prompts {args.prompts}, want at least 0 and 1")
    kv = "f32" if args.f32 == "yes" else "f16"
    differ, tokens, steps, seconds = 0, 0, 0, time.perf_counter()
    with ExitStack() as stack:
        target_path, draft_path = Path(builtin.target_path()), Path(builtin.draft_path())
        if args.f32 == "yes":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            target_path = upcast_gguf(target_path, folder / "target.gguf")
            draft_path = upcast_gguf(draft_path, folder / "draft.gguf")
        target = stack.enter_context(pydflash.TargetModel.open(target_path, n_threads=args.threads))
        drafter = stack.enter_context(pydflash.DraftModel.open(draft_path, target))
        caches = [
            stack.enter_context(
                pydflash.TargetCache(
                    target, capacity=512, k_type=kv, v_type=kv, capture_layers=drafter.config.target_layer_ids
                )
            )
            for _ in range(2)
        ]
        context = stack.enter_context(pydflash.DraftContext(drafter, k_type=kv, v_type=kv))
        alone = stack.enter_context(pydflash.Decoder(caches[0]))
        drafted = stack.enter_context(pydflash.Decoder(caches[1], context))
        prompts = prompts_of(Tokenizer.from_metadata(target.metadata), args.start + args.prompts)
        for number, prompt in enumerate(prompts[args.start :], args.start):
            options = SamplingOptions(temperature=args.temperature, seed=number)
            wanted = generate(alone, prompt, args.tokens, 1, options)
            for width in args.widths:
                got = generate(drafted, prompt, args.tokens, width, options)
                tokens, steps = tokens + len(got) - 1, steps + drafted.stats.steps
                if got != wanted:
                    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
                    print(f"prompt {number} width {width}: differs at token {at}", flush=True)
                    differ += 1
    total = args.prompts * len(args.widths)
    print(
        f"prompts {args.start} to {args.start + args.prompts - 1}: {total - differ} of {total} texts of {args.tokens} "
        f"tokens equal, mean accepted length {tokens / steps:.2f}, {time.perf_counter() - seconds:.0f} s"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
