#!/usr/bin/env python3
"""Write a tiny seeded random Qwen3.5-style target model as a Hugging Face folder.

    python make_tiny_target.py FOLDER --preset nano [--seed 0] [--mtp]

Each tensor's scale is chosen so that activations stay near one and logits have a standard deviation near three: a
forgotten norm offset or a swapped head then changes the first logit visibly. All numbers are exact in bfloat16, so a
bf16 file holds the same model as an f32 file.

--mtp appends one random multi-token-prediction block, as published checkpoints have; transformers ignores it.
"""

import argparse
import json
import math
import pathlib
from typing import Any

import numpy as np
import torch
from oracle_inputs import named_rng
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

# The published pre-tokenizer pattern of the Qwen3.5 family.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END, "<think>", "</think>"]
UNUSED_IDS = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NANO: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
    "mrope_section": [2, 1, 1],
}
MICRO = NANO | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
PRESETS: dict[str, dict[str, Any]] = {
    "nano": NANO,
    "micro": MICRO,
    # two full-attention layers, found by an interval other than the usual one
    "dense": MICRO | {"full_attention_interval": 2, "head_dim": 64, "mrope_section": [3, 3, 2]},
    # head sizes of the published checkpoints, tied output head, an uneven key/value head ratio
    "hd256": NANO
    | {
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "head_dim": 256,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
        "mrope_section": [11, 11, 10],
    },
    # no value-head reordering in the file; a vocabulary that no block size divides
    "equalkv": NANO | {"vocab_size": 397, "linear_num_key_heads": 4},
    # every row a multiple of 256, which K-quants need
    "wide": NANO
    | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mrope_section": [3, 3, 2],
    },
    "moe": NANO
    | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def train_tokenizer(folder: pathlib.Path, n_vocab: int) -> Tokenizer:
    """Byte-level BPE on corpus.txt, with unused ids at the end as the published vocabularies have."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(SPECIAL_TOKENS) - UNUSED_IDS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = pathlib.Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([corpus], trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer


def build(preset: str, tokenizer: Tokenizer) -> torch.nn.Module:
    sizes = dict(PRESETS[preset])
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": sizes.pop("mrope_section"),
    }
    ids = {
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    if "num_experts" in sizes:
        del sizes["intermediate_size"]
        moe = Qwen3_5MoeTextConfig(**sizes, **ids, rope_parameters=rope, max_position_embeddings=4096)
        return Qwen3_5MoeForCausalLM(moe)
    config = Qwen3_5TextConfig(**sizes, **ids, rope_parameters=rope, max_position_embeddings=4096)
    return Qwen3_5ForCausalLM(config)


def draw(name: str, shape: tuple[int, ...], seed: int, tied: bool = False) -> torch.Tensor:
    """One tensor, drawn by the part it plays in the network; values exact in bfloat16."""
    rng = named_rng(name, seed)
    w = rng.standard_normal(shape)
    if name.endswith("A_log"):
        w = np.log(rng.uniform(0.05, 4.0, shape))  # decay rates
    elif name.endswith("dt_bias"):
        w -= 1.0
    elif name.endswith("linear_attn.norm.weight"):
        w = 1.0 + 0.3 * w
    elif name.endswith("norm.weight") or "pre_fc_norm" in name:
        w *= 0.3  # the network adds one
    elif "conv1d" in name:
        w *= 0.6
    elif "embed_tokens" in name:
        w *= 3.0 / math.sqrt(shape[-1]) if tied else 1.0
    elif "lm_head" in name:
        w *= 3.0 / math.sqrt(shape[-1])
    else:
        w *= 1.5 / math.sqrt(shape[-1])
    return torch.from_numpy(w).to(torch.bfloat16).to(torch.float32)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int, first_special: int) -> None:
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, tuple(parameter.shape), seed, tied))
        if "lm_head" in name:
            parameter[first_special:] = 0.0  # greedy text must not meet an end token by chance


def append_mtp_block(folder: pathlib.Path, config: Any, seed: int) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    full_layer = f"model.layers.{config.num_hidden_layers - 1}."
    for name in [n for n in tensors if n.startswith(full_layer)]:
        new = name.replace(full_layer, "mtp.layers.0.")
        tensors[new] = draw(new, tuple(tensors[name].shape), seed)
    n = config.hidden_size
    outer = {"fc": (n, 2 * n), "norm": (n,), "pre_fc_norm_embedding": (n,), "pre_fc_norm_hidden": (n,)}
    for part, shape in outer.items():
        tensors[f"mtp.{part}.weight"] = draw(f"mtp.{part}.weight", shape, seed)
    save_file(tensors, path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="nano")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtp", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.folder, PRESETS[args.preset]["vocab_size"])
    model = build(args.preset, tokenizer).float().eval()
    fill(model, args.seed, tokenizer.token_to_id(END_OF_TEXT))
    model.save_pretrained(args.folder)
    # llama.cpp's converter needs two keys that transformers does not write
    path = args.folder / "config.json"
    config = json.loads(path.read_text())
    config["full_attention_interval"] = PRESETS[args.preset]["full_attention_interval"]
    if args.mtp:
        append_mtp_block(args.folder, model.config, args.seed)
        config["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(config, indent=1))
    n_weights = sum(p.numel() for p in model.parameters())
    print(f"{args.folder}: {args.preset}, {n_weights / 1e6:.2f} M weights, {model.config.layer_types}")


if __name__ == "__main__":
    main()
