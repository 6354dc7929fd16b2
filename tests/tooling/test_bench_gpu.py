"""scripts/bench_gpu.py on the CPU: every section gives numbers that hang together; programs in llama.cpp's place."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SIZES = (
    *("--contexts", "0", "96", "--prefills", "40", "96", "--widths", "1", "4", "16", "--rates", "0.8"),
    *("--short-prompt", "16", "--n-new", "40", "--n-tokens", "8", "--n-steps", "4", "--repeats", "2"),
)

LLAMA_BENCH = """
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
assert words["-o"] == "json" and words["-ngl"] == "0" and words["-m"].endswith("target.gguf"), words
if words["-p"] == "0":
    n = int(words["-n"])
    rows = [{"n_prompt": 0, "n_gen": n, "n_depth": int(d), "avg_ts": 50.0} for d in words["-d"].split(",")]
else:
    rows = [{"n_prompt": int(n), "n_gen": 0, "n_depth": 0, "avg_ts": 2000.0} for n in words["-p"].split(",")]
print(json.dumps(rows))
"""
# Says that 40 tokens took three steps with draft-all, in which 36 drafts were accepted, and 39 with another drafter.
LLAMA_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
assert value("--spec-type") == "draft-dflash" and value("-np") == "1", words
accepted = 36 if value("-md").endswith("draft-all.gguf") else 0
class Handler(BaseHTTPRequestHandler):
    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = asked["n_predict"]
        assert len(asked["prompt"]) == 16 and asked["temperature"] == 0.0, asked
        times = {"predicted_n": n, "predicted_ms": 390.0, "predicted_per_second": (n - 1) / 0.39}
        self.answer({"timings": {**times, "draft_n": 45, "draft_n_accepted": accepted}})
    def log_message(self, *words):
        pass
HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    options = ["--size", "tiny", "--acceptance", "all", "none", "--window", "0", "32"]
    subprocess.run([sys.executable, str(SCRIPTS / "make_random_pair.py"), str(folder), *options], check=True)
    return folder


@pytest.fixture(scope="module")
def llama_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    for name, program in (("llama-bench", LLAMA_BENCH), ("llama-server", LLAMA_SERVER)):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(0o755)
    return folder


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_gpu.py"), "--device", "cpu", "--n-threads", "1"]
    return subprocess.run([*command, *map(str, arguments)], check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(pair: Path, llama_bin: Path) -> tuple[str, dict[str, Any]]:
    """What one run of everything prints and writes."""
    out = pair / "bench.json"
    done = bench("--pair", pair, "--json", out, "--vs", llama_bin, "--peer-n-max", "15", "7", *SIZES)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def by(rows: list[dict[str, Any]], key: str) -> dict[Any, dict[str, Any]]:
    return {row[key]: row for row in rows}


def test_plain_decoding_and_prefill(run: tuple[str, dict[str, Any]]) -> None:
    _, data = run
    assert list(by(data["autoregressive"], "context")) == [0, 96]
    for section in ("prefill", "prefill_with_drafter"):
        assert list(by(data[section], "tokens")) == [40, 96]
    rows = [row for name in ("autoregressive", "prefill", "prefill_with_drafter") for row in data[name]]
    assert all(0 < row["tok_s"] <= row["best_tok_s"] for row in rows)
    plain = data["autoregressive"][0]
    assert plain["weights_tb_s"] == pytest.approx(data["run"]["weight_bytes_plain"] / plain["step_ms"] * 1e-9)
    assert data["copy"] is None
    assert plain["share_of_copy"] is None


def test_weights_of_a_step(pair: Path, run: tuple[str, dict[str, Any]]) -> None:
    _, data = run
    sizes = {name: (pair / name).stat().st_size for name in ("target.gguf", "draft-all.gguf")}
    plain, drafted = data["run"]["weight_bytes_plain"], data["run"]["weight_bytes_drafted"]
    assert 0.9 * sizes["target.gguf"] < plain < sizes["target.gguf"]  # without the embedding table
    assert (
        plain + 0.95 * sizes["draft-all.gguf"] < drafted < plain + 1.3 * sizes["draft-all.gguf"]
    )  # and the head again


def test_steps_add_up(run: tuple[str, dict[str, Any]]) -> None:
    rows = by([row for row in run[1]["steps"] if not row["tree"]], "width")
    trees = [row for row in run[1]["steps"] if row["tree"]]
    assert [(row["tree"], row["width"]) for row in trees] == [(n, n + 1) for n in (16, 22, 32, 64)]
    assert all(row["tokens_per_step"] > 1.0 for row in trees)
    assert all(row["graphs_built"] <= 0.5 for row in trees)
    assert {width: row["tokens_per_step"] for width, row in rows.items()} == {1: 1.0, 4: 4.0, 16: 16.0}
    for row in rows.values():
        parts = [row[f"{name}_ms"] for name in ("draft", "verify", "accept", "commit", "append", "gap")]
        assert min(parts) >= 0
        assert row["wall_ms"] == pytest.approx(sum(parts), rel=0.5)
        assert row["graphs_computed"] >= 1
    assert rows[1]["graphs_built"] == rows[4]["graphs_built"] == rows[4]["buffers_allocated"] == 0
    alone = run[1]["parts"]
    assert [(row["context"], row["width"]) for row in alone] == [(0, 1), (0, 4), (0, 16), (96, 16)]
    for row in alone:
        parts = [row[f"{name}_ms"] for name in ("draft", "verify", "commit", "append")]
        assert row["sum_ms"] == pytest.approx(sum(parts))
        assert min(parts) > 0


def test_requests_accept_what_the_pair_promises(run: tuple[str, dict[str, Any]]) -> None:
    rows = by(run[1]["requests"], "name")
    assert rows["all accepted, width 16"]["accepted"] == rows["all accepted, width 16"]["proposed"] == 36
    assert rows["all accepted, width 16"]["accepted_length"] == 39 / 3
    assert rows["none accepted, width 16"]["accepted"] == 0 < rows["none accepted, width 16"]["proposed"]
    assert rows["no drafter"]["proposed"] == 0
    assert {"none accepted, width chosen", "all accepted, width chosen", "rate 0.8"} < set(rows)
    assert run[1]["window"][0]["draft_side_ms"] > 0


def test_ratios_to_the_peer(run: tuple[str, dict[str, Any]]) -> None:
    text, data = run
    drafted = data["peer"]["drafted"]
    assert [(row["draft"], row["n_max"]) for row in drafted] == [
        *(("draft-all.gguf", n) for n in (15, 7)),
        *(("draft-none.gguf", n) for n in (15, 7)),
    ]
    assert [row["step_ms"] for row in drafted] == [130.0, 130.0, 10.0, 10.0]
    rows = by(data["ratios"], "what")
    ours = by(data["prefill"], "tokens")[96]["tok_s"]
    assert rows["prefill 96"] == {"what": "prefill 96", "pydflash": ours, "llama.cpp": 2000.0, "ratio": ours / 2000.0}
    assert rows["autoregressive 0"]["llama.cpp"] == 50.0
    assert rows["all accepted, width 16"]["llama.cpp"] == 100.0
    assert "autoregressive 96" in text


def test_a_section_alone_needs_only_its_files(pair: Path) -> None:
    out = pair / "alone.json"
    done = bench("--target", pair / "target.gguf", "--only", "plain", "--json", out, *SIZES)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    assert {"autoregressive", "prefill"} < set(data)
    assert not {"steps", "requests", "prefill_with_drafter"} & set(data)


def test_missing_files_and_programs_are_named(pair: Path, tmp_path: Path) -> None:
    assert "no target" in bench("--pair", tmp_path).stderr
    assert "absent.gguf does not exist" in bench("--pair", pair, "--draft", tmp_path / "absent.gguf").stderr
    failed = bench("--pair", pair, "--only", "peer", "--vs", tmp_path, *SIZES)
    assert failed.returncode != 0
    assert "llama-bench" in failed.stderr


def test_pictures(pair: Path, run: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plot_bench.py needs matplotlib, which the dev extra brings")
    assert run[1]["steps"]
    script = str(SCRIPTS / "plot_bench.py")
    subprocess.run([sys.executable, script, str(pair / "bench.json"), str(tmp_path)], check=True)
    made = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(made) == {"steps.png", "acceptance.png", "contexts.png"}
    assert min(made.values()) > 10_000
