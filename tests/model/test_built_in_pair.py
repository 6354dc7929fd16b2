"""The built-in pair in float32 against llama.cpp's own DFlash loop on the same weights, prompt by prompt."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.goldens import GOLDENS
from support.models import upcast_gguf

import pydflash
from pydflash import SamplingOptions, builtin
from pydflash.text.tokenizer import Tokenizer

WIDTH = 16


@dataclass(frozen=True)
class Run:
    """Tokens of one prompt, and the tokens that its steps emitted."""

    kind: str
    wanted: list[int]
    tokens: list[int]
    emitted: int
    steps: int
    peer_emitted: int
    peer_steps: int


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    golden = json.loads((GOLDENS / "demo-llama-cpp-dflash.json").read_text(encoding="utf-8"))
    prompts = json.loads((Path(__file__).parents[2] / "scripts" / "prompts.json").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("pair")
    target_path = upcast_gguf(Path(builtin.target_path()), folder / "target.gguf")
    draft_path = upcast_gguf(Path(builtin.draft_path()), folder / "draft.gguf")
    texts = {entry["id"]: entry for entry in prompts["prompts"]}
    out = []
    with (
        pydflash.TargetModel.open(target_path, n_threads=1) as target,
        pydflash.DraftModel.open(draft_path, target) as drafter,
        pydflash.TargetCache(
            target, capacity=1024, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
        ) as cache,
        pydflash.DraftContext(drafter, k_type="f32", v_type="f32") as context,
        pydflash.Decoder(cache, context) as decoder,
    ):
        tokenizer = Tokenizer.from_metadata(target.metadata)
        for case in golden["prompts"]:
            ids = prompt_ids(tokenizer, texts[case["id"]])
            assert len(ids) == case["n_prompt"]
            n = len(case["tokens"])
            decoder.reset()
            decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
            tokens = list(decoder.prefill(ids, n).tokens)
            steps = 0
            while len(tokens) < n:
                tokens += decoder.step(WIDTH, n - len(tokens)).tokens
                steps += 1
            out.append(Run(case["kind"], case["tokens"], tokens, n - 1, steps, case["tokens_in_steps"], case["steps"]))
        yield out


def prompt_ids(tokenizer: Tokenizer, entry: dict[str, str]) -> list[int]:
    text = entry["text"]
    if entry["kind"] == "chat":
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(text))


@pytest.mark.slow
def test_greedy_text_equals_llama_cpp(runs: list[Run]) -> None:
    assert len(runs) == 24
    for run in runs:
        assert run.tokens == run.wanted


@pytest.mark.slow
def test_mean_accepted_length_equals_llama_cpp(runs: list[Run]) -> None:
    """Within 3 % over the set; the last step of a prompt may be cut differently."""
    ours = sum(run.emitted for run in runs) / sum(run.steps for run in runs)
    peers = sum(run.peer_emitted for run in runs) / sum(run.peer_steps for run in runs)
    assert ours == pytest.approx(peers, rel=0.03)
