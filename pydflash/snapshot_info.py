"""What a snapshot is of, as plain values: how it is described, and how its file describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from pydflash._ffi import CData, ffi, lib, text_of
from pydflash.errors import FormatError

SnapshotKind: TypeAlias = Literal["full", "delta", "thin"]
"""All that is needed to go on; the same, but rows only since a parent; keys and values of a range and nothing else."""

_KINDS: Final[Mapping[int, SnapshotKind]] = {
    lib.DFLASH_SNAPSHOT_FULL: "full",
    lib.DFLASH_SNAPSHOT_DELTA: "delta",
    lib.DFLASH_SNAPSHOT_THIN: "thin",
}
_TEXTS: Final = (
    *("architecture", "target_digest", "draft_digest", "k_type", "v_type", "feature_type"),
    *("draft_k_type", "draft_v_type"),
)
_INTEGERS: Final = (
    *("version", "k_rotation", "v_rotation", "draft_k_rotation", "draft_v_rotation", "rope_dims"),
    *("layer_begin", "layer_end", "fa_window", "position", "kv_begin", "feature_begin", "feature_end"),
    *("draft_begin", "draft_cursor", "draft_high"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """What a snapshot is of. Snapshots and caches whose fields agree may exchange bytes.

    Attributes:
        version: of the layout; kind: "full", "delta" or "thin".
        architecture, target_digest: of the model; draft_digest: of the drafter, empty without its state.
        k_type, v_type, feature_type, draft_k_type, draft_v_type: how rows are stored.
        k_rotation, v_rotation, draft_k_rotation, draft_v_rotation: order of the Hadamard matrix that rows are rotated
            by; 0: none.
        rope_theta, rope_dims: rotary embedding of the target; fa_window: attention window, 0: all.
        layer_begin, layer_end: layers of the cache; capture_layers: those whose outputs are the features.
        position: tokens. Rows of keys and values are there from kv_begin on, features of [feature_begin, feature_end).
        draft_begin, draft_cursor, draft_high: of the draft context; draft_held, draft_rows: for each of its layers the
            first position held with the parents, and in this snapshot itself.
    """

    version: int
    kind: SnapshotKind
    architecture: str
    target_digest: str
    draft_digest: str
    k_type: str
    v_type: str
    feature_type: str
    draft_k_type: str
    draft_v_type: str
    k_rotation: int
    v_rotation: int
    draft_k_rotation: int
    draft_v_rotation: int
    rope_theta: float
    rope_dims: int
    fa_window: int
    layer_begin: int
    layer_end: int
    capture_layers: tuple[int, ...]
    position: int
    kv_begin: int
    feature_begin: int
    feature_end: int
    draft_begin: int
    draft_cursor: int
    draft_high: int
    draft_held: tuple[int, ...]
    draft_rows: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        """The fields as values that JSON knows."""
        lists = ("capture_layers", "draft_held", "draft_rows")
        return {name: list(value) if name in lists else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: object) -> SnapshotInfo:
        """The opposite of to_dict().

        Raises:
            FormatError: a field is missing, unknown, or not of its type.
        """
        if not isinstance(values, dict) or values.keys() != set(cls.__dataclass_fields__):
            raise FormatError("the description of the snapshot has other fields than expected")
        for name in _TEXTS:
            if not isinstance(values[name], str) or len(values[name].encode()) > 39 or "\0" in values[name]:
                raise FormatError(f"{name} is {values[name]!r:.80}, expected a short text")
        for name in _INTEGERS:
            _check_integer(name, values[name])
        for name in ("capture_layers", "draft_held", "draft_rows"):
            if not isinstance(values[name], list) or len(values[name]) > 64:
                raise FormatError(f"{name} is {values[name]!r:.80}, expected a list of at most 64 integers")
            for item in values[name]:
                _check_integer(name, item)
        if values["kind"] not in _KINDS.values():
            raise FormatError(f"kind is {values['kind']!r:.80}, expected one of " + ", ".join(_KINDS.values()))
        theta = values["rope_theta"]
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not math.isfinite(theta):
            raise FormatError(f"rope_theta is {theta!r:.80}, expected a finite number")
        fields: dict[str, Any] = {}
        for name, value in values.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)

    @classmethod
    def from_c(cls, info: CData) -> SnapshotInfo:
        """From a ``dflash_prefix_snapshot_info``."""
        values: dict[str, Any] = {name: text_of(getattr(info, name)) for name in _TEXTS}
        values |= {name: getattr(info, name) for name in _INTEGERS}
        return cls(
            kind=_KINDS[info.kind],
            rope_theta=info.rope_theta,
            capture_layers=tuple(info.capture_layers[0 : info.n_capture_layers]),
            draft_held=tuple(info.draft_held[0 : info.n_draft_layers]),
            draft_rows=tuple(info.draft_rows[0 : info.n_draft_layers]),
            **values,
        )

    def to_c(self) -> CData:
        """As a ``dflash_prefix_snapshot_info *``; counts and sizes stay 0."""
        info = ffi.new("dflash_prefix_snapshot_info *")
        info.kind = next(number for number, kind in _KINDS.items() if kind == self.kind)
        info.rope_theta = self.rope_theta
        for name in _TEXTS:
            text = getattr(self, name).encode()
            field = getattr(info, name)
            if len(text) >= len(field):
                raise FormatError(f"{name} is {getattr(self, name)!r}, expected at most {len(field) - 1} bytes")
            ffi.memmove(field, text, len(text))
        for name in _INTEGERS:
            setattr(info, name, getattr(self, name))
        if len(self.draft_held) != len(self.draft_rows):
            raise FormatError(f"{len(self.draft_held)} and {len(self.draft_rows)} draft layers")
        info.n_capture_layers, info.n_draft_layers = len(self.capture_layers), len(self.draft_held)
        for name in ("capture_layers", "draft_held", "draft_rows"):
            for i, value in enumerate(getattr(self, name)):
                getattr(info, name)[i] = value
        return info


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise FormatError(f"{name} is {value!r:.80}, expected an integer from 0 to 2**31 - 1")
