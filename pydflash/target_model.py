"""TargetModel: the weights of a target, or of a range of its layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

import numpy as np

from pydflash import builtin
from pydflash._ffi import (
    NULL,
    FloatArray,
    ProgressCall,
    TokenIds,
    as_c_array,
    as_ids,
    c_text,
    check,
    ffi,
    lib,
    text_of,
)
from pydflash._handle import NativeHandle, native_call
from pydflash.gguf_file import GgufFile, GgufValue
from pydflash.options import EmbeddingPlace, as_choice, as_flag, as_integer, as_layers
from pydflash.results import Progress

LayerKind: TypeAlias = Literal["attention", "recurrent"]
"""Full attention, or gated DeltaNet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Geometry of a target.

    Attributes:
        architecture, name: of the file; name may be empty.
        n_layer: layers that are run; n_layer_nextn multi-token-prediction blocks behind them are not.
        layer_begin, layer_end: the layers that are loaded.
        layer_kinds: "attention" or "recurrent" for each of the n_layer layers.
        n_embd, n_vocab, n_ff: width, vocabulary, feed-forward width.
        n_head, n_head_kv, head_dim: of the full-attention layers.
        n_ctx_train: context it was trained for; 0 if the file does not say.
        ssm_d_conv, ssm_d_state, ssm_n_group, ssm_dt_rank: of the recurrent layers: taps of the convolution, head size,
            key heads, value heads.
        is_moe, n_expert, n_expert_used: mixture of experts.
        has_output: True if the output norm and head are loaded.
        mask_token_id: of block drafters; None if the file names none.
        weight_bytes: memory of the weights on the device.
    """

    architecture: str
    name: str
    n_layer: int
    n_layer_nextn: int
    layer_begin: int
    layer_end: int
    layer_kinds: tuple[LayerKind, ...]
    n_embd: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ctx_train: int
    ssm_d_conv: int
    ssm_d_state: int
    ssm_n_group: int
    ssm_dt_rank: int
    is_moe: bool
    n_expert: int
    n_expert_used: int
    has_output: bool
    mask_token_id: int | None
    weight_bytes: int

    @property
    def conv_channels(self) -> int:
        """Channels of a recurrent layer's convolution: queries, keys and values side by side."""
        return self.ssm_d_state * (2 * self.ssm_n_group + self.ssm_dt_rank)


_INTEGERS: Final = (
    *("n_layer", "n_layer_nextn", "layer_begin", "layer_end", "n_embd", "n_vocab", "n_head", "n_head_kv", "head_dim"),
    *("n_ff", "n_ctx_train", "ssm_d_conv", "ssm_d_state", "ssm_n_group", "ssm_dt_rank", "n_expert", "n_expert_used"),
    "weight_bytes",
)


