"""Model files for tests: where the committed ones are, and copies of them in other weight types.

The committed GGUFs hold bf16 weights to stay small. ggml rounds activations to the weight's type in a matrix product,
so only an f32 copy (`upcast_gguf`) can be held against float32 goldens.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import save_file

from .q4_k import quantize_q4_k

DATA = Path(__file__).resolve().parents[1] / "data"
MODELS = DATA / "models"
DRAFTERS = DATA / "drafters"

QuantType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k"]
_Weights = npt.NDArray[np.float32]
_Stored = tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType]

# general.file_type values of the GGUF format
_FILE_TYPE = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 14, "bf16": 32}
# matrices that quantised files of the llama.cpp tools keep in f32
_ALWAYS_F32 = ("ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


def read_tensors(path: Path) -> dict[str, _Weights]:
    """Every tensor of a GGUF widened to float32, in row-major order (the first axis is the slowest)."""
    return {tensor.name: _widen(tensor) for tensor in gguf.GGUFReader(path).tensors}


def upcast_gguf(path: Path, out: Path) -> Path:
    """Copy a GGUF with every float or quantised tensor widened to f32; metadata other than the file type is unchanged.

    Returns `out`. The numbers are those that the source file stands for, so no rounding is added.
    """
    return _rewrite(path, out, "f32", lambda name, weights: (weights, gguf.GGMLQuantizationType.F32))


def quantize_gguf(path: Path, out: Path, quant: QuantType) -> Path:
    """Copy a GGUF with its matrices stored as `quant`; returns `out`.

    Vectors, convolution kernels and routers become f32. So do matrices whose rows the block size (32, for q4_k 256)
    does not divide.
    """
    qtype = gguf.GGMLQuantizationType[quant.upper()]
    block = gguf.GGML_QUANT_SIZES[qtype][0]

    def store(name: str, weights: _Weights) -> _Stored:
        if weights.ndim < 2 or weights.shape[-1] % block or name.endswith(_ALWAYS_F32):
            return weights, gguf.GGMLQuantizationType.F32
        if quant == "q4_k":
            return quantize_q4_k(weights), qtype
        return gguf.quants.quantize(weights, qtype), qtype

    return _rewrite(path, out, quant, store)


def upcast_folder(folder: Path, out: Path) -> Path:
    """Copy a Hugging Face folder (config.json, bf16 model.safetensors) with tensors widened to f32; returns `out`."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    tensors = {}
    stored = (folder / "model.safetensors").read_bytes()
    for name, entry in safetensors.deserialize(stored):  # type: ignore[no-untyped-call]
        if entry["dtype"] in ("I64", "BOOL"):  # maps between vocabularies
            kind = np.int64 if entry["dtype"] == "I64" else np.bool_
            tensors[name] = np.frombuffer(entry["data"], dtype=kind).reshape(entry["shape"])
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name}: {entry['dtype']}, expected BF16")
        upper = np.frombuffer(entry["data"], dtype=np.uint16).astype(np.uint32)
        tensors[name] = (upper << 16).view(np.float32).reshape(entry["shape"])
    save_file(tensors, out / "model.safetensors")
    return out


def _widen(tensor: gguf.ReaderTensor) -> _Weights:
    return np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _rewrite(path: Path, out: Path, quant: str, store: Callable[[str, _Weights], _Stored]) -> Path:
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = _FILE_TYPE[quant] if name == "general.file_type" else field.contents()
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        if tensor.tensor_type in (gguf.GGMLQuantizationType.I32, gguf.GGMLQuantizationType.I64):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        data, qtype = store(tensor.name, _widen(tensor))
        writer.add_tensor(tensor.name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
