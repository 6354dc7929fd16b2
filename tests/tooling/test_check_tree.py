"""Each rule of scripts/check_tree.py finds what it forbids, and nothing in a tree that keeps the rules."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_tree.py"

CLEAN = {
    "native/base/error.hpp": "#pragma once\n// getenv( and printf( in a comment\n",
    "native/ggmlx/tensors.cpp": '#include "ggml.h"\n#include "base/error.hpp"\nvoid f() { ggml_gallocr_new(0); }\n',
    "native/model/model.cpp": '#include <ggml.h>\n#include "ggmlx/tensors.hpp"\nauto s = "ggml_log_set(0) abort()";\n',
    "native/ggmlx/tensors.hpp": "#pragma once\n",
    "native/capi/dflash.h": "\n" * 700,
    "pydflash/__init__.py": "from pydflash._abi import __version__\nfrom pydflash.engine import Engine\n",
    "pydflash/_abi.py": "from pydflash import _native\n",
    "pydflash/engine.py": "from pydflash import __version__\nfrom .target_cache import TargetCache\n",
    "pydflash/target_cache.py": "from pydflash.text import stop\n",
    "pydflash/cli/__init__.py": "import os\nprint(os.environ)\nfrom pydflash.engine import Engine\n",
}


def check(root: Path, extra: dict[str, str]) -> tuple[int, list[str]]:
    for name, text in {**CLEAN, **extra}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, str(SCRIPT), str(root)], check=False, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    assert check(tmp_path, {}) == (0, [])


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        ("native/base/a.cpp", '\n#include "ggmlx/tensors.hpp"\n', 2, "ggmlx stands above base"),
        ("native/base/a.cpp", '#include "ggml.h"\n', 1, "must not see ggml"),
        ("native/capi/a.cpp", "#include <ggml-backend.h>\n", 1, "must not see ggml"),
        ("native/model/a.cpp", '#include "ggml-backend-impl.h"\n', 1, "private headers"),
        ("native/model/a.cpp", '#include "model.hpp"\n', 1, "write FOLDER/model.hpp"),
        ("native/model/a.cpp", '#include "model/absent.hpp"\n', 1, "no such file"),
        ("native/helpers/a.cpp", "\n", 1, "not in one of native's folders"),
        ("native/state/a.cpp", "/* one\ntwo */ ggml_backend_tensor_set(t, p, 0, 4);\n", 2, "only native/ggmlx"),
        ("native/state/a.cpp", "ggml_backend_tensor_get_async (b, t, p, 0, 4);\n", 1, "only native/ggmlx"),
        ("native/state/a.cpp", "ggml_backend_alloc_ctx_tensors(c, b);\n", 1, "only native/ggmlx"),
        ("native/engine/a.cpp", "ggml_gallocr_alloc_graph(g, c);\n", 1, "only native/ggmlx"),
        ("native/engine/a.cpp", "ggml_set_abort_callback(f);\n", 1, "only native/ggmlx"),
        ("native/engine/a.cpp", "ggml_log_set(f, 0);\n", 1, "only native/ggmlx"),
        ("native/ggmlx/a.cpp", 'auto x = std::getenv("HOME");\n', 1, "no environment variables"),
        ("native/base/a.hpp", "std::cerr << 1;\n", 1, "base/log.hpp"),
        ("native/base/a.hpp", 'fprintf(stderr, "x");\n', 1, "base/log.hpp"),
        ("native/base/a.hpp", "std::abort();\n", 1, "nothing here ends the process"),
        ("native/model/a.cpp", "GGML_ASSERT(a == b);\n", 1, "nothing here ends the process"),
        ("pydflash/errors.py", "\nimport pydflash.engine\n", 2, "engine, which stands above it"),
        ("pydflash/engine.py", "from .server import app\n", 1, "server, which stands above it"),
        ("pydflash/text/stop.py", "from ..engine import Engine\n", 1, "engine, which stands above it"),
        ("pydflash/text/stop.py", "from pydflash import target_cache\n", 1, "target_cache, which stands above it"),
        ("pydflash/server/app.py", "from pydflash import cli\n", 1, "cli, which stands above it"),
        ("pydflash/__init__.py", "from pydflash import server\n", 1, "must not load it"),
        ("pydflash/engine.py", "from pydflash._native import lib\n", 1, "only _abi, _ffi may"),
        ("pydflash/engine.py", "import os\nx = os.environ['A']\n", 2, "only cli/ reads the environment"),
        ("pydflash/engine.py", "from os import getenv\n", 1, "only cli/ reads the environment"),
        ("pydflash/server/app.py", "def f():\n    print('x')\n", 2, "only cli/ writes"),
        ("pydflash/server/app.py", "import sys\nsys.stderr.write('x')\n", 2, "only cli/ writes"),
        ("pydflash/engine.py", "def f(:\n", 1, "not valid Python"),
        ("pydflash/string_utils.py", "\n", 1, "'utils' does not"),
        ("native/base/common.hpp", "\n", 1, "'common' does not"),
        ("tests/internal/test_a.py", "\n", 1, "'internal' does not"),
        ("scripts/long.py", "\n" * 601, 601, "the limit is 600"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, name: str, text: str, line: int, message: str) -> None:
    code, output = check(tmp_path, {name: text})
    assert code == 1
    assert len(output) == 1
    assert output[0].startswith(f"{name if '/internal/' not in name else 'tests/internal'}:{line}: ")
    assert message in output[0]


def test_a_long_file_is_only_warned_of(tmp_path: Path) -> None:
    assert check(tmp_path, {"scripts/long.py": "\n" * 301}) == (
        0,
        ["scripts/long.py:301: warning: 301 lines; try to stay below 300"],
    )


def test_this_tree_keeps_the_rules() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
