"""GgufFile: what a model file says about itself, without loading the model."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pydflash._ffi import NULL, CData, as_c_array, c_text, check, ffi, lib, text_of
from pydflash._handle import NativeHandle, native_call
from pydflash.errors import FormatError, NotFoundError

GgufArray: TypeAlias = (
    npt.NDArray[np.uint8]
    | npt.NDArray[np.int8]
    | npt.NDArray[np.uint16]
    | npt.NDArray[np.int16]
    | npt.NDArray[np.uint32]
    | npt.NDArray[np.int32]
    | npt.NDArray[np.float32]
    | npt.NDArray[np.bool_]
    | npt.NDArray[np.uint64]
    | npt.NDArray[np.int64]
    | npt.NDArray[np.float64]
)
GgufValue: TypeAlias = bool | int | float | str | list[str] | GgufArray
"""A metadata value: a scalar, a list of texts, or an array [n] of numbers or booleans."""

_STRING: Final = 8
_ARRAY: Final = 9
# By GGUF type number; the payload is little-endian.
_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
        name, type: such as "blk.0.attn_norm.weight" and "f32", "q8_0", "q4_K".
        shape: elements per axis in NumPy's order, the contiguous axis last.
        n_bytes: size of the data as it lies in the file.
        split_index: part of a split model that holds it, from 0.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int
    split_index: int


class GgufFile(NativeHandle):
    """An open GGUF file, or all parts of a split one as one model.

    Only metadata and the tensor table are read until a tensor is asked for. Immutable; any thread may use it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        out = ffi.new("dflash_gguf **")
        name = c_text("path", path)
        with native_call() as err:
            check(lib.dflash_gguf_open(out, name, err), err, "gguf_open")
        self._adopt(out[0], lib.dflash_gguf_free)
        self._metadata: dict[str, GgufValue] | None = None
        self._tensors: tuple[GgufTensor, ...] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file; of a split model any part.

        Raises:
            NotFoundError: the file or one of the parts is missing.
            FormatError: the file is damaged.
            UnsupportedModelError: its version, byte order or a tensor type is unknown.
        """
        return cls(path)

    def _facts(self) -> str:
        return repr(self._path.name)

    def _state_text(self) -> str:
        return f"{self._count_values()} keys, {self._count_tensors()} tensors"

    @property
    def path(self) -> Path:
        """As it was given."""
        return self._path

    @property
    def metadata(self) -> dict[str, GgufValue]:
        """All keys in file order with their values, read on first use; the caller may keep it, not change it.

        Bytes that are no UTF-8 become lone surrogates, as in Python's file names.
        """
        if self._metadata is None:
            with self._use() as (ptr, err):
                self._metadata = dict(_read_value(ptr, i, err) for i in range(self._count_values()))
        return self._metadata

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """The tensor table, in file order, part after part."""
        if self._tensors is None:
            with self._use() as (ptr, err):
                self._tensors = tuple(_read_tensor_entry(ptr, i, err) for i in range(self._count_tensors()))
        return self._tensors

    def read_tensor(self, name: str) -> npt.NDArray[np.uint8]:
        """A copy of a tensor's bytes as they lie in the file, uint8 [n_bytes].

        Raises:
            NotFoundError: there is no tensor of this name.
        """
        for i, tensor in enumerate(self.tensors):
            if tensor.name == name:
                data = np.empty(tensor.n_bytes, np.uint8)
                with self._use() as (ptr, err):
                    buffer = as_c_array(data, "uint8_t[]", writable=True)
                    check(lib.dflash_gguf_tensor_read(ptr, i, buffer, data.size, err), err, "gguf_tensor_read")
                return data
        raise NotFoundError(f"{self._path}: no tensor {name!r}", operation="read_tensor")

    def _count_values(self) -> int:
        n = ffi.new("int64_t *")
        with self._use() as (ptr, err):
            check(lib.dflash_gguf_value_count(ptr, n, err), err, "gguf_value_count")
        return int(n[0])

    def _count_tensors(self) -> int:
        n = ffi.new("int64_t *")
        with self._use() as (ptr, err):
            check(lib.dflash_gguf_tensor_count(ptr, n, err), err, "gguf_tensor_count")
        return int(n[0])


def _read_value(ptr: CData, i: int, err: CData) -> tuple[str, GgufValue]:
    info, needed = ffi.new("dflash_gguf_value *"), ffi.new("uint64_t *")
    check(lib.dflash_gguf_value_at(ptr, i, info, NULL, 0, needed, err), err, "gguf_value_at")
    key = ffi.new("char[]", needed[0])
    check(lib.dflash_gguf_value_at(ptr, i, NULL, key, needed[0], NULL, err), err, "gguf_value_at")
    payload = bytearray(info.n_bytes)
    if payload:
        buffer = ffi.from_buffer("uint8_t[]", payload, require_writable=True)
        check(lib.dflash_gguf_value_read(ptr, i, buffer, len(payload), err), err, "gguf_value_read")
        ffi.release(buffer)
    name = ffi.string(key).decode("utf-8", "surrogateescape")
    return name, _decode(name, payload, info.type, info.element_type, info.count)


def _decode(key: str, payload: bytearray, kind: int, element_kind: int, count: int) -> GgufValue:
    if element_kind == _STRING:
        texts = _split_strings(bytes(payload), count)
        return texts if kind == _ARRAY else texts[0]
    dtype = _DTYPES.get(element_kind)
    if dtype is None:
        raise FormatError(f"key {key} has type {element_kind}, which this version cannot decode")
    values: GgufArray = np.frombuffer(payload, dtype)
    if kind == _ARRAY:
        return values.astype(dtype.newbyteorder("="), copy=False)
    scalar: bool | int | float = values[0].item()
    return scalar


def _split_strings(payload: bytes, count: int) -> list[str]:
    # A vocabulary has a few hundred thousand of them, so the loop does as little as it can.
    length_at = struct.Struct("<Q").unpack_from
    texts = []
    at = 0
    for _ in range(count):
        end = at + 8 + length_at(payload, at)[0]
        texts.append(payload[at + 8 : end].decode("utf-8", "surrogateescape"))
        at = end
    return texts


def _read_tensor_entry(ptr: CData, i: int, err: CData) -> GgufTensor:
    info = ffi.new("dflash_gguf_tensor *")
    check(lib.dflash_gguf_tensor_at(ptr, i, info, err), err, "gguf_tensor_at")
    return GgufTensor(
        name=text_of(info.name),
        type=text_of(info.type),
        shape=tuple(info.ne[axis] for axis in reversed(range(info.n_dims))),
        n_bytes=info.n_bytes,
        split_index=info.split_index,
    )
