"""DraftContext: what the drafter knows of the sequence so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from pydflash._ffi import NULL, FloatArray, IntArray, as_c_array, c_text, check, ffi, lib
from pydflash._handle import NativeHandle, use, use_all
from pydflash.draft_feature_mirror import DraftFeatureMirror
from pydflash.draft_model import DraftModel
from pydflash.errors import InvalidArgumentError
from pydflash.options import MAX_TREE, DraftCacheType, as_choice, as_integer
from pydflash.target_cache import TargetCache


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A drafted block.

    Attributes:
        ids: proposed tokens in order, int32 [n_proposals].
        logits: of the drafter, float32 [n_proposals, heads.n_vocab]; None unless asked for. With a Markov head what it
            adds is in them; a selector's choice is not.
        chances: how likely the drafter takes each proposal to be right, given those before it, float32 [n_proposals];
            None for a drafter that does not say.
    """

    ids: IntArray
    logits: FloatArray | None
    chances: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Proposals that form a tree; the arrays fit TargetCache.verify_tree().

    Attributes:
        tokens: int32 [n + 1], the anchor first.
        parents: row that each token stands behind, int32 [n + 1]; -1 for the anchor.
        scores: natural log-probability of the path to each token under the drafter, float32 [n + 1].
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray

    def path_to(self, node: int) -> list[int]:
        """Rows from the anchor to a node."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]


@dataclass(frozen=True, slots=True)
class DraftContextState:
    """A draft context at one moment: rows [begin, cursor) are there; bytes of its memory and of its graphs."""

    begin: int
    cursor: int
    memory_bytes: int
    graph_bytes: int


_STATE: Final = tuple(DraftContextState.__dataclass_fields__)


class DraftContext(NativeHandle):
    """Keys and values that a drafter has made of the target's features, position by position.

    Appending moves the cursor forward; only rewind() and reset() move it back. Rows are written from the position that
    the caller names, and a request that would leave a gap or move the cursor back is refused before anything is
    written.

    Memory: a layer with a window keeps ``window + block_size + slack`` rows whatever the context, one without
    ``full_rows``; a row is ``n_head_kv * head_dim`` values of ``k_type`` and as many of ``v_type``. Older positions
    are forgotten.

    One thread at a time: a second one waits.
    """

    def __init__(
        self,
        model: DraftModel,
        k_type: DraftCacheType = "auto",
        v_type: DraftCacheType = "auto",
        full_rows: int = 8192,
        slack: int = 64,
    ) -> None:
        """Allocate an empty context.

        Args:
            model: the drafter.
            k_type, v_type: storage, one of f32 f16 q8_0 q4_0; "auto": f32 on a CPU, f16 elsewhere.
            full_rows: context rows that layers without a window keep.
            slack: extra rows of layers with a window, so that a rewind of as many tokens loses nothing.

        Raises:
            InvalidArgumentError: an option is outside its limits.
            UnsupportedModelError: a type does not divide a head.
            OutOfMemoryError: the device has too little memory.
        """
        self._model = model
        options = ffi.new("dflash_draft_context_options *")
        lib.dflash_draft_context_options_init(options)
        usual: DraftCacheType = "f32" if model.device == "CPU" else "f16"
        k_type = usual if as_choice("k_type", k_type, DraftCacheType) == "auto" else k_type
        v_type = usual if as_choice("v_type", v_type, DraftCacheType) == "auto" else v_type
        k_text, v_text = c_text("k_type", k_type), c_text("v_type", v_type)
        options.k_type, options.v_type = k_text, v_text
        options.full_rows = as_integer("full_rows", full_rows, 1)
        options.slack = as_integer("slack", slack, 0)
        out = ffi.new("dflash_draft_context **")
        with use(model) as (model_ptr, err):
            check(lib.dflash_draft_context_new(out, model_ptr, options, err), err, "draft_context_new")
        self._made = f"of {full_rows} full rows, k {k_type}, v {v_type}"
        self._full_rows = full_rows
        self._types = (k_type, v_type)
        self._c_state = ffi.new("dflash_draft_context_state *")
        self._adopt(out[0], lib.dflash_draft_context_free, model)

    def _facts(self) -> str:
        return self._made

    def _state_text(self) -> str:
        s = self.state
        return f"positions [{s.begin}, {s.cursor}), {s.memory_bytes / 2**20:.1f} MiB"

    @property
    def model(self) -> DraftModel:
        """The drafter."""
        return self._model

    @property
    def k_type(self) -> DraftCacheType:
        """How keys are stored."""
        return self._types[0]

    @property
    def v_type(self) -> DraftCacheType:
        """How values are stored."""
        return self._types[1]

    @property
    def state(self) -> DraftContextState:
        """All numbers at once."""
        with self._use() as (ptr, err):
            s = self._c_state
            check(lib.dflash_draft_context_state_get(ptr, s, err), err, "draft_context_state_get")
            return DraftContextState(*(getattr(s, name) for name in _STATE))

    @property
    def begin(self) -> int:
        """First position that is there."""
        return self.state.begin

    @property
    def cursor(self) -> int:
        """Position behind the last one that is there; a block is drafted from here."""
        return self.state.cursor

    def append(self, cache: TargetCache, begin: int, end: int) -> None:
        """Write positions [begin, end) from the features of a cache on the drafter's device.

        Raises:
            InvalidArgumentError: the cache does not have them (any more), begin lies behind the cursor, or end before
                it.
            SnapshotMismatchError: the cache is on another device, or captures other layers.
        """
        with use_all(self, cache) as (ptr, source, err):
            status = lib.dflash_draft_context_append(ptr, source, begin, end - begin, err)
            check(status, err, "draft_context_append")

    def append_mirror(self, mirror: DraftFeatureMirror, begin: int, end: int) -> None:
        """Write positions [begin, end) from a mirror on the drafter's device; errors as append()."""
        with use_all(self, mirror) as (ptr, source, err):
            status = lib.dflash_draft_context_append_mirror(ptr, source, begin, end - begin, err)
            check(status, err, "draft_context_append_mirror")

    def append_host(self, features: FloatArray, base: int) -> None:
        """Write positions from ``base`` on from host memory: float32 [n, n_taps * n_embd]; errors as append()."""
        width = self._model.config.n_taps * self._model.target.config.n_embd
        c_features = as_c_array(features, "float[]", name="features", shape=(None, width))
        with self._use() as (ptr, err):
            status = lib.dflash_draft_context_append_host(ptr, c_features, base, len(features), err)
            check(status, err, "draft_context_append_host")

    def propose(self, anchor: int, logits: bool = False) -> Proposal:
        """Draft a block behind ``anchor``, the token at the cursor. Nothing of it stays in the context.

        Raises:
            InvalidArgumentError: the id is outside the vocabulary.
        """
        config = self._model.config
        anchor = as_integer("anchor", anchor, 0)
        ids = np.empty(config.n_proposals, np.int32)
        out = np.empty((config.n_proposals, config.heads.n_vocab), np.float32) if logits else None
        c_ids = as_c_array(ids, "int32_t[]", writable=True)
        c_out = as_c_array(out, "float[]", writable=True) if out is not None else NULL
        with self._use() as (ptr, err):
            n_logits = 0 if out is None else out.size
            check(
                lib.dflash_draft_context_propose(ptr, anchor, c_ids, c_out, n_logits, err), err, "draft_context_propose"
            )
            if not config.heads.says_chances:
                return Proposal(ids, out)
            chances = np.empty(config.n_proposals, np.float32)
            c_chances = as_c_array(chances, "float[]", writable=True)
            status = lib.dflash_draft_context_chances(ptr, c_chances, chances.size, err)
            check(status, err, "draft_context_chances")
        return Proposal(ids, out, chances)

    def propose_tree(self, anchor: int, n_nodes: int) -> DraftTree:
        """Draft a tree of up to ``n_nodes`` tokens behind ``anchor``, best first by the drafter's own probabilities.

        Fewer come out only where the drafter's candidates, 8 for each slot, are used up.

        Raises:
            InvalidArgumentError: the id is outside the vocabulary, or n_nodes is not 1 to 64.
        """
        anchor = as_integer("anchor", anchor, 0)
        n_nodes = as_integer("n_nodes", n_nodes, 1, MAX_TREE)
        tokens, parents = np.empty(n_nodes + 1, np.int32), np.empty(n_nodes + 1, np.int32)
        scores = np.empty(n_nodes + 1, np.float32)
        c_tokens, c_parents = (as_c_array(array, "int32_t[]", writable=True) for array in (tokens, parents))
        c_scores, n = as_c_array(scores, "float[]", writable=True), ffi.new("int32_t *")
        with self._use() as (ptr, err):
            status = lib.dflash_draft_context_propose_tree(ptr, anchor, n_nodes, c_tokens, c_parents, c_scores, n, err)
            check(status, err, "draft_context_propose_tree")
        return DraftTree(tokens[: n[0]].copy(), parents[: n[0]].copy(), scores[: n[0]].copy())

    def rewind(self, position: int) -> None:
        """Forget positions from ``position`` on.

        Raises:
            InvalidArgumentError: unless begin <= position <= cursor.
        """
        with self._use() as (ptr, err):
            check(lib.dflash_draft_context_rewind(ptr, position, err), err, "draft_context_rewind")

    def reset(self, position: int = 0) -> None:
        """Forget everything; the next append starts at ``position``, which must not be negative."""
        with self._use() as (ptr, err):
            check(lib.dflash_draft_context_reset(ptr, position, err), err, "draft_context_reset")

    def read(self, layer: int, what: Literal["k", "v"], begin: int, end: int) -> FloatArray:
        """Keys or values of positions [begin, end) of a layer: float32 [end - begin, n_head_kv, head_dim].

        Raises:
            InvalidArgumentError: no such layer, or the layer does not have the positions (any more).
        """
        config = self._model.config
        layer = as_integer("layer", layer, 0)
        as_integer("begin", begin, 0)
        as_integer("end", end, begin)
        most = max(self._full_rows, *(window + config.block_size for window in config.windows)) + 65536
        if end - begin > most:
            raise InvalidArgumentError("end", end, f"at most begin + {most}, more than any layer keeps")
        out = np.empty((end - begin, config.n_head_kv, config.head_dim), np.float32)
        c_out, c_what = as_c_array(out, "float[]", writable=True), c_text("what", what)
        with self._use() as (ptr, err):
            check(lib.dflash_draft_context_read(ptr, layer, c_what, begin, end, c_out, err), err, "draft_context_read")
        return out
