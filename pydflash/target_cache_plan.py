"""What a target cache will be: its options filled in, in C, and in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydflash._ffi import CData, c_list, c_text, check, ffi, lib
from pydflash._handle import use
from pydflash.options import CacheOptions
from pydflash.target_model import TargetModel


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Exact bytes of a cache, part by part.

    Attributes:
        k_bytes, v_bytes: keys and values of the full-attention layers.
        recurrent_bytes, conv_bytes: states of the recurrent layers.
        feature_bytes: the ring of features.
        rotation_bytes: matrices that quantised keys and values are rotated with.
        rollback_bytes: copies that the first snapshot_state() allocates; not in the total.
        total_bytes: as allocated, with alignment.
        physical_capacity: rows of keys and values, a multiple of 256.
    """

    k_bytes: int
    v_bytes: int
    recurrent_bytes: int
    conv_bytes: int
    feature_bytes: int
    rotation_bytes: int
    rollback_bytes: int
    total_bytes: int
    physical_capacity: int


_PLAN: Final = tuple(CachePlan.__dataclass_fields__)


def plan_cache(model: TargetModel, chosen: CacheOptions) -> CachePlan:
    """The memory of a cache with these options.

    Raises:
        InvalidArgumentError: an option is outside its limits.
        UnsupportedModelError: a type does not divide a head.
    """
    options, keep = c_cache_options(chosen, capture_layers_of(model, chosen))
    plan = ffi.new("dflash_target_cache_plan *")
    with use(model) as (model_ptr, err):
        check(lib.dflash_target_cache_plan_bytes(model_ptr, options, plan, err), err, "target_cache_plan_bytes")
    del keep
    return CachePlan(*(getattr(plan, name) for name in _PLAN))


def capture_layers_of(model: TargetModel, options: CacheOptions) -> tuple[int, ...]:
    if options.capture_layers is not None:
        return tuple(options.capture_layers)
    begin, end = options.layers or (model.config.layer_begin, model.config.layer_end)
    return tuple(id_ for id_ in model.default_capture_layers(min(5, model.config.n_layer)) if begin <= id_ < end)


def feature_capacity_of(options: CacheOptions) -> int:
    return options.feature_capacity or min((options.capacity + 255) // 256 * 256, 4096)


def c_cache_options(chosen: CacheOptions, capture_layers: tuple[int, ...]) -> tuple[CData, list[CData]]:
    """The struct, and what must stay alive as long as it is used."""
    options = ffi.new("dflash_target_cache_options *")
    lib.dflash_target_cache_options_init(options)
    texts = [c_text(name, getattr(chosen, name)) for name in ("k_type", "v_type", "feature_type")]
    options.k_type, options.v_type, options.feature_type = texts
    layers = c_list("int32_t[]", capture_layers)
    options.capture_layers, options.n_capture_layers = layers, len(capture_layers)
    options.feature_capacity = feature_capacity_of(chosen)
    for name in ("capacity", "max_verify", "prefill_only", "keep_states", "fa_window"):
        setattr(options, name, getattr(chosen, name))
    if chosen.layers is not None:
        options.layer_begin, options.layer_end = chosen.layers
    return options, [*texts, layers]
