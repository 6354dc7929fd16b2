#!/usr/bin/env python3
"""Check the rules of the source tree that no compiler or linter knows; standard library only.

Layers of native/ (#include) and pydflash/ (import), names, file sizes, and calls that only certain folders may make.
Prints `file:line: message` for each violation and exits with 1 if there is one. Sizes between the soft and the hard
limit are printed as warnings.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A folder includes itself and those before it.
NATIVE_LAYERS = ["base", "cuda", "cpu", "ggmlx", "gguf", "model", "state", "graph", "decode", "engine", "capi"]
# Folders that see nothing of ggml: base and cpu stand below it, capi only translates between C and C++.
WITHOUT_GGML = {"base", "cpu", "capi"}

# A module imports its own row and those before it. Modules in no row are the nouns: one module per class.
PYTHON_LAYERS = [
    {"errors", "options", "results", "_abi"},
    {"_ffi", "_handle", "_log"},
    {"text"},
    {"(nouns)"},
    {"engine", "engine_prefix", "generate", "prefix_cache", "sequence", "sequence_prefix", "session"},
    {"server"},
    {"cli", "__main__"},
]
NOUNS = PYTHON_LAYERS.index({"(nouns)"})
IMPORTERS_OF_NATIVE = {"_abi", "_ffi"}

FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "internal"}
SOFT_LINES, HARD_LINES = 300, 600
ANY_SIZE = {"native/capi/dflash.h", "pydflash/_native.pyi"}  # the interface, and what is generated from it

SOURCE_FOLDERS = ["native", "pydflash", "scripts", "tests", "third_party", "docs", "examples"]
CODE_SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".py", ".pyi"}
NATIVE_SUFFIXES = CODE_SUFFIXES - {".py", ".pyi"}


@dataclass(frozen=True, slots=True)
class NativeRule:
    """A pattern that no file of native/ outside `allowed` may contain."""

    pattern: str
    allowed: frozenset[str]
    message: str


NATIVE_RULES = [
    NativeRule(rf"\b{name}\s*\(", frozenset({"ggmlx"}), "only native/ggmlx allocates, moves data or sets hooks in ggml")
    for name in (
        r"ggml_backend_(?:buft_)?alloc_\w+",
        r"ggml_backend_buffer_(?:free|clear|copy_tensor|reset)",
        r"ggml_backend_tensor_(?:set|get|copy|memset|alloc)\w*",
        r"ggml_backend_(?:dev|buft|buffer|reg)?_?buffer_from_\w+",
        r"ggml_backend_cpu_buffer_from_ptr",
        r"ggml_backend_dev_buffer_from_host_ptr",
        r"ggml_backend_view_init",
        r"ggml_gallocr_\w+",
        r"ggml_tallocr_\w+",
        r"ggml_set_abort_callback",
        r"ggml_log_set",
    )
] + [
    NativeRule(
        r"\b(?:secure_)?getenv\s*\(|\bsetenv\s*\(|\bputenv\s*\(|\benviron\b", frozenset(), "no environment variables"
    ),
    NativeRule(r"\bstd::c(?:out|err|log)\b", frozenset(), "text leaves native code through base/log.hpp"),
    NativeRule(r"\b(?:printf|puts|putchar|perror)\s*\(", frozenset(), "text leaves native code through base/log.hpp"),
    NativeRule(r"\bfprintf\s*\(\s*std(?:out|err)\b", frozenset(), "text leaves native code through base/log.hpp"),
    NativeRule(
        r"\b(?:abort|exit|_exit|quick_exit|terminate|assert|GGML_ASSERT|GGML_ABORT)\s*\(",
        frozenset(),
        "failures are exceptions (base/error.hpp); nothing here ends the process",
    ),
]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    path: str
    line: int
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {'warning: ' if self.warning else ''}{self.message}"


def blank_comments(text: str, *, strings: bool) -> str:
    """C++ text with comments, and string contents if wanted, replaced by spaces; line numbers stay the same."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        is_string = not match[0].startswith("/")
        return match[0] if is_string and not strings else re.sub(r"[^\n]", " ", match[0])

    return token.sub(blank, text)


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def check_native_file(root: Path, path: Path) -> Iterator[Finding]:
    relative = path.relative_to(root).as_posix()
    parts = path.relative_to(root / "native").parts
    layer = parts[0] if len(parts) > 1 else ""
    if layer not in NATIVE_LAYERS:
        yield Finding(relative, 1, f"not in one of native's folders ({', '.join(NATIVE_LAYERS)})")
        return
    text = path.read_text(encoding="utf-8")
    code = blank_comments(text, strings=True)
    for rule in NATIVE_RULES:
        if layer not in rule.allowed:
            for match in re.finditer(rule.pattern, code):
                yield Finding(relative, line_of(code, match.start()), f"{match[0].strip()}: {rule.message}")
    with_strings = blank_comments(text, strings=False)
    for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', with_strings, re.MULTILINE):
        message = check_include(root, layer, match[2], quoted=match[1] == '"')
        if message:
            yield Finding(relative, line_of(with_strings, match.start()), message)


