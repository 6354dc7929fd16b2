"""What a tiny drafter may have beyond the network of the package `dflash`: DSpark's heads and a smaller vocabulary.

The heads are the classes of the PyPI package `speculators` (MarkovHead, ConfidenceHead); only that one file of it is
loaded, which needs nothing but torch. The walk over the slots is the greedy one: each slot's bias comes from the token
chosen before it, the anchor first.
"""

import importlib.util
import json
import pathlib
from typing import Any

import torch
from safetensors.torch import load_file

CONFIDENCE_BIAS = 0.25


def _speculators_heads() -> Any:
    package = importlib.util.find_spec("speculators")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pip install --no-deps speculators==0.9.0")
    path = pathlib.Path(package.submodule_search_locations[0]) / "models" / "dspark" / "model_definitions.py"
    spec = importlib.util.spec_from_file_location("speculators_dspark_heads", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Heads(torch.nn.Module):
    """Parameters are named as in published checkpoints. `draft_ids`: target ids of a smaller vocabulary, or None."""

    def __init__(
        self,
        n_embd: int,
        n_vocab: int,
        *,
        rank: int = 0,
        confidence: bool = False,
        anchor_first: bool = False,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.n_vocab, self.rank, self.anchor_first, self.draft_ids = n_vocab, rank, anchor_first, draft_ids
        n_draft = n_vocab if draft_ids is None else len(draft_ids)
        if rank:
            heads = _speculators_heads()
            self.markov_head = heads.MarkovHead(
                verifier_vocab_size=n_vocab, draft_vocab_size=n_draft, markov_rank=rank, hidden_size=n_embd
            )
            if confidence:
                self.confidence_head = heads.ConfidenceHead(n_embd + rank)
        if draft_ids is not None:
            self.lm_head = torch.nn.Linear(n_embd, n_draft, bias=False)

    @property
    def first_slot(self) -> int:
        """The first row of a block that proposes."""
        return 0 if self.anchor_first else 1

    def output_head(self, target: Any) -> Any:
        return target.lm_head if self.draft_ids is None else self.lm_head

    def target_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the head as ids of the target."""
        return rows if self.draft_ids is None else self.draft_ids[rows]

    def bias(self, previous: torch.Tensor) -> torch.Tensor:
        """What the Markov head adds to the logits behind these tokens, [n, draft vocabulary]."""
        return self.markov_head.markov_w2(self.markov_head.prev_embeddings(previous))

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits of the confidence in the proposals of rows `hidden` behind the tokens `previous`."""
        return self.confidence_head(torch.cat([hidden, self.markov_head.prev_embeddings(previous)], dim=-1))

    def walk(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchor: int
    ) -> tuple[list[int], torch.Tensor, list[float]]:
        """Proposed ids, the logits that chose them and the confidence in each, for proposing rows [n, ...]."""
        ids, rows, trust, previous = [], [], [], torch.tensor([anchor])
        for row_hidden, row in zip(hidden, logits, strict=True):
            chosen = row + self.bias(previous)[0] if self.rank else row
            if hasattr(self, "confidence_head"):
                trust.append(float(torch.sigmoid(self.confidence(row_hidden[None], previous))[0]))
            previous = self.target_ids(chosen.argmax()[None])
            ids.append(int(previous))
            rows.append(chosen)
        return ids, torch.stack(rows), trust

    def saved(self) -> dict[str, torch.Tensor]:
        """Tensors of the file: parameters, and for a smaller vocabulary the two maps (d2t as distances)."""
        tensors = dict(self.state_dict())
        if self.draft_ids is not None:
            marks = torch.zeros(self.n_vocab, dtype=torch.bool)
            marks[self.draft_ids] = True
            tensors |= {"d2t": self.draft_ids - torch.arange(len(self.draft_ids)), "t2d": marks}
        return tensors

    def settings(self) -> dict[str, Any]:
        """Keys of config.json."""
        keys: dict[str, Any] = {}
        if self.draft_ids is not None:
            keys["draft_vocab_size"] = len(self.draft_ids)
        if self.rank:
            keys |= {"markov_rank": self.rank, "markov_head_type": "vanilla"}
            keys["enable_confidence_head"] = hasattr(self, "confidence_head")
        return keys


def as_speculators(config: dict[str, Any], heads: Heads) -> dict[str, Any]:
    """The same configuration as the package `speculators` writes it; layers are counted by their inputs there."""
    layer = {key: value for key, value in config.items() if key not in ("dflash_config", "architectures")}
    return {
        "architectures": ["DSparkSpeculator" if heads.rank else "DFlashSpeculator"],
        "speculators_model_type": "dspark" if heads.rank else "dflash",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "block_size": config["block_size"],
        "sample_from_anchor": heads.anchor_first,
        "draft_vocab_size": heads.n_vocab if heads.draft_ids is None else len(heads.draft_ids),
        "sliding_window_non_causal": False,
        **heads.settings(),
    }


def as_package(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of any of these folders with the keys and places that the package `dflash` knows."""
    layer = config.get("transformer_layer_config")
    if layer is None:
        return config
    ids = [layer_id - 1 for layer_id in config["aux_hidden_state_layer_ids"]]
    dflash = {"mask_token_id": config["mask_token_id"], "target_layer_ids": ids}
    return layer | {"block_size": config["block_size"], "dflash_config": dflash}


def load_heads(folder: pathlib.Path, n_vocab: int) -> Heads:
    """The heads of a folder; plain ones where it has none."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    draft_ids = None
    if "d2t" in tensors:
        draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    rank = tensors["markov_head.markov_w1.weight"].shape[1] if "markov_head.markov_w1.weight" in tensors else 0
    n_embd = config.get("transformer_layer_config", config)["hidden_size"]
    anchor_first = config.get("sample_from_anchor", bool(rank) and "transformer_layer_config" not in config)
    heads = Heads(
        n_embd,
        n_vocab,
        rank=rank,
        confidence="confidence_head.proj.weight" in tensors,
        anchor_first=anchor_first,
        draft_ids=draft_ids,
    )
    heads.load_state_dict({name: tensors[name].float() for name in heads.state_dict()})
    return heads.eval()
