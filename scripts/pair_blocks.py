"""Quantised weights without a quantiser: valid blocks of random codes, and a GGUF file made of repeated runs of them.

A *tile* is a ring of random blocks whose number is a prime. Tensors are cut out of it one after the other, so that no
two rows of a tensor with fewer rows than the tile has blocks are alike, although gigabytes come from megabytes.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
F32, Q4_K, Q6_K, Q8_0 = (GGMLQuantizationType[name] for name in ("F32", "Q4_K", "Q6_K", "Q8_0"))

# Sub-block scales of the K-types are drawn from these codes: wide enough to be random, narrow enough to fit four bits.
_LOW_CODE, _HIGH_CODE = 8, 15
_CODE_RMS = float(np.sqrt(np.mean(np.arange(_LOW_CODE, _HIGH_CODE + 1) ** 2.0)))
# Root mean square of what a random payload stands for, in units of the block's own scale.
_PAYLOAD_RMS = {
    Q4_K: _CODE_RMS * float(np.sqrt((16**2 - 1) / 12)),
    Q6_K: _CODE_RMS * float(np.sqrt((64**2 - 1) / 12 + 0.25)),
    Q8_0: float(np.sqrt((256**2 - 1) / 12 + 0.25)),
}
_WRITE_THREADS = 8


def row_bytes(qtype: GGMLQuantizationType, n: int) -> int:
    """Bytes of n values."""
    values, size = GGML_QUANT_SIZES[qtype]
    if n % values:
        raise ValueError(f"rows of {n} values cannot be stored as {qtype.name}: blocks have {values}")
    return n // values * size


def random_blocks(qtype: GGMLQuantizationType, n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Blocks [n_blocks, bytes] of random values with mean near 0 and this standard deviation; 0: all values are 0."""
    blocks = rng.integers(0, 256, (n_blocks, GGML_QUANT_SIZES[qtype][1]), np.uint8)
    wanted = std / _PAYLOAD_RMS[qtype]
    if std > 0 and not 2**-20 < wanted < 2**12:  # half precision holds it and its small multiples
        raise ValueError(f"a standard deviation of {std:g} is outside the range of {qtype.name}")
    scale = np.float16(wanted)
    if qtype == Q4_K:
        # Minimum codes equal scale codes, and the minimum's unit is 7.5 scales: codes 0 to 15 are then centred on 0.
        codes = rng.integers(_LOW_CODE, _HIGH_CODE + 1, (n_blocks, 8), np.uint8)
        blocks[:, :4] = np.array([scale, np.float16(7.5 * scale)], np.float16).view(np.uint8)
        blocks[:, 4:8] = blocks[:, 8:12] = codes[:, :4]
        blocks[:, 12:16] = codes[:, 4:] | codes[:, 4:] << 4
    elif qtype == Q6_K:
        codes = rng.integers(_LOW_CODE, _HIGH_CODE + 1, (n_blocks, 16), np.int8)
        blocks[:, 192:208] = np.where(blocks[:, 192:208] & 1, codes, -codes).view(np.uint8)
        blocks[:, 208:] = np.array([scale], np.float16).view(np.uint8)
    elif qtype == Q8_0:
        blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    else:
        raise ValueError(f"no random blocks of type {qtype.name}")
    return blocks


def sign_blocks(qtype: GGMLQuantizationType, signs: npt.NDArray[np.bool_], amplitude: float) -> tuple[Bytes, float]:
    """Blocks [n / 256, bytes] that hold +a where signs [n] is True and -a elsewhere, and a itself.

    a is as near to `amplitude` as the type allows.
    """
    half = signs.reshape(-1, 2, 4, 32).astype(np.uint8)  # per block: two halves of 128 in four runs of 32
    blocks = np.zeros((len(half), GGML_QUANT_SIZES[qtype][1]), np.uint8)
    if qtype == Q4_K:
        scale = np.float16(amplitude / (7.5 * _LOW_CODE))
        minimum = np.float16(7.5 * scale)
        blocks[:, :4] = np.array([scale, minimum], np.float16).view(np.uint8)
        blocks[:, 4:12] = _LOW_CODE
        blocks[:, 12:16] = _LOW_CODE | _LOW_CODE << 4
        pairs = half.reshape(-1, 4, 2, 32)  # neighbouring runs share bytes
        blocks[:, 16:] = (15 * pairs[:, :, 0] | 15 * pairs[:, :, 1] << 4).reshape(len(half), -1)
        return blocks, float(minimum) * _LOW_CODE
    if qtype == Q6_K:
        scale = np.float16(amplitude / (16 * _LOW_CODE))
        # Codes 48 and 16 stand for +16 and -16: low nibbles 0, upper pairs of bits 3 and 1.
        upper = half << 1 | 1
        shifted = upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6
        blocks[:, 128:192] = shifted.reshape(len(half), -1)
        blocks[:, 192:208] = _LOW_CODE
        blocks[:, 208:] = np.array([scale], np.float16).view(np.uint8)
        return blocks, float(scale) * 16 * _LOW_CODE
    raise ValueError(f"no sign blocks of type {qtype.name}")


