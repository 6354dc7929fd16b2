"""What a drafter's Hugging Face folder says, for the converter. The engine itself reads such folders natively."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import safetensors

from pydflash.errors import FormatError, InvalidArgumentError, UnsupportedModelError

_QWEN3_HEAD_DIM: Final = 128
_MAPS: Final = {"I64": "<i8", "I32": "<i4", "BOOL": "?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Rotary positions: base, and for "linear" and "yarn" how they are stretched."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFolderConfig:
    """config.json in the terms of :class:`pydflash.draft_model.DraftConfig`. ``causal`` None: no key says so."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    rms_eps: float
    max_positions: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int, ...]
    causal: bool | None
    rope: RopeSettings
    embedding_scale: float
    logit_scale: float
    final_logit_softcapping: float
    sample_from_anchor: bool
    is_dspark: bool = False
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0


_ARCHITECTURES: Final = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator")
_DSPARK: Final = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
_INNER: Final = "transformer_layer_config"  # where speculators' form keeps the network's sizes


class _Settings:
    """Typed look-ups in config.json; the first of several dotted names that is there counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgumentError("folder", str(path.parent), "a Hugging Face folder with config.json") from error
        except ValueError as error:
            raise FormatError(f"{path}: no JSON: {error}") from error
        if not isinstance(values, dict):
            raise FormatError(f"{path}: holds no object")
        self._values = values

    def find(self, *names: str) -> object:
        for name in names:
            for root in (self._values, self._values.get(_INNER)):
                value: object = root
                for part in name.split("."):
                    value = value.get(part) if isinstance(value, dict) else None
                if value is not None:
                    return value
        return None

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{self.path}: {names[0]} is {value!r}, expected an integer")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{self.path}: {names[0]} is {value!r}, expected a number")
        return float(value)

    def text(self, *names: str, default: str) -> str:
        value = self.find(*names)
        value = default if value is None else value
        if not isinstance(value, str):
            raise FormatError(f"{self.path}: {names[0]} is {value!r}, expected a string")
        return value

    def items(self, *names: str) -> list[object]:
        value = self.find(*names)
        if value is not None and not isinstance(value, list):
            raise FormatError(f"{self.path}: {names[0]} is {value!r}, expected a list")
        return value or []


def read_draft_config(folder: Path) -> DraftFolderConfig:
    """Read config.json.

    Raises:
        InvalidArgumentError: there is none. FormatError: a key is missing or has the wrong type.
        UnsupportedModelError: it is no DFlash drafter, or one with parts that pydflash does not run.
    """
    s = _Settings(folder / "config.json")
    architectures = s.items("architectures")
    architecture = architectures[0] if architectures else None
    if architecture not in (*_ARCHITECTURES, *_DSPARK):
        known = ", ".join((*_ARCHITECTURES, *_DSPARK))
        raise UnsupportedModelError(f"{s.path}: architectures is {architectures!r}, expected one of {known}")
    if (head := s.text("markov_head_type", default="vanilla")) != "vanilla":
        raise UnsupportedModelError(f"{s.path}: markov_head_type {head!r} is not supported, only 'vanilla'")
    if s.find("attention_bias"):
        raise UnsupportedModelError(f"{s.path}: attention_bias is not supported")
    if (activation := s.text("hidden_act", default="silu")) != "silu":
        raise UnsupportedModelError(f"{s.path}: hidden_act {activation!r} is not supported, only 'silu'")
    n_layer, n_head = s.integer("num_hidden_layers"), s.integer("num_attention_heads")
    n_embd = s.integer("hidden_size")
    taps = [layer for layer in s.items("dflash_config.target_layer_ids", "target_layer_ids") if isinstance(layer, int)]
    taps = taps or [layer - 1 for layer in s.items("aux_hidden_state_layer_ids") if isinstance(layer, int)]
    causal = s.find("is_causal", "dflash_config.is_causal", "dflash_config.causal")
    if causal is None and s.find("sliding_window_non_causal"):
        causal = False
    nested, second = s.find(_INNER) is not None, architecture == "DFlash2DraftModel"

    def of_second(name: str) -> int:
        return s.integer(f"dflash_config.{name}", name) if second else 0

    return DraftFolderConfig(
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=s.integer("intermediate_size"),
        n_head=n_head,
        n_head_kv=s.integer("num_key_value_heads", default=n_head),
        head_dim=s.integer("head_dim", default=_QWEN3_HEAD_DIM if nested else n_embd // n_head),
        n_vocab=s.integer("vocab_size", default=0),
        rms_eps=s.number("rms_norm_eps", default=1e-6),
        max_positions=s.integer("max_position_embeddings", default=0),
        block_size=s.integer("dflash_config.block_size", "block_size", default=16),
        mask_token_id=s.integer("dflash_config.mask_token_id", "mask_token_id"),
        target_layer_ids=tuple(taps) or _default_taps(s, n_layer),
        windows=_windows(s, n_layer),
        causal=None if causal is None else bool(causal),
        rope=_rope(s),
        embedding_scale=s.number("dflash_config.input_embedding_scale", "input_embedding_scale", default=1.0),
        logit_scale=s.number("dflash_config.output_multiplier", "output_multiplier", default=1.0),
        final_logit_softcapping=s.number(
            "dflash_config.final_logit_softcapping", "final_logit_softcapping", default=0.0
        ),
        sample_from_anchor=_from_anchor(s, architecture in _DSPARK and not nested),
        is_dspark=architecture in _DSPARK,
        conv_kernel=of_second("conv_kernel_size"),
        conv_group=of_second("conv_group_size"),
        selector_rank=of_second("selector_rank"),
        selector_top_k=of_second("selector_top_k"),
    )


def _from_anchor(s: _Settings, usual: bool) -> bool:
    value = s.find("dflash_config.sample_from_anchor", "sample_from_anchor")
    return usual and s.find("aux_hidden_state_layer_ids") is None if value is None else bool(value)


def _default_taps(s: _Settings, n_layer: int) -> tuple[int, ...]:
    """Evenly spread layers from 1 to the target's fourth from the end, rounded half to even."""
    n_target = s.integer("num_target_layers", "dflash_config.num_target_layers")
    if n_layer == 1:
        return (n_target // 2,)
    return tuple(round(1 + i * (n_target - 4) / (n_layer - 1)) for i in range(n_layer))


def _windows(s: _Settings, n_layer: int) -> tuple[int, ...]:
    kinds = s.items("layer_types") or ["full_attention"] * n_layer
    if len(kinds) != n_layer:
        raise FormatError(f"{s.path}: layer_types has {len(kinds)} entries, expected {n_layer}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{s.path}: layer type {kind!r} is not supported")
    return tuple(s.integer("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(s: _Settings) -> RopeSettings:
    def both(name: str) -> tuple[str, str]:
        return f"rope_parameters.{name}", f"rope_scaling.{name}"

    theta = s.number("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta")
    kind = s.text(*both("rope_type"), *both("type"), default="default")
    if kind == "default":
        return RopeSettings(theta=theta)
    factor = s.number(*both("factor"))
    if kind == "linear":
        return RopeSettings(theta=theta, kind=kind, factor=factor)
    if kind != "yarn":
        raise UnsupportedModelError(f"{s.path}: rope type {kind!r} is not supported, only default, linear and yarn")
    # GGUF keeps the attention factor relative to the one that the operator applies by itself.
    built_in = 1.0 + 0.1 * math.log(factor)
    return RopeSettings(
        theta=theta,
        kind=kind,
        factor=factor,
        n_ctx_orig=s.integer(*both("original_max_position_embeddings"), "max_position_embeddings"),
        attn_factor=s.number(*both("attention_factor"), default=built_in) / built_in,
        beta_fast=s.number(*both("beta_fast"), default=32.0),
        beta_slow=s.number(*both("beta_slow"), default=1.0),
    )


def read_draft_tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Name and values of every tensor of a .safetensors file, widened to float32; maps of tokens as they are.

    Raises:
        FormatError: the file is damaged. UnsupportedModelError: a tensor is not F32, F16 or BF16.
    """
    try:
        entries: Sequence[tuple[str, dict[str, object]]] = safetensors.deserialize(  # type: ignore[no-untyped-call]
            path.read_bytes()
        )
    except safetensors.SafetensorError as error:
        raise FormatError(f"{path}: {error}") from error
    for name, entry in entries:
        shape, data, dtype = entry["shape"], entry["data"], entry["dtype"]
        if not isinstance(shape, list) or not isinstance(data, bytes | bytearray):
            raise FormatError(f"{path}: tensor {name} has no shape or data")
        if dtype == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif dtype in ("F16", "F32"):
            values = np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32)
        elif dtype in _MAPS and name.removeprefix("model.") in ("d2t", "t2d"):
            yield name, np.frombuffer(data, _MAPS[str(dtype)]).reshape(shape)
            continue
        else:
            raise UnsupportedModelError(f"{path}: tensor {name} has dtype {dtype}, expected F32, F16 or BF16")
        yield name, values.reshape(shape)
