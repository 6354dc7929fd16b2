"""PrefixSnapshot: a copy of a cache at a position, to go on from later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pydflash._ffi import NULL, CData, FloatArray, IntArray, TokenIds, as_c_array, as_ids, check, ffi, lib, text_of
from pydflash._handle import NativeHandle, use_all
from pydflash.draft_context import DraftContext
from pydflash.draft_model import DraftModel
from pydflash.errors import InvalidArgumentError, UnsupportedModelError
from pydflash.options import SnapshotPlace, as_choice, as_integer
from pydflash.snapshot_info import SnapshotInfo, SnapshotKind
from pydflash.target_cache import TargetCache
from pydflash.target_model import TargetModel

SnapshotFeatures: TypeAlias = Literal["tail", "all", "none"]
"""Feature rows that are copied: those that the drafter has not read (without one: all), all, or none."""

_FEATURES: Final = {
    "tail": lib.DFLASH_SNAPSHOT_FEATURES_TAIL,
    "all": lib.DFLASH_SNAPSHOT_FEATURES_ALL,
    "none": lib.DFLASH_SNAPSHOT_FEATURES_NONE,
}
# Element types of parts that NumPy has; rows of other types are bytes.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
PartArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One tensor of a snapshot: ``rows`` rows of ``width`` values of a type, the first of position ``begin``."""

    name: str
    type: str
    width: int
    rows: int
    begin: int
    n_bytes: int


