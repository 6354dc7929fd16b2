#!/usr/bin/env python3
"""Golden numbers of a drafter: the network of the reference package (PyPI `dflash`) in float32, with an exact loop.

    python reference_draft.py block TARGET DRAFT OUT.npz --contexts 12,24,40 [--features]
    python reference_draft.py steps TARGET DRAFT OUT.json [--new-tokens 64] [--package-loop]

block: logits of all rows of the block that follows each context length of one fixed sequence (BlockGolden in
tests/support/goldens.py). steps: greedy speculative decoding of the tiny prompts (StepGolden).

The loop keeps no cache. Every step passes the whole prefix through target and drafter, so nothing is rolled back and
the text is the target's own by construction; this is checked against plain greedy decoding all the same. The
package's own loop is no truth for these targets: it crops K/V after a rejection but leaves the recurrent state of the
linear-attention layers as the rejected tokens made it. --package-loop runs it too and prints where its text departs.

Every step drafts a whole block, as the drafter was trained, also where fewer tokens are wanted.
"""

import argparse
import json
import pathlib
import sys
import time
from dataclasses import dataclass
from typing import Any

import dflash.model as reference
import numpy as np
import torch
from draft_heads import as_package, load_heads
from oracle_inputs import sample_columns, tiny_prompt_ids, token_rows
from reference_target import load_target, run_target, thin_out
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config


def load_draft(folder: str, n_vocab: int) -> Any:
    """The package's network, with what else the folder has as its attribute `heads`."""
    path = pathlib.Path(folder)
    config = as_package(json.loads((path / "config.json").read_text()))
    if config.get("architectures") == ["DFlash2DraftModel"]:
        draft = reference.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32)
    else:
        draft = reference.DFlashDraftModel(Qwen3Config(**config)).float()
        names = set(draft.state_dict())
        tensors = load_file(path / "model.safetensors")
        draft.load_state_dict({name: value.float() for name, value in tensors.items() if name in names})
    draft.heads = load_heads(path, n_vocab)
    return draft.eval()


def features_of(draft: Any, hidden_states: Any, length: int) -> torch.Tensor:
    """Captured target rows, float32 [1, length, n_taps * n_embd]."""
    return reference.extract_context_feature(hidden_states, draft.target_layer_ids)[:, :length]