@dataclass(frozen=True)
class Run:
    """n_bytes of a ring, from byte `start` on, as often around as it takes."""

    ring: Bytes
    start: int
    n_bytes: int

    def pieces(self) -> Iterator[memoryview]:
        view = memoryview(self.ring)
        at, left = self.start, self.n_bytes
        while left > 0:
            n = min(left, len(view) - at)
            yield view[at : at + n]
            left, at = left - n, 0


def gather(run: Run) -> Bytes:
    """A run as one array."""
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in run.pieces()])


class Tile:
    """A ring of blocks, or of whole rows, that hands out one run after the other."""

    def __init__(self, units: Bytes) -> None:
        self._unit = units.shape[1]
        self._ring = np.ascontiguousarray(units).reshape(-1)
        self._next = 0

    def take(self, n_bytes: int) -> Run:
        """The next n_bytes, which are whole units."""
        if n_bytes % self._unit:
            raise ValueError(f"{n_bytes} bytes are no whole blocks of {self._unit}")
        run = Run(self._ring, self._next, n_bytes)
        self._next = (self._next + n_bytes) % len(self._ring)
        return run


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: shape in NumPy's order, and its bytes."""

    name: str
    shape: tuple[int, ...]
    qtype: GGMLQuantizationType
    runs: tuple[Run, ...]

    @property
    def n_bytes(self) -> int:
        return sum(run.n_bytes for run in self.runs)


def float_tensor(name: str, values: Floats) -> Tensor:
    """A float32 tensor."""
    data = np.ascontiguousarray(values, np.float32)
    return Tensor(name, data.shape, F32, (Run(data.reshape(-1).view(np.uint8), 0, data.nbytes),))


def write_gguf(path: Path, metadata: gguf.GGUFWriter, tensors: Iterable[Tensor]) -> int:
    """Write a file; `metadata` is a writer that holds the keys only. Returns the size in bytes.

    The gguf package writes keys and tensor table; the tensors, which it would want in memory as a whole, are written
    here, several at a time.
    """
    tensors = list(tensors)
    for tensor in tensors:
        expected = row_bytes(tensor.qtype, tensor.shape[-1]) * int(np.prod(tensor.shape[:-1]))
        if expected != tensor.n_bytes:
            raise ValueError(f"{tensor.name}: {tensor.n_bytes} bytes of data, want {expected}")
        metadata.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, tensor.qtype)
    metadata.write_header_to_file(path)
    metadata.write_kv_data_to_file()
    metadata.write_ti_data_to_file()
    metadata.close()
    alignment = metadata.data_alignment
    at = gguf.GGUFWriter.ggml_pad(path.stat().st_size, alignment)
    offsets = []
    for tensor in tensors:
        offsets.append(at)
        at += gguf.GGUFWriter.ggml_pad(tensor.n_bytes, alignment)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, at)
        with ThreadPoolExecutor(_WRITE_THREADS) as pool:
            for _ in pool.map(lambda tensor, offset: _write(descriptor, tensor, offset), tensors, offsets):
                pass
    finally:
        os.close(descriptor)
    return at


def _write(descriptor: int, tensor: Tensor, offset: int) -> None:
    for run in tensor.runs:
        for piece in run.pieces():
            done = 0
            while done < len(piece):  # one call writes 2 GiB at most
                done += os.pwrite(descriptor, piece[done:], offset + done)
            offset += len(piece)
