#!/usr/bin/env python3
"""Write a tiny seeded DFlash drafter for a target made by make_tiny_target.py, as a Hugging Face folder.

    python make_tiny_draft.py TARGET_FOLDER FOLDER [--size small|large] [--kind dflash|dflash2|dspark] [--layers 2]
        [--window N] [--causal yes|no] [--yarn ORIGINAL_LENGTH] [--draft-vocab N] [--speculators] [--teach STEPS]

The network is the reference package's own class (PyPI `dflash`), so names and shapes are its own. Weights are random;
they are exact in bfloat16 and float16, so every file form holds the same numbers. A random drafter accepts nothing:
--teach trains it on the target's own greedy text after the tiny prompts, until it accepts blocks in part.

--window makes every layer but the last a sliding one, with --all-sliding the last one too; --yarn scales rotary
positions by 4 from ORIGINAL_LENGTH.
--kind dspark has a Markov and a confidence head and proposes from the anchor on. --draft-vocab gives the drafter an
output head of its own over N of the target's tokens. --speculators writes the configuration in that package's form,
which proposes from the masks.
"""

import argparse
import json
import math
import pathlib
from typing import Any

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, extract_context_feature
from draft_heads import CONFIDENCE_BIAS, Heads, as_speculators
from oracle_inputs import named_rng, tiny_prompt_ids
from reference_target import load_target, run_target
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config

SIZES = {
    "small": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64},
    "large": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128},
}
BLOCK_SIZE = 8
MARKOV_RANK = 16
YARN_FACTOR = 4.0


def draft_config(target: Any, args: argparse.Namespace) -> Qwen3Config:
    n_target = target.num_hidden_layers
    dflash: dict[str, Any] = {"mask_token_id": target.vocab_size - 3, "target_layer_ids": [0, n_target - 2]}
    architecture = "DFlashDraftModel"
    if args.kind == "dflash2":
        architecture = "DFlash2DraftModel"
        dflash |= {"conv_kernel_size": 3, "conv_group_size": 32, "selector_rank": 32, "selector_top_k": 4}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000_000.0}
    if args.yarn:
        rope |= {"rope_type": "yarn", "factor": YARN_FACTOR, "original_max_position_embeddings": args.yarn}
    window = args.window or None
    inner = "sliding_attention" if window else "full_attention"
    extra = {} if args.causal is None else {"is_causal": args.causal == "yes"}
    return Qwen3Config(
        **SIZES[args.size],
        architectures=[architecture],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=args.layers,
        layer_types=[inner] * (args.layers - 1) + [inner if args.all_sliding else "full_attention"],
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0 if window else args.layers,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        max_position_embeddings=int(args.yarn * YARN_FACTOR) if args.yarn else 4096,
        tie_word_embeddings=False,
        block_size=BLOCK_SIZE,
        num_target_layers=n_target,
        dflash_config=dflash,
        **extra,
    )


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    for name, parameter in model.named_parameters():
        w = torch.from_numpy(named_rng(name, seed).standard_normal(tuple(parameter.shape)))
        if name.endswith("norm.weight"):
            w = 1.0 + 0.2 * w
        elif name.endswith("base_kernel"):
            w *= 0.2
            w[:, 0] += 1.0  # the tap of the row itself
        elif "kernel_projection" in name:
            w *= 0.1 / math.sqrt(w.shape[-1])
        elif "codebook" in name or "markov" in name:
            w *= 0.5
        elif name.endswith("bias"):
            w[:] = CONFIDENCE_BIAS
        else:
            w *= 1.2 / math.sqrt(w.shape[-1])
        parameter.copy_(w)


