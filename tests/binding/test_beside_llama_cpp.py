"""Another ggml in the same process: both engines generate, and neither disturbs the other."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys, urllib.request
{imports}
import pydflash
from pydflash import builtin

def ours():
    with pydflash.Engine.open(options=pydflash.EngineOptions(n_threads=1, n_ctx=256)) as engine:
        return engine.generate([200, 201, 202, 203], pydflash.SamplingOptions(max_tokens=24, seed=1)).token_ids

def theirs(server):
    body = json.dumps(dict(prompt=[200, 201, 202, 203], n_predict=24, temperature=0.0, return_tokens=True)).encode()
    url, headers = server.listening_address + "/completion", {{"Content-Type": "application/json"}}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())["tokens"]

options = xllamacpp.CommonParams()
options.model.path = str(builtin.target_path())
options.n_ctx, options.n_parallel, options.warmup, options.verbosity = 256, 1, False, 0
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
before = list(ours())
server = xllamacpp.Server(options)
first = theirs(server)
assert list(ours()) == before
assert theirs(server) == first
assert len(first) == 24 and len(before) == 24
print("both", len(first) + len(before))
"""


@pytest.mark.parametrize("imports", ["import xllamacpp", "import pydflash\nimport xllamacpp"])
def test_both_generate_in_one_process(tmp_path: Path, imports: str) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp's prebuilt wheel is not installed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,  # not the source tree, which Python would import from
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "both 48" in done.stdout
