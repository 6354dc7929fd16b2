"""Decoding with trees: the same text as without a drafter, at every size, and what the engine makes of them."""

from collections.abc import Callable

import numpy as np
import pytest
from model.conftest import EngineMaker
from support.goldens import step_golden

import pydflash
from pydflash import InvalidArgumentError, SamplingOptions
from pydflash.options import MAX_TREE

Target = Callable[[str], pydflash.TargetModel]
Drafter = Callable[[str], pydflash.DraftModel]
GREEDY = SamplingOptions(temperature=0.0, seed=1)


class Pair:
    """A decoder over the nano target, and one generation with it."""

    def __init__(self, target: pydflash.TargetModel, drafter: pydflash.DraftModel | None, capacity: int = 512) -> None:
        layers = () if drafter is None else drafter.config.target_layer_ids
        self.cache = pydflash.TargetCache(
            target, capacity, "f32", "f32", MAX_TREE + 1 if capacity > MAX_TREE else 16, capture_layers=layers
        )
        self.context = None if drafter is None else pydflash.DraftContext(drafter, k_type="f32", v_type="f32")
        self.decoder = pydflash.Decoder(self.cache, self.context)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.decoder, self.context, self.cache):
            if part is not None:
                part.close()

    def run(
        self,
        prompt: list[int],
        n: int,
        shapes: list[int],
        options: SamplingOptions = GREEDY,
        stop_ids: tuple[int, ...] = (),
        settle_each: bool = False,
    ) -> tuple[list[int], list[pydflash.StepResult]]:
        """Shapes in turn: a positive one is a tree of as many nodes, a negative one a chain of as many rows."""
        decoder = self.decoder
        decoder.reset()
        decoder.begin(options, stop_ids=list(stop_ids))
        first = decoder.prefill(prompt, n)
        tokens, steps, reason = list(first.tokens), [], first.reason
        while len(tokens) < n and reason == "none":
            shape, budget = shapes[len(steps) % len(shapes)], n - len(tokens)
            step = decoder.step_tree(shape, budget) if shape > 0 else decoder.step(-shape, budget)
            steps.append(step)
            tokens += step.tokens
            reason = step.reason
            if settle_each:
                decoder.settle()
        decoder.settle()
        return tokens, steps


@pytest.mark.parametrize("name", ["d-part", "d-swa", "d-rand"])
def test_greedy_is_lossless_at_every_size(f32_target: Target, f32_drafter: Drafter, name: str) -> None:
    cases = step_golden(name)["cases"]
    with Pair(f32_target("nano"), f32_drafter(name)) as pair:
        for n_nodes in range(1, MAX_TREE + 1):
            case = cases[n_nodes % len(cases)]
            n = min(len(case["greedy"]), 64 if name == "d-part" else 24)
            tokens, steps = pair.run(case["prompt"], n, [n_nodes])
            assert tokens == case["greedy"][:n], n_nodes
            assert all(step.tree == n_nodes == step.width - 1 for step in steps[:-1])


@pytest.mark.parametrize("schedule", [[22, -1, 22, -1, -4], [-1, -1, 8], [3, -1, -8, 64, -2, 1], [16, 32, 8]])
def test_schedules_of_trees_chains_and_plain_steps(
    f32_target: Target, f32_drafter: Drafter, schedule: list[int]
) -> None:
    with Pair(f32_target("nano"), f32_drafter("d-part")) as pair:
        for settle_each in (False, True):
            for case in step_golden("d-part")["cases"]:
                tokens, _ = pair.run(case["prompt"], len(case["greedy"]), schedule, settle_each=settle_each)
                assert tokens == case["greedy"]


