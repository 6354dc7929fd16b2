"""The installed program as a process: pipes and signals."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("pydflash")
PROMPT = "def quicksort(items):"


def command(*arguments: object) -> list[str]:
    if not PROGRAM.exists():
        found = shutil.which("pydflash")
        assert found is not None, "the pydflash program is not installed"
        return [found, *map(str, arguments)]
    return [str(PROGRAM), *map(str, arguments)]


def test_nothing_but_the_text_in_a_pipe() -> None:
    done = subprocess.run(command("generate", PROMPT, "-n", 24, "-t", 1), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr == b""
    assert len(done.stdout.decode().splitlines()) > 1
    assert b"\x1b" not in done.stdout


def test_text_comes_as_it_is_made() -> None:
    with subprocess.Popen(
        command("generate", PROMPT, "--ignore-eos", "-n", 3000, "-t", 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert len(process.stdout.read(40)) == 40
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert process.wait(30) == 130
        assert time.monotonic() - begun < 10
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_a_reader_that_leaves_ends_the_program() -> None:
    with subprocess.Popen(
        command("generate", PROMPT, "--ignore-eos", "-n", 3000, "-t", 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(20)
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_errors_in_a_process() -> None:
    done = subprocess.run(
        command("generate", PROMPT, "--nope"), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pydflash: No such option: --nope")
    assert done.stderr.count("\n") == 1


def test_chat_in_a_pipe() -> None:
    done = subprocess.run(
        command("chat", "-n", 16, "-t", 1),
        input="Write a Python function that adds two numbers.\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_module_form() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from pydflash.cli import main; main()", "devices", "--json"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_streams_do_no_harm(name: str) -> None:
    redirect = "1>&-" if name == "stdout" else "2>&-"
    line = " ".join(f"'{part}'" for part in command("devices", "--json")) + f" {redirect}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, 1)
    assert b"Traceback" not in done.stderr
