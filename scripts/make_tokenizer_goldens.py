#!/usr/bin/env python3
"""Texts for the tokenizer tests, and what llama.cpp makes of them.

    python scripts/make_tokenizer_goldens.py write NAME TARGET.gguf
        store the vocabulary of TARGET.gguf and llama.cpp's ids in tests/data/tokenizer/NAME.json.gz
    python scripts/make_tokenizer_goldens.py write-crossing
        store llama.cpp's ids for crossing_vocabulary() in crossing-qwen35.json.gz and crossing-qwen2.json.gz
    python scripts/make_tokenizer_goldens.py ask MODEL.gguf < requests.json > answers.json
        send every {"route": ..., "body": ...} of a JSON list to llama.cpp's server; prints a JSON list of its answers

llama.cpp comes from the PyPI wheel `xllamacpp`, whose in-process server answers on loopback. It is started here and
not in the tests, so that a crash in it cannot take pytest along. GGUF files are read and written with `gguf`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SEED = 20261130
N_STRINGS = 2000
N_GOLDEN = 250
DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "tokenizer"

# First and last code point of alphabets, all assigned since Unicode 15 or earlier: llama.cpp knows nothing newer.
ALPHABETS = [
    (0x61, 0x7A), (0x41, 0x5A), (0xC0, 0xF6), (0x100, 0x17F), (0x180, 0x24F), (0x250, 0x2AF), (0x391, 0x3A1),
    (0x3B1, 0x3C9), (0x410, 0x44F), (0x531, 0x556), (0x5D0, 0x5EA), (0x620, 0x64A), (0x710, 0x72F), (0x780, 0x7A5),
    (0x904, 0x939), (0x985, 0x98C), (0xA05, 0xA0A), (0xA85, 0xA8D), (0xB85, 0xB8A), (0xC05, 0xC0C), (0xD05, 0xD0C),
    (0xE01, 0xE30), (0xE81, 0xE82), (0xF40, 0xF47), (0x1000, 0x102A), (0x10D0, 0x10FA), (0x1100, 0x115F),
    (0x1200, 0x1248), (0x13A0, 0x13F5), (0x1401, 0x1420), (0x1780, 0x17B3), (0x1820, 0x1842), (0x1E00, 0x1EFF),
    (0x2C00, 0x2C5F), (0x2D30, 0x2D67), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x3105, 0x312F), (0x4E00, 0x9FEF),
    (0xA000, 0xA48C), (0xAC00, 0xD7A3), (0xFB00, 0xFB06), (0xFF21, 0xFF5A), (0x10330, 0x10340), (0x12000, 0x12399),
    (0x1D400, 0x1D454), (0x1E900, 0x1E943), (0x20000, 0x2A6D6),
]  # fmt: skip
MARKS = [
    (0x300, 0x36F), (0x483, 0x489), (0x5B0, 0x5BD), (0x64B, 0x65F), (0x93A, 0x93C), (0x93E, 0x94F), (0xBBE, 0xBC2),
    (0xE34, 0xE3A), (0xF71, 0xF7E), (0x1AB0, 0x1ABD), (0x20D0, 0x20F0), (0x302A, 0x302D), (0x3099, 0x309A),
    (0xFE00, 0xFE0F), (0xFE20, 0xFE2F), (0x1D165, 0x1D169), (0xE0100, 0xE01EF),
]  # fmt: skip
NUMBERS = [
    (0x30, 0x39), (0xB2, 0xB3), (0xBC, 0xBE), (0x660, 0x669), (0x966, 0x96F), (0xE50, 0xE59), (0x2070, 0x2070),
    (0x2153, 0x218B), (0x2460, 0x249B), (0x3007, 0x3007), (0x3220, 0x3229), (0xFF10, 0xFF19), (0x1D7CE, 0x1D7FF),
]  # fmt: skip
SYMBOLS = [
    (0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0xA1, 0xA9), (0xAB, 0xAC), (0xD7, 0xD7), (0x2010, 0x2027),
    (0x20A0, 0x20BF), (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2500, 0x257F), (0x2600, 0x26FF), (0x3001, 0x3003),
    (0x3008, 0x3011), (0xFF01, 0xFF0F), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F680, 0x1F6C5),
]  # fmt: skip
# Controls, format characters, private use, unassigned and noncharacters.
ODD = [
    (0x00, 0x08), (0x0E, 0x1F), (0x7F, 0x84), (0x86, 0x9F), (0xAD, 0xAD), (0x378, 0x379), (0x600, 0x605),
    (0x180E, 0x180E), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x2064), (0x2FFF, 0x2FFF), (0xE000, 0xE010),
    (0xF8FF, 0xF8FF), (0xFDD0, 0xFDD3), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFF), (0x1FFFE, 0x1FFFF), (0xE0001, 0xE0001),
    (0xE0020, 0xE007F), (0xF0000, 0xF0003), (0x10FFFD, 0x10FFFF),
]  # fmt: skip
SPACES = [" ", " ", " ", " ", "\t", "\n", "\n", "\r\n", "\r", "\v", "\f", "\u0085", "\u00a0", "\u1680", "\u2003",
          "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"]  # fmt: skip
CONTRACTIONS = ["'s", "'S", "'t", "'re", "'RE", "'vE", "'m", "'ll", "'Ll", "'d", "'", "''", "\u2019s", "'\u017f", "'x"]
EMOJI = [
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "1\ufe0f\u20e3", "\U0001f3f4\U000e0067\U000e0062\U000e007f",
    "\U0001f9d1\U0001f3ff\u200d\U0001f680", "\u263a",
]  # fmt: skip
CODE = [
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += 1;\n\t}\n", "```json\n{}\n```",
    "<div class='a b'>&nbsp;</div>", "SELECT * FROM t WHERE a = 'it''s';", "https://example.org/a?b=c&d=%20#e",
    "x = {'k': [1, 2.5e-3, 0xFF]}\r\n", "if __name__ == \"__main__\":\n\n\n        main()\n", "\\frac{1}{2}",
    "$ ls -la | grep '^d' && echo \"ok\"", "#include <stdio.h>\n", "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "na\u00efve caf\u00e9 \u2013 \u201cquoted\u201d \u2026 3.14",
]  # fmt: skip
SPECIALS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>", "<think>", "</think>", "<|im_start|>user\n",
    "<|im_end|>\n", "<tool_call>", "<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>",
    # pieces, doublings and nestings of them
    "<|im_", "|im_end|>", "<|im_<|im_end|>end|>", "<<think>>", "</think", "<|IM_END|>", "< |im_end|>",
]  # fmt: skip
FIXED = [
    "", " ", "  ", "\n", "\r\n", "\n\n\n", "\t", "\u0000", "a", "a ", " a", "  a", "a\n b", " \n", "\n ", "   \n\n  x",
    "a\u0301", "\u0301", " \u0301", "\n\u0301", "1\u0301", "'\u0301", "हिन्दी", "नमस्ते दुनिया", "ภาษาไทย", "עִבְרִית",
    "Hello, world!", "I'M you'RE it's", "don't", "'sa", "a'sb", "12345", "1,234.56", "<|im_end|>",
    "<|im_end|><|im_end|>", " <|im_end|> ", "a" * 200, " " * 100, "\n" * 50, "." * 77, "ab" * 150, "\U0001f600" * 20,
    "\ufeffbom", "x\u200by", "\U0010ffff", "\ufffd\ufffd", "e\u0301\u00e9", "\u212b\u00c5A\u030a", "\ufb01",
    "\u0130i\u0307", "\u00df", "\r", "\r\r\n", "a\rb", "'\u017fa" * 30,
]  # fmt: skip


class _Dice:
    """Choices made from random() alone, the one generator whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def run(self, ranges: Sequence[tuple[int, int]], longest: int) -> str:
        first, last = self.pick(ranges)
        return "".join(chr(first + self.below(last - first + 1)) for _ in range(1 + self.below(longest)))


