"""DraftModel: the weights of a DFlash drafter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pydflash import builtin
from pydflash._ffi import NULL, c_text, check, ffi, lib, text_of
from pydflash._handle import NativeHandle, use
from pydflash.options import DraftWeights, as_choice
from pydflash.target_model import TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeads:
    """What a drafter has beyond a plain DFlash network; 0 and False: not there.

    Attributes:
        n_vocab: tokens that it proposes from; fewer than the target's with a reduced vocabulary.
        conv_kernel, conv_group: DFlash2: taps of its convolutions along the block, channels that share a dynamic tap.
        selector_rank, selector_top_k: DFlash2: width of its codebooks, candidates that it chooses from.
        markov_rank: DSpark: width of the head that looks at the token before.
        has_confidence: DSpark: a head says how likely each proposal is right.
    """

    n_vocab: int
    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    markov_rank: int
    has_confidence: bool

    @property
    def says_chances(self) -> bool:
        """The drafter says for each proposal how likely it is right."""
        return self.selector_rank > 0 or self.markov_rank > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Geometry of a drafter, the same whatever form its file has.

    Attributes:
        form: of the file: "huggingface", "llama.cpp" or "lucebox".
        n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim: of its blocks.
        block_size: rows of a block, the token at hand and masks; n_proposals: tokens it proposes.
        mask_token_id: what stands in the rows of a block to be filled.
        n_taps: captured target layers; target_layer_ids names them, in the order of a feature row.
        windows: context rows that each layer sees; 0: all.
        causal: for each layer, True if rows of a block see only earlier rows of it.
        sample_from_anchor: True if row 0 of a block also gives a proposal.
        has_own_head: False if the target's output head is used.
        rope_theta, rope_freq_scale, rope_ext_factor, rope_attn_factor, rope_n_ctx_orig: of its rotary positions.
        rms_eps, embedding_scale, logit_scale: as in the file; final_logit_softcapping: 0 is off.
        weight_bytes: memory of the weights on the device.
        heads: what it has beyond a plain network.
    """

    form: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    block_size: int
    n_proposals: int
    mask_token_id: int
    n_taps: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    sample_from_anchor: bool
    has_own_head: bool
    rope_theta: float
    rope_freq_scale: float
    rope_ext_factor: float
    rope_attn_factor: float
    rope_n_ctx_orig: int
    rms_eps: float
    embedding_scale: float
    logit_scale: float
    final_logit_softcapping: float
    weight_bytes: int
    heads: DraftHeads


_NUMBERS: Final = (
    *("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "head_dim", "block_size", "n_proposals", "mask_token_id"),
    *("n_taps", "rope_theta", "rope_freq_scale", "rope_ext_factor", "rope_attn_factor", "rope_n_ctx_orig", "rms_eps"),
    *("embedding_scale", "logit_scale", "final_logit_softcapping", "weight_bytes"),
)


_HEAD_NUMBERS: Final = ("n_vocab", "conv_kernel", "conv_group", "selector_rank", "selector_top_k", "markov_rank")


class DraftModel(NativeHandle):
    """Weights of a drafter on one device, checked against the target it drafts for.

    Read-only after opening: any thread may use it, and any number of contexts may share it. It keeps its target alive,
    whose embedding table, and often output head, it uses. Memory: ``config.weight_bytes``.
    """

    def __init__(
        self, path: str | os.PathLike[str], target: TargetModel, device: str | None, weights: DraftWeights
    ) -> None:
        self._path = Path(path)
        self._target = target
        name = c_text("path", path)
        on = c_text("device", device) if device is not None else NULL
        stored = c_text("weights", as_choice("weights", weights, DraftWeights))
        out = ffi.new("dflash_draft_model **")
        with use(target) as (target_ptr, err):
            check(lib.dflash_draft_model_open(out, name, on, stored, target_ptr, err), err, "draft_model_open")
        self._adopt(out[0], lib.dflash_draft_model_free, target)
        info, heads = ffi.new("dflash_draft_info *"), ffi.new("dflash_draft_heads *")
        with self._use() as (ptr, err):
            check(lib.dflash_draft_model_info(ptr, info, err), err, "draft_model_info")
            check(lib.dflash_draft_model_heads(ptr, heads, err), err, "draft_model_heads")
        self._digest = text_of(info.digest)
        self._device = text_of(info.device)
        shown = min(info.n_layer, len(info.windows))
        self._config = DraftConfig(
            form=text_of(info.form),
            target_layer_ids=tuple(info.target_layer_ids[0 : info.n_taps]),
            windows=tuple(info.windows[0:shown]),
            causal=tuple(bool(flag) for flag in info.causal[0:shown]),
            sample_from_anchor=bool(info.sample_from_anchor),
            has_own_head=bool(info.has_own_head),
            heads=DraftHeads(
                has_confidence=bool(heads.has_confidence), **{name: getattr(heads, name) for name in _HEAD_NUMBERS}
            ),
            **{name: getattr(info, name) for name in _NUMBERS},
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        target: TargetModel,
        device: str | None = None,
        *,
        weights: DraftWeights = "file",
    ) -> Self:
        """Load a drafter for a target.

        Args:
            path: a Hugging Face folder, or a GGUF file in llama.cpp's or Lucebox's form; None: the built-in drafter,
                which belongs to the built-in target.
            target: the model it drafts for.
            device: where its weights go; None: where the target's are.
            weights: "file" keeps the matrices as they are; another type stores those that are not quantised as that.

        Raises:
            NotFoundError: no such file or device.
            FormatError: the file is damaged; UnsupportedModelError: it asks for something that pydflash cannot do.
            SnapshotMismatchError: it was made for another target.
            OutOfMemoryError: the weights do not fit.
        """
        return cls(builtin.draft_path() if path is None else path, target, device, weights)

    def _facts(self) -> str:
        c = self._config
        kind = "DFlash2, " if c.heads.selector_rank else "DSpark, " if c.heads.markov_rank else ""
        return (
            f"{self._path.name!r}: {c.form}, {kind}{c.n_layer} layers, blocks of {c.block_size}, features of layers "
            f"{', '.join(map(str, c.target_layer_ids))}, {c.weight_bytes / 2**20:.1f} MiB on {self._device}"
        )

    @property
    def path(self) -> Path:
        """What it was read from."""
        return self._path

    @property
    def target(self) -> TargetModel:
        """The model it drafts for."""
        return self._target

    @property
    def config(self) -> DraftConfig:
        """Geometry."""
        return self._config

    @property
    def device(self) -> str:
        """Name of the device that holds the weights."""
        return self._device

    @property
    def digest(self) -> str:
        """Identifies its content."""
        return self._digest
