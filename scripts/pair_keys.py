"""Metadata of made-up model pairs: a vocabulary that every loader accepts, and the keys of target and drafter."""

from dataclasses import dataclass
from pathlib import Path

import gguf
from pair_sizes import DraftSize, TargetSize

_EPS = 1e-6
_ROPE_THETA = 1e7
_MASK_TOKEN, _TURN_END, _END_OF_TEXT, _TURN_START = 248070, 248046, 248044, 248045
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Byte tokens, one merge, fillers, and special tokens: at their usual ids, or at the end if there are fewer."""

    tokens: list[str]
    types: list[int]
    mask: int
    turn_end: int
    end_of_text: int
    favourite: int

    @classmethod
    def of(cls, n_vocab: int) -> "Vocabulary":
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
        tokens = [*alphabet, "th"] + [f"w{i}" for i in range(len(alphabet) + 1, n_vocab)]
        shift = min(0, n_vocab - 1 - _MASK_TOKEN)
        named = {"<|endoftext|>": _END_OF_TEXT, "<|im_start|>": _TURN_START, "<|im_end|>": _TURN_END}
        named["<|mask|>"] = _MASK_TOKEN
        types = [int(gguf.TokenType.NORMAL)] * n_vocab
        for text, token_id in named.items():
            tokens[token_id + shift] = text
            types[token_id + shift] = int(gguf.TokenType.CONTROL)
        ids = {text: token_id + shift for text, token_id in named.items()}
        return cls(tokens, types, ids["<|mask|>"], ids["<|im_end|>"], ids["<|endoftext|>"], tokens.index("x"))

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen35")
        # With the element type named, the writer does not look it up for a quarter of a million entries.
        array = gguf.GGUFValueType.ARRAY
        writer.add_key_value(gguf.Keys.Tokenizer.LIST, self.tokens, array, gguf.GGUFValueType.STRING)
        writer.add_key_value(gguf.Keys.Tokenizer.TOKEN_TYPE, self.types, array, gguf.GGUFValueType.INT32)
        writer.add_token_merges(["t h"])
        writer.add_bos_token_id(self.end_of_text)
        writer.add_eos_token_id(self.turn_end)
        writer.add_pad_token_id(self.end_of_text)
        writer.add_mask_token_id(self.mask)
        writer.add_add_bos_token(value=False)
        writer.add_chat_template(_CHAT_TEMPLATE)


def target_keys(path: Path, label: str, size: TargetSize, vocabulary: Vocabulary, more_bits: bool) -> gguf.GGUFWriter:
    k = gguf.GGUFWriter(path, size.architecture)
    k.add_type("model")
    k.add_name(f"Random {label}")
    k.add_block_count(size.n_layer)
    k.add_context_length(size.n_ctx)
    k.add_embedding_length(size.n_embd)
    if size.n_expert:
        k.add_expert_count(size.n_expert)
        k.add_expert_used_count(size.n_expert_used)
        k.add_expert_feed_forward_length(size.n_ff_exp)
        k.add_expert_shared_feed_forward_length(size.n_ff_exp)
    else:
        k.add_feed_forward_length(size.n_ff)
    k.add_head_count(size.n_head)
    k.add_head_count_kv(size.n_head_kv)
    k.add_key_length(size.head_dim)
    k.add_value_length(size.head_dim)
    k.add_layer_norm_rms_eps(_EPS)
    k.add_rope_freq_base(_ROPE_THETA)
    k.add_rope_dimension_count(size.n_rot)
    k.add_rope_dimension_sections(size.rope_sections)
    k.add_ssm_conv_kernel(size.conv)
    k.add_ssm_state_size(size.state)
    k.add_ssm_group_count(size.n_group)
    k.add_ssm_time_step_rank(size.n_value)
    k.add_ssm_inner_size(size.inner)
    k.add_full_attention_interval(size.interval)
    kind = gguf.LlamaFileType.MOSTLY_Q4_K_M if more_bits else gguf.LlamaFileType.MOSTLY_Q4_K_S
    k.add_file_type(int(kind))
    k.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary.add_to(k)
    return k


def draft_keys(
    path: Path, label: str, target: TargetSize, draft: DraftSize, window: int, vocabulary: Vocabulary
) -> gguf.GGUFWriter:
    k = gguf.GGUFWriter(path, "dflash")
    k.add_type("model")
    k.add_name(f"Random {label} DFlash")
    k.add_block_count(draft.n_layer)
    k.add_context_length(target.n_ctx)
    k.add_embedding_length(target.n_embd)
    k.add_feed_forward_length(draft.n_ff)
    k.add_head_count(draft.n_head)
    k.add_head_count_kv(draft.n_head_kv)
    k.add_key_length(draft.head_dim)
    k.add_value_length(draft.head_dim)
    k.add_layer_norm_rms_eps(_EPS)
    k.add_rope_freq_base(_ROPE_THETA)
    k.add_rope_dimension_sections([draft.head_dim // 2, 0, 0, 0])
    k.add_uint32("dflash.block_size", draft.block_size)
    k.add_array("dflash.target_layers", [tap + 1 for tap in draft.taps(target.n_layer)])  # counted by layer inputs
    if window:
        k.add_sliding_window(window)
        k.add_array("dflash.attention.sliding_window_pattern", [i + 1 < draft.n_layer for i in range(draft.n_layer)])
    k.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q8_0))
    k.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary.add_to(k)
    return k
