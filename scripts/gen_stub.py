#!/usr/bin/env python3
"""Write pydflash/_native.pyi, the type stub of the extension module, from dflash.h. With --check: compare only."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
CAPI = ROOT / "native" / "capi"
STUB = ROOT / "pydflash" / "_native.pyi"

HEAD = '''\
# Generated from native/capi/dflash.h by scripts/gen_stub.py; do not edit.
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., object])

class CData:
    """A C value: a pointer, an array, a struct or a number that cffi does not turn into a Python object."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...
    def __getitem__(self, index: int | slice) -> Any: ...
    def __setitem__(self, index: int | slice, value: object) -> None: ...
    def __len__(self) -> int: ...
    def __int__(self) -> int: ...
    def __add__(self, offset: int) -> CData: ...
    def __enter__(self) -> CData: ...
    def __exit__(self, *exc: object) -> None: ...

class CType:
    kind: str
    cname: str
    elements: dict[int, str]
    relements: dict[str, int]
    fields: list[tuple[str, Any]]

class Buffer:
    def __len__(self) -> int: ...
    def __getitem__(self, index: int | slice) -> bytes: ...
    def __setitem__(self, index: int | slice, value: bytes) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class FFI:
    NULL: CData
    error: type[Exception]
    def new(self, ctype: str | CType, init: object = ...) -> CData: ...
    def cast(self, ctype: str | CType, value: object) -> CData: ...
    def string(self, value: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, value: CData, length: int) -> Any: ...
    def buffer(self, value: CData, size: int = ...) -> Buffer: ...
    def from_buffer(self, ctype: str | CType, source: object, require_writable: bool = ...) -> CData: ...
    def memmove(self, target: object, source: object, n: int) -> None: ...
    def sizeof(self, ctype: str | CType | CData) -> int: ...
    def typeof(self, ctype: str | CData) -> CType: ...
    def addressof(self, value: object, *fields: str | int) -> CData: ...
    def gc(self, value: CData, destructor: Callable[[CData], object] | CData | None, size: int = ...) -> CData: ...
    def release(self, value: CData) -> None: ...
    def new_handle(self, value: object) -> CData: ...
    def from_handle(self, handle: CData) -> Any: ...
    def def_extern(
        self, name: str = ..., error: object = ..., onerror: Callable[..., object] | None = ...
    ) -> Callable[[_F], _F]: ...

'''

INTEGERS = {"int", "size_t", *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def gen_cdef() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_cdef", CAPI / "gen_cdef.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_type(declaration: str, enums: set[str], pointers: set[str], *, result: bool) -> str:
    """Annotation for a C parameter (with or without its name) or a result type."""
    text = " ".join(re.sub(r"\bconst\b|\bstruct\b|\benum\b", " ", declaration).replace("*", " * ").split())
    if "*" in text or "[" in text:
        # Text may be passed as bytes: cffi hands C a NUL-terminated copy.
        is_text = text.startswith("char *") and text.count("*") == 1 and "const" in declaration
        return "CData | bytes" if is_text and not result else "CData"
    name = text.split()[0] if text else ""
    if name in INTEGERS or name in enums:
        return "int"
    if name in ("float", "double"):
        return "float"
    if name in pointers:
        return "CData"
    if name == "void":
        return "None"
    raise ValueError(f"no Python type for the C declaration {declaration.strip()!r}")


def statements(cdef: str) -> list[str]:
    """The declarations of a cdef without comments, #define lines and the bodies of structs; enums keep theirs."""
    text = re.sub(r"^#.*$", "", strip_comments(cdef), flags=re.MULTILINE)
    text = re.sub(r"(struct\s+\w*\s*)\{[^{}]*\}", r"\1", text)
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


def members(cdef: str, trampolines: str) -> list[str]:
    """The lines of class Lib, in the order of the header."""
    constants = re.findall(r"^#define\s+(\w+)", cdef, flags=re.MULTILINE)
    enums: set[str] = set()
    pointers: set[str] = set()
    functions: list[str] = []
    for statement in statements(cdef):
        if enum := re.search(r"\benum\b[^{]*\{(.*)\}\s*(\w*)$", statement):
            constants += re.findall(r"(\w+)(?:\s*=[^,]*)?(?:,|$)", enum[1].strip())
            enums.add(enum[2])
        elif callback := re.match(r"typedef .*\(\s*\*\s*(\w+)\s*\)\s*\(", statement):
            pointers.add(callback[1])
        elif not statement.startswith("typedef") and "(" in statement:
            functions.append(statement)
    lines = [f"{name}: int" for name in constants]
    lines += [function(statement, enums, pointers) for statement in functions]
    lines += [f"{name}: CData" for name in re.findall(r"(\w+)\s*\([^()]*\)\s*;", strip_comments(trampolines))]
    return lines


def strip_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def function(statement: str, enums: set[str], pointers: set[str]) -> str:
    match = re.fullmatch(r"(.*?)(\w+)\s*\((.*)\)", statement)
    if match is None:
        raise ValueError(f"not a function declaration: {statement!r}")
    result, name, parameters = match.groups()
    types = []
    for parameter in parameters.split(","):
        if parameter.strip() not in ("", "void"):
            parameter_name = re.findall(r"\w+", parameter.partition("[")[0])[-1]
            types.append(f"{parameter_name}: {python_type(parameter, enums, pointers, result=False)}")
    arguments = "".join(f", {entry}" for entry in types)
    slash = ", /" if types else ""  # cffi functions take no keyword arguments
    return f"def {name}(self{arguments}{slash}) -> {python_type(result, enums, pointers, result=True)}: ..."


def stub() -> str:
    cdef = gen_cdef().region((CAPI / "dflash.h").read_text(encoding="utf-8"))
    trampolines = (CAPI / "trampolines.cdef").read_text(encoding="utf-8")
    body = "".join(f"    {line}\n" for line in members(cdef, trampolines))
    return f"{HEAD}class Lib:\n{body}\nffi: FFI\nlib: Lib\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the stub is not up to date")
    options = parser.parse_args()
    try:
        text = stub()
    except ValueError as error:
        print(f"gen_stub: {error}", file=sys.stderr)
        return 1
    if not options.check:
        STUB.write_text(text, encoding="utf-8")
    elif not STUB.exists() or STUB.read_text(encoding="utf-8") != text:
        print(f"{STUB.relative_to(ROOT)} is not up to date: run python scripts/gen_stub.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