class PrefixSnapshot(NativeHandle):
    """A copy of a target cache at a position, and of the drafter's context: all that is needed to go on from there.

    Immutable; it says itself what it is of, knows its tokens, and can be restored into any cache of the same model,
    types and layers that has room for it. A delta holds only what was added since its parent, which it keeps alive.

    Bytes of a full one at n tokens: ``n`` rows of K and of V for each full-attention layer; for each recurrent layer
    its states, ``4 * ssm_dt_rank * ssm_d_state**2 + 4 * (ssm_d_conv - 1) * conv_channels``; the draft rows, at most a
    ring for each layer of the drafter; feature rows that the drafter has not read; logits and tokens, 4 bytes each.

    Any thread. Memory is freed with the last reference; close() does it at once. Not picklable: prefix_store writes and
    reads files.
    """

    _info: SnapshotInfo
    _parent: PrefixSnapshot | None
    _numbers: tuple[int, int, int, int, int]  # parts, bytes, allocated bytes, tokens, logits
    _tokens: IntArray
    _token_digest: str
    _on_device: bool
    _depth: int

    def __init__(self) -> None:
        raise TypeError("use PrefixSnapshot.take()")

    @classmethod
    def take(
        cls,
        cache: TargetCache,
        context: DraftContext | None = None,
        *,
        tokens: TokenIds | None = None,
        parent: PrefixSnapshot | None = None,
        features: SnapshotFeatures = "tail",
        place: SnapshotPlace = "host",
    ) -> Self:
        """Copy what a cache holds. Copies to host memory go on behind the caller's back; nothing changes.

        Args:
            cache: holds at least one committed token; pending rows of a decoder are not part of it.
            context: the drafter's; None: the snapshot cannot go on with a drafter.
            tokens: all that the cache holds. None: not known; then it cannot be looked up and has no deltas.
            parent: a snapshot of a prefix; the result is then a delta.
            features: which feature rows.
            place: where the bytes go.

        Raises:
            InvalidArgumentError: the cache is empty, or holds another number of tokens.
            SnapshotMismatchError: the parent is no prefix, or of something else.
            OutOfMemoryError: the bytes do not fit.
            PoisonedError: an earlier failure left the cache unusable.
        """
        options = ffi.new("dflash_prefix_snapshot_options *")
        lib.dflash_prefix_snapshot_options_init(options)
        options.features = _FEATURES[as_choice("features", features, SnapshotFeatures)]
        options.on_device = as_choice("place", place, SnapshotPlace) == "device"
        ids = np.empty(0, np.int32) if tokens is None else as_ids(tokens, "tokens")
        c_ids = as_c_array(ids, "int32_t[]")
        options.tokens, options.n_tokens = c_ids, len(ids)
        out = ffi.new("dflash_prefix_snapshot **")
        handles = [handle for handle in (context, parent) if handle is not None]
        with use_all(cache, *handles) as (cache_ptr, *parts, err):
            context_ptr = parts.pop(0) if context is not None else NULL
            options.parent = parts.pop(0) if parent is not None else NULL
            status = lib.dflash_prefix_snapshot_take(out, cache_ptr, context_ptr, options, err)
            check(status, err, "prefix_snapshot_take")
        return cls._of(out[0], parent)

    @classmethod
    def thin(cls, cache: TargetCache, begin: int, end: int) -> Self:
        """Copy keys and values of positions [begin, end) and nothing else.

        A model with recurrent layers cannot go on from that: restore_chain() says when it is of use.

        Raises:
            InvalidArgumentError: unless 0 <= begin < end <= position.
        """
        begin, end = as_integer("begin", begin, 0), as_integer("end", end, 0)
        out = ffi.new("dflash_prefix_snapshot **")
        with use_all(cache) as (cache_ptr, err):
            status = lib.dflash_prefix_snapshot_take_thin(out, cache_ptr, begin, end, err)
            check(status, err, "prefix_snapshot_take_thin")
        return cls._of(out[0], None)

    @classmethod
    def from_parts(
        cls,
        info: SnapshotInfo,
        target: TargetModel,
        draft: DraftModel | None,
        *,
        parent: PrefixSnapshot | None = None,
        tokens: IntArray,
        logits: FloatArray,
        parts: Sequence[PartArray],
    ) -> Self:
        """Put a snapshot together again from its description and its parts in order, as read() gave them.

        Args:
            info: of the snapshot; it is checked against the models and the sizes of the parts, not believed.
            target, draft: models that are open; draft may be None when the snapshot has no drafter state.
            parent: of a delta.
            tokens, logits: may be empty.
            parts: copied.

        Raises:
            SnapshotMismatchError: it is of other models, or the parent is no prefix.
            FormatError: its numbers do not fit each other.
        """
        c_info = info.to_c()
        blocks = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
        c_blocks = [as_c_array(block, "uint8_t[]") for block in blocks]
        data, sizes = ffi.new("void *[]", max(len(blocks), 1)), ffi.new("uint64_t[]", max(len(blocks), 1))
        for i, block in enumerate(blocks):
            data[i], sizes[i] = c_blocks[i], block.size
        ids, values = as_ids(tokens, "tokens"), np.ascontiguousarray(logits, np.float32)
        c_ids, c_values = as_c_array(ids, "int32_t[]"), as_c_array(values, "float[]")
        out = ffi.new("dflash_prefix_snapshot **")
        handles = [handle for handle in (draft, parent) if handle is not None]
        with use_all(target, *handles) as (target_ptr, *pointers, err):
            draft_ptr = pointers.pop(0) if draft is not None else NULL
            parent_ptr = pointers.pop(0) if parent is not None else NULL
            status = lib.dflash_prefix_snapshot_import(
                *(out, target_ptr, draft_ptr, parent_ptr, c_info, c_ids, len(ids), c_values, len(values)),
                *(data, sizes, len(blocks), err),
            )
            check(status, err, "prefix_snapshot_import")
        return cls._of(out[0], parent)

    @classmethod
    def _of(cls, raw: CData, parent: PrefixSnapshot | None) -> Self:
        self = cls.__new__(cls)
        self._parent = parent
        self._adopt(raw, lib.dflash_prefix_snapshot_free, parent)
        # Caches drop snapshots that others may still hold: nobody in particular has to close them.
        self._leak.detach()
        info = ffi.new("dflash_prefix_snapshot_info *")
        with self._use() as (ptr, err):
            check(lib.dflash_prefix_snapshot_info_get(ptr, info, err), err, "prefix_snapshot_info_get")
            self._info = SnapshotInfo.from_c(info)
            self._numbers = (info.n_parts, info.n_bytes, info.allocated_bytes, info.n_tokens, info.n_logits)
            self._on_device = bool(info.on_device)
            self._depth = info.depth
            self._token_digest = text_of(info.token_digest)
            n = ffi.new("int64_t *")
            self._tokens = np.empty(info.n_tokens, np.int32)
            c_ids = as_c_array(self._tokens, "int32_t[]", writable=True)
            check(lib.dflash_prefix_snapshot_tokens(ptr, c_ids, info.n_tokens, n, err), err, "prefix_snapshot_tokens")
            self._tokens.flags.writeable = False
        return self

    def _facts(self) -> str:
        i = self._info
        drafter = "with a drafter" if i.draft_digest else "no drafter"
        rows = f"{i.kind} of {i.position} tokens" + (f" since {i.kv_begin}" if i.kind != "full" else "")
        return f"{rows}, k {i.k_type}, v {i.v_type}, {drafter}, {self.n_bytes / 2**20:.1f} MiB"

    @property
    def info(self) -> SnapshotInfo:
        """What it is of."""
        return self._info

    @property
    def kind(self) -> SnapshotKind:
        """ "full", "delta" or "thin"."""
        return self._info.kind

    @property
    def position(self) -> int:
        """Tokens that a cache holds once it is restored."""
        return self._info.position

    @property
    def parent(self) -> PrefixSnapshot | None:
        """What a delta was taken behind."""
        return self._parent

    @property
    def depth(self) -> int:
        """Parents above it."""
        return self._depth

    @property
    def tokens(self) -> IntArray:
        """int32 [position], read-only; empty when they were not given."""
        return self._tokens

    @property
    def token_digest(self) -> str:
        """Of the tokens; empty when they are not known."""
        return self._token_digest

    @property
    def has_draft(self) -> bool:
        """True if the drafter's state is part of it."""
        return bool(self._info.draft_digest)

    @property
    def has_logits(self) -> bool:
        """True if the logits behind its last token are known: a prompt that ends here needs no forward pass."""
        return bool(self._numbers[4] > 0)

    @property
    def n_bytes(self) -> int:
        """Of its own parts, tokens and logits."""
        return int(self._numbers[1])

    @property
    def allocated_bytes(self) -> int:
        """Memory that it holds itself; a parent's is its own."""
        return int(self._numbers[2])

    @property
    def total_bytes(self) -> int:
        """n_bytes with those of all parents."""
        return self.n_bytes + (0 if self._parent is None else self._parent.total_bytes)

    @property
    def parts(self) -> tuple[SnapshotPart, ...]:
        """Its tensors in order."""
        out = []
        part = ffi.new("dflash_prefix_snapshot_part *")
        with self._use() as (ptr, err):
            for i in range(self._numbers[0]):
                check(lib.dflash_prefix_snapshot_part_at(ptr, i, part, err), err, "prefix_snapshot_part_at")
                kind = text_of(part.type)
                out.append(SnapshotPart(text_of(part.name), kind, part.width, part.rows, part.begin, part.n_bytes))
        return tuple(out)

    @property
    def logits(self) -> FloatArray:
        """Behind the last token, float32 [n_vocab]; empty when they are not known."""
        out = np.empty(self._numbers[4], np.float32)
        c_out, n = as_c_array(out, "float[]", writable=True), ffi.new("int64_t *")
        with self._use() as (ptr, err):
            check(lib.dflash_prefix_snapshot_logits(ptr, c_out, out.size, n, err), err, "prefix_snapshot_logits")
        return out

    def read(self, part: int | str) -> PartArray:
        """A copy of one part, by index or name: [rows, width] of float32, float16 or (bf16) uint16; rows of other types
        as bytes, uint8 [rows, bytes of a row].

        Raises:
            InvalidArgumentError: there is no such part.
        """
        parts = self.parts
        names = [entry.name for entry in parts]
        if isinstance(part, str):
            if part not in names:
                raise InvalidArgumentError("part", part, "one of " + ", ".join(names))
            part = names.index(part)
        index = as_integer("part", part, 0, len(parts) - 1)
        entry = parts[index]
        raw = np.empty(entry.n_bytes, np.uint8)
        c_raw = as_c_array(raw, "uint8_t[]", writable=True)
        with self._use() as (ptr, err):
            status = lib.dflash_prefix_snapshot_part_read(ptr, index, c_raw, raw.size, err)
            check(status, err, "prefix_snapshot_part_read")
        width = entry.width if entry.type in _DTYPES else (entry.n_bytes // entry.rows if entry.rows else 0)
        return raw.view(_DTYPES.get(entry.type, raw.dtype)).reshape(entry.rows, width)

    def wait(self) -> None:
        """Return when the copies that take() started are done."""
        with self._use() as (ptr, err):
            check(lib.dflash_prefix_snapshot_wait(ptr, err), err, "prefix_snapshot_wait")

    def restore_into(self, cache: TargetCache, context: DraftContext | None = None) -> None:
        """Make a cache, and a drafter's context, hold what was copied; capacity and memory of theirs stay.

        Everything is checked before anything is written, and after any failure both are as before.

        Raises:
            SnapshotMismatchError: of another model, drafter, type, rotation, rope or layers; or a context is given and
                the drafter's state is not there, or its rings were smaller.
            CapacityError: more tokens, or features that the drafter needs, than fit.
            UnsupportedModelError: a thin snapshot.
        """
        handles = [cache] if context is None else [cache, context]
        with use_all(self, *handles) as (ptr, cache_ptr, *rest):
            context_ptr, err = (rest[0] if context is not None else NULL), rest[-1]
            status = lib.dflash_prefix_snapshot_restore(ptr, cache_ptr, context_ptr, err)
            check(status, err, "prefix_snapshot_restore")
        cache._note_changed()  # noqa: SLF001 - the cache's verifies are stale now

    @staticmethod
    def restore_chain(thick: PrefixSnapshot | None, thins: Sequence[PrefixSnapshot], cache: TargetCache) -> None:
        """Restore a full or delta snapshot (None: what the cache holds), then thin ones in this order.

        Raises:
            UnsupportedModelError: a layer of the cache is recurrent and the thin ones reach beyond the base. Their keys
                and values are useless there, since the recurrent state would stay behind; a delta has it.
            InvalidArgumentError: positions between them are missing, or one is not thin.
            SnapshotMismatchError, CapacityError: as restore_into().
        """
        handles: list[NativeHandle] = [cache, *thins]
        if thick is not None:
            handles.append(thick)
        with use_all(*handles) as (cache_ptr, *rest):
            err = rest[-1]
            c_thins = ffi.new("dflash_prefix_snapshot *[]", rest[: len(thins)] or 1)
            thick_ptr = rest[len(thins)] if thick is not None else NULL
            status = lib.dflash_prefix_snapshot_restore_chain(thick_ptr, c_thins, len(thins), cache_ptr, err)
            check(status, err, "prefix_snapshot_restore_chain")
        cache._note_changed()  # noqa: SLF001 - the cache's verifies are stale now

    def flatten(self, target: TargetModel, draft: DraftModel | None) -> PrefixSnapshot:
        """A full snapshot of the same; itself when it is one.

        Raises:
            UnsupportedModelError: it is thin.
            SnapshotMismatchError: the models are not those it was taken of.
        """
        if self.kind == "full":
            return self
        if self.kind == "thin":
            raise UnsupportedModelError("a thin snapshot has no state that one could go on from")
        chain: list[PrefixSnapshot] = [self]
        while (above := chain[-1].parent) is not None:
            chain.append(above)
        chain.reverse()
        arrays = []
        held = iter(self._info.draft_held)
        begins: dict[str, int] = {}
        for i, layer_begin in enumerate(held):
            begins |= {f"snap_draft_k_{i}": layer_begin, f"snap_draft_v_{i}": layer_begin}
        for part in self.parts:
            if part.name.startswith("snap_cache_"):
                arrays.append(np.concatenate([link.read(part.name) for link in chain]))
            elif part.name in begins:
                arrays.append(_joined(chain, part.name, begins[part.name], part.begin + part.rows))
            else:
                arrays.append(self.read(part.name))
        info = replace(self._info, kind="full", kv_begin=0, draft_rows=self._info.draft_held)
        return PrefixSnapshot.from_parts(info, target, draft, tokens=self._tokens, logits=self.logits, parts=arrays)

    def describe(self) -> dict[str, object]:
        """Everything there is to know but the bytes: info, sizes, and bytes by kind of part."""
        groups: dict[str, int] = {}
        for part in self.parts:
            name = part.name.removeprefix("snap_").rstrip("0123456789").rstrip("_")
            groups[name] = groups.get(name, 0) + part.n_bytes
        groups |= {"logits": 4 * self._numbers[4], "tokens": 4 * self._numbers[3]}
        return {
            **self._info.to_dict(),
            "token_digest": self._token_digest,
            "on_device": self._on_device,
            "depth": self._depth,
            "n_bytes": self.n_bytes,
            "allocated_bytes": self.allocated_bytes,
            "total_bytes": self.total_bytes,
            "bytes_by_part": {name: n for name, n in groups.items() if n},
        }


def _joined(chain: Sequence[PrefixSnapshot], name: str, begin: int, end: int) -> PartArray:
    """Rows [begin, end) of a part out of a chain; later links win."""
    whole = [link.read(name) for link in chain if name in {entry.name for entry in link.parts}]
    wide = max(whole, key=lambda data: data.shape[1])
    rows = np.zeros((end - begin, wide.shape[1]), wide.dtype)
    for link in chain:
        part = next((entry for entry in link.parts if entry.name == name), None)
        if part is None or link.info.draft_digest != chain[-1].info.draft_digest:
            continue
        first, last = max(part.begin, begin), min(part.begin + part.rows, end)
        if first < last:
            rows[first - begin : last - begin] = link.read(name)[first - part.begin : last - part.begin]
    return rows
