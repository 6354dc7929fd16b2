"""What callers may choose: frozen dataclasses that check every value when they are made.

An unknown name is a TypeError from the dataclass, a value outside its limits an InvalidArgumentError that names both.
Nothing here reads files, devices or environment variables, and nothing is shared: objects with different options can
live side by side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Final, Literal, TypeAlias, get_args

from pydflash.errors import InvalidArgumentError

CacheType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
"""How a target cache stores keys or values."""
DraftCacheType: TypeAlias = Literal["auto", "f32", "f16", "q8_0", "q4_0"]
"""How a draft context stores keys or values."""
FeatureType: TypeAlias = Literal["f32", "f16", "bf16"]
"""How a target cache stores captured features."""
MirrorType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""How a feature mirror stores its rows."""
DraftWeights: TypeAlias = Literal["file", "f32", "f16", "bf16", "q8_0"]
"""How a drafter's float matrices are stored; "file": as they are."""
DraftFailure: TypeAlias = Literal["error", "autoregressive"]
"""What a failure of the drafter does: it is raised, or decoding goes on without the drafter and says so."""
SnapshotPlace: TypeAlias = Literal["host", "device"]
"""Where the bytes of a snapshot are: host memory (pinned where there is a GPU), or the target's device."""
EmbeddingPlace: TypeAlias = Literal["device", "host"]
"""Where token embeddings are looked up."""

MAX_LOGPROBS: Final = 20
MAX_WIDTH: Final = 64
MAX_TREE: Final = 64
AUTO_TREES: Final = (8, 16, 32)
MAX_VERIFY: Final = 1024
MAX_SEED: Final = 2**64 - 1
_INT32: Final = 2**31 - 1


def as_integer(name: str, value: object, low: int, high: int = _INT32, *, also: str = "") -> int:
    """The value as a plain int. InvalidArgumentError unless it is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        limit = f"an integer >= {low}" if high == _INT32 else f"an integer from {low} to {high}"
        raise InvalidArgumentError(name, value, limit + also)
    return int(value)


def as_number(name: str, value: object, low: float, high: float, limit: str, *, open_low: bool = False) -> float:
    """The value as a plain float. InvalidArgumentError unless it is finite and in [low, high], or (low, high]."""
    if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(number := float(value)):
        inside = low < number <= high if open_low else low <= number <= high
        if inside:
            return number
    raise InvalidArgumentError(name, value, limit)


def as_choice(name: str, value: str, choices: object) -> str:
    """The value itself. InvalidArgumentError unless it is one of a Literal's values."""
    allowed = get_args(choices)
    if value not in allowed:
        raise InvalidArgumentError(name, value, "one of " + ", ".join(allowed))
    return value


