#!/usr/bin/env python3
"""A tiny target whose next token depends on the last few dozen tokens only, from a folder of make_tiny_target.py.

    python shorten_memory.py FOLDER OUT

Recurrent states decay eight times as fast, and full attention adds nothing. Such a target continues the same prompt
with the same text behind any amount of other text, so what a drafter gets accepted can be compared across contexts.
"""

import argparse
import math
import pathlib
import shutil

from safetensors.torch import load_file, save_file

FASTER = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    shutil.copytree(args.folder, args.out)
    path = args.out / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = tensors[name] + math.log(FASTER)
        if name.endswith("self_attn.o_proj.weight"):
            tensors[name] = tensors[name] * 0
    save_file(tensors, path, metadata={"format": "pt"})
    print(f"{args.out}: decays {FASTER:g} times as fast, attention off")


if __name__ == "__main__":
    main()
