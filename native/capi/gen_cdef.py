#!/usr/bin/env python3
"""Cut the declarations for cffi out of dflash.h; standard library only."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

BEGIN, END = "/* cdef: begin.", "/* cdef: end. */"
DEFINE = re.compile(r"#define\s+(\w+)\s+(-?(?:0x[0-9a-fA-F]+|\d+))$")


def region(header: str) -> str:
    """The text between the two marks, without comments and DFLASH_API. ValueError if it needs a preprocessor."""
    if header.count(BEGIN) != 1 or header.count(END) != 1:
        raise ValueError(f"want exactly one '{BEGIN}' and one '{END}'")
    text = header[header.index(BEGIN) : header.index(END)]
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        line = re.sub(r"\bDFLASH_API\s+", "", line).rstrip()
        if line.lstrip().startswith("#"):
            define = DEFINE.fullmatch(line.strip())
            if define is None:
                raise ValueError(f"only integer constants may be #defined between the marks: {line.strip()}")
            line = f"#define {define[1]} ..."  # the C compiler supplies the value
        if line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("header", type=Path)
    parser.add_argument("trampolines", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        cdef = region(options.header.read_text(encoding="utf-8"))
    except ValueError as error:
        print(f"{options.header}: {error}", file=sys.stderr)
        return 1
    trampolines = options.trampolines.read_text(encoding="utf-8")
    options.output.write_text(cdef + "\n" + trampolines, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
