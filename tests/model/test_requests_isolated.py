"""Nothing of one request is left for the next."""

import random
from collections.abc import Callable

import pytest

from pydflash import Engine, SamplingOptions

EngineMaker = Callable[..., Engine]
N_REQUESTS = 20


def _requests() -> list[tuple[list[int], SamplingOptions]]:
    """Unrelated prompts, long and short, greedy and sampled, with and without penalties, stop texts and log-probs."""
    rng = random.Random(5)
    requests = []
    for i in range(N_REQUESTS):
        prompt = [rng.randrange(360) for _ in range(rng.choice([1, 3, 30, 120]))]
        options = SamplingOptions(
            max_tokens=rng.choice([1, 7, 40]),
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            repeat_penalty=1.3 if i % 3 == 0 else 1.0,
            logit_bias={rng.randrange(360): 4.0} if i % 4 == 0 else {},
            stop=("e", "\n") if i % 5 == 0 else (),
            ignore_eos=bool(i % 2),
            logprobs=2 if i % 7 == 0 else None,
            width=rng.choice([None, 1, 4, 8]),
        )
        requests.append((prompt, options))
    return requests


@pytest.mark.parametrize("draft", [None, "d-part", "d-rand"])
def test_alternating_requests_equal_fresh_engines(make_engine: EngineMaker, draft: str | None) -> None:
    engine = make_engine(draft)
    for prompt, options in _requests():
        got = engine.generate(prompt, options)
        with make_engine(draft) as fresh:
            wanted = fresh.generate(prompt, options)
        assert got.token_ids == wanted.token_ids
        assert (got.text, got.finish_reason, got.stop_text) == (wanted.text, wanted.finish_reason, wanted.stop_text)
        # Widths are chosen by measured time, and another width rounds differently.
        ours = [entry.logprob for entry in got.logprobs or ()]
        assert ours == pytest.approx([entry.logprob for entry in wanted.logprobs or ()], abs=1e-4)


@pytest.mark.parametrize("width", [1, 8, None])
def test_long_then_short_then_long(make_engine: EngineMaker, width: int | None) -> None:
    engine = make_engine(n_ctx=1024)
    long = [(i * 31) % 350 for i in range(500)]
    short = list(range(20))
    options = SamplingOptions(max_tokens=48, ignore_eos=True, width=width)
    first = engine.generate(long, options)
    between = engine.generate(short, options)
    assert engine.generate(long, options).token_ids == first.token_ids
    assert engine.generate(short, options).token_ids == between.token_ids


def test_a_failed_request_leaves_nothing(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine()
    options = SamplingOptions(max_tokens=20, ignore_eos=True, seed=1)
    wanted = engine.generate(prompts[0], options).token_ids
    for bad, wrong in (([], options), ([1, 9999], options), (prompts[0], SamplingOptions(logit_bias={9999: 1.0}))):
        with pytest.raises(ValueError, match=r"expected|want"):
            engine.generate(bad, wrong)
        assert engine.generate(prompts[0], options).token_ids == wanted
