"""Header, library, extension module and stub agree, and the library shows nothing but its C interface."""

import ctypes
import importlib.resources
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pydflash
from pydflash import _abi, _native

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native" / "capi" / "dflash.h"
INSTALLED = Path(_native.__file__).parent
LIBRARY = INSTALLED / "libdflash.so"

C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
CXX_COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


def declared_functions() -> set[str]:
    return set(re.findall(r"^DFLASH_API[^;(]*?\b(\w+)\(", without_comments(HEADER.read_text()), flags=re.MULTILINE))


def test_installed_header_is_the_one_in_the_tree() -> None:
    assert (INSTALLED / "include" / "dflash.h").read_bytes() == HEADER.read_bytes()


def test_licences_are_installed() -> None:
    assert "The ggml authors" in (INSTALLED / "licenses" / "ggml.txt").read_text()
    assert importlib.resources.files("pydflash").joinpath("py.typed").is_file()


@pytest.mark.skipif(C_COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_header_compiles_as_strict_c(standard: str, tmp_path: Path) -> None:
    source = tmp_path / "header.c"
    source.write_text('#include "dflash.h"\n#include "dflash.h"\nint main(void) { return 0; }\n')
    flags = ["-pedantic", "-Wall", "-Wextra", "-Wstrict-prototypes", "-Werror", "-fsyntax-only"]
    run(C_COMPILER or "", f"-std={standard}", *flags, f"-I{HEADER.parent}", source)


@pytest.mark.skipif(CXX_COMPILER is None, reason="no C++ compiler")
def test_header_compiles_as_cpp(tmp_path: Path) -> None:
    source = tmp_path / "header.cpp"
    source.write_text('#include "dflash.h"\nint main() { dflash_error err = DFLASH_ERROR_INIT; return err.status; }\n')
    run(CXX_COMPILER or "", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{HEADER.parent}", source)


@pytest.mark.skipif(C_COMPILER is None, reason="no C compiler")
def test_a_c_program_links_against_the_installed_package(tmp_path: Path) -> None:
    program = tmp_path / "versions"
    include, library = f"-I{INSTALLED / 'include'}", [f"-L{INSTALLED}", "-ldflash", f"-Wl,-rpath,{INSTALLED}"]
    source = ROOT / "tests" / "capi" / "test_versions.c"
    run(C_COMPILER or "", "-std=c99", "-pedantic", "-Werror", include, source, *library, "-o", program)
    assert pydflash.__version__ in run(program)


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_the_library_exports_exactly_what_the_header_declares() -> None:
    lines = run("nm", "-D", "--defined-only", "--format=posix", LIBRARY).splitlines()
    exported = {line.split()[0].partition("@")[0] for line in lines}
    assert exported == declared_functions()


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_nothing_of_ggml_is_taken_from_outside() -> None:
    undefined = run("nm", "-D", "--undefined-only", "--format=posix", LIBRARY)
    assert not re.findall(r"^\w*(?:ggml|gguf|llama)\w*", undefined, flags=re.MULTILINE)


def test_every_declared_function_is_callable_through_the_extension() -> None:
    assert declared_functions() <= set(dir(_native.lib))
    library = ctypes.CDLL(str(LIBRARY))
    assert all(hasattr(library, name) for name in declared_functions())


def test_every_status_has_a_name() -> None:
    elements = _native.ffi.typeof("dflash_status").elements
    names = {number: _native.ffi.string(_native.lib.dflash_status_name(number)).decode() for number in elements}
    assert {f"DFLASH_STATUS_{name}" for name in names.values()} == set(elements.values())
    assert _native.ffi.string(_native.lib.dflash_status_name(1)) == b"UNKNOWN"


def test_region_for_cffi_needs_no_preprocessor() -> None:
    text = HEADER.read_text()
    region = without_comments(text[text.index("/* cdef: begin.") : text.index("/* cdef: end. */")])
    directives = [line for line in region.splitlines() if line.lstrip().startswith("#")]
    assert all(re.fullmatch(r"#define DFLASH_[A-Z0-9_]+ -?\d+", line) for line in directives)
    macros = set(re.findall(r"#\s*define\s+(\w+)", text)) - {line.split()[1] for line in directives}
    assert macros >= {"DFLASH_API", "DFLASH_ERROR_INIT"}
    assert not (macros - {"DFLASH_API"}) & set(re.findall(r"\w+", region))


def test_public_types_are_of_fixed_width() -> None:
    text = HEADER.read_text()
    region = without_comments(text[text.index("/* cdef: begin.") : text.index("/* cdef: end. */")])
    assert not re.findall(r"\b(?:int|long|short|unsigned|bool|_Bool|union)\b", region)


def test_stub_is_fresh() -> None:
    run(sys.executable, ROOT / "scripts" / "gen_stub.py", "--check")


def test_versions_agree() -> None:
    assert _native.lib.dflash_abi_version() == _native.lib.DFLASH_ABI_VERSION
    assert f'version = "{pydflash.__version__}"' in (ROOT / "pyproject.toml").read_text()
    with pytest.raises(ImportError, match=r"version 3 of dflash\.h.* has version 4"):
        _abi.require_same_abi(3, 4)


def test_import_without_the_compiled_module_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "pydflash"
    package.mkdir()
    for name in ("__init__.py", "_abi.py"):
        shutil.copy(ROOT / "pydflash" / name, package)
    done = subprocess.run(
        [sys.executable, "-c", "import pydflash"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "without its compiled module" in done.stderr.strip().splitlines()[-1]
