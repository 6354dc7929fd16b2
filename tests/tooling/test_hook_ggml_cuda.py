"""third_party/hook_ggml_cuda.py: one declaration and one call go into ggml's source, or nothing does."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "third_party" / "hook_ggml_cuda.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hook_ggml_cuda", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(script: ModuleType) -> str:
    return f'#include <a>\n{script.DECLARATION_ANCHOR}, "size");\nloop {{\n{script.CALL_ANCHOR}}}\n'


def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], check=False, capture_output=True, text=True, timeout=60)


def test_declaration_and_call_are_inserted_once(script: ModuleType, source: str, tmp_path: Path) -> None:
    (tmp_path / "in.cu").write_text(source)
    result = run(tmp_path / "in.cu", tmp_path / "made" / "out.cu")
    assert (result.returncode, result.stderr) == (0, "")
    text = (tmp_path / "made" / "out.cu").read_text()
    assert text.count("dflash_ggml_cuda_hook") == 3  # declared, compared, called
    assert text.index("(*dflash_ggml_cuda_hook)(int device") < text.index("static_assert")
    assert text.index("i += taken - 1") < text.index("int nodes_to_skip")
    assert text.replace(script.DECLARATION, "").replace(script.CALL, "") == source
    assert (tmp_path / "in.cu").read_text() == source


def test_an_output_that_is_right_keeps_its_time(source: str, tmp_path: Path) -> None:
    """Else every configure would compile ggml's largest file again."""
    (tmp_path / "in.cu").write_text(source)
    out = tmp_path / "out.cu"
    assert run(tmp_path / "in.cu", out).returncode == 0
    before = out.stat().st_mtime_ns
    assert run(tmp_path / "in.cu", out).returncode == 0
    assert out.stat().st_mtime_ns == before


@pytest.mark.parametrize("which", ["DECLARATION_ANCHOR", "CALL_ANCHOR"])
@pytest.mark.parametrize("count", [0, 2])
def test_an_anchor_that_is_gone_or_twice_there_is_named(
    script: ModuleType, source: str, tmp_path: Path, which: str, count: int
) -> None:
    anchor = getattr(script, which)
    (tmp_path / "in.cu").write_text(source.replace(anchor, anchor * count))
    result = run(tmp_path / "in.cu", tmp_path / "out.cu")
    assert result.returncode == 1
    assert f"found {count} times" in result.stderr
    assert anchor.strip()[:30] in result.stderr
    assert "DFLASH_CUDA_KERNELS=OFF" in result.stderr
    assert not (tmp_path / "out.cu").exists()


def test_a_missing_source_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "none.cu", tmp_path / "out.cu")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert run(tmp_path).returncode == 2