def test_the_state_behind_a_tree_is_that_of_plain_decoding(f32_target: Target, f32_drafter: Drafter) -> None:
    target, drafter = f32_target("nano"), f32_drafter("d-part")
    case = step_golden("d-part")["cases"][0]
    with (
        Pair(target, drafter) as pair,
        pydflash.TargetCache(target, 512, "f32", "f32", capture_layers=drafter.config.target_layer_ids) as plain,
    ):
        tokens, _ = pair.run(case["prompt"], len(case["greedy"]), [16])
        plain.forward(case["prompt"] + tokens[:-1], logits="none")
        assert pair.decoder.position == plain.position
        for layer, kind in enumerate(target.config.layer_kinds):
            for what in ("recurrent", "conv") if kind == "recurrent" else ("k", "v"):
                got, want = (cache.read(layer, what) for cache in (pair.cache, plain))  # type: ignore[arg-type]
                np.testing.assert_allclose(got, want, atol=2e-4, err_msg=f"{what}{layer}")
        features = [cache.features(0, plain.position) for cache in (pair.cache, plain)]
        np.testing.assert_allclose(*features, atol=1e-3)
        assert pair.context is not None
        pair.context.append(pair.cache, pair.context.cursor, plain.position)  # what a last plain step left
        with pydflash.DraftContext(drafter, k_type="f32", v_type="f32") as fresh:
            fresh.append(plain, 0, plain.position)
            proposals = [context.propose(tokens[-1], logits=True).logits for context in (pair.context, fresh)]
            assert proposals[0] is not None
            assert proposals[1] is not None
            np.testing.assert_allclose(proposals[0], proposals[1], atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, seed=11),
        SamplingOptions(temperature=1.3, min_p=0.05, seed=13, repeat_penalty=1.3, presence_penalty=0.4),
    ],
)
@pytest.mark.parametrize("name", ["d-part", "d-rand"])
def test_same_seed_same_text(f32_target: Target, f32_drafter: Drafter, options: SamplingOptions, name: str) -> None:
    with Pair(f32_target("nano"), None) as alone, Pair(f32_target("nano"), f32_drafter(name)) as drafted:
        for case in step_golden("d-part")["cases"]:
            wanted, _ = alone.run(case["prompt"], 48, [-1], options)
            for n_nodes in (2, 9, 22, 64):
                assert drafted.run(case["prompt"], 48, [n_nodes], options)[0] == wanted


def test_stop_ids_and_budgets_cut_inside_a_tree(f32_target: Target, f32_drafter: Drafter) -> None:
    case = step_golden("d-part")["cases"][0]
    n_prompt = len(case["prompt"])
    with Pair(f32_target("nano"), f32_drafter("d-part")) as pair:
        for token in sorted(set(case["greedy"])):
            first = case["greedy"].index(token)
            tokens, _ = pair.run(case["prompt"], len(case["greedy"]), [22], stop_ids=(token,))
            assert tokens == case["greedy"][: first + 1]
            assert pair.decoder.position == n_prompt + first
            assert pair.decoder.tokens == case["prompt"] + tokens
        for budget in range(1, 24):
            tokens, _ = pair.run(case["prompt"], budget, [22])
            assert tokens == case["greedy"][:budget]
            assert pair.decoder.position == n_prompt + budget - 1


def test_a_step_can_be_cut_behind_any_token(f32_target: Target, f32_drafter: Drafter) -> None:
    case = step_golden("d-part")["cases"][0]
    with Pair(f32_target("nano"), f32_drafter("d-part")) as pair:
        decoder, cut = pair.decoder, 0
        for n_keep in (1, 2, 3):
            decoder.reset()
            decoder.begin(GREEDY, stop_ids=[])
            tokens = list(decoder.prefill(case["prompt"], 100).tokens)
            for _ in range(12):
                step = decoder.step_tree(22, 100)
                kept = step.tokens[:n_keep]
                cut += len(kept) < len(step.tokens)
                decoder.settle(len(kept))
                tokens += kept
            assert tokens == case["greedy"][: len(tokens)]
        assert cut > 5


def test_the_end_of_the_context(f32_target: Target, f32_drafter: Drafter) -> None:
    case = step_golden("d-part")["cases"][0]
    n_prompt = len(case["prompt"])
    for room in (1, 2, 9, 14, 15, 16, 40):
        with Pair(f32_target("nano"), f32_drafter("d-part"), capacity=n_prompt + room) as pair:
            decoder = pair.decoder
            decoder.begin(GREEDY, stop_ids=[])
            tokens = list(decoder.prefill(case["prompt"], 100).tokens)
            while decoder.room > 0:
                tokens += decoder.step_tree(14, 100).tokens
            assert tokens == case["greedy"][: room + 1]
            with pytest.raises(pydflash.CapacityError, match="is full"):
                decoder.step_tree(14, 100)