def check_include(root: Path, layer: str, target: str, *, quoted: bool) -> str | None:
    if re.match(r"(ggml|gguf)[\w-]*\.h$", target) and layer in WITHOUT_GGML:
        return f"{layer} includes {target}: it must not see ggml"
    if re.search(r"(^|/)ggml-[\w-]*(impl|quants|common|threading)[\w-]*\.h$", target):
        return f"includes {target}: ggml's private headers change without notice"
    folder, slash, _ = target.partition("/")
    if not quoted or (not slash and target.startswith(("ggml", "gguf"))):
        return None
    if not slash:
        return None if layer == "capi" and target == "dflash.h" else f"includes {target}: write FOLDER/{target}"
    if folder not in NATIVE_LAYERS or not (root / "native" / target).is_file():
        return f"includes {target}: no such file below native/"
    if NATIVE_LAYERS.index(folder) > NATIVE_LAYERS.index(layer):
        return f"{layer} includes {target}: {folder} stands above {layer}"
    return None


def python_layer(module: str) -> int:
    return next((index for index, row in enumerate(PYTHON_LAYERS) if module in row), NOUNS)


def imported_modules(node: ast.AST, package: list[str]) -> Iterator[list[str]]:
    """Parts of every module that an import statement may name; `package` is that of the importing file."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        yield from ([*base, alias.name] for alias in node.names)


def check_python_file(root: Path, path: Path) -> Iterator[Finding]:
    relative = path.relative_to(root).as_posix()
    parts = path.relative_to(root / "pydflash").with_suffix("").parts
    module = parts[0]
    is_top = module == "__init__" and len(parts) == 1
    layer = len(PYTHON_LAYERS) if is_top else python_layer(module)
    in_cli = module in ("cli", "__main__")
    package = ["pydflash", *parts[:-1]]
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
    except SyntaxError as error:
        yield Finding(relative, error.lineno or 1, f"not valid Python {sys.version_info[0]}.{sys.version_info[1]}")
        return
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for name in imported_modules(node, package):
            if name[0] == "os" and name[-1] in ("environ", "getenv", "putenv") and not in_cli:
                yield Finding(relative, line, f"imports os.{name[-1]}: only cli/ reads the environment")
            if name[0] != "pydflash" or len(name) < 2:
                continue
            target = name[1]
            if target == "_native":
                if module not in IMPORTERS_OF_NATIVE:
                    yield Finding(relative, line, f"imports _native: only {', '.join(sorted(IMPORTERS_OF_NATIVE))} may")
            elif is_top and target in ("server", "cli"):
                yield Finding(relative, line, f"imports {target}: `import pydflash` must not load it")
            elif target != "__version__" and python_layer(target) > layer:
                yield Finding(relative, line, f"{module} imports {target}, which stands above it")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not in_cli:
            name_of = f"{node.value.id}.{node.attr}"
            if name_of in ("os.environ", "os.getenv", "os.putenv"):
                yield Finding(relative, line, f"{name_of}: only cli/ reads the environment")
            if name_of in ("sys.stdout", "sys.stderr"):
                yield Finding(relative, line, f"{name_of}: only cli/ writes to the terminal; use logging")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and not in_cli:
            yield Finding(relative, line, "print: only cli/ writes to the terminal; use logging")


def source_files(root: Path) -> Iterator[Path]:
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if "__pycache__" not in path.parts:
                yield path


def check_name_and_size(root: Path, path: Path) -> Iterator[Finding]:
    relative = path.relative_to(root).as_posix()
    words = set(re.split(r"[^a-z]+", path.name.lower())) & FORBIDDEN_NAMES
    if words:
        yield Finding(relative, 1, f"a name must say what is inside; '{words.pop()}' does not")
    if path.is_file() and path.suffix in CODE_SUFFIXES and relative not in ANY_SIZE:
        n_lines = path.read_bytes().count(b"\n")
        if n_lines > HARD_LINES:
            yield Finding(relative, n_lines, f"{n_lines} lines; the limit is {HARD_LINES}")
        elif n_lines > SOFT_LINES:
            yield Finding(relative, n_lines, f"{n_lines} lines; try to stay below {SOFT_LINES}", warning=True)


def check_tree(root: Path) -> list[Finding]:
    findings: list[Finding] = []
    for path in source_files(root):
        top = path.relative_to(root).parts[0]
        findings += check_name_and_size(root, path)
        if path.is_file() and top == "native" and path.suffix in NATIVE_SUFFIXES:
            findings += check_native_file(root, path)
        elif path.is_file() and top == "pydflash" and path.suffix == ".py":
            findings += check_python_file(root, path)
    return sorted(set(findings))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="default: the tree this script is in")
    findings = check_tree(parser.parse_args().root.resolve())
    for finding in findings:
        print(finding)
    return 1 if any(not finding.warning for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