def strings(n: int = N_STRINGS, seed: int = SEED) -> list[str]:
    """The first ``n`` texts: fixed corner cases, then mixtures of everything above."""
    dice = _Dice(seed)

    def fragment() -> str:
        kind = dice.below(14)
        if kind < 3:
            return dice.run(ALPHABETS, 10)
        if kind == 3:  # letters with combining marks
            return "".join(dice.run(ALPHABETS, 2) + dice.run(MARKS, 2) for _ in range(1 + dice.below(4)))
        if kind == 4:
            return dice.run(MARKS, 3)
        if kind == 5:
            return dice.run(NUMBERS, 6)
        if kind == 6:
            return dice.run(SYMBOLS, 5)
        if kind == 7:
            return dice.run(ODD, 3)
        if kind == 8:
            return "".join(dice.pick(SPACES) for _ in range(1 + dice.below(6)))
        if kind == 9:
            return dice.pick([" ", "\n"]) * (1 + dice.below(20))
        if kind == 10:
            return dice.run(ALPHABETS, 4) + dice.pick(CONTRACTIONS)
        if kind == 11:
            return dice.pick(EMOJI)
        if kind == 12:
            return dice.pick(SPECIALS)
        text = dice.pick(CODE)
        begin = dice.below(len(text))
        return text[begin:] if dice.below(2) else text

    def generate() -> Iterator[str]:
        yield from FIXED
        while True:
            parts = [fragment() for _ in range(1 + dice.below(9))]
            yield (" " if dice.below(3) == 0 else "").join(parts)

    source = generate()
    return [next(source) for _ in range(n)]