def as_flag(name: str, value: object) -> bool:
    """The value itself. InvalidArgumentError unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(name, value, "True or False")
    return value


def as_layers(name: str, value: object) -> tuple[int, int] | None:
    """A range of layers [begin, end) from a pair or a range, or None. InvalidArgumentError otherwise."""
    if value is None:
        return None
    if isinstance(value, range) and value.step == 1:
        value = (value.start, value.stop)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == 2:
        begin, end = value
        if all(isinstance(bound, Integral) and not isinstance(bound, bool) for bound in value) and 0 <= begin < end:
            return int(begin), int(end)
    raise InvalidArgumentError(name, value, "None, a range, or (begin, end) with 0 <= begin < end")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, and when a request ends.

    The defaults are greedy, so that a result can be repeated without a seed.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token. >= 0
        top_k: keep the k likeliest tokens; 0 is off.
        top_p: keep the smallest set with this probability; 1 is off. 0 to 1
        min_p: drop tokens below this share of the likeliest one's probability; 0 is off. 0 to 1
        typical_p: locally typical sampling; 1 is off. 0 to 1
        repeat_penalty: divides positive and multiplies negative logits of recent tokens; 1 is off. > 0
        presence_penalty: subtracted once from the logit of each recent token; 0 is off.
        frequency_penalty: subtracted for each recent occurrence; 0 is off.
        penalty_last_n: how many of the newest tokens are recent; 0 turns penalties off, -1 means the whole context.
        seed: key of the random numbers, 0 to 2**64 - 1. None: one is drawn and reported in the result. The same seed
            gives the same text with and without a drafter.
        logit_bias: token id -> number added to its logit; ``-inf`` forbids the token.
        stop: texts that end the request; they are not part of the result. A single string counts as one text.
        max_tokens: most tokens of the request; None: as many as fit the context. >= 1
        ignore_eos: True forbids the model's stop tokens, so that only ``stop`` and ``max_tokens`` end the request.
        logprobs: None: no log-probabilities. 0: that of each token. n: those of the n likeliest besides, up to 20.
        width: rows of each target forward, 1 to 64: the token to consume and ``width - 1`` proposals of the drafter.
            None: chosen by measured cost. Without a drafter it has no effect.
        cache_prompt: False evaluates the whole prompt anew and keeps nothing of the request for later ones.
        tree: proposals that are verified as a tree in each step, 1 to 64, at most what the engine was opened for; 0: no
            trees. None: chosen by measured cost, together with the width. Not both ``width`` and a tree.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    width: int | None = None
    cache_prompt: bool = True
    tree: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        big = math.inf
        put(self, "temperature", as_number("temperature", self.temperature, 0.0, big, "a finite number >= 0"))
        put(self, "top_k", as_integer("top_k", self.top_k, 0))
        for name in ("top_p", "min_p", "typical_p"):
            put(self, name, as_number(name, getattr(self, name), 0.0, 1.0, "a number from 0 to 1"))
        put(
            self,
            "repeat_penalty",
            as_number("repeat_penalty", self.repeat_penalty, 0.0, big, "a finite number > 0", open_low=True),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, as_number(name, getattr(self, name), -big, big, "a finite number"))
        put(self, "penalty_last_n", as_integer("penalty_last_n", self.penalty_last_n, -1))
        if self.seed is not None:
            put(self, "seed", as_integer("seed", self.seed, 0, MAX_SEED, also=", or None"))
        put(self, "logit_bias", _checked_bias(self.logit_bias))
        put(self, "stop", _checked_stop(self.stop))
        if self.max_tokens is not None:
            put(self, "max_tokens", as_integer("max_tokens", self.max_tokens, 1, also=", or None"))
        as_flag("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            put(self, "logprobs", as_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, also=", or None"))
        if self.width is not None:
            put(self, "width", as_integer("width", self.width, 1, MAX_WIDTH, also=", or None"))
        as_flag("cache_prompt", self.cache_prompt)
        if self.tree is not None:
            put(self, "tree", as_integer("tree", self.tree, 0, MAX_TREE, also=", or None"))
            if self.tree > 0 and self.width is not None:
                raise InvalidArgumentError("tree", self.tree, f"0 or None together with width={self.width}")


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidArgumentError("logit_bias", bias, "a mapping of token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) < math.inf:
            raise InvalidArgumentError(f"logit_bias[{token!r}]", value, "a finite number or -inf")
        checked[as_integer("token id in logit_bias", token, 0)] = float(value)
    return checked


def _checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError("stop", text, "texts that are not empty")
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Shape of a target cache; TargetCache explains what each one costs.

    Attributes:
        capacity: most tokens.
        k_type, v_type: storage of keys and values, one of f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0.
        max_verify: most rows of one verify forward.
        capture_layers: layers whose outputs are kept as features; None: the model's default; (): none.
        feature_capacity: rows of the feature ring; 0: capacity rounded up to 256, at most 4,096.
        feature_type: storage of features, one of f32 f16 bf16.
        layers: (begin, end) of the layers the cache is for; None: all that are loaded.
        prefill_only: True refuses verify until migrate().
        keep_states: True lets a verify keep the recurrent state after every row, for inspection.
        fa_window: full-attention layers see only the newest fa_window keys; 0: all.
    """

    capacity: int = 4096
    k_type: CacheType = "f16"
    v_type: CacheType = "f16"
    max_verify: int = 16
    capture_layers: Sequence[int] | None = None
    feature_capacity: int = 0
    feature_type: FeatureType = "f32"
    layers: tuple[int, int] | None = None
    prefill_only: bool = False
    keep_states: bool = False
    fa_window: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "capacity", as_integer("capacity", self.capacity, 1))
        as_choice("k_type", self.k_type, CacheType)
        as_choice("v_type", self.v_type, CacheType)
        put(self, "max_verify", as_integer("max_verify", self.max_verify, 1, MAX_VERIFY))
        if self.capture_layers is not None:
            layers = tuple(as_integer("capture_layers", layer, 0) for layer in self.capture_layers)
            put(self, "capture_layers", layers)
        put(self, "feature_capacity", as_integer("feature_capacity", self.feature_capacity, 0))
        as_choice("feature_type", self.feature_type, FeatureType)
        put(self, "layers", as_layers("layers", self.layers))
        as_flag("prefill_only", self.prefill_only)
        as_flag("keep_states", self.keep_states)
        put(self, "fa_window", as_integer("fa_window", self.fa_window, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine is set up.

    Attributes:
        n_ctx: most tokens of prompt and answer together.
        k_type, v_type: storage of the target's keys and values, as in CacheOptions.
        device: of the target: "cpu", "auto", "cuda", "cuda:1", or a name that devices() reports.
        draft_device: of the drafter; None: the target's. On another device features travel through a mirror.
        n_threads: CPU threads; 0: one per hardware thread, up to 16.
        embedding: "device" keeps the embedding table beside the layers, "host" saves that memory and looks rows up on
            the host.
        pack_weights: on a CPU, copy quantised matrices of target and drafter into the layout that it multiplies by
            fastest, where it has one. False saves that memory and computes from the mapped file.
        prefill_chunk: most prompt tokens of one forward.
        max_verify: most rows of one verify forward of a chain.
        tree: proposals that may be verified as a tree. 0: chains only. "auto": each step is a tree of 8, 16 or 32, a
            chain or plain, whichever promises most tokens for its cost; a number from 1 to 64 makes that the only tree
            to choose. Trees need memory for their graphs, and max_verify grows to hold them.
        fa_window: full-attention layers see only the newest fa_window keys; 0: all.
        draft_k_type, draft_v_type: storage of the drafter's context, one of f32 f16 q8_0 q4_0. "auto" is f32 on a
            CPU, where attention over many rows is fastest in it, and f16 elsewhere.
        draft_full_rows: context rows that full-attention layers of the drafter keep.
        draft_slack: extra rows of the drafter's sliding layers.
        on_draft_failure: "error" raises it, "autoregressive" logs it and goes on without the drafter.
        feature_capacity: rows of the target's feature ring; 0: n_ctx rounded up to 256, at most 4,096.
        feature_type: storage of the target's features.
        mirror_type: storage of the mirror of a drafter on another device.
        draft_weights: how the drafter's matrices are stored: "file" as they are, or a type. "auto" is q8_0 on a CPU,
            where drafting is arithmetic and 8-bit products are fastest, and "file" elsewhere. Matrices that are
            quantised in the file stay as they are.
        prefix_cache: True keeps snapshots of prompts and answers, so that a later prompt that begins with one goes on
            from there.
        prefix_bytes: memory for snapshots.
        prefix_place: where snapshots are: "host", or "device" for the memory of the target's device.
        prefix_directory: a folder for snapshots that outlive the process; None: memory only.
        prefix_directory_bytes: of the files in it.
        prefix_interval: tokens between snapshots while a long prompt is read.
        save_directory: a folder for what is saved by name; None: nothing can be.
    """

    n_ctx: int = 4096
    k_type: CacheType = "f16"
    v_type: CacheType = "f16"
    device: str = "cpu"
    draft_device: str | None = None
    n_threads: int = 0
    embedding: EmbeddingPlace = "device"
    pack_weights: bool = True
    prefill_chunk: int = 512
    max_verify: int = 16
    tree: int | Literal["auto"] = 0
    fa_window: int = 0
    draft_k_type: DraftCacheType = "auto"
    draft_v_type: DraftCacheType = "auto"
    draft_full_rows: int = 8192
    draft_slack: int = 64
    on_draft_failure: DraftFailure = "error"
    feature_capacity: int = 0
    feature_type: FeatureType = "f32"
    mirror_type: MirrorType = "f16"
    draft_weights: Literal["auto"] | DraftWeights = "auto"
    prefix_cache: bool = True
    prefix_bytes: int = 4 << 30
    prefix_place: SnapshotPlace = "host"
    prefix_directory: str | os.PathLike[str] | None = None
    prefix_directory_bytes: int = 16 << 30
    prefix_interval: int = 4096
    save_directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        lowest = {"n_ctx": 2, "n_threads": 0, "fa_window": 0, "draft_full_rows": 1, "draft_slack": 0}
        for name, low in (lowest | {"feature_capacity": 0}).items():
            put(self, name, as_integer(name, getattr(self, name), low))
        put(self, "prefill_chunk", as_integer("prefill_chunk", self.prefill_chunk, 1, 65536))
        put(self, "max_verify", as_integer("max_verify", self.max_verify, 1, MAX_VERIFY))
        as_flag("pack_weights", self.pack_weights)
        if self.tree != "auto":
            put(self, "tree", as_integer("tree", self.tree, 0, MAX_TREE, also=', or "auto"'))
        for name, choices in _ENGINE_CHOICES.items():
            as_choice(name, getattr(self, name), choices)
        for name in ("device", "draft_device"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (name == "draft_device" and value is None):
                raise InvalidArgumentError(name, value, "the name of a device")
        if self.draft_weights != "auto":
            as_choice("draft_weights", self.draft_weights, DraftWeights)
        as_flag("prefix_cache", self.prefix_cache)
        for name in ("prefix_bytes", "prefix_directory_bytes"):
            put(self, name, as_integer(name, getattr(self, name), 0, 2**63 - 1))
        put(self, "prefix_interval", as_integer("prefix_interval", self.prefix_interval, 1))
        for name in ("prefix_directory", "save_directory"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str | os.PathLike) and os.fspath(value)):
                raise InvalidArgumentError(name, value, "the path of a folder, or None")


def tree_sizes(options: EngineOptions) -> tuple[int, ...]:
    """Node counts that an engine with a drafter chooses from."""
    if options.tree == "auto":
        return AUTO_TREES
    return (options.tree,) if options.tree > 0 else ()


_ENGINE_CHOICES: Final[Mapping[str, object]] = {
    "k_type": CacheType,
    "v_type": CacheType,
    "embedding": EmbeddingPlace,
    "draft_k_type": DraftCacheType,
    "draft_v_type": DraftCacheType,
    "on_draft_failure": DraftFailure,
    "feature_type": FeatureType,
    "mirror_type": MirrorType,
    "prefix_place": SnapshotPlace,
}
