"""The policy with trees against simulated models: known costs, known acceptance, noisy clocks."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest

from pydflash.errors import InvalidArgumentError
from pydflash.shape_policy import ShapePolicy, StepShape

BLOCK = 16
TREES = (8, 16, 32)
N_TOKENS = 256
SEEDS = range(8)

Costs = Callable[[StepShape], float]


def gpu(shape: StepShape) -> float:
    """Rows ride along with the weights; a tree's recurrence costs more than a chain's."""
    if shape.width == 1:
        return 11.5
    return 14.0 + 0.4 * shape.width + (1.0 + 0.15 * shape.tree if shape.tree else 0.0)


def cpu(shape: StepShape) -> float:
    """Rows cost nearly full price."""
    return 4.0 if shape.width == 1 else 4.0 * (1.6 + 0.25 * (shape.width - 1))


def dear_trees(shape: StepShape) -> float:
    return gpu(shape) * (4.0 if shape.tree else 1.0)


COSTS = [gpu, cpu, dear_trees]


@dataclass
class Model:
    """Chance that a slot's first choice is right, and of another one of a tree of n nodes to be, where it is not."""

    right: float
    rescue: float = 0.4

    def rescued(self, n_nodes: int) -> float:
        return self.rescue * min(1.0, n_nodes / 32) ** 0.5

    def step(self, rng: random.Random, shape: StepShape, budget: int) -> tuple[int, int, bool]:
        """Tokens emitted, first choices right in a row, whether the budget cut it."""
        slots = min(BLOCK - 1, shape.tree or shape.width - 1)
        chain = accepted = 0
        while accepted < slots and accepted + 1 < budget:
            if rng.random() < self.right:
                chain += chain == accepted
            elif not shape.tree or rng.random() >= self.rescued(shape.tree):
                return accepted + 1, chain, False
            accepted += 1
        return accepted + 1, chain, accepted + 1 >= budget


@dataclass
class Run:
    ms: float = 0.0
    shapes: Counter[StepShape] = field(default_factory=Counter)
    curve: list[tuple[int, float]] = field(default_factory=list)