def test_a_tree_accepts_what_its_chain_does_and_more(f32_target: Target, f32_drafter: Drafter) -> None:
    """From the same place, with the counts of each step in agreement."""
    more = 0
    with Pair(f32_target("nano"), f32_drafter("d-part")) as pair:
        for case in step_golden("d-part")["cases"]:
            tokens, steps = pair.run(case["prompt"], len(case["greedy"]), [40])
            done = 1
            for step in steps:
                budget = len(case["greedy"]) - done
                assert step.n_accepted == len(step.tokens) - 1 <= step.depth <= 7
                assert step.n_chain_accepted <= min(step.n_chain, step.n_accepted)
                pair.decoder.reset()
                pair.decoder.begin(GREEDY, stop_ids=[])
                head = case["prompt"] + tokens[: done - 1]
                assert pair.decoder.prefill(head, 100).tokens == (tokens[done - 1],)
                chain = pair.decoder.step(8, budget)
                assert step.n_accepted >= chain.n_accepted
                assert step.n_chain_accepted == min(chain.n_accepted, step.n_chain)
                more += step.n_accepted > chain.n_accepted
                done += len(step.tokens)
    assert more >= 3


def test_a_steady_state_builds_and_allocates_nothing(f32_target: Target, f32_drafter: Drafter) -> None:
    """Whatever shapes the trees of a size take; the logits stay on the device."""
    case = step_golden("d-part")["cases"][0]
    with Pair(f32_target("nano"), f32_drafter("d-part")) as pair:
        decoder = pair.decoder
        decoder.begin(GREEDY, stop_ids=[])
        decoder.prefill(case["prompt"], 1000)
        for _ in range(3):
            decoder.step_tree(22, 1000)
        decoder.settle()
        seen = set()
        before = pydflash.work_counters()
        while decoder.position < 200:
            seen.add(decoder.step_tree(22, 1000).depth)
        decoder.settle()
        after = pydflash.work_counters()
    assert len(seen) > 1
    built = after.graphs_built - before.graphs_built
    # Rows that are written to the draft context come in as many sizes as a step can accept.
    assert built <= 8
    assert after.buffers_allocated - before.buffers_allocated == built


def test_propose_tree_is_what_a_step_verifies(f32_target: Target, f32_drafter: Drafter) -> None:
    """Scores against the drafter's own logits, and a greedy step by hand through verify_tree and commit_path."""
    case = step_golden("d-part")["cases"][0]
    with Pair(f32_target("nano"), f32_drafter("d-part")) as pair:
        assert pair.context is not None
        tokens = [int(pair.cache.forward(case["prompt"], logits="last").logits[0].argmax())]
        while len(tokens) < 30:
            pair.context.append(pair.cache, pair.context.cursor, pair.cache.position)
            tree = pair.context.propose_tree(tokens[-1], 16)
            assert (len(tree.tokens), tree.tokens[0], tree.parents[0], tree.scores[0]) == (17, tokens[-1], -1, 0.0)
            logits = pair.context.propose(tokens[-1], logits=True).logits
            assert logits is not None
            logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
            for node in range(1, 17):
                path = tree.path_to(node)
                want = sum(logprobs[depth, tree.tokens[row]] for depth, row in enumerate(path[1:]))
                assert tree.scores[node] == pytest.approx(want, abs=1e-3)
            verify = pair.cache.verify_tree(tree.tokens, tree.parents.tolist(), logits=False)
            path, node = [0], 0
            while True:
                token = int(verify.argmax[node])
                children = [i for i in range(17) if tree.parents[i] == node and tree.tokens[i] == token]
                tokens.append(token)
                if not children:
                    break
                node = children[0]
                path.append(node)
            verify.commit_path(path)
        assert tokens == case["greedy"][: len(tokens)]
        for n_nodes in (0, -1, 65):
            with pytest.raises(InvalidArgumentError, match="n_nodes"):
                pair.context.propose_tree(tokens[-1], n_nodes)


