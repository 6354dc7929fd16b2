"""pydflash bench: rows, ratios, prompts, and llama.cpp beside us."""

import importlib.util
import json
from pathlib import Path

import pytest

import pydflash
from pydflash import builtin
from pydflash.cli import run
from pydflash.cli.bench import Row
from pydflash.cli.bench_prompts import BUILT_IN, load_prompts
from pydflash.cli.llama_cpp import LlamaServer

SMALL = ["-t", "1", "-n", "12", "-p", "16", "-r", "2"]
NEEDS_PEER = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(["bench", *SMALL, *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def rows_of(report: dict[str, object]) -> list[dict[str, object]]:
    rows = report["rows"]
    assert isinstance(rows, list)
    return rows


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys)
    assert report["threads"] == 1
    assert report["draft"] == str(builtin.draft_path())
    rows = rows_of(report)
    assert [(row["test"], row["mode"]) for row in rows[:2]] == [("prefill", "-"), ("decode", "autoregressive")]
    assert [(row["test"], row["mode"]) for row in rows[2:]] == [
        (f"{kind}, {how}", mode)
        for kind in ("code", "prose", "chat")
        for how in ("greedy", "T=1")
        for mode in ("autoregressive", "speculative")
    ]
    for row in rows:
        rates = row["rates"]
        assert isinstance(rates, list)
        assert len(rates) == 2
        assert min(rates) > 0
    for row in rows[3::2]:
        assert row["ratio_to"] == "autoregressive"
        assert float(str(row["mean_accepted_length"])) >= 1.0
        assert row["widths"]


def test_a_fixed_width_and_no_drafter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": [{"kind": "code", "text": "import os\n"}]}))
    rows = rows_of(bench(capsys, "--width", "16", "--prompts", str(path)))
    assert len(rows) == 6
    widths = rows[3]["widths"]
    assert isinstance(widths, dict)
    assert "1" not in widths or len(widths) > 1
    assert max(int(width) for width in widths) <= 12
    assert [row["test"] for row in rows_of(bench(capsys, "--draft", "none"))] == ["prefill", "decode"]


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["bench", *SMALL, "--draft", "none"]) == 0
    out = capsys.readouterr().out
    for words in ("prefill", "decode", "tok/s"):
        assert words in out


def test_medians_and_ratios() -> None:
    ours, theirs = Row("pydflash", "decode", "-", [5.0, 100.0, 6.0]), Row("llama.cpp", "decode", "-", [4.0, 50.0, 1.0])
    ours.compare(theirs, "llama.cpp")
    assert ours.tokens_per_second == 6.0
    assert (ours.ratio, ours.ratio_to) == (2.0, "llama.cpp")


def test_prompt_files(tmp_path: Path) -> None:
    assert {prompt.kind for prompt in BUILT_IN} == {"code", "prose", "chat"}
    path = tmp_path / "prompts.json"
    for text in ("[]", "{", '{"prompts": [{"kind": "code"}]}', '{"prompts": [{"kind": "poem", "text": "x"}]}'):
        path.write_text(text)
        with pytest.raises(pydflash.FormatError, match=r"prompts\.json"):
            load_prompts(path)


@NEEDS_PEER
def test_llama_cpp_takes_turns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(bench(capsys, "--draft", "none", "--vs-llama-cpp"))
    assert [(row["engine"], row["test"]) for row in rows] == [
        ("pydflash", "prefill"),
        ("llama.cpp", "prefill"),
        ("pydflash", "decode"),
        ("llama.cpp", "decode"),
    ]
    assert all(row["ratio"] is not None for row in rows[::2])
    assert all(len(row["rates"]) == 2 for row in rows)  # type: ignore[arg-type]


@NEEDS_PEER
def test_a_model_that_llama_cpp_refuses(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_text("no model")
    with pytest.raises(pydflash.DeviceError, match=r"llama\.cpp did not start"):
        LlamaServer(path, n_ctx=256, n_threads=1, k_type="f16", v_type="f16")
