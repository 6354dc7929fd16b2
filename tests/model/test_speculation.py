"""Speculative decoding against golden steps, and against plain decoding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.goldens import step_golden

import pydflash
from pydflash import SamplingOptions

Target = Callable[[str], pydflash.TargetModel]
Drafter = Callable[[str], pydflash.DraftModel]
TAUGHT = ["d-part", "d-swa", "d-rand"]


@contextmanager
def decoder_of(
    target: pydflash.TargetModel, drafter: pydflash.DraftModel | None, capacity: int = 512, kv: str = "f32"
) -> Iterator[pydflash.Decoder]:
    capture = drafter.config.target_layer_ids if drafter is not None else ()
    with pydflash.TargetCache(
        target,
        capacity=capacity,
        k_type=kv,
        v_type=kv,
        capture_layers=capture,
        max_verify=16,  # type: ignore[arg-type]
    ) as cache:
        if drafter is None:
            with pydflash.Decoder(cache) as decoder:
                yield decoder
        else:
            with (
                pydflash.DraftContext(drafter, k_type="f32", v_type="f32") as context,
                pydflash.Decoder(cache, context) as decoder,
            ):
                yield decoder


def run(
    decoder: pydflash.Decoder,
    prompt: list[int],
    n: int,
    widths: int | list[int],
    options: SamplingOptions | None = None,
    stop_ids: tuple[int, ...] = (),
) -> tuple[list[int], list[pydflash.StepResult]]:
    decoder.reset()
    decoder.begin(options or SamplingOptions(temperature=0.0, seed=1), stop_ids=list(stop_ids))
    first = decoder.prefill(prompt, n)
    tokens, steps = list(first.tokens), []
    reason = first.reason
    while len(tokens) < n and reason == "none":
        width = widths if isinstance(widths, int) else widths[len(steps) % len(widths)]
        step = decoder.step(width, n - len(tokens))
        steps.append(step)
        tokens += step.tokens
        reason = step.reason
    decoder.settle()
    return tokens, steps


@pytest.mark.parametrize("name", TAUGHT)
def test_every_step_equals_the_golden(f32_target: Target, f32_drafter: Drafter, name: str) -> None:
    """Start, proposals and accepted count of each step, driven by hand through verify and commit."""
    golden = step_golden(name)
    target, drafter = f32_target("nano"), f32_drafter(name)
    assert golden["target_layer_ids"] == list(drafter.config.target_layer_ids)
    for case in golden["cases"]:
        prompt, wanted = case["prompt"], case["greedy"]
        with (
            pydflash.TargetCache(
                target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
            ) as cache,
            pydflash.DraftContext(drafter, k_type="f32", v_type="f32") as context,
        ):
            tokens = [int(cache.forward(prompt, logits="last").logits[0].argmax())]
            for number, (start, proposed, produced) in enumerate(case["steps"]):
                assert cache.position == start
                context.append(cache, context.cursor, start)
                proposal = context.propose(tokens[-1], logits=True)
                last = start + golden["block_size"] > len(prompt) + len(wanted)
                if not last:
                    assert proposal.ids.tolist() == proposed, f"step {number}"
                if number == 0:
                    assert proposal.logits is not None
                    ids = np.array(case["first"]["ids"], dtype=np.int64)
                    at = np.take_along_axis(proposal.logits[: len(ids)], ids, axis=-1)
                    assert np.abs(at - np.array(case["first"]["logits"])).max() <= 1e-3
                room = len(wanted) - len(tokens)
                block = [tokens[-1], *proposal.ids.tolist()][: room if room > 0 else 1]
                verify = cache.verify(block)
                n = 0
                while n < len(block) - 1 and block[n + 1] == verify.argmax[n]:
                    n += 1
                verify.commit(n + 1)
                tokens += [*block[1 : n + 1], int(verify.argmax[n])]
                if not last:
                    assert n + 1 == produced, f"step {number}"
            assert tokens == wanted


@pytest.mark.parametrize("name", TAUGHT)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_greedy_is_lossless(f32_target: Target, f32_drafter: Drafter, name: str, width: int) -> None:
    with decoder_of(f32_target("nano"), f32_drafter(name)) as decoder:
        for case in step_golden(name)["cases"]:
            tokens, _ = run(decoder, case["prompt"], len(case["greedy"]), width)
            assert tokens == case["greedy"]


def test_acceptance_counts_equal_the_golden(f32_target: Target, f32_drafter: Drafter) -> None:
    golden = step_golden("d-part")
    with decoder_of(f32_target("nano"), f32_drafter("d-part")) as decoder:
        seen = set()
        for case in golden["cases"]:
            _, steps = run(decoder, case["prompt"], len(case["greedy"]), golden["block_size"])
            made = [len(step.tokens) for step in steps]
            wanted = [produced for _, _, produced in case["steps"]]
            whole = [
                i
                for i, (start, _, _) in enumerate(case["steps"])
                if start + golden["block_size"] <= len(case["prompt"]) + len(case["greedy"])
            ]
            assert [made[i] for i in whole] == [wanted[i] for i in whole]
            seen |= {step.n_accepted for step in steps}
        assert len(seen) >= 5  # rejects, partial and full acceptance all occur


@pytest.mark.parametrize("schedule", [[8, 1, 8, 1, 4], [1, 1, 8], [2, 1, 1, 1, 3, 8], [1] * 40 + [8]])
def test_width_schedules_with_plain_steps_between(
    f32_target: Target, f32_drafter: Drafter, schedule: list[int]
) -> None:
    with decoder_of(f32_target("nano"), f32_drafter("d-part")) as decoder:
        for case in step_golden("d-part")["cases"]:
            tokens, _ = run(decoder, case["prompt"], len(case["greedy"]), schedule)
            assert tokens == case["greedy"]


SAMPLED = [
    SamplingOptions(temperature=1.0, seed=11),
    SamplingOptions(temperature=0.7, top_k=20, top_p=0.9, seed=12),
    SamplingOptions(
        temperature=1.3, min_p=0.05, seed=13, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    SamplingOptions(temperature=1.0, typical_p=0.8, seed=14, logit_bias={5: 2.0, 9: float("-inf")}),
]


@pytest.mark.parametrize("options", SAMPLED)
@pytest.mark.parametrize("name", ["d-part", "d-rand"])
def test_same_seed_same_text(f32_target: Target, f32_drafter: Drafter, options: SamplingOptions, name: str) -> None:
    """With and without a drafter, good or bad, at every width."""
    cases = step_golden("d-part")["cases"]
    with decoder_of(f32_target("nano"), None) as alone, decoder_of(f32_target("nano"), f32_drafter(name)) as drafted:
        for case in cases:
            wanted, _ = run(alone, case["prompt"], 48, 1, options)
            for width in (1, 2, 8):
                assert run(drafted, case["prompt"], 48, width, options)[0] == wanted


def test_first_token_is_sampled(f32_target: Target, f32_drafter: Drafter) -> None:
    prompt = step_golden("d-part")["cases"][0]["prompt"]
    with decoder_of(f32_target("nano"), f32_drafter("d-part")) as decoder:
        firsts = set()
        for seed in range(60):
            tokens, _ = run(decoder, prompt, 1, 8, SamplingOptions(temperature=1.5, seed=seed))
            firsts.add(tokens[0])
    assert len(firsts) > 10


def test_stop_id_at_every_slot(f32_target: Target, f32_drafter: Drafter) -> None:
    """Generation ends with the stop id and the cache holds what the text shows, nothing behind it."""
    case = step_golden("d-part")["cases"][0]
    target = f32_target("nano")
    with decoder_of(target, f32_drafter("d-part")) as decoder:
        for token in sorted(set(case["greedy"])):
            first = case["greedy"].index(token)
            tokens, _ = run(decoder, case["prompt"], len(case["greedy"]), 8, stop_ids=(token,))
            assert tokens == case["greedy"][: first + 1]
            assert decoder.position == len(case["prompt"]) + first
            assert decoder.tokens == case["prompt"] + tokens
            with pydflash.TargetCache(target, capacity=512, k_type="f32", v_type="f32") as plain:
                plain.forward(case["prompt"] + tokens[:-1], logits="none")
                for layer, kind in enumerate(target.config.layer_kinds):
                    what = "recurrent" if kind == "recurrent" else "k"
                    np.testing.assert_allclose(decoder.cache.read(layer, what), plain.read(layer, what), atol=2e-4)


def test_budget_at_every_slot(f32_target: Target, f32_drafter: Drafter) -> None:
    case = step_golden("d-part")["cases"][1]
    with decoder_of(f32_target("nano"), f32_drafter("d-part")) as decoder:
        for budget in range(1, 30):
            tokens, _ = run(decoder, case["prompt"], budget, 8)
            assert tokens == case["greedy"][:budget]
            assert decoder.position == len(case["prompt"]) + budget - 1


def test_settle_cuts_a_step(f32_target: Target, f32_drafter: Drafter) -> None:
    """Keeping k of the emitted tokens goes on as if generation had stopped there."""
    case = step_golden("d-part")["cases"][0]
    n_prompt = len(case["prompt"])
    with decoder_of(f32_target("nano"), f32_drafter("d-part")) as decoder:
        for keep in range(1, 5):
            decoder.reset()
            decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
            tokens = list(decoder.prefill(case["prompt"], 64).tokens)
            while True:
                step = decoder.step(8, 64)
                if len(step.tokens) > keep:
                    break
                tokens += step.tokens
            tokens += step.tokens[:keep]
            decoder.settle(keep)
            assert decoder.position == n_prompt + len(tokens) - 1
            assert decoder.tokens == case["prompt"] + tokens
            with pytest.raises(pydflash.InvalidArgumentError):
                decoder.step(8, 0)
            while len(tokens) < 40:
                tokens += decoder.step(8, 40 - len(tokens)).tokens
            assert tokens == case["greedy"][:40]


def test_generation_runs_into_the_end_of_the_context(f32_target: Target, f32_drafter: Drafter) -> None:
    case = step_golden("d-part")["cases"][0]
    n_prompt = len(case["prompt"])
    for room in (1, 2, 7, 8, 9, 20):
        with decoder_of(f32_target("nano"), f32_drafter("d-part"), capacity=n_prompt + room) as decoder:
            decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
            tokens = list(decoder.prefill(case["prompt"], 100).tokens)
            while decoder.room > 0:
                tokens += decoder.step(8, 100).tokens
            assert tokens == case["greedy"][: room + 1]
            with pytest.raises(pydflash.CapacityError, match="is full"):
                decoder.step(8, 100)


def test_a_second_prompt_behind_the_first(f32_target: Target, f32_drafter: Drafter) -> None:
    """A turn appended to a cache equals the whole text prefilled at once."""
    cases = step_golden("d-part")["cases"]
    with decoder_of(f32_target("nano"), f32_drafter("d-part")) as decoder:
        first, _ = run(decoder, cases[0]["prompt"], 20, 8)
        decoder.begin(SamplingOptions(temperature=0.0, seed=1), stop_ids=[])
        tokens = list(decoder.prefill(cases[1]["prompt"], 20).tokens)
        while len(tokens) < 20:
            tokens += decoder.step(8, 20 - len(tokens)).tokens
        whole, _ = run(decoder, cases[0]["prompt"] + first + cases[1]["prompt"], 20, 8)
        assert tokens == whole


def test_logprobs_equal_plain_decoding(f32_target: Target, f32_drafter: Drafter) -> None:
    case = step_golden("d-part")["cases"][0]
    options = SamplingOptions(temperature=0.0, seed=1, logprobs=3)
    with (
        decoder_of(f32_target("nano"), None) as alone,
        decoder_of(f32_target("nano"), f32_drafter("d-part")) as drafted,
    ):
        plain = [lp for step in run(alone, case["prompt"], 40, 1, options)[1] for lp in step.logprobs or ()]
        steps = run(drafted, case["prompt"], 40, 8, options)[1]
        got = [lp for step in steps for lp in step.logprobs or ()]
        np.testing.assert_allclose(got, plain, atol=1e-3)
        tops = [top for step in steps for top in step.top_logprobs or ()]
        assert all(len(top) == 3 for top in tops)
        assert len(tops) == len(got)


def test_drafters_come_and_go_over_one_cache(f32_target: Target, f32_drafter: Drafter) -> None:
    """Graphs of the cache look into the drafter's memory: those of a closed one are never used again."""
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    case = step_golden("d-part")["cases"][0]
    with pydflash.TargetCache(
        target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
    ) as cache:
        for _ in range(25):
            with pydflash.DraftContext(drafter) as context, pydflash.Decoder(cache, context) as decoder:
                assert run(decoder, case["prompt"], 40, 8)[0] == case["greedy"][:40]