@torch.inference_mode()
def draft_block(target: Any, draft: Any, features: torch.Tensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows and logits [1, block_size, ...] of the block that follows the context `features`."""
    start = features.shape[1]
    tokens = torch.full((1, draft.block_size), draft.mask_token_id)
    tokens[0, 0] = anchor
    hidden = draft(
        target_hidden=features,
        noise_embedding=target.get_input_embeddings()(tokens),
        position_ids=torch.arange(start + draft.block_size)[None],
    )
    return hidden, draft.compute_logits(hidden, draft.heads.output_head(target))


@dataclass(frozen=True)
class Proposal:
    """Proposed ids, the logits [n, draft vocabulary] of their rows, and the confidence in them where there is one."""

    ids: list[int]
    logits: torch.Tensor
    confidence: list[float]


@torch.inference_mode()
def propose(target: Any, draft: Any, features: torch.Tensor, anchor: int) -> Proposal:
    hidden, logits = draft_block(target, draft, features, anchor)
    first = draft.heads.first_slot
    hidden, logits = hidden[:, first:], logits[:, first:]
    if isinstance(draft, reference.DFlash2DraftModel):
        ids = draft.propose(hidden, torch.tensor([anchor]), target.lm_head, 0.0)[0]
        return Proposal(ids[0].tolist(), logits[0], [])
    return Proposal(*draft.heads.walk(hidden[0], logits[0], anchor))


def greedy(target: Any, prompt: list[int], n_new: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + n_new and (len(text) == len(prompt) or text[-1] not in stop_ids):
        text.append(int(run_target(target, text).logits[0, -1].argmax()))
    return text[len(prompt) :]


def decode(target: Any, draft: Any, prompt: list[int], n_new: int, stop_ids: tuple[int, ...] = ()) -> dict[str, Any]:
    """Greedy speculative decoding: new tokens, steps, logits of the first block, and every top-two gap that decided.

    A gap near the rounding of float32 sums would make the golden depend on the machine.
    """
    state = run_target(target, prompt)
    text = [*prompt, int(state.logits[0, -1].argmax())]
    end, steps, first = len(prompt) + n_new, [], None
    gaps = [top_two_gap(state.logits[0, -1:])]
    while len(text) < end and text[-1] not in stop_ids:
        start = len(text) - 1
        proposal = propose(target, draft, features_of(draft, state.hidden_states, start), text[-1])
        ids, logits = proposal.ids, proposal.logits
        first = logits if first is None else first
        state = run_target(target, text + ids)
        choice = state.logits[0, start:].argmax(-1).tolist()
        n_equal = next((i for i, (a, b) in enumerate(zip(ids, choice, strict=False)) if a != b), len(ids))
        new = choice[: n_equal + 1][: end - len(text)]
        cut = next((i + 1 for i, token in enumerate(new) if token in stop_ids), len(new))
        text += new[:cut]
        steps.append((start, ids, cut))
        gaps += [top_two_gap(logits), top_two_gap(state.logits[0, start : start + cut])]
    return {"text": text[len(prompt) :], "steps": steps, "first": first, "gaps": gaps}


def top_two_gap(logits: torch.Tensor) -> float:
    """Smallest distance between the largest and the second logit over the rows."""
    best = logits.topk(2, dim=-1).values
    return float((best[..., 0] - best[..., 1]).min())


def package_loop(target: Any, draft: Any, prompt: list[int], plain: list[int]) -> str:
    reference._cuda_time = time.perf_counter  # noqa: SLF001  its statistics would ask for a GPU
    run = reference.dflash_generate(draft, target, torch.tensor([prompt]), len(plain), None, return_stats=True)
    text = run.output_ids[0, len(prompt) :].tolist()
    departs = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), None)
    return f"the package's own loop departs at {departs}, accepts {run.acceptance_lengths}"


def write_block(target: Any, draft: Any, args: argparse.Namespace) -> None:
    contexts = np.array([int(c) for c in args.contexts.split(",")], dtype=np.int32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    ids = token_rows(tokenizer, target.config.vocab_size, int(contexts.max()) + 1)[1]
    hidden_states = run_target(target, ids).hidden_states
    logits, proposals = [], []
    for c in contexts:
        features = features_of(draft, hidden_states, int(c))
        _, rows = draft_block(target, draft, features, int(ids[c]))
        proposal = propose(target, draft, features, int(ids[c]))
        # The rows that propose, as they are when they do; a row that proposes nothing as the network gives it.
        logits.append(torch.cat([rows[0, : draft.heads.first_slot], proposal.logits]).numpy())
        proposals.append(proposal)
    columns = sample_columns(logits[0].shape[-1])
    arrays = {
        "ids": ids,
        "contexts": contexts,
        "anchors": ids[contexts],
        "mask_id": np.int32(draft.mask_token_id),
        "block_size": np.int32(draft.block_size),
        **thin_out(np.stack(logits), columns),
    }
    if args.proposals:
        arrays["proposals"] = np.array([p.ids for p in proposals], dtype=np.int32)
        arrays["confidence"] = np.array([p.confidence for p in proposals], dtype=np.float32)
    if args.features:
        arrays["features"] = features_of(draft, hidden_states, 40)[0].numpy()
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {args.out.stat().st_size} bytes, contexts {contexts.tolist()}")


def write_steps(target: Any, draft: Any, args: argparse.Namespace) -> None:
    cases = []
    for prompt in tiny_prompt_ids(AutoTokenizer.from_pretrained(args.target)):
        plain = greedy(target, prompt, args.new_tokens)
        run = decode(target, draft, prompt, args.new_tokens)
        if run["text"] != plain:
            raise SystemExit("speculative text differs from greedy text")
        produced = [step[2] for step in run["steps"]]
        gap = min(run["gaps"])
        print(f"{len(prompt)} + {len(plain)} tokens in {len(produced)} steps, smallest gap {gap:.1e}: {produced}")
        if args.package_loop:
            print("  ", package_loop(target, draft, prompt, plain))
        top = run["first"].topk(5, dim=-1)
        values = [[round(v, 5) for v in row] for row in top.values.tolist()]
        first = {"ids": top.indices.tolist(), "logits": values}
        cases.append({"prompt": prompt, "greedy": plain, "steps": run["steps"], "first": first})
    golden = {
        "block_size": draft.block_size,
        "mask": draft.mask_token_id,
        "target_layer_ids": draft.target_layer_ids,
        "cases": cases,
    }
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(f"{args.out}: {args.out.stat().st_size} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in ("block", "steps"):
        sub = modes.add_parser(mode)
        sub.add_argument("target")
        sub.add_argument("draft")
        sub.add_argument("out", type=pathlib.Path)
        if mode == "block":
            sub.add_argument("--contexts", required=True)
            sub.add_argument("--features", action="store_true")
            sub.add_argument("--proposals", action="store_true")
        else:
            sub.add_argument("--new-tokens", type=int, default=64)
            sub.add_argument("--package-loop", action="store_true")
    args = parser.parse_args()
    target = load_target(args.target)
    draft = load_draft(args.draft, target.config.vocab_size)
    (write_block if args.mode == "block" else write_steps)(target, draft, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
