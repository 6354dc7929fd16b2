#!/usr/bin/env python3
"""Convert a tiny Hugging Face folder with llama.cpp's own converter.

    python hf_to_gguf.py LLAMA_CPP FOLDER OUT.gguf [--outtype bf16] [--target FOLDER]

LLAMA_CPP is a source tree that holds convert_hf_to_gguf.py, such as vendor/llama.cpp of the llama-cpp-python source
distribution. The converter recognises a pre-tokenizer by a hash over a published vocabulary, which a private one never
matches; that single look-up is answered with "qwen35" here. --target names the target's folder when FOLDER is a
drafter.
"""

import argparse
import importlib
import json
import logging
import pathlib
import sys


def convert(llama_cpp: pathlib.Path, folder: pathlib.Path, out: pathlib.Path, outtype: str, target: str | None) -> None:
    for place in (llama_cpp / "gguf-py", llama_cpp):
        sys.path.insert(0, str(place))
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
    arguments = [str(folder), "--outfile", str(out), "--outtype", outtype]
    config = json.loads((folder / "config.json").read_text())
    if target is not None:
        arguments += ["--target-model-dir", target]
    elif not config.get("mtp_num_hidden_layers"):
        arguments.append("--no-mtp")
    converter = importlib.import_module("convert_hf_to_gguf")
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    converter.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0"], default="bf16")
    parser.add_argument("--target")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # the converter calls basicConfig, which leaves a configured root logger alone
    logging.basicConfig(level=logging.ERROR)
    convert(args.llama_cpp, args.folder, args.out, args.outtype, args.target)
    print(f"{args.out}: {args.out.stat().st_size} bytes, {args.outtype}")


if __name__ == "__main__":
    main()
