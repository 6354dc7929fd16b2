#!/usr/bin/env python3
"""Write a Hugging Face drafter as a GGUF in the Lucebox dialect: f16 matrices, f32 norms, no tokenizer.

    python write_lucebox_draft.py FOLDER OUT.gguf [--arch qwen35-dflash-draft|dflash-draft] [--old-names]

The dialect stores the tapped layers as in the config (index of the layer whose output is read) and knows two spellings
of some tensor names; --old-names writes the other one.
"""

import argparse
import json
import pathlib
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

LAYER_NAMES = {
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
}


def gguf_name(name: str, old_names: bool) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem == "norm":
        return f"output_norm.{suffix}"
    if stem in ("fc", "hidden_norm"):
        return f"dflash{'_' if old_names else '.'}{stem}.{suffix}"
    _, layer, part = stem.split(".", 2)
    short = LAYER_NAMES[part]
    if old_names and short == "ffn_norm":
        short = "post_attention_norm"
    return f"blk.{layer}.{short}.{suffix}"


def write_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    dflash = config["dflash_config"]
    writer.add_name("tiny drafter")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    if config["use_sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    prefix = f"{writer.arch}.dflash."
    writer.add_uint32(prefix + "block_size", config["block_size"])
    writer.add_uint32(prefix + "n_target_layers", len(dflash["target_layer_ids"]))
    writer.add_uint32(prefix + "mask_token_id", dflash["mask_token_id"])
    ids = gguf.GGUFValueType
    writer.add_key_value(prefix + "target_layer_ids", dflash["target_layer_ids"], ids.ARRAY, sub_type=ids.INT32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--arch", choices=["qwen35-dflash-draft", "dflash-draft"], default="qwen35-dflash-draft")
    parser.add_argument("--old-names", action="store_true")
    args = parser.parse_args()
    writer = gguf.GGUFWriter(args.out, args.arch)
    write_keys(writer, json.loads((args.folder / "config.json").read_text()))
    for name, tensor in sorted(load_file(args.folder / "model.safetensors").items()):
        value = tensor.float().numpy()
        if value.ndim == 2:
            narrow = value.astype(np.float16)
            if not np.array_equal(narrow.astype(np.float32), value):
                raise SystemExit(f"{name} holds numbers that float16 does not")
            value = narrow
        writer.add_tensor(gguf_name(name, args.old_names), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {args.out.stat().st_size} bytes, {args.arch}")


if __name__ == "__main__":
    main()
