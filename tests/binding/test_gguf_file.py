"""GgufFile against the reader of the gguf package."""

import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import pydflash
from pydflash import builtin

FILES = [builtin.target_path(), builtin.draft_path()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_metadata(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    with pydflash.GgufFile.open(path) as file:
        metadata = file.metadata
        assert list(metadata) == list(expected)
        for key, value in metadata.items():
            if isinstance(value, np.ndarray):
                assert value.tolist() == expected[key], key
                assert value.dtype.isnative
            else:
                assert value == expected[key], key
                assert type(value) is type(expected[key]), key
        assert file.metadata is metadata


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_tensors(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with pydflash.GgufFile.open(str(path)) as file:
        assert file.path == path
        assert len(file.tensors) == len(reader.tensors)
        for ours, theirs in zip(file.tensors, reader.tensors, strict=True):
            assert ours.name == theirs.name
            assert ours.type.lower() == theirs.tensor_type.name.lower()
            assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
            assert (ours.n_bytes, ours.split_index) == (theirs.n_bytes, 0)
        for tensor in reader.tensors[:3] + reader.tensors[-3:]:
            data = file.read_tensor(tensor.name)
            assert data.dtype == np.uint8
            assert data.tobytes() == tensor.data.tobytes()
        with pytest.raises(pydflash.NotFoundError, match=r"no tensor 'blk\.99'"):
            file.read_tensor("blk.99")


def write_values(path: Path) -> dict[str, object]:
    """A file with a value of every type, and what they should read as."""
    writer = gguf.GGUFWriter(path, "none")
    kinds = gguf.GGUFValueType
    scalars: dict[str, tuple[object, gguf.GGUFValueType]] = {
        "a.u8": (200, kinds.UINT8),
        "a.i8": (-100, kinds.INT8),
        "a.u16": (60000, kinds.UINT16),
        "a.i16": (-30000, kinds.INT16),
        "a.u32": (4000000000, kinds.UINT32),
        "a.i32": (-2000000000, kinds.INT32),
        "a.f32": (0.15625, kinds.FLOAT32),
        "a.bool": (True, kinds.BOOL),
        "a.string": ("grün \U0001f40d", kinds.STRING),
        "a.empty": ("", kinds.STRING),
        "a.u64": (2**63 + 1, kinds.UINT64),
        "a.i64": (-(2**62), kinds.INT64),
        "a.f64": (1e300, kinds.FLOAT64),
    }
    for key, (value, kind) in scalars.items():
        writer.add_key_value(key, value, kind)
    arrays = {
        "b.ints": [1, -2, 3],
        "b.floats": [0.5, -0.25],
        "b.bools": [True, False, True],
        "b.strings": ["", "ä", "\U0001f40d" * 100],
    }
    for key, values in arrays.items():
        writer.add_array(key, values)
    writer.add_tensor("t", np.zeros((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {key: value for key, (value, _) in scalars.items()} | dict(arrays)


def test_every_type(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    expected = write_values(path)
    with pydflash.GgufFile.open(path) as file:
        for key, value in expected.items():
            got = file.metadata[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == value, key
        assert isinstance(file.metadata["a.bool"], bool)
        assert isinstance(file.metadata["b.strings"], list)
        assert {file.metadata[key].dtype.kind for key in ("b.ints", "b.floats", "b.bools")} == set("ifb")  # type: ignore[union-attr]
        assert file.tensors == (pydflash.GgufTensor("t", "f32", (2, 3), 24, 0),)


def test_text_that_is_no_utf8_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    write_values(path)
    path.write_bytes(path.read_bytes().replace("grün".encode(), b"gr\xff\xfen"))
    with pydflash.GgufFile.open(path) as file:
        text = file.metadata["a.string"]
    assert isinstance(text, str)
    assert text.encode("utf-8", "surrogateescape").startswith(b"gr\xff\xfen")


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "none")
    tokens = [f"token {i}" for i in range(248320)]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pydflash.GgufFile.open(path) as file:
        begun = time.thread_time()
        got = file.metadata["tokenizer.ggml.tokens"]
        seconds = time.thread_time() - begun
    assert got == tokens
    assert seconds < 1.0


def test_broken_files(tmp_path: Path) -> None:
    whole = builtin.draft_path().read_bytes()
    for name, data in {"empty": b"", "text": b"hello world, this is no model", "cut": whole[:5000]}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(pydflash.FormatError, match=name):
            pydflash.GgufFile.open(path)