def test_caches_come_and_go_under_one_drafter(f32_target: Target, f32_drafter: Drafter) -> None:
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    cases = step_golden("d-part")["cases"]
    with pydflash.DraftContext(drafter) as context:
        for number in range(25):
            case = cases[number % len(cases)]
            with (
                pydflash.TargetCache(
                    target, capacity=512, k_type="f32", v_type="f32", capture_layers=drafter.config.target_layer_ids
                ) as cache,
                pydflash.Decoder(cache, context) as decoder,
            ):
                tokens, steps = run(decoder, case["prompt"], 40, 8)
                assert tokens == case["greedy"][:40]
                assert sum(step.n_accepted for step in steps) > 5


def test_draft_kv_type_keeps_acceptance() -> None:
    """The built-in pair, whose heads of 64 are rotated when the type is quantised: q8_0 within 3 % of f16."""
    prompts = [list(range(start, start + 32)) for start in range(200, 3000, 350)]
    with (
        pydflash.TargetModel.open(None, n_threads=1) as target,
        pydflash.DraftModel.open(None, target) as drafter,
        pydflash.TargetCache(target, capacity=512, capture_layers=drafter.config.target_layer_ids) as cache,
    ):
        lengths = {}
        for kv in ("f16", "f32", "q8_0"):
            with (
                pydflash.DraftContext(drafter, k_type=kv, v_type=kv) as context,  # type: ignore[arg-type]
                pydflash.Decoder(cache, context) as decoder,
            ):
                runs = [run(decoder, prompt, 96, 16) for prompt in prompts]
                lengths[kv] = sum(len(tokens) - 1 for tokens, _ in runs) / sum(len(steps) for _, steps in runs)
    assert lengths["q8_0"] == pytest.approx(lengths["f16"], rel=0.03), lengths
    assert lengths["f32"] == pytest.approx(lengths["f16"], rel=0.03), lengths