@torch.no_grad()
def snap(model: torch.nn.Module) -> None:
    """Round to numbers that bfloat16 and float16 both hold."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(torch.float16).to(torch.float32))


def block_loss(
    model: Any, heads: Heads, target: Any, text: torch.Tensor, features: torch.Tensor, start: int
) -> torch.Tensor:
    """Cross-entropy of one block anchored at `start` against the text that follows it."""
    size, first = model.block_size, heads.first_slot
    tokens = torch.full((1, size), model.mask_token_id)
    tokens[0, 0] = text[start]
    hidden = model(
        target_hidden=features[None, :start],
        noise_embedding=target.get_input_embeddings()(tokens),
        position_ids=torch.arange(start + size)[None],
    )[0, first:]
    logits = model.compute_logits(hidden, heads.output_head(target))
    previous = text[start : start + size - first]
    truth = text[start + 1 : start + 1 + size - first]
    if heads.draft_ids is not None:
        draft_of = torch.full((heads.n_vocab,), -100)
        draft_of[heads.draft_ids] = torch.arange(len(heads.draft_ids))
        truth = draft_of[truth]
    loss = torch.nn.functional.cross_entropy(logits, truth)
    selector = getattr(model, "candidate_selector", None)
    if selector is not None:
        before = selector.predecessor_codebook(previous)
        pair = (before * selector.hidden_projection(hidden)) @ selector.successor_codebook.weight.T
        loss = loss + torch.nn.functional.cross_entropy(logits.detach() + pair, truth)
    if heads.rank:
        logits = logits.detach() + heads.bias(previous)
        loss = loss + torch.nn.functional.cross_entropy(logits, truth)
        right = (logits.argmax(-1) == truth).float()
        trust = heads.confidence(hidden.detach(), previous)
        loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(trust, right)
    return loss


def greedy_texts(target: Any, prompts: list[list[int]]) -> list[list[int]]:
    texts = []
    for ids in prompts:
        text = list(ids)
        while len(text) < len(ids) + 64:
            text.append(int(run_target(target, text).logits[0, -1].argmax()))
        texts.append(text)
    return texts


def teach(
    model: Any, heads: Heads, target: Any, prompts: list[list[int]], greedy: list[list[int]], steps: int
) -> float:
    """Train on blocks of the target's greedy continuations; returns the last loss."""
    texts = []
    for ids, text in zip(prompts, greedy, strict=True):
        hidden_states = run_target(target, text).hidden_states
        features = extract_context_feature(hidden_states, model.target_layer_ids)[0].clone()
        texts.append((len(ids), torch.tensor(text), features))
    optimizer = torch.optim.Adam([*model.parameters(), *heads.parameters()], lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rng = torch.Generator().manual_seed(1)
    last = math.nan
    for step in range(steps):
        n_prompt, text, features = texts[step % len(texts)]
        end = len(text) - model.block_size - (1 - heads.first_slot)
        starts = torch.randint(n_prompt, end, (16,), generator=rng).tolist()
        loss = torch.stack([block_loss(model, heads, target, text, features, s) for s in starts]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        decay.step()
        last = float(loss.detach())
    return last


def draft_vocabulary(size: int, n_vocab: int, greedy: list[list[int]]) -> torch.Tensor:
    """Ids in the target's order: those of the texts as far as there is room, and random ones."""
    used = sorted({token for text in greedy for token in text})[:size]
    others = [int(i) for i in named_rng("draft vocabulary", 1).permutation(n_vocab) if int(i) not in used]
    return torch.tensor(sorted(used + others[: size - len(used)]))


def save(model: Any, heads: Heads, folder: pathlib.Path, speculators: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    # published DFlash 2 files name the codebooks without ".weight"
    tensors = {name.replace("codebook.weight", "codebook"): value for name, value in load_file(path).items()}
    for name, value in heads.saved().items():
        tensors[name] = value.to(torch.bfloat16) if value.is_floating_point() else value
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    settings = folder / "config.json"
    config = json.loads(settings.read_text())
    if heads.rank:
        config["architectures"] = ["Qwen3DSparkModel"]  # saved as the class that holds the rest
    config = as_speculators(config, heads) if speculators else config | heads.settings()
    if heads.saved():
        settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--kind", choices=["dflash", "dflash2", "dspark"], default="dflash")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--all-sliding", action="store_true")
    parser.add_argument("--causal", choices=["yes", "no"])
    parser.add_argument("--yarn", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, default=0)
    parser.add_argument("--speculators", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--teach", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()
    target = load_target(args.target).requires_grad_(False)
    config = draft_config(target.config, args)
    model = (DFlash2DraftModel if args.kind == "dflash2" else DFlashDraftModel)(config).float().eval()
    prompts = tiny_prompt_ids(AutoTokenizer.from_pretrained(args.target))
    greedy = greedy_texts(target, prompts) if args.teach or args.draft_vocab else []
    n_vocab, dspark = target.config.vocab_size, args.kind == "dspark"
    heads = Heads(
        config.hidden_size,
        n_vocab,
        rank=MARKOV_RANK if dspark else 0,
        confidence=dspark,
        anchor_first=dspark and not args.speculators,
        draft_ids=draft_vocabulary(args.draft_vocab, n_vocab, greedy) if args.draft_vocab else None,
    )
    fill(model, args.seed)
    fill(heads, args.seed)
    if heads.draft_ids is not None:
        with torch.no_grad():
            heads.lm_head.weight.copy_(target.lm_head.weight[heads.draft_ids])
    loss = teach(model, heads, target, prompts, greedy, args.teach) if args.teach else math.nan
    snap(model)
    snap(heads)
    save(model, heads, args.folder, args.speculators)
    n_weights = sum(p.numel() for p in [*model.parameters(), *heads.parameters()])
    written = json.loads((args.folder / "config.json").read_text())
    print(f"{args.folder}: {args.kind}, {n_weights} weights, last loss {loss:.3f}, {written['architectures']}")


if __name__ == "__main__":
    main()
