"""What native code has to say arrives at logging.getLogger("pydflash.native"), and nowhere else."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import pydflash
from pydflash import _log, builtin
from pydflash._ffi import NULL, ffi, lib

EOS_KEY = b"tokenizer.ggml.eos_token_id"


def without_eos(folder: Path) -> Path:
    """The built-in target with its end-of-sequence key under another name: a legal file that is warned about."""
    folder.mkdir(parents=True, exist_ok=True)
    data = builtin.target_path().read_bytes()
    assert data.count(EOS_KEY) == 1
    path = folder / "no-eos.gguf"
    path.write_bytes(data.replace(EOS_KEY, b"tokenizer.ggml.eox_token_id"))
    return path


def open_part(path: Path) -> pydflash.TargetModel:
    return pydflash.TargetModel.open(path, layers=(0, 1), load_output=False)


def test_a_warning_arrives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pydflash"), open_part(without_eos(tmp_path)) as model:
        assert model.stop_ids == {4092, 4094}  # by their texts
    record = next(record for record in caplog.records if "eos_token_id" in record.getMessage())
    assert record.name == "pydflash.native"
    assert record.levelno == logging.WARNING
    assert str(tmp_path) in record.getMessage()
    assert record.getMessage().count("\n") == 0


def test_a_line_of_any_length_arrives_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "/".join("é" * 60 for _ in range(10))
    with open_part(without_eos(folder)):
        pass
    message = next(record.getMessage() for record in caplog.records if "eos_token_id" in record.getMessage())
    assert len(message.encode()) > 1024
    assert str(folder) in message


def test_lines_are_not_formatted_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_part(without_eos(tmp_path / "100%s %d")):
        pass
    assert any("100%s %d" in record.getMessage() for record in caplog.records)


def test_lines_are_taken_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_part(without_eos(tmp_path)):
        first = len(caplog.records)
        _log.drain()
        assert len(caplog.records) == first
    assert sum("eos_token_id" in record.getMessage() for record in caplog.records) == 1


def test_lines_arrive_after_a_failed_call_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: pydflash.TargetCache
) -> None:
    path = str(without_eos(tmp_path)).encode()
    for fail in (lambda: pydflash.GgufFile.open("missing"), lambda: cache.forward([9999])):
        out = ffi.new("dflash_target_model **")
        assert lib.dflash_target_model_open(out, path, NULL, NULL) == 0  # leaves its line in the queue
        lib.dflash_target_model_free(out[0])
        caplog.clear()
        with pytest.raises(pydflash.PydflashError):
            fail()
        assert sum("eos_token_id" in record.getMessage() for record in caplog.records) == 1


def test_nothing_is_written_to_the_terminal(script: Callable[[str], object], tmp_path: Path) -> None:
    path = without_eos(tmp_path)
    source = f"""
import logging, pydflash
assert not logging.getLogger("pydflash.native").handlers
logging.getLogger("pydflash").addHandler(logging.NullHandler())
with pydflash.TargetModel.open({str(path)!r}, n_threads=1) as model, pydflash.TargetCache(model, 64) as cache:
    cache.forward([1, 2, 3])
"""
    done = script(source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")  # type: ignore[attr-defined]
