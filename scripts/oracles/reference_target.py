#!/usr/bin/env python3
"""Golden logits of a target model, computed by transformers in float32: one full pass, no cache.

    python reference_target.py FOLDER OUT.npz [--weights FILE.gguf] [--length 96] [--all-f16]

FOLDER is a Hugging Face folder. With --weights the numbers of that GGUF (any type, widened to f32) replace the
folder's, which gives the truth for a quantised file. OUT.npz holds what tests/support/goldens.py describes as
TargetGolden, or with --all-f16 every logit as float16 (ids0, logits0, ids1, ...).
"""

import argparse
import pathlib
import sys
from typing import Any

import numpy as np
import torch
from oracle_inputs import sample_columns, token_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
from support.models import read_tensors

# GGUF name and the part of the transformers name that it stands for; {} is the layer
_PLAIN = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def load_target(folder: str, weights: pathlib.Path | None = None) -> Any:
    """A float32 transformers model, with the numbers of a GGUF of the same dense model if one is given."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        _take_weights(model, read_tensors(weights))
    return model


@torch.no_grad()
def _take_weights(model: Any, tensors: dict[str, np.ndarray]) -> None:
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not model.config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(model.config.num_hidden_layers):
        for short, full in _PLAIN.items():
            if f"blk.{layer}.{short}" in tensors:
                names[f"blk.{layer}.{short}"] = f"model.layers.{layer}.{full}"
    parameters = dict(model.named_parameters())
    if set(names.values()) != set(parameters):
        raise SystemExit(f"weights without a counterpart: {sorted(set(parameters) ^ set(names.values()))}")
    for source, name in names.items():
        value = _undo_conversion(name, tensors[source], model.config)
        parameters[name].copy_(torch.from_numpy(value.reshape(parameters[name].shape)))


def _undo_conversion(name: str, value: np.ndarray, config: Any) -> np.ndarray:
    """Back from GGUF conventions: norms with their offset, A = -exp(A_log), value heads tiled over key heads."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return value - 1.0
    if "linear_attn" not in name:
        return value
    if name.endswith("A_log"):
        value = np.log(-value)
    n_k, n_v, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    # the file's value head h stands at position (h mod n_k) * (n_v / n_k) + h // n_k in the network
    order = np.arange(n_v).reshape(n_v // n_k, n_k).T.ravel()
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return value[order]
    channels = (order[:, None] * size + np.arange(size)).ravel()
    if name.endswith("in_proj_z.weight"):
        return value[channels]
    if name.endswith("out_proj.weight"):
        return value[:, channels]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        n_qk = 2 * n_k * config.linear_key_head_dim
        return np.concatenate([value[:n_qk], value[n_qk:][channels]])
    return value


@torch.inference_mode()
def run_target(model: Any, ids: Any) -> Any:
    """Full pass over one sequence without a cache; `.logits[0]` and `.hidden_states`."""
    return model(torch.tensor([[int(i) for i in ids]]), output_hidden_states=True, use_cache=False)


def thin_out(logits: np.ndarray, columns: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a SparseLogits golden for logits [..., n_vocab]."""
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :8]
    return {
        "argmax": logits.argmax(-1).astype(np.int32),
        "top_ids": order.astype(np.int32),
        "top_logits": np.take_along_axis(logits, order, axis=-1).astype(np.float32),
        "columns": columns,
        "column_logits": logits[..., columns].astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--weights", type=pathlib.Path)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--all-f16", action="store_true")
    args = parser.parse_args()
    model = load_target(args.folder, args.weights)
    n_vocab = model.config.vocab_size
    ids = token_rows(AutoTokenizer.from_pretrained(args.folder), n_vocab, args.length)
    logits = np.stack([run_target(model, row).logits[0].numpy() for row in ids])
    if args.all_f16:
        arrays = {f"ids{i}": row for i, row in enumerate(ids)}
        arrays |= {f"logits{i}": row.astype(np.float16) for i, row in enumerate(logits)}
    else:
        arrays = {"ids": ids, **thin_out(logits, sample_columns(n_vocab))}
    np.savez_compressed(args.out, **arrays)
    size = args.out.stat().st_size
    print(f"{args.out}: {size} bytes, {ids.shape[0]} x {ids.shape[1]} ids, logit deviation {logits.std():.2f}")


if __name__ == "__main__":
    main()