def decode(chooser: ShapePolicy | StepShape, costs: Costs, model: Model, seed: int, n_tokens: int = N_TOKENS) -> Run:
    """One request; a fixed shape is kept to the end."""
    rng = random.Random(seed)
    run, done = Run(), 0
    if isinstance(chooser, ShapePolicy):
        chooser.begin()
    while done < n_tokens:
        budget = n_tokens - done
        if isinstance(chooser, ShapePolicy):
            shape = chooser.choose_shape(budget)
        else:
            shape = chooser if chooser.tree else StepShape(min(chooser.width, budget))
        emitted, chain, cut = model.step(rng, shape, budget)
        ms = costs(shape) * rng.lognormvariate(0.0, 0.05)
        if isinstance(chooser, ShapePolicy):
            accepted = emitted - 1
            if shape.tree:
                chooser.record_tree(
                    n_nodes=shape.tree,
                    n_tokens=emitted,
                    n_accepted=accepted,
                    n_chain=min(shape.tree // 2, BLOCK - 1),
                    n_chain_accepted=min(chain, shape.tree // 2),
                    ms=ms,
                    cut=cut,
                )
            else:
                chooser.record(width=shape.width, n_tokens=emitted, n_accepted=accepted, ms=ms, cut=cut)
        done += emitted
        run.ms += ms
        run.shapes[shape] += 1
        run.curve.append((done, run.ms))
    return run


def warm(costs: Costs, trees: tuple[int, ...] = TREES) -> ShapePolicy:
    policy = ShapePolicy(BLOCK, trees)
    for _ in range(4):
        for width in policy.widths:
            policy.measured(width, costs(StepShape(width)))
        for n in trees:
            policy.measured_tree(n, costs(StepShape(n + 1, n)))
    return policy


def fixed_shapes() -> list[StepShape]:
    return [StepShape(width) for width in (1, 2, 4, 8, 16)] + [StepShape(n + 1, n) for n in TREES]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("right", [0.35, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("rescue", [0.05, 0.4])
def test_close_to_the_best_fixed_shape(costs: Costs, right: float, rescue: float) -> None:
    """On average over the seeds, the third request of an engine is close to the best shape for it."""
    model = Model(right, rescue)
    best = min(mean(decode(shape, costs, model, seed).ms for seed in SEEDS) for shape in fixed_shapes())
    chosen = []
    for seed in SEEDS:
        policy = warm(costs)
        for earlier in range(2):
            decode(policy, costs, model, 100 + 10 * seed + earlier)
        chosen.append(decode(policy, costs, model, seed).ms)
    assert best / mean(chosen) >= 0.89


@pytest.mark.parametrize("costs", COSTS)
def test_a_useless_drafter_costs_at_most_3_percent(costs: Costs) -> None:
    for seed in SEEDS:
        policy = warm(costs)
        for number in range(4):
            run = decode(policy, costs, Model(0.0, 0.0), 10 * seed + number)
            plain = costs(StepShape(1))
            assert min(n * plain / ms for n, ms in run.curve if n >= 100) >= 0.96  # the clock itself is 5 % off


def test_a_drafter_that_turns_useless_is_dropped_at_once() -> None:
    """What a good request earned may be lost again once, up to the stated steps."""
    policy = warm(gpu)
    decode(policy, gpu, Model(0.9), 1)
    runs = [decode(policy, gpu, Model(0.0, 0.0), seed) for seed in range(2, 6)]
    for run in runs:
        assert run.ms <= (N_TOKENS + 11) * gpu(StepShape(1)) * 1.02
    assert sum(run.ms for run in runs[1:]) <= 3 * N_TOKENS * gpu(StepShape(1)) / 0.97


def test_trees_that_pay_are_found_and_those_that_do_not_are_left() -> None:
    model, chains = Model(0.8, 0.6), [StepShape(width) for width in (2, 4, 8, 16)]
    paid, best_chain, with_trees = [], [], []
    for seed in SEEDS:
        policy = warm(gpu)
        runs = [decode(policy, gpu, model, 10 * seed + number, 600) for number in range(3)]
        paid.append(runs[-1].ms)
        best_chain.append(min(decode(shape, gpu, model, 10 * seed + 2, 600).ms for shape in chains))
        with_trees.append(sum(n for shape, n in runs[-1].shapes.items() if shape.tree) / sum(runs[-1].shapes.values()))
    assert mean(paid) < 0.95 * mean(best_chain)
    assert mean(with_trees) > 0.6
    policy = warm(dear_trees)
    left = decode(policy, dear_trees, Model(0.7, 0.5), 3, 600)
    assert sum(n for shape, n in left.shapes.items() if shape.tree) <= 2


def test_without_trees_it_is_the_width_policy() -> None:
    policy = warm(gpu, trees=())
    run = decode(policy, gpu, Model(0.8), 5)
    assert policy.trees == ()
    assert all(shape.tree == 0 for shape in run.shapes)
    assert ShapePolicy(1, TREES).choose_shape(10) == StepShape(1)


def test_nothing_is_tried_before_plain_decoding_was_measured() -> None:
    policy = ShapePolicy(BLOCK, TREES)
    assert policy.choose_shape(100) == StepShape(1)


def test_a_tree_teaches_about_chains() -> None:
    policy = warm(gpu)
    before = policy.acceptance()[0]
    for _ in range(10):
        policy.record_tree(n_nodes=16, n_tokens=5, n_accepted=4, n_chain=4, n_chain_accepted=0, ms=20.0)
    assert policy.acceptance()[0] < before / 2
    assert policy.expected_tree_tokens(16) > policy.expected_tokens(16)


def test_a_tree_of_an_unknown_size_is_recorded_for_what_it_shows() -> None:
    policy = warm(gpu)
    policy.record_tree(n_nodes=5, n_tokens=3, n_accepted=2, n_chain=2, n_chain_accepted=2, ms=20.0, cut=True)
    assert policy.tree_cost(5) > 1.0


@pytest.mark.parametrize("limit", [0, -1])
def test_limits(limit: int) -> None:
    with pytest.raises(InvalidArgumentError, match="limit"):
        warm(gpu).choose_shape(limit)
    with pytest.raises(InvalidArgumentError, match="trees"):
        ShapePolicy(BLOCK, (8, limit))
    assert warm(gpu).choose_shape(1) == StepShape(1)