def test_sizes_that_do_not_fit_are_refused(f32_target: Target, f32_drafter: Drafter) -> None:
    with Pair(f32_target("nano"), f32_drafter("d-part"), capacity=60) as pair:
        decoder = pair.decoder
        assert decoder.max_tree == 15
        decoder.begin(GREEDY, stop_ids=[])
        with pytest.raises(InvalidArgumentError, match="needs a prefill first"):
            decoder.step_tree(4, 10)
        decoder.prefill([1, 2, 3], 50)
        with pytest.raises(InvalidArgumentError, match=r"a tree of 16 nodes .* at most max_verify 16 rows"):
            decoder.step_tree(16, 10)
        with pytest.raises(InvalidArgumentError, match="a tree of 65 nodes, want 1 to 64"):
            decoder.step_tree(65, 10)
        with pytest.raises(InvalidArgumentError, match="n_nodes"):
            decoder.step_tree(0, 10)
        with pytest.raises(InvalidArgumentError, match="budget 0"):
            decoder.step_tree(4, 0)
        assert decoder.step_tree(15, 10).tree == 15
    with Pair(f32_target("nano"), None) as pair:
        assert pair.decoder.max_tree == 0
        pair.decoder.begin(GREEDY, stop_ids=[])
        pair.decoder.prefill([1, 2, 3], 50)
        step = pair.decoder.step_tree(8, 10)
        assert (step.tree, step.width, len(step.tokens)) == (0, 1, 1)


def test_engine_with_trees(make_engine: EngineMaker, prompts: list[list[int]], greedy: list[list[int]]) -> None:
    engine = make_engine(tree=22)
    assert engine.decoder.max_tree == 22
    for prompt, wanted in zip(prompts, greedy, strict=True):
        n = len(wanted)
        fixed = engine.generate(prompt, SamplingOptions(max_tokens=n, ignore_eos=True, tree=22))
        chosen = engine.generate(prompt, SamplingOptions(max_tokens=n, ignore_eos=True))
        chain = engine.generate(prompt, SamplingOptions(max_tokens=n, ignore_eos=True, tree=0))
        assert list(fixed.token_ids) == list(chosen.token_ids) == list(chain.token_ids)
        assert fixed.stats.trees[22] >= fixed.stats.steps - 1
        assert chain.stats.trees == {}
        assert fixed.stats.to_dict()["trees"] == fixed.stats.trees
        assert fixed.stats.mean_accepted_length >= chain.stats.mean_accepted_length * 0.99
    smaller = engine.generate(prompts[0], SamplingOptions(max_tokens=20, ignore_eos=True, tree=7))
    assert set(smaller.stats.trees) <= {7}
    with pytest.raises(InvalidArgumentError, match=r"tree.*23.*at most 22"):
        engine.generate(prompts[0], SamplingOptions(tree=23))
    with pytest.raises(InvalidArgumentError, match=r"tree.*together with width=4"):
        SamplingOptions(tree=3, width=4)
    assert SamplingOptions(tree=0, width=4).width == 4


def test_engine_without_trees(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine(tree=0)
    assert engine.decoder.max_tree == 15
    assert engine.generate(prompts[0], SamplingOptions(max_tokens=30, ignore_eos=True)).stats.trees == {}
    alone = make_engine(None)
    assert alone.cache.options.max_verify == 16
    assert alone.generate(prompts[0], SamplingOptions(max_tokens=8, tree=5)).stats.widths == {1: 7}


def test_a_policy_that_sees_trees_pay_takes_them(make_engine: EngineMaker, prompts: list[list[int]]) -> None:
    engine = make_engine(tree=22)
    policy = engine.width_policy
    assert policy is not None
    assert policy.trees == (22,)
    for _ in range(20):  # as if a tree cost no more than plain decoding, and a chain ten times as much
        policy.measured(1, 1.0)
        policy.measured_tree(22, 1.0)
        for width in policy.widths[1:]:
            policy.measured(width, 10.0)
    stats = engine.generate(prompts[0], SamplingOptions(max_tokens=12, ignore_eos=True)).stats
    assert stats.trees.get(22, 0) >= 1
