#!/usr/bin/env python3
"""Write a GGUF with another weight type.

    python requantize.py IN.gguf OUT.gguf --type f32|f16|bf16|q8_0|q4_0|q4_k

Types and exceptions are those of tests/support/models.py.
"""

import argparse
import pathlib
import sys
from typing import get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
from support.models import QuantType, quantize_gguf, upcast_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--type", choices=get_args(QuantType), required=True)
    args = parser.parse_args()
    if args.type == "f32":
        upcast_gguf(args.source, args.out)
    else:
        quantize_gguf(args.source, args.out, args.type)
    print(f"{args.out}: {args.out.stat().st_size} bytes, {args.type}")


if __name__ == "__main__":
    main()
