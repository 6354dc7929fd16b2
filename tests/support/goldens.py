"""Golden numbers of independent implementations: what is stored, and how a result is held against it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

from .models import DATA

GOLDENS = DATA / "goldens"

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """How far a result is from a golden: worst difference over the stored logits, and equal argmaxes."""

    max_abs_diff: float
    argmax_equal: int
    positions: int


@dataclass(frozen=True)
class SparseLogits:
    """Logits of some rows, thinned out: the eight largest of each row and a fixed random set of vocabulary columns.

    argmax        int32   [...]
    top_ids       int32   [..., 8], largest first
    top_logits    float32 [..., 8]
    columns       int32   [n_columns]
    column_logits float32 [..., n_columns]
    """

    argmax: _Ints
    top_ids: _Ints
    top_logits: _Floats
    columns: _Ints
    column_logits: _Floats

    def compare(self, logits: _Floats, index: int | tuple[int | slice, ...] = ()) -> Agreement:
        """Hold full logits [..., n_vocab] against the stored rows at `index` of the leading axes."""
        at_top = np.take_along_axis(logits, self.top_ids[index], axis=-1)
        worst = max(
            float(np.abs(at_top - self.top_logits[index]).max()),
            float(np.abs(logits[..., self.columns] - self.column_logits[index]).max()),
        )
        equal = logits.argmax(-1) == self.argmax[index]
        return Agreement(worst, int(equal.sum()), int(equal.size))


@dataclass(frozen=True)
class TargetGolden:
    """Target logits of whole sequences: ids int32 [n_sequences, length]; logits at every position."""

    ids: _Ints
    logits: SparseLogits


@dataclass(frozen=True)
class BlockGolden:
    """One draft block after several context lengths of one sequence.

    ids       int32 [n], the sequence; a block anchored at position c follows context ids[:c]
    contexts  int32 [k], the values of c
    anchors   int32 [k], the token at position c (row 0 of the block; the other rows are mask tokens)
    mask_id, block_size
    logits    over [k, block_size] rows; row j predicts position c + j, row 0 is not used for proposals
    features  float32 [features_context, n_taps * n_embd] of the first `features_context` positions, or None
    """

    ids: _Ints
    contexts: _Ints
    anchors: _Ints
    mask_id: int
    block_size: int
    logits: SparseLogits
    features: _Floats | None


class StepCase(TypedDict):
    """Greedy speculative decoding of one prompt; a step is [anchor position, proposed ids, tokens produced]."""

    prompt: list[int]
    greedy: list[int]
    steps: list[tuple[int, list[int], int]]
    first: dict[str, list[list[float]]]


class StepGolden(TypedDict):
    """Steps of a drafter with its target; every step drafts a whole block, the last one is cut at the budget."""

    block_size: int
    mask: int
    target_layer_ids: list[int]
    cases: list[StepCase]


class DemoAnswer(TypedDict):
    """Greedy f32 answer of the built-in pair to a prompt of scripts/prompts.json: 192 tokens, or to the turn's end.

    accepted_length is the mean number of tokens that a verify step adds; the first token comes from the prompt and
    belongs to no step. Both sources hold these keys, and more of their own.
    """

    id: str
    n_prompt: int
    tokens: list[int]
    accepted_length: float


def _sparse(data: "np.lib.npyio.NpzFile") -> SparseLogits:
    return SparseLogits(*(data[name] for name in ("argmax", "top_ids", "top_logits", "columns", "column_logits")))


def _load(path: Path) -> "np.lib.npyio.NpzFile":
    loaded = np.load(path)
    assert isinstance(loaded, np.lib.npyio.NpzFile)
    return loaded


def target_golden(name: str) -> TargetGolden:
    """Golden of a target model, by the name of its file in tests/data/models without type and ending."""
    with _load(GOLDENS / f"target-{name}.npz") as data:
        return TargetGolden(data["ids"], _sparse(data))


@dataclass(frozen=True)
class PeerGolden:
    """llama.cpp's natural-log probabilities for the quantised file with this SHA-256; ids int32 [n, length]."""

    ids: _Ints
    sha256: str
    logprobs: SparseLogits


def peer_golden(name: str) -> PeerGolden:
    """What llama.cpp makes of a quantised model, by name and type, such as "nano-q8_0"."""
    with _load(GOLDENS / f"peer-{name}.npz") as data:
        return PeerGolden(data["ids"], str(data["sha256"]), _sparse(data))


def nano_logits() -> tuple[_Ints, _Floats]:
    """Ids int32 [4, 96] and all logits [4, 96, 384] of the nano target; stored as f16, so good to 4e-3 only."""
    with _load(GOLDENS / "nano-logits-f16.npz") as data:
        ids = np.stack([data[f"ids{i}"] for i in range(4)])
        return ids, np.stack([data[f"logits{i}"] for i in range(4)]).astype(np.float32)


def block_golden(name: str) -> BlockGolden:
    """Draft logits of a drafter in tests/data/drafters, or of the built-in one as "demo-" and the id of a prompt."""
    with _load(GOLDENS / f"block-{name}.npz") as data:
        features = data["features"] if "features" in data.files else None
        return BlockGolden(
            data["ids"],
            data["contexts"],
            data["anchors"],
            int(data["mask_id"]),
            int(data["block_size"]),
            _sparse(data),
            features,
        )


def demo_answers(source: Literal["reference", "llama-cpp-dflash"]) -> list[DemoAnswer]:
    """Answers to the whole prompt set, by the exact loop (transformers and `dflash`) or by llama.cpp's DFlash."""
    text = (GOLDENS / f"demo-{source}.json").read_text(encoding="utf-8")
    answers: list[DemoAnswer] = json.loads(text)["prompts"]
    return answers


def step_golden(name: str) -> StepGolden:
    """Steps of a drafter in tests/data/models, by its name without type and ending, or "demo-steps"."""
    golden: StepGolden = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    return golden
