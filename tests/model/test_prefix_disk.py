"""Snapshots on disk: what another process finds, what damaged files do, and names that come from strangers."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.models import upcast_gguf

import pydflash
from pydflash import Engine, EngineOptions, PrefixSnapshot, PrefixStore, SamplingOptions
from pydflash.prefix_file import read_description, read_snapshot, remove_leftovers, write_snapshot

EngineMaker = Callable[..., Engine]
GREEDY = SamplingOptions(max_tokens=16, ignore_eos=True, width=8)
COLD = SamplingOptions(max_tokens=16, ignore_eos=True, width=8, cache_prompt=False)
HERE = Path(__file__).resolve().parent


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 31 + salt * 17 + (i * i) % 13) % 350 for i in range(n)]


@pytest.fixture
def snapshot(
    f32_drafter: Callable[[str], pydflash.DraftModel],
) -> Iterator[tuple[PrefixSnapshot, pydflash.DraftModel]]:
    draft = f32_drafter("d-part")
    with (
        pydflash.TargetCache(draft.target, 256, "q8_0", "f16", capture_layers=draft.config.target_layer_ids) as cache,
        pydflash.DraftContext(draft, "f16", "f32") as context,
    ):
        cache.forward(prompt(70))
        context.append(cache, 0, 70)
        yield PrefixSnapshot.take(cache, context, tokens=prompt(70)), draft


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_a_file_holds_every_byte(snapshot: tuple[PrefixSnapshot, pydflash.DraftModel], tmp_path: Path) -> None:
    taken, draft = snapshot
    path = tmp_path / "one.safetensors"
    n_bytes = write_snapshot(path, taken)
    assert n_bytes == path.stat().st_size > taken.n_bytes
    assert read_description(path).info == taken.info
    loaded = read_snapshot(path, draft.target, draft)
    assert loaded.info == taken.info
    assert loaded.token_digest == taken.token_digest
    np.testing.assert_array_equal(loaded.logits, taken.logits)
    for part in taken.parts:
        np.testing.assert_array_equal(loaded.read(part.name), taken.read(part.name), err_msg=part.name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.safetensors"]


def test_every_flipped_bit_is_found(snapshot: tuple[PrefixSnapshot, pydflash.DraftModel], tmp_path: Path) -> None:
    taken, draft = snapshot
    path = tmp_path / "one.safetensors"
    write_snapshot(path, taken)
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    header = int.from_bytes(data[:8], "little") + 8
    places = [*range(8), *rng.integers(8, header, 60).tolist(), *rng.integers(header, len(data), 60).tolist()]
    for place in places:
        broken = bytearray(data)
        broken[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        with pytest.raises((pydflash.FormatError, pydflash.SnapshotMismatchError)):
            read_snapshot(path, draft.target, draft)
    for cut in (0, 1, 7, 8, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(pydflash.FormatError):
            read_snapshot(path, draft.target, draft)
    path.write_bytes(data + b"\0")
    with pytest.raises(pydflash.FormatError):
        read_snapshot(path, draft.target, draft)
    path.write_bytes(data)
    assert read_snapshot(path, draft.target, draft).position == 70


def test_files_that_are_well_formed_and_wrong(
    snapshot: tuple[PrefixSnapshot, pydflash.DraftModel],
    f32_drafter: Callable[[str], pydflash.DraftModel],
    f32_target: Callable[[str], pydflash.TargetModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, draft = snapshot
    path = tmp_path / "one.safetensors"
    write_snapshot(path, taken)
    with pytest.raises(pydflash.SnapshotMismatchError, match="model"):
        read_snapshot(path, f32_target("dense"), None)
    with pytest.raises(pydflash.SnapshotMismatchError, match="there is no drafter"):
        read_snapshot(path, draft.target, None)
    with pytest.raises(pydflash.SnapshotMismatchError, match="drafter"):
        read_snapshot(path, draft.target, f32_drafter("d-rand"))
    with pytest.raises(pydflash.NotFoundError):
        read_snapshot(tmp_path / "none.safetensors", draft.target, draft)
    with pytest.raises(pydflash.NotFoundError):
        read_snapshot(tmp_path, draft.target, draft)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weights": np.zeros(3, np.float32)}, foreign)
    with pytest.raises(pydflash.FormatError, match="is no snapshot"):
        read_snapshot(foreign, draft.target, draft)
    # Every checksum right, and yet not what this model has: written by someone who knows how.
    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    whole = pydflash.prefix_file
    for name, change, error in (
        ("version", lambda text: "2", pydflash.SnapshotMismatchError),
        ("info", lambda text: text.replace('"rope_theta": ', '"rope_theta": 1'), pydflash.SnapshotMismatchError),
        ("info", lambda text: text.replace('"k_type": "q8_0"', '"k_type": "q4_0"'), pydflash.PydflashError),
        ("info", lambda text: text.replace('"position": 70', '"position": 71'), pydflash.FormatError),
        ("info", lambda text: text.replace('"position": 70', '"position": 1e9'), pydflash.FormatError),
        ("info", lambda text: text.replace('"version": 1', '"version": 9'), pydflash.SnapshotMismatchError),
        ("info", lambda text: text.replace('"kind": "full"', '"kind": "half"'), pydflash.FormatError),
        ("info", lambda text: text.replace('"kind": "full"', '"kind": "delta"'), pydflash.SnapshotMismatchError),
        ("info", lambda text: "[" * 100_000, pydflash.FormatError),
        ("parts", lambda text: "{}", pydflash.FormatError),
        ("parts", lambda text: "[1]", pydflash.FormatError),
        ("parts", lambda text: "[]", pydflash.FormatError),
        ("checksums", lambda text: "[]", pydflash.FormatError),
        ("parent", lambda text: "x" * 1000, pydflash.FormatError),
    ):
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata())
        metadata[name] = change(metadata[name])
        metadata["checksum"] = whole._sign(metadata)
        made = tmp_path / "made.safetensors"
        save_file(tensors, made, metadata)
        with pytest.raises(error):
            read_snapshot(made, draft.target, draft)


def test_another_process_goes_on(make_engine: EngineMaker, tmp_path: Path) -> None:
    """An engine writes; one that has just started reads, deltas and all."""
    with make_engine(n_ctx=512, prefill_chunk=64, prefix_interval=64, prefix_directory=tmp_path) as engine:
        answer = engine.generate(prompt(200), GREEDY)
        cold = engine.generate([*prompt(200), *answer.token_ids, 5, 6], COLD)
        engine.prefix_cache.flush()  # type: ignore[union-attr]
        assert engine.prefix_cache.stats.disk_written >= 3  # type: ignore[union-attr]
    assert len(files_of(tmp_path)) >= 3
    with make_engine(n_ctx=700, prefill_chunk=64, prefix_directory=tmp_path) as engine:
        warm = engine.generate([*prompt(200), *answer.token_ids, 5, 6], GREEDY)
        assert (warm.stats.prefix_source, warm.stats.cached_tokens) == ("disk", 215)
        assert (warm.token_ids, warm.stats.accepted) == (cold.token_ids, cold.stats.accepted)
        assert engine.generate(prompt(200), GREEDY).token_ids == answer.token_ids
        again = engine.generate([*prompt(200), *answer.token_ids, 5, 6], GREEDY)
        assert again.stats.prefix_source == "memory"


@pytest.mark.parametrize("draft", [None, "d-rand", "d-part"])
def test_files_of_something_else_are_never_used(make_engine: EngineMaker, tmp_path: Path, draft: str | None) -> None:
    with make_engine("d-part", n_ctx=512, prefix_directory=tmp_path) as engine:
        engine.generate(prompt(100), GREEDY)
        engine.prefix_cache.flush()  # type: ignore[union-attr]
    source = files_of(tmp_path)[0].parent
    options = {"k_type": "f16"} if draft == "d-part" else {}
    with make_engine(draft, n_ctx=512, prefix_directory=tmp_path, **options) as engine:
        own = tmp_path / engine.prefix_cache.state_key  # type: ignore[union-attr]
        assert own != source
        assert engine.generate(prompt(100), COLD).stats.prefix_source == "off"
        assert engine.generate(prompt(100), GREEDY).stats.prefix_source == "none"
        engine.prefix_cache.flush()  # type: ignore[union-attr]
        engine.prefix_cache.clear()  # type: ignore[union-attr]
        # Somebody put the files of the other kind where those of this one belong.
        names = {path.name.split("-")[0]: path for path in own.iterdir()}
        for path in source.iterdir():
            shutil.copy(path, names[path.name.split("-")[0]])
        engine._prefix.forget()
        wanted = engine.generate(prompt(100), COLD)
        result = engine.generate(prompt(100), GREEDY)
        assert (result.stats.prefix_source, result.stats.prefix_reason) == ("none", "file of something else")
        assert result.token_ids == wanted.token_ids


def test_another_model_has_another_key(tmp_path: Path) -> None:
    """The same weights with another rotary base are another model."""
    from support.gguf_edit import edit_gguf

    plain = upcast_gguf(HERE.parent / "data" / "models" / "nano-bf16.gguf", tmp_path / "a.gguf")
    turned = edit_gguf(plain, tmp_path / "b.gguf", {"qwen35.rope.freq_base": 12345.0})
    store = tmp_path / "cache"
    for model, sources in ((plain, ["none", "disk"]), (turned, ["none", "disk"])):
        for source in sources:
            options = EngineOptions(n_ctx=256, n_threads=1, prefix_directory=store)
            with Engine.open(model, None, options) as engine:
                assert engine.generate(prompt(60), GREEDY).stats.prefix_source == source


def test_a_damaged_file_is_a_miss_and_goes_away(make_engine: EngineMaker, tmp_path: Path) -> None:
    with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
        wanted = engine.generate(prompt(100), GREEDY).token_ids
        engine.prefix_cache.flush()  # type: ignore[union-attr]
    for damage in ("cut", "flip", "empty", "text"):
        for path in files_of(tmp_path):
            data = bytearray(path.read_bytes() or b"\0")
            data[len(data) // 2] ^= 4
            path.write_bytes({"cut": data[: len(data) // 2], "flip": data, "empty": b"", "text": b"hello"}[damage])
        damaged = files_of(tmp_path)
        with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
            result = engine.generate(prompt(100), GREEDY)
            assert (result.stats.prefix_source, result.stats.prefix_reason) == ("none", "file damaged")
            assert result.token_ids == wanted
            stats = engine.prefix_cache.stats  # type: ignore[union-attr]
            assert stats.misses_by_reason == {"file damaged": 1}
            engine.prefix_cache.flush()  # type: ignore[union-attr]
        assert len(damaged) >= 2
        with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
            assert engine.generate(prompt(100), GREEDY).stats.prefix_source == "disk"


def test_a_delta_without_its_parent_is_a_miss(make_engine: EngineMaker, tmp_path: Path) -> None:
    with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
        answer = engine.generate(prompt(100), GREEDY)
        engine.prefix_cache.flush()  # type: ignore[union-attr]
    parent = next(path for path in files_of(tmp_path) if path.name.startswith("100-"))
    parent.unlink()
    with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
        result = engine.generate([*prompt(100), *answer.token_ids], GREEDY)
        assert (result.stats.prefix_source, result.stats.prefix_reason) == ("none", "file of something else")


def test_the_directory_stays_within_its_bound(make_engine: EngineMaker, tmp_path: Path) -> None:
    with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
        engine.generate(prompt(100), GREEDY)
        engine.prefix_cache.flush()  # type: ignore[union-attr]
    one = max(path.stat().st_size for path in files_of(tmp_path))
    bound = 5 * one
    with make_engine(n_ctx=512, prefix_directory=tmp_path, prefix_directory_bytes=bound) as engine:
        for salt in range(1, 8):
            engine.generate(prompt(100, salt), GREEDY)
            engine.prefix_cache.flush()  # type: ignore[union-attr]
            files = files_of(tmp_path)
            assert sum(path.stat().st_size for path in files) <= bound
            keys = {path.stem.split("-")[1] for path in files}
            assert {path.stem.split("-")[2] for path in files} <= keys | {"0"}  # every parent is there
    with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
        assert engine.generate(prompt(100, 7), GREEDY).stats.prefix_source == "disk"
        assert engine.generate(prompt(100, 0), GREEDY).stats.prefix_source == "none"


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_line_in_the_log(
    make_engine: EngineMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(n_ctx=512, prefix_directory=tmp_path) as engine:
        shutil.rmtree(tmp_path / engine.prefix_cache.state_key)  # type: ignore[union-attr]
        (tmp_path / engine.prefix_cache.state_key).write_text("a file where a folder was")  # type: ignore[union-attr]
        wanted = engine.generate(prompt(100), COLD).token_ids
        assert engine.generate(prompt(100), GREEDY).token_ids == wanted
        engine.prefix_cache.flush()  # type: ignore[union-attr]
        assert engine.prefix_cache.stats.disk_failed > 0  # type: ignore[union-attr]
        assert "could not be written" in caplog.text
        assert engine.generate(prompt(100), GREEDY).stats.prefix_source == "memory"


_WRITER = """
import sys
from pathlib import Path
import pydflash
from pydflash.prefix_file import write_snapshot
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
with pydflash.Engine.open(sys.argv[3], None, pydflash.EngineOptions(
        n_ctx=256, n_threads=1, prefix_directory=folder, prefix_directory_bytes=1 << 20)) as engine:
    print("ready", flush=True)
    for i in range(int(sys.argv[4])):
        ids = [(k * 31 + (seed + i) % 5 * 17) % 350 for k in range(120)]
        engine.generate(ids, pydflash.SamplingOptions(max_tokens=6, ignore_eos=True))
        engine.prefix_cache.clear()
