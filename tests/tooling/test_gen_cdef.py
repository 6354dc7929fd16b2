"""The region of dflash.h that cffi reads, and the type stub made from it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gen_cdef = load("gen_cdef", ROOT / "native" / "capi" / "gen_cdef.py")
gen_stub = load("gen_stub", ROOT / "scripts" / "gen_stub.py")

HEADER = """
#define OUTSIDE(x) x
/* cdef: begin. */
#define DFLASH_LIMIT 7
/* a comment; with int bad(int); inside */
typedef enum dflash_kind { DFLASH_KIND_A = 0, DFLASH_KIND_B = -2 } dflash_kind;
typedef struct dflash_thing dflash_thing;
typedef struct dflash_options {
    uint32_t struct_size;
    float scale;
} dflash_options;
typedef int32_t (*dflash_progress_fn)(void * user, double done);
DFLASH_API dflash_kind dflash_thing_open(dflash_thing ** out, const char * path, const dflash_options * options,
                                         dflash_progress_fn progress, void * user);
DFLASH_API void dflash_thing_free(dflash_thing * thing);
DFLASH_API const char * dflash_name(void);
DFLASH_API double dflash_scale(int64_t n, const float values[4]);
/* cdef: end. */
"""


def test_region() -> None:
    region = gen_cdef.region(HEADER)
    assert "#define DFLASH_LIMIT ...\n" in region
    assert "OUTSIDE" not in region
    assert "DFLASH_API" not in region
    assert "bad" not in region


@pytest.mark.parametrize(
    "line", ["#define F(x) x", '#define TEXT "a"', "#ifdef X", "#define A (1 << 3)", "#include <x.h>"]
)
def test_region_refuses_what_needs_a_preprocessor(line: str) -> None:
    with pytest.raises(ValueError, match="only integer constants"):
        gen_cdef.region(HEADER.replace("#define DFLASH_LIMIT 7", line))


def test_region_wants_both_marks_once() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        gen_cdef.region(HEADER + HEADER)
    with pytest.raises(ValueError, match="exactly one"):
        gen_cdef.region("int x;")


def test_stub_members() -> None:
    trampolines = '/* text (with) braces; */\nextern "Python" int32_t pydflash_on_progress(void * user, double done);\n'
    assert gen_stub.members(gen_cdef.region(HEADER), trampolines) == [
        "DFLASH_LIMIT: int",
        "DFLASH_KIND_A: int",
        "DFLASH_KIND_B: int",
        (
            "def dflash_thing_open"
            "(self, out: CData, path: CData | bytes, options: CData, progress: CData, user: CData, /) -> int: ..."
        ),
        "def dflash_thing_free(self, thing: CData, /) -> None: ...",
        "def dflash_name(self) -> CData: ...",
        "def dflash_scale(self, n: int, values: CData, /) -> float: ...",
        "pydflash_on_progress: CData",
    ]


def test_stub_refuses_unknown_types() -> None:
    with pytest.raises(ValueError, match="dflash_options options"):
        gen_stub.members("void f(dflash_options options);", "")
