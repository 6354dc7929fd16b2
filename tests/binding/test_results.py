"""Result values: rates by their rules, and JSON."""

import json
import math
from dataclasses import replace

from pydflash import DecoderStats, GenerationResult, GenerationStats, TokenLogprobs

DECODER = DecoderStats(
    position=50,
    room=14,
    prompt_tokens=10,
    emitted=41,
    steps=16,
    draft_steps=12,
    proposed=120,
    accepted=24,
    proposed_by_slot=(12, 12, 6),
    accepted_by_slot=(9, 3, 0),
    prefill_ms=20.0,
    draft_ms=30.0,
    verify_ms=60.0,
    accept_ms=1.0,
    commit_ms=2.0,
    append_ms=3.0,
    has_drafter=True,
    max_width=16,
    draft_disabled="",
)
STATS = GenerationStats.of(DECODER, total_ms=220.0, drafter="on", cached_tokens=5, widths={16: 12, 1: 4})


def test_rates() -> None:
    # The first token comes from the prefill: 40 tokens in 16 steps and 200 ms.
    assert STATS.mean_accepted_length == 2.5
    assert STATS.tokens_per_second == 200.0
    assert STATS.acceptance_by_slot == (0.75, 0.25, 0.0)
    assert (STATS.prompt_tokens, STATS.cached_tokens) == (15, 5)
    assert GenerationStats.of(DECODER, total_ms=1.0, drafter="on", prompt_tokens=99).prompt_tokens == 99
    assert STATS.widths == {16: 12, 1: 4}
    assert hash(STATS) == hash(replace(STATS))


def test_rates_without_steps() -> None:
    stats = replace(STATS, emitted=1, steps=0)
    assert (stats.mean_accepted_length, stats.tokens_per_second) == (0.0, 0.0)


def test_json() -> None:
    logprobs = (TokenLogprobs(5, -0.5, ((5, -0.5), (6, -math.inf))), TokenLogprobs(6, -math.inf))
    result = GenerationResult(
        text='grün "\U0001f40d"\n',
        token_ids=(5, 6),
        finish_reason="stop",
        stats=STATS,
        logprobs=logprobs,
        seed=2**64 - 1,
    )
    data = json.loads(result.to_json())
    assert data == json.loads(result.to_json(indent=2))
    assert data["text"] == result.text
    assert data["token_ids"] == [5, 6]
    assert data["seed"] == 2**64 - 1
    assert data["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [6, None]]},
        {"token_id": 6, "logprob": None, "top": []},
    ]
    assert data["stats"]["mean_accepted_length"] == 2.5
    assert data["stats"]["tokens_per_second"] == 200.0
    assert data["stats"]["verify_ms"] == 60.0
    assert data["stats"]["widths"] == {"16": 12, "1": 4}
    assert result.to_json().count("\n") == 0
    assert json.loads(replace(result, logprobs=None).to_json())["logprobs"] is None
