"""Copies of GGUF files with keys or tensors changed, for tests of what a loader accepts and refuses."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Tensors = dict[str, tuple[Array, gguf.GGMLQuantizationType]]


class Remove:
    """Stands for a key that is left out."""


REMOVE = Remove()


def edit_gguf(
    path: Path,
    out: Path,
    keys: Mapping[str, object] | None = None,
    tensors: Callable[[Tensors], None] | None = None,
    *,
    architecture: str | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Copy `path` to `out` with `keys` replaced, added or removed, and the tensor table changed in place by `tensors`.

    A key's new value keeps the old type; a new key is stored as i32, f32, bool, string, or an array of these.
    """
    reader = gguf.GGUFReader(path)
    old_arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, architecture or old_arch, split_max_tensors=split_max_tensors)
    changes = dict(keys or {})
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = changes.pop(name, None)
        if isinstance(value, Remove):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(
            name,
            field.contents() if value is None else value,
            field.types[0],
            sub_type=field.types[-1] if is_array else None,
        )
    for name, value in changes.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif not isinstance(value, Remove):
            writer.add_key_value(name, value, _type_of(value))
    table: Tensors = {t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors}
    if tensors is not None:
        tensors(table)
    for name, (data, kind) in table.items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _type_of(value: object) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.INT32
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT32
    return gguf.GGUFValueType.STRING
