"""TargetCache: what a sequence leaves behind in the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from pydflash._ffi import (
    NULL,
    FloatArray,
    IntArray,
    ProgressCall,
    TokenIds,
    as_c_array,
    as_ids,
    c_list,
    c_text,
    check,
    ffi,
    lib,
)
from pydflash._handle import NativeHandle, use
from pydflash.errors import InvalidArgumentError, NotFoundError
from pydflash.options import CacheOptions, CacheType, FeatureType, as_flag, as_integer, as_layers
from pydflash.results import Progress
from pydflash.target_cache_plan import CachePlan, c_cache_options, capture_layers_of, feature_capacity_of, plan_cache
from pydflash.target_model import TargetModel
from pydflash.verify import Verify

if TYPE_CHECKING:
    from pydflash.prefix_snapshot import PrefixSnapshot

LogitRows: TypeAlias = Literal["last", "all", "none"] | Sequence[int]
"""Rows whose logits are wanted: a word, or strictly increasing indices into the tokens of the call."""
CacheTensor: TypeAlias = Literal["k", "v", "recurrent", "conv"]


@dataclass(frozen=True, slots=True)
class CacheState:
    """A cache at one moment.

    Attributes:
        position: committed tokens; capacity: most tokens.
        feature_begin, feature_end: positions whose features can be read.
        n_taps: captured layers; max_verify: most rows of a verify forward.
        can_verify: False for a prefill-only cache.
        poisoned: True after a device error, until reset().
        physical_capacity: rows of keys and values.
        graph_bytes: working memory of the graphs made so far; memory_bytes: of the cache itself.
    """

    position: int
    capacity: int
    feature_begin: int
    feature_end: int
    n_taps: int
    max_verify: int
    can_verify: bool
    poisoned: bool
    physical_capacity: int
    graph_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """Outputs of a forward pass over n tokens, in the caller's memory.

    Attributes:
        logits: float32 [rows, n_vocab] of the rows that were asked for, in order.
        hidden: layer -> its output for every token, float32 [n, n_embd].
        hidden_out: output of the last layer run, float32 [n, n_embd]; None unless asked for.
    """

    logits: FloatArray
    hidden: Mapping[int, FloatArray]
    hidden_out: FloatArray | None


_STATE: Final = tuple(CacheState.__dataclass_fields__)
_FLAGS: Final = frozenset({"can_verify", "poisoned"})


class TargetCache(NativeHandle):
    """Keys and values, recurrent and convolution states, features and the position of one sequence.

    Memory of its parts, exactly what plan() says:

    - each full-attention layer: ``physical_capacity * n_head_kv * head_dim`` values of ``k_type`` and as many of
      ``v_type``, where physical_capacity is capacity rounded up to 256. A value takes 4 bytes in f32, 2 in f16 and
      bf16, and in blocks of 32 values 34 in q8_0, 24 in q5_1, 22 in q5_0, 20 in q4_1, 18 in q4_0.
    - each recurrent layer: ``4 * ssm_dt_rank * ssm_d_state**2`` and ``4 * (ssm_d_conv - 1) * conv_channels`` bytes,
      whatever the length; once more after the first snapshot_state().
    - features: ``feature_capacity * n_taps * n_embd`` values of ``feature_type``.

    Quantised keys and values are stored rotated by a Hadamard matrix, and read() shows them so.

    One thread at a time: a second one waits; cancel() may be called beside any call. A decoder that was given the cache
    moves it too: use both in turn. Results are copies that the caller owns.
    """

    def __init__(
        self,
        model: TargetModel,
        capacity: int = 4096,
        k_type: CacheType = "f16",
        v_type: CacheType = "f16",
        max_verify: int = 16,
        *,
        capture_layers: Sequence[int] | None = None,
        feature_capacity: int = 0,
        feature_type: FeatureType = "f32",
        layers: tuple[int, int] | range | None = None,
        prefill_only: bool = False,
        keep_states: bool = False,
        fa_window: int = 0,
    ) -> None:
        """Allocate an empty cache; the arguments are those of CacheOptions.

        Raises:
            InvalidArgumentError: an option is outside its limits.
            UnsupportedModelError: a type does not divide a head.
            OutOfMemoryError: the device has too little memory.
        """
        self._model = model
        self._options = CacheOptions(
            capacity=capacity,
            k_type=k_type,
            v_type=v_type,
            max_verify=max_verify,
            capture_layers=capture_layers,
            feature_capacity=feature_capacity,
            feature_type=feature_type,
            layers=as_layers("layers", layers),
            prefill_only=prefill_only,
            keep_states=keep_states,
            fa_window=fa_window,
        )
        self._capture_layers = capture_layers_of(model, self._options)
        options, keep = c_cache_options(self._options, self._capture_layers)
        out = ffi.new("dflash_target_cache **")
        with use(model) as (model_ptr, err):
            check(lib.dflash_target_cache_new(out, model_ptr, options, err), err, "target_cache_new")
        del keep
        self._c_state = ffi.new("dflash_target_cache_state *")
        self._verify_serial = 0
        self._adopt(out[0], lib.dflash_target_cache_free, model)

    @staticmethod
    def plan(
        model: TargetModel,
        capacity: int = 4096,
        k_type: CacheType = "f16",
        v_type: CacheType = "f16",
        max_verify: int = 16,
        *,
        capture_layers: Sequence[int] | None = None,
        feature_capacity: int = 0,
        feature_type: FeatureType = "f32",
        layers: tuple[int, int] | range | None = None,
        prefill_only: bool = False,
        keep_states: bool = False,
        fa_window: int = 0,
    ) -> CachePlan:
        """The memory that a cache with these arguments takes, without making it.

        Raises:
            InvalidArgumentError, UnsupportedModelError: as the constructor.
        """
        chosen = CacheOptions(
            capacity=capacity,
            k_type=k_type,
            v_type=v_type,
            max_verify=max_verify,
            capture_layers=capture_layers,
            feature_capacity=feature_capacity,
            feature_type=feature_type,
            layers=as_layers("layers", layers),
            prefill_only=prefill_only,
            keep_states=keep_states,
            fa_window=fa_window,
        )
        return plan_cache(model, chosen)

    def _facts(self) -> str:
        o = self._options
        return f"of {o.capacity} tokens, k {o.k_type}, v {o.v_type}, {len(self._capture_layers)} feature layers"

    def _state_text(self) -> str:
        state = self.state
        return f"position {state.position}, {state.memory_bytes / 2**20:.1f} MiB"

    @property
    def model(self) -> TargetModel:
        """The model it was made for."""
        return self._model

    @property
    def options(self) -> CacheOptions:
        """As it was made."""
        return self._options

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Layers whose outputs are the features, in the order of a feature row."""
        return self._capture_layers

    @property
    def capacity(self) -> int:
        """Most tokens."""
        return self._options.capacity

    @property
    def feature_capacity(self) -> int:
        """Rows of the feature ring; 0 without captured layers."""
        return feature_capacity_of(self._options) if self._capture_layers else 0

    @property
    def position(self) -> int:
        """Committed tokens; the next one stands at this position."""
        return self.state.position

    @property
    def feature_range(self) -> tuple[int, int]:
        """Positions [begin, end) whose features can be read."""
        state = self.state
        return state.feature_begin, state.feature_end

    @property
    def state(self) -> CacheState:
        """All numbers at once."""
        with self._use() as (ptr, err):
            s = self._c_state
            check(lib.dflash_target_cache_state_get(ptr, s, err), err, "target_cache_state_get")
            return CacheState(*(bool(getattr(s, n)) if n in _FLAGS else getattr(s, n) for n in _STATE))

    def forward(
        self,
        ids: TokenIds | None,
        logits: LogitRows = "last",
        *,
        chunk: int = 512,
        hidden_layers: Sequence[int] = (),
        hidden_in: FloatArray | None = None,
        want_hidden: bool = False,
        layers: tuple[int, int] | range | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> ForwardResult:
        """Append n tokens: keys, values, states and features, and the position moves by n.

        Args:
            ids: token ids [n]; None with hidden_in.
            logits: rows whose logits are wanted: "last", "all", "none", or strictly increasing indices into [0, n).
            chunk: most rows of one pass; results do not depend on it beyond rounding.
            hidden_layers: layers whose outputs are wanted for every token, strictly increasing.
            hidden_in: float32 [n, n_embd], input of the first layer instead of ids.
            want_hidden: True returns the output of the last layer run, for a next range of layers.
            layers: (begin, end) of the layers to run; None: all of the cache. Below its last layer the position stays.
            progress: called before each chunk and at the end, in tokens; raising from it stops the call.

        Raises:
            CapacityError: the tokens do not fit.
            InvalidArgumentError: an id, row or layer is outside its limits. In both cases nothing was done.
            Cancelled: cancel() was called. Then, as after an exception from ``progress`` or Ctrl-C, the cache holds the
                chunks that were done: position says how many tokens.
        """
        if (ids is None) == (hidden_in is None):
            raise InvalidArgumentError("ids", "given" if ids is not None else None, "either ids or hidden_in")
        config = self._model.config
        options = ffi.new("dflash_forward_options *")
        lib.dflash_forward_options_init(options)
        if hidden_in is None:
            tokens = as_ids(ids if ids is not None else ())
            n, c_ids = len(tokens), as_c_array(tokens, "int32_t[]")
        else:
            c_hidden_in = as_c_array(hidden_in, "float[]", name="hidden_in", shape=(None, config.n_embd))
            n, c_ids, options.hidden_in = len(hidden_in), NULL, c_hidden_in
        rows = _logit_rows(logits, n)
        out_logits = np.empty((len(rows), config.n_vocab), np.float32)
        c_rows, c_logits = as_c_array(rows, "int64_t[]"), as_c_array(out_logits, "float[]", writable=True)
        options.logit_rows, options.n_logit_rows, options.logits = c_rows, len(rows), c_logits
        wanted = tuple(as_integer("hidden_layers", layer, 0) for layer in hidden_layers)
        hidden = np.empty((len(wanted), n, config.n_embd), np.float32)
        c_wanted, c_hidden = c_list("int32_t[]", wanted), as_c_array(hidden, "float[]", writable=True)
        options.hidden_layers, options.n_hidden_layers, options.hidden = c_wanted, len(wanted), c_hidden
        hidden_out = np.empty((n, config.n_embd), np.float32) if as_flag("want_hidden", want_hidden) else None
        if hidden_out is not None:
            c_hidden_out = as_c_array(hidden_out, "float[]", writable=True)
            options.hidden_out = c_hidden_out
        options.chunk = as_integer("chunk", chunk, 1)
        if (bounds := as_layers("layers", layers)) is not None:
            options.layer_begin, options.layer_end = bounds
        with ProgressCall(progress) as call, self._use() as (ptr, err):
            options.progress, options.user = call.function, call.user
            call.check(lib.dflash_target_cache_forward(ptr, c_ids, n, options, err), err, "target_cache_forward")
            self._verify_serial += 1
        return ForwardResult(out_logits, dict(zip(wanted, hidden, strict=True)), hidden_out)

    def cancel(self) -> None:
        """Make a running forward stop before its next chunk. Any thread; nothing on a closed cache."""
        self._cancel(lib.dflash_target_cache_cancel, "target_cache_cancel")

    def verify(self, ids: TokenIds, *, logits: bool = True) -> Verify:
        """Run n rows behind the position without accepting them: commit() of the result does.

        Args:
            ids: int32 [n], 1 to max_verify.
            logits: False leaves the logits on the device.

        Raises:
            InvalidArgumentError: too many rows, an id outside the vocabulary, or a cache that cannot verify.
            CapacityError: the rows do not fit.
        """
        return self._verify(as_ids(ids), None, logits=logits)

    def verify_tree(self, ids: TokenIds, parents: Sequence[int], *, logits: bool = True) -> Verify:
        """verify() for the nodes of a tree: row i is ``ids[i]`` behind row ``parents[i]``.

        A row sees what the cache holds and its ancestors, and stands at the position of its depth. A tree that is a
        chain runs as verify() does; on a CPU the rows of any path have the values that a chain of them has.

        Args:
            ids: int32 [n], 1 to max_verify and at most 65; row 0 is the root.
            parents: ``parents[0]`` is -1, every other row names one before it.
            logits: False leaves the logits on the device.

        Raises:
            InvalidArgumentError: too many rows, parents that are no tree, an id outside the vocabulary, or a cache that
                cannot verify.
            CapacityError: the rows do not fit.
        """
        tokens, rows = as_ids(ids), as_ids(parents, "parents")
        if len(rows) != len(tokens):
            raise InvalidArgumentError("parents", f"{len(rows)} rows", f"{len(tokens)}, one for each id")
        return self._verify(tokens, rows, logits=logits)

    def _verify(self, tokens: IntArray, parents: IntArray | None, *, logits: bool) -> Verify:
        argmax = np.empty(len(tokens), np.int32)
        out = np.empty((len(tokens), self._model.config.n_vocab), np.float32) if logits else None
        c_ids, c_argmax = as_c_array(tokens, "int32_t[]"), as_c_array(argmax, "int32_t[]", writable=True)
        c_logits = as_c_array(out, "float[]", writable=True) if out is not None else NULL
        with self._use() as (ptr, err):
            base = self.position
            n = len(tokens)
            if parents is None:
                status = lib.dflash_target_cache_verify(ptr, c_ids, n, c_logits, c_argmax, err)
            else:
                c_parents = as_c_array(parents, "int32_t[]")
                status = lib.dflash_target_cache_verify_tree(ptr, c_ids, c_parents, n, c_logits, c_argmax, err)
            check(status, err, "target_cache_verify" if parents is None else "target_cache_verify_tree")
            self._verify_serial += 1
            return Verify(self, self._verify_serial, base, argmax, out, parents)

    def commit_path(self, path: Sequence[int]) -> None:
        """Accept a path of the newest verify; as Verify.commit_path()."""
        rows = as_ids(path, "path")
        c_path = as_c_array(rows, "int32_t[]")
        with self._use() as (ptr, err):
            status = lib.dflash_target_cache_commit_path(ptr, c_path, len(rows), err)
            check(status, err, "target_cache_commit_path")
            self._verify_serial += 1

    def commit(self, n: int) -> None:
        """Accept the first n rows of the newest verify; as Verify.commit()."""
        n = as_integer("n", n, 0)
        with self._use() as (ptr, err):
            check(lib.dflash_target_cache_commit(ptr, n, err), err, "target_cache_commit")
            self._verify_serial += 1

    def reset(self, kv: bool = True, recurrent: bool = True, features: bool = True) -> None:
        """Zero the chosen parts; the position becomes 0. Memory is kept. Heals a poisoned cache.

        Keys and values at or beyond the position are never seen, so zeroing them is a matter of hygiene.
        """
        for name, value in (("kv", kv), ("recurrent", recurrent), ("features", features)):
            as_flag(name, value)
        with self._use() as (ptr, err):
            check(lib.dflash_target_cache_reset(ptr, kv, recurrent, features, err), err, "target_cache_reset")
            self._verify_serial += 1

    def migrate(self, max_verify: int) -> None:
        """Let a prefill-only cache verify up to max_verify rows. Everything it holds stays."""
        max_verify = as_integer("max_verify", max_verify, 1)
        with self._use() as (ptr, err):
            check(lib.dflash_target_cache_migrate(ptr, max_verify, err), err, "target_cache_migrate")

    def snapshot_state(self) -> None:
        """Copy recurrent and convolution states aside, with the position. The first call allocates the memory."""
        with self._use() as (ptr, err):
            check(lib.dflash_target_cache_snapshot_state(ptr, err), err, "target_cache_snapshot_state")

    def restore_state(self) -> None:
        """Put the copy back, position included; keys and values behind it become invisible.

        Raises:
            InvalidArgumentError: nothing was saved since the last reset.
        """
        with self._use() as (ptr, err):
            check(lib.dflash_target_cache_restore_state(ptr, err), err, "target_cache_restore_state")
            self._verify_serial += 1

    def rewind(self, position: int, tokens: TokenIds, snapshots: Iterable[PrefixSnapshot] = ()) -> int:
        """Hold the first ``position`` tokens only; how many of them had to be evaluated for it.

        A recurrent state cannot go back: the snapshot with the most of these tokens is restored, and the tokens behind
        it go through the model again. A drafter's context has to be rewound by itself.

        Args:
            position: 0 to the present one.
            tokens: what the cache holds, at least the first ``position``.
            snapshots: those of other tokens are passed over.

        Raises:
            InvalidArgumentError: the cache holds fewer tokens, or fewer are given.
        """
        held = self.position
        position = as_integer("position", position, 0, held)
        ids = as_ids(tokens, "tokens")
        if len(ids) < position:
            raise InvalidArgumentError("tokens", len(ids), f"at least {position} of them")
        if position == held:
            return 0
        best: PrefixSnapshot | None = None
        for snapshot in snapshots:
            n = len(snapshot.tokens)
            if 0 < n <= position and (best is None or n > best.position) and np.array_equal(snapshot.tokens, ids[:n]):
                best = snapshot
        if best is None:
            self.reset()
        else:
            best.restore_into(self)
        begin = 0 if best is None else best.position
        if begin < position:
            self.forward(ids[begin:position])
        return position - begin

    @property
    def n_changes(self) -> int:
        """Calls of this object that changed what it holds; those of a decoder do not count."""
        return self._verify_serial

    def _note_changed(self) -> None:
        """Someone else changed what it holds: a verify made before is stale."""
        self._verify_serial += 1

    @property
    def last_logits(self) -> FloatArray | None:
        """Logits of the newest token, float32 [n_vocab]; None when the last call did not compute them."""
        out = np.empty(self._model.config.n_vocab, np.float32)
        c_out = as_c_array(out, "float[]", writable=True)
        with self._use() as (ptr, err):
            try:
                check(lib.dflash_target_cache_last_logits(ptr, c_out, err), err, "target_cache_last_logits")
            except NotFoundError:
                return None
        return out

    def features(self, begin: int, end: int) -> FloatArray:
        """Feature rows of positions [begin, end): float32 [end - begin, n_taps * n_embd], one layer after another.

        Raises:
            InvalidArgumentError: they are not there (any more); feature_range says which are.
        """
        out = self._rows(begin, end, len(self._capture_layers) * self._model.config.n_embd)
        c_out = as_c_array(out, "float[]", writable=True)
        with self._use() as (ptr, err):
            check(lib.dflash_target_cache_features(ptr, begin, end, c_out, err), err, "target_cache_features")
        return out

    def read(self, layer: int, what: CacheTensor, begin: int = 0, end: int | None = None) -> FloatArray:
        """A copy of one tensor of a layer as float32, for inspection.

        "k" and "v" of a full-attention layer: [end - begin, n_head_kv, head_dim] of positions [begin, end); end None
        means the position. "recurrent" of a recurrent layer: [value heads, S, S]; "conv": [d_conv - 1, channels],
        oldest first. The range is ignored for these two.

        Raises:
            InvalidArgumentError: the layer has no such tensor, or the positions are not there.
        """
        config = self._model.config
        with self._use() as (ptr, err):
            if what in ("k", "v"):
                end = self.position if end is None else end
                out = self._rows(begin, end, config.n_head_kv * config.head_dim)
                shape: tuple[int, ...] = (len(out), config.n_head_kv, config.head_dim)
            else:
                begin, end = 0, 0
                states = (config.ssm_dt_rank, config.ssm_d_state, config.ssm_d_state)
                shape = states if what == "recurrent" else (config.ssm_d_conv - 1, config.conv_channels)
                out = np.empty(shape, np.float32)
            c_out, c_what = as_c_array(out, "float[]", writable=True), c_text("what", what)
            status = lib.dflash_target_cache_read(ptr, layer, c_what, begin, end, c_out, out.size, err)
            check(status, err, "target_cache_read")
        return out.reshape(shape)

    def moe_selected(self, layer: int) -> IntArray:
        """Experts that the router chose in the last pass, int32 [rows, n_expert_used]; [0, 0] for a dense layer."""
        layer = as_integer("layer", layer, 0)
        n = ffi.new("int64_t *")
        with self._use() as (ptr, err):
            operation = "target_cache_moe_selected"
            check(lib.dflash_target_cache_moe_selected(ptr, layer, NULL, 0, n, err), err, operation)
            out = np.empty(n[0], np.int32)
            c_out = as_c_array(out, "int32_t[]", writable=True)
            check(lib.dflash_target_cache_moe_selected(ptr, layer, c_out, out.size, n, err), err, operation)
        return out.reshape(-1, self._model.config.n_expert_used) if out.size > 0 else out.reshape(0, 0)

    def _rows(self, begin: int, end: int, width: int) -> FloatArray:
        """Room for positions [begin, end); native code says which positions there are."""
        as_integer("begin", begin, 0)
        as_integer("end", end, begin, begin + self._options.capacity)
        return np.empty((end - begin, width), np.float32)

    def _verify_state(self, layer: int, row: int) -> FloatArray:
        config = self._model.config
        out = np.empty((config.ssm_dt_rank, config.ssm_d_state, config.ssm_d_state), np.float32)
        c_out = as_c_array(out, "float[]", writable=True)
        with self._use() as (ptr, err):
            status = lib.dflash_target_cache_verify_state(ptr, layer, row, c_out, out.size, err)
            check(status, err, "target_cache_verify_state")
        return out

    def _verify_conv(self, layer: int, n_rows: int) -> FloatArray:
        config = self._model.config
        out = np.empty((config.ssm_d_conv - 1 + n_rows, config.conv_channels), np.float32)
        c_out = as_c_array(out, "float[]", writable=True)
        with self._use() as (ptr, err):
            status = lib.dflash_target_cache_verify_conv(ptr, layer, c_out, out.size, err)
            check(status, err, "target_cache_verify_conv")
        return out


def _logit_rows(rows: LogitRows, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if isinstance(rows, str):
        words = {"last": range(n - 1, n) if n > 0 else range(0), "all": range(n), "none": range(0)}
        if rows not in words:
            raise InvalidArgumentError("logits", rows, "'last', 'all', 'none', or a list of row indices")
        return np.array(words[rows], np.int64)
    return np.array([as_integer("logits", row, 0) for row in rows], np.int64)