print("done", flush=True)
"""


def start_writer(folder: Path, seed: int, model: Path, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), str(seed), str(model), str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
    )


def assert_all_files_are_whole(folder: Path, model: pydflash.TargetModel) -> int:
    """Every file that a reader would find is complete; how many there are."""
    files = files_of(folder)
    by_key = {path.stem.split("-")[1]: path for path in files}

    def load(path: Path) -> PrefixSnapshot:
        return read_snapshot(path, model, None, parent_of=lambda parent: load(by_key[parent]))

    for path in files:
        if path.stem.split("-")[2] in {*by_key, "0"}:
            load(path)
        else:
            read_description(path)
    return len(files)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL")
def test_killed_while_writing(
    f32_path: Callable[[str], Path], f32_target: Callable[[str], pydflash.TargetModel], tmp_path: Path
) -> None:
    rounds = int(os.environ.get("PYDFLASH_TEST_KILLS", "3"))
    folder = tmp_path / "cache"
    found, model = 0, f32_target("nano")
    for i in range(rounds):
        with start_writer(folder, i, f32_path("nano"), 10_000) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(0.15 + 0.013 * (i % 40))
            writer.kill()
        found += assert_all_files_are_whole(folder, model)
    assert found > 0
    options = EngineOptions(n_ctx=256, n_threads=1, prefix_directory=folder)
    with Engine.open(model, None, options) as engine:
        for salt in range(5):
            ids = [(k * 31 + salt * 17) % 350 for k in range(120)]
            cold = engine.generate(ids, SamplingOptions(max_tokens=6, ignore_eos=True, cache_prompt=False))
            warm = engine.generate(ids, SamplingOptions(max_tokens=6, ignore_eos=True))
            assert warm.token_ids == cold.token_ids
            assert warm.stats.prefix_reason in ("", "empty", "no common prefix")
    assert not list(folder.rglob(".*.tmp"))


def test_two_processes_share_a_folder(
    f32_path: Callable[[str], Path], f32_target: Callable[[str], pydflash.TargetModel], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    writers = [start_writer(folder, seed, f32_path("nano"), 25) for seed in (0, 2)]
    for writer in writers:
        out, _ = writer.communicate(timeout=120)
        assert out == "ready\ndone\n"
        assert writer.returncode == 0
    assert assert_all_files_are_whole(folder, f32_target("nano")) > 0


def test_names(snapshot: tuple[PrefixSnapshot, pydflash.DraftModel], tmp_path: Path) -> None:
    taken, draft = snapshot
    store = PrefixStore(tmp_path / "saved", draft.target, draft)
    saved = store.save("slot-1.bin", taken)
    assert (saved.name, saved.n_tokens, saved.n_bytes) == (
        "slot-1.bin",
        70,
        (tmp_path / "saved/slot-1.bin").stat().st_size,
    )
    assert store.load("slot-1.bin").token_digest == taken.token_digest
    assert [(entry.name, entry.n_tokens) for entry in store.entries()] == [("slot-1.bin", 70)]
    for name in (
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        "/etc/passwd",
        ".hidden",
        "-x",
        "a\0b",
        "ä",
        "x" * 129,
        "a b",
        "C:x",
    ):
        for call in (store.path, store.load, store.erase, lambda given: store.save(given, taken)):
            with pytest.raises(pydflash.InvalidArgumentError, match="name"):
                call(name)
    with pytest.raises(pydflash.InvalidArgumentError, match="name"):
        store.path(3)  # type: ignore[arg-type]
    with pytest.raises(pydflash.NotFoundError):
        store.load("nothing")
    with pytest.raises(pydflash.NotFoundError):
        store.erase("nothing")
    own = tmp_path / "saved" / "notes.txt"
    own.write_text("not a snapshot, and somebody's")
    for call in (store.erase, lambda given: store.save(given, taken)):
        with pytest.raises(pydflash.InvalidArgumentError, match="snapshot"):
            call("notes.txt")
    with pytest.raises(pydflash.FormatError):
        store.load("notes.txt")
    assert own.read_text() == "not a snapshot, and somebody's"
    (tmp_path / "saved" / "folder").mkdir()
    with pytest.raises((pydflash.InvalidArgumentError, pydflash.NotFoundError)):
        store.erase("folder")
    bounded = PrefixStore(tmp_path / "saved", draft.target, draft, max_bytes=saved.n_bytes + 1000)
    bounded.save("slot-1.bin", taken)  # in its own place
    with pytest.raises(pydflash.CapacityError, match="at most"):
        bounded.save("slot-2.bin", taken)
    erased = store.erase("slot-1.bin")
    assert (erased.n_tokens, erased.n_bytes) == (70, saved.n_bytes)
    assert store.entries() == ()


def test_save_load_and_erase(make_engine: EngineMaker, tmp_path: Path) -> None:
    with make_engine(n_ctx=512, save_directory=tmp_path, prefill_chunk=64, prefix_interval=64) as engine:
        with pytest.raises(pydflash.InvalidArgumentError, match="no tokens"):
            engine.save("nothing")
        answer = engine.generate(prompt(150), GREEDY)
        saved = engine.save("talk")
        assert (saved.n_tokens, saved.n_bytes) == (165, (tmp_path / "talk").stat().st_size)
        turn = [*prompt(150), *answer.token_ids, 7]
        cold = engine.generate(turn, COLD)
    with make_engine(n_ctx=300, save_directory=tmp_path) as engine:
        assert engine.load("talk").n_tokens == 165
        assert engine.cache.position == 165
        warm = engine.generate(turn, GREEDY)
        assert (warm.stats.prefix_source, warm.stats.cached_tokens) == ("live", 165)
        assert (warm.token_ids, warm.stats.accepted) == (cold.token_ids, cold.stats.accepted)
        engine.generate(prompt(20, 8), GREEDY)
        assert engine.generate(turn, GREEDY).stats.prefix_source == "memory"
        assert engine.erase("talk").n_tokens == 165
        with pytest.raises(pydflash.NotFoundError):
            engine.load("talk")
        assert engine.store is not None
        assert engine.store.entries() == ()
    with make_engine(n_ctx=100, save_directory=tmp_path) as small:
        small.generate(prompt(20), GREEDY)
        small.save("small")
    with make_engine("d-rand", n_ctx=100, save_directory=tmp_path) as other:
        with pytest.raises(pydflash.SnapshotMismatchError, match="drafter"):
            other.load("small")
        assert other.cache.position == 0
    with make_engine(n_ctx=100) as none:
        for call in (none.save, none.load, none.erase):
            with pytest.raises(pydflash.InvalidArgumentError, match="save_directory"):
                call("talk")


def test_leftovers_of_living_processes_stay(tmp_path: Path) -> None:
    mine = tmp_path / f".x.safetensors.{os.getpid()}.abcd.tmp"
    dead = tmp_path / ".x.safetensors.999999999.abcd.tmp"
    other = tmp_path / "notes.tmp"
    for path in (mine, dead, other):
        path.write_text("")
    assert remove_leftovers(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, other.name])