class TargetModel(NativeHandle):
    """Weights of a target on one device, its embedding table in host memory, its geometry and stop ids.

    Read-only after opening: any thread may use it, and any number of caches and drafters may share it; each keeps it
    alive, also when it is closed. Memory: ``config.weight_bytes`` on the device; the file itself is mapped.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str,
        layers: tuple[int, int] | range | None,
        *,
        n_threads: int,
        load_output: bool,
        embedding: EmbeddingPlace,
        pack_weights: bool,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self._path = Path(path)
        options = ffi.new("dflash_target_options *")
        lib.dflash_target_options_init(options)
        device_text = c_text("device", device)
        options.device = device_text
        options.n_threads = as_integer("n_threads", n_threads, 0)
        options.load_output = load_output
        options.embedding_on_device = as_choice("embedding", embedding, EmbeddingPlace) == "device"
        options.pack_weights = as_flag("pack_weights", pack_weights)
        if (bounds := as_layers("layers", layers)) is not None:
            options.layer_begin, options.layer_end = bounds
        name = c_text("path", path)
        out = ffi.new("dflash_target_model **")
        with ProgressCall(progress) as call, native_call() as err:
            options.progress, options.user = call.function, call.user
            call.check(lib.dflash_target_model_open(out, name, options, err), err, "target_model_open")
        self._adopt(out[0], lib.dflash_target_model_free)
        self._read_info()
        self._metadata: dict[str, GgufValue] | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        layers: tuple[int, int] | range | None = None,
        *,
        n_threads: int = 0,
        load_output: bool = True,
        embedding: EmbeddingPlace = "device",
        pack_weights: bool = True,
        progress: Callable[[Progress], object] | None = None,
    ) -> Self:
        """Load a GGUF file of architecture ``qwen35`` or ``qwen35moe``.

        Args:
            path: the file, or any part of a split one; None: the built-in model.
            device: "cpu", "auto" (the first GPU, else the CPU), "cuda", "cuda:1", or a name that devices() reports.
            layers: (begin, end) or a range of the layers to load; None: all.
            n_threads: CPU threads; 0: one per hardware thread, up to 16.
            load_output: False leaves out the output norm and head.
            embedding: "device" keeps the embedding table beside the layers too, "host" saves that memory.
            pack_weights: on a CPU, copy quantised matrices into the layout that it multiplies by fastest, where it has
                one; a drafter's too. False saves that memory and computes from the mapped file.
            progress: called with thousandths of the weights, on this thread; raising from it stops the call.

        Raises:
            NotFoundError: no such file or device.
            FormatError: the file is damaged; UnsupportedModelError: sound, but of a kind that pydflash does not run.
            OutOfMemoryError: the weights do not fit; InvalidArgumentError: an option is outside its limits.
        """
        return cls(
            builtin.target_path() if path is None else path,
            device,
            layers,
            n_threads=n_threads,
            load_output=load_output,
            embedding=embedding,
            pack_weights=pack_weights,
            progress=progress,
        )

    def _read_info(self) -> None:
        info = ffi.new("dflash_target_info *")
        n, recurrent = ffi.new("int64_t *"), ffi.new("int32_t *")
        kinds: list[LayerKind] = []
        with self._use() as (ptr, err):
            check(lib.dflash_target_model_info(ptr, info, err), err, "target_model_info")
            for layer in range(info.n_layer):
                check(lib.dflash_target_model_layer_kind(ptr, layer, recurrent, err), err, "target_model_layer_kind")
                kinds.append("recurrent" if recurrent[0] else "attention")
            check(lib.dflash_target_model_stop_ids(ptr, NULL, 0, n, err), err, "target_model_stop_ids")
            ids = ffi.new("int32_t[]", n[0])
            check(lib.dflash_target_model_stop_ids(ptr, ids, len(ids), n, err), err, "target_model_stop_ids")
        self._stop_ids = frozenset(ffi.unpack(ids, len(ids)))
        self._device = text_of(info.device)
        self._digest = text_of(info.digest)
        self._config = TargetConfig(
            architecture=text_of(info.architecture),
            name=text_of(info.name),
            layer_kinds=tuple(kinds),
            is_moe=bool(info.is_moe),
            has_output=bool(info.has_output),
            mask_token_id=info.mask_token_id if info.mask_token_id >= 0 else None,
            **{name: getattr(info, name) for name in _INTEGERS},
        )

    def _facts(self) -> str:
        c = self._config
        part = "" if (c.layer_begin, c.layer_end) == (0, c.n_layer) else f" [{c.layer_begin}, {c.layer_end}) of"
        where = f"{c.weight_bytes / 2**20:.1f} MiB on {self._device}"
        return f"{c.name or self._path.name!r}: {c.architecture},{part} {c.n_layer} layers, {where}"

    @property
    def path(self) -> Path:
        """The file it was read from."""
        return self._path

    @property
    def config(self) -> TargetConfig:
        """Geometry."""
        return self._config

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""
        return self._config.n_vocab

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn; may be empty."""
        return self._stop_ids

    @property
    def device(self) -> str:
        """Name of the device that holds the weights."""
        return self._device

    @property
    def digest(self) -> str:
        """Hexadecimal digits that identify the content of the file; not meant against deliberate collisions."""
        return self._digest

    @property
    def metadata(self) -> dict[str, GgufValue]:
        """All keys of the file, read on first use; see GgufFile.metadata."""
        if self._metadata is None:
            with GgufFile.open(self._path) as file:
                self._metadata = file.metadata
        return self._metadata

    def embed(self, ids: TokenIds) -> FloatArray:
        """Rows of the embedding table for ids [n], looked up on the host: float32 [n, n_embd].

        Raises:
            InvalidArgumentError: an id is outside the vocabulary.
        """
        tokens = as_ids(ids)
        rows = np.empty((len(tokens), self._config.n_embd), np.float32)
        c_ids, c_rows = as_c_array(tokens, "int32_t[]"), as_c_array(rows, "float[]", writable=True)
        with self._use() as (ptr, err):
            check(lib.dflash_target_model_embed(ptr, c_ids, len(tokens), c_rows, err), err, "target_model_embed")
        return rows

    def default_capture_layers(self, n_taps: int = 5) -> tuple[int, ...]:
        """The layers whose outputs are features when no drafter names them: evenly spread, at most n_taps.

        Raises:
            InvalidArgumentError: unless 1 <= n_taps <= n_layer.
        """
        n_taps = as_integer("n_taps", n_taps, 1)
        n = ffi.new("int64_t *")
        with self._use() as (ptr, err):
            operation = "target_model_default_capture"
            check(lib.dflash_target_model_default_capture(ptr, n_taps, NULL, 0, n, err), err, operation)
            ids = ffi.new("int32_t[]", n[0])
            check(lib.dflash_target_model_default_capture(ptr, n_taps, ids, len(ids), n, err), err, operation)
        return tuple(ffi.unpack(ids, len(ids)))