def read_vocabulary(path: str | Path) -> dict[str, Any]:
    """The ``tokenizer.*`` keys of a GGUF file."""
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    alphabet: list[str] = []
    moved = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + moved))
            moved += 1
    return alphabet


def crossing_vocabulary(pre: str, n_merges: int = 1500) -> dict[str, Any]:
    """A vocabulary that joins the byte pairs most frequent in the texts, also across the borders of words.

    In a trained vocabulary few merges reach over such a border, so that a border in the wrong place goes unnoticed.
    Here it changes the ids.
    """
    alphabet = byte_alphabet()
    pairs: Counter[tuple[int, int]] = Counter()
    for text in strings():
        pairs.update(pairwise(text.encode()))
    frequent = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:n_merges]
    # The rarest first: inside a character pairs are common, and across borders they are not.
    joined = [(alphabet[a], alphabet[b]) for a, b in reversed(frequent)]
    tokens = [*alphabet, *(a + b for a, b in joined), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in joined],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def read_stored(name: str) -> dict[str, Any]:
    """What `write` has stored: seed, metadata, and the ids for bodies_for(strings(N_GOLDEN))."""
    stored: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return stored


def write_model(path: str | Path, metadata: Mapping[str, Any]) -> None:
    """A model of almost no weights around a vocabulary, just enough for llama.cpp to load it."""
    import numpy as np
    from gguf import GGUFWriter

    n_vocab, width, heads = len(metadata["tokenizer.ggml.tokens"]), 32, 4
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(n_vocab)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    square = np.zeros((width, width), np.float16)
    writer.add_tensor("token_embd.weight", np.zeros((n_vocab, width), np.float16))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ask(path: str | Path, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Answers of llama.cpp's server to requests of the form {"route": "/tokenize", "body": {...}}.

    The server runs in this process. A refused request is answered with {"error": ...}.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = 256, 1, 64, 64
    params.warmup, params.cpuparams.n_threads, params.verbosity = False, 1, 0
    params.use_jinja = True
    server = xllamacpp.Server(params)
    answers = []
    for request in requests:
        http = urllib.request.Request(
            server.listening_address + request["route"],
            json.dumps(request["body"]).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(http, timeout=300) as answer:
                answers.append(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            answers.append(json.loads(error.read()))
    return answers


def bodies_for(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Two requests a text: special texts parsed, and not."""
    return [{"content": text, "parse_special": parse} for text in texts for parse in (True, False)]


def tokenize(path: str | Path, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
    """llama.cpp's tokens for bodies of /tokenize, asked in a process of its own."""
    requests = [{"route": "/tokenize", "body": body} for body in bodies]
    return [answer["tokens"] for answer in ask_elsewhere(path, requests)]


def ask_elsewhere(path: str | Path, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Like ask(), in a process of its own: a crash in llama.cpp then reaches the caller as CalledProcessError."""
    command = [sys.executable, __file__, "ask", str(path)]
    done = subprocess.run(command, input=json.dumps(requests).encode(), stdout=subprocess.PIPE, check=True)
    answers: list[Any] = json.loads(done.stdout)
    return answers


def store(name: str, model: str | Path, metadata: Mapping[str, Any]) -> None:
    ids = tokenize(model, bodies_for(strings(N_GOLDEN)))
    golden = {"seed": SEED, "metadata": metadata, "ids": ids}
    data = json.dumps(golden, ensure_ascii=True, separators=(",", ":")).encode()
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / f"{name}.json.gz"
    # No time stamp inside, so that the same content gives the same bytes.
    path.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{path.name}: {len(ids)} answers, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("name")
    write.add_argument("model")
    commands.add_parser("write-crossing")
    commands.add_parser("ask").add_argument("model")
    args = parser.parse_args()
    if args.command == "ask":
        json.dump(ask(args.model, json.load(sys.stdin)), sys.stdout)
    elif args.command == "write":
        store(args.name, args.model, read_vocabulary(args.model))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for pre in ("qwen35", "qwen2"):
                metadata = crossing_vocabulary(pre)
                write_model(Path(folder) / "model.gguf", metadata)
                store(f"crossing-{pre}", Path(folder) / "model.gguf", metadata)


if __name__ == "__main__":
    main()
