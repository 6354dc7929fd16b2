"""A Hugging Face drafter folder -> a GGUF file in llama.cpp's ``dflash`` form.

The tokenizer comes from the target's file, because llama.cpp wants one in the drafter's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import gguf
import numpy as np
from gguf.quants import quantize

from pydflash.draft_folder import DraftFolderConfig, read_draft_config, read_draft_tensors
from pydflash.errors import InvalidArgumentError, NotFoundError, UnsupportedModelError
from pydflash.gguf_file import GgufFile
from pydflash.results import Progress

DraftType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Storage of a drafter's matrices; vectors are always f32."""

_ARCHITECTURE: Final = "dflash"
_TYPES: Final = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_NAMES: Final = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
_BLOCK_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
_LARGEST_F16: Final = 65504.0


@dataclass(frozen=True, slots=True)
class ConvertedDraft:
    """What was written: the file, its size, and how many tensors of each type it holds."""

    path: Path
    n_bytes: int
    types: dict[str, int]


def convert_draft(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: DraftType = "bf16",
    *,
    progress: Callable[[Progress], object] | None = None,
) -> ConvertedDraft:
    """Write a drafter as one GGUF file.

    Args:
        folder: config.json and .safetensors files.
        out: the file to make; it must not exist.
        target: GGUF file of the model that the drafter was trained for; only its metadata is read.
        dtype: of the matrices. One whose rows are no multiple of 32 is stored as f16 where a block type is asked for.
        progress: called after each tensor, in bytes; raising from it stops, and nothing is left behind.

    Raises:
        InvalidArgumentError: ``out`` exists, ``folder`` is no drafter's folder, or the type is unknown.
        FormatError, UnsupportedModelError: the folder cannot be used, or this form cannot express it.
        NotFoundError: the folder has no .safetensors file, or there is no target.
    """
    folder, out = Path(folder), Path(out)
    if dtype not in get_args(DraftType):
        raise InvalidArgumentError("dtype", dtype, "one of " + ", ".join(get_args(DraftType)))
    if out.exists():
        raise InvalidArgumentError("out", str(out), "a file that does not exist yet")
    config = read_draft_config(folder)
    partial = out.with_name(out.name + ".partial")
    writer = gguf.GGUFWriter(partial, _ARCHITECTURE)
    try:
        _add_keys(writer, config, folder.resolve().name, dtype)
        _add_tokenizer(writer, Path(target), config)
        types = _add_tensors(writer, folder, dtype, progress)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return ConvertedDraft(out, out.stat().st_size, types)


def _add_keys(writer: gguf.GGUFWriter, config: DraftFolderConfig, name: str, dtype: DraftType) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_TYPES[dtype][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.n_layer)
    if config.max_positions:
        writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    _add_rope(writer, config)
    widths = sorted({window for window in config.windows if window})
    if len(widths) > 1:
        raise UnsupportedModelError(f"layers with windows of {widths}: this form has one width for all")
    if widths:
        writer.add_sliding_window(widths[0])
        writer.add_sliding_window_pattern([window > 0 for window in config.windows])
    if config.causal is not None:
        writer.add_causal_attention(config.causal)
    writer.add_uint32(f"{_ARCHITECTURE}.block_size", config.block_size)
    # Layer inputs are counted here: the output of layer i is the input of layer i + 1.
    writer.add_array(f"{_ARCHITECTURE}.target_layers", [layer + 1 for layer in config.target_layer_ids])
    for key, value, neutral in (
        ("embedding_scale", config.embedding_scale, 1.0),
        ("logit_scale", config.logit_scale, 1.0),
        ("final_logit_softcapping", config.final_logit_softcapping, 0.0),
    ):
        if value != neutral:
            writer.add_float32(f"{_ARCHITECTURE}.{key}", value)
    if config.sample_from_anchor or config.is_dspark:
        writer.add_bool(f"{_ARCHITECTURE}.sample_from_anchor", config.sample_from_anchor)
    if config.selector_rank:
        writer.add_uint32(f"{_ARCHITECTURE}.conv_kernel_size", config.conv_kernel)
        writer.add_uint32(f"{_ARCHITECTURE}.conv_group_size", config.conv_group)
        writer.add_uint32(f"{_ARCHITECTURE}.selector_rank", config.selector_rank)
        writer.add_uint32(f"{_ARCHITECTURE}.selector_top_k", config.selector_top_k)


def _add_rope(writer: gguf.GGUFWriter, config: DraftFolderConfig) -> None:
    rope = config.rope
    writer.add_rope_freq_base(rope.theta)
    # The target has positions on several axes; with all of them equal, one axis does the same.
    writer.add_rope_dimension_sections([config.head_dim // 2, 0, 0, 0])
    if rope.kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.n_ctx_orig)
        writer.add_rope_scaling_attn_factors(rope.attn_factor)
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)


def _add_tokenizer(writer: gguf.GGUFWriter, path: Path, config: DraftFolderConfig) -> None:
    """Copy the tokenizer of a file, value types included; the drafter's own mask token goes in."""
    mask_key = "tokenizer.ggml.mask_token_id"
    with GgufFile.open(path) as source:
        for key, value in source.metadata.items():
            if not key.startswith("tokenizer.") or key == mask_key:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.add_uint32(mask_key, config.mask_token_id)


def _add_tensors(
    writer: gguf.GGUFWriter, folder: Path, dtype: DraftType, progress: Callable[[Progress], object] | None
) -> dict[str, int]:
    types: dict[str, int] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotFoundError(f"{folder}: no .safetensors file in this folder")
    total = sum(path.stat().st_size for path in files)
    done = 0
    for path in files:
        for name, values in read_draft_tensors(path):
            if (stem := name.removeprefix("model.")) in ("d2t", "t2d"):
                if stem == "d2t":  # stored as distances; t2d says nothing that it does not
                    ids = values.astype(np.int64) + np.arange(values.size, dtype=np.int64)
                    writer.add_tensor("d2t", ids, raw_dtype=gguf.GGMLQuantizationType.I64)
                    types["i64"] = 1
                continue
            wanted, _ = _TYPES[dtype if values.ndim == 2 else "f32"]
            block, _ = gguf.GGML_QUANT_SIZES[wanted]
            if values.shape[-1] % block:
                wanted = gguf.GGMLQuantizationType.F16
            if wanted == gguf.GGMLQuantizationType.F16 and not np.abs(values).max(initial=0) <= _LARGEST_F16:
                largest = np.abs(values).max()
                raise UnsupportedModelError(f"tensor {name} holds {largest:g}, f16 ends at {_LARGEST_F16:g}")
            writer.add_tensor(_name_of(name), quantize(values, wanted), raw_dtype=wanted)
            types[wanted.name.lower()] = types.get(wanted.name.lower(), 0) + 1
            done = min(total, done + values.size * 2)
            if progress is not None:
                progress(Progress(done, total))
    return types


def _name_of(name: str) -> str:
    suffix = "bias" if name.endswith("confidence_head.proj.bias") else "weight"
    stem = name.removeprefix("model.").removesuffix(f".{suffix}")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", stem):
        short = _BLOCK_NAMES.get(match[2])
        stem = f"blk.{match[1]}.{short}" if short else ""
    else:
        stem = _NAMES.get(stem, "")
    if not stem:
        raise UnsupportedModelError(f"tensor {name} is not part of a DFlash drafter that this version runs")
    return stem if stem.endswith("_conv_base") else f"{stem}.{suffix}"
