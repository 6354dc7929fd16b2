"""A model's weights as float32 numbers: a reference in which a product rounds nothing but its sum."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from support.gguf_edit import Tensors, edit_gguf


def widened(path: Path, out: Path) -> Path:
    """Write the file again with every matrix dequantised by the gguf package."""

    def widen(tensors: Tensors) -> None:
        for name, (data, kind) in tensors.items():
            if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.I32):
                tensors[name] = (gguf.quants.dequantize(data, kind).astype(np.float32), GGMLQuantizationType.F32)

    return edit_gguf(path, out, tensors=widen)
