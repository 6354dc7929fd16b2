"""The width policy against simulated models: known costs, known acceptance, noisy clocks."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import pytest

from pydflash.errors import InvalidArgumentError
from pydflash.width_policy import StepCosts, WidthPolicy, candidate_widths

BLOCK = 16
N_TOKENS = 256
SEEDS = range(12)

Costs = Callable[[int], float]
Rates = Callable[[int], Sequence[float]]


def cpu(width: int) -> float:
    """A draft as dear as a plain step, and rows that cost nearly full price."""
    return 4.0 if width == 1 else 4.0 * (1.6 + 0.2 * (width - 1))


def gpu(width: int) -> float:
    """Rows that ride along with the weights."""
    return 11.5 if width == 1 else 14.0 + 0.8 * width


def dear(width: int) -> float:
    """Drafting so expensive that hardly anything is worth it."""
    return 2.0 if width == 1 else 6.5 + 1.0 * width


@dataclass
class Run:
    """A decoded request: true time, and the true time at each token count."""

    ms: float = 0.0
    widths: Counter[int] = field(default_factory=Counter)
    curve: list[tuple[int, float]] = field(default_factory=list)

    def slowest_share_of_plain(self, cost: float, begin: int) -> float:
        """The worst ratio to plain decoding at any moment from token `begin` on."""
        return min(n * cost / ms for n, ms in self.curve if n >= begin)


def decode(policy: WidthPolicy | int, costs: Costs, rates: Rates, seed: int, n_tokens: int = N_TOKENS) -> Run:
    """One request. A fixed width instead of a policy is kept to the end."""
    rng = random.Random(seed)
    run = Run()
    done = 0
    if isinstance(policy, WidthPolicy):
        policy.begin()
    while done < n_tokens:
        budget = n_tokens - done
        width = policy.choose(budget) if isinstance(policy, WidthPolicy) else min(policy, budget)
        accepted = 0
        while accepted < width - 1 and rng.random() < rates(done)[accepted]:
            accepted += 1
        ms = costs(width)
        seen = ms * math.exp(rng.gauss(0.0, 0.05)) * (3.0 if rng.random() < 0.02 else 1.0)
        if isinstance(policy, WidthPolicy):
            policy.record(width=width, n_tokens=accepted + 1, n_accepted=accepted, ms=seen)
        done += accepted + 1
        run.ms += ms
        run.widths[width] += 1
        run.curve.append((done, run.ms))
    return run


def warmed_up(costs: Costs) -> WidthPolicy:
    """A policy that has seen each width three times, the first time while its graph was built."""
    policy = WidthPolicy(BLOCK)
    for extra in (50.0, 0.0, 0.0):
        for width in policy.widths:
            policy.measured(width, costs(width) + extra)
    return policy


def flat(rate: float) -> Rates:
    return lambda _done: [rate] * (BLOCK - 1)


@pytest.mark.parametrize(
    ("max_width", "widths"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (15, (1, 2, 4, 8, 15)), (16, (1, 2, 4, 8, 16))],
)
def test_candidates_are_powers_of_two_and_the_widest(max_width: int, widths: tuple[int, ...]) -> None:
    assert candidate_widths(max_width) == widths


def test_limits_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="max_width is 0"):
        WidthPolicy(0)
    with pytest.raises(InvalidArgumentError, match="limit is 0"):
        WidthPolicy(4).choose(0)


def test_without_proposals_every_step_is_plain() -> None:
    policy = WidthPolicy(1)
    for _ in range(20):
        assert policy.choose(100) == 1
        policy.record(width=1, n_tokens=1, n_accepted=0, ms=1.0)
    assert policy.acceptance() == ()


@pytest.mark.parametrize("costs", [cpu, gpu, dear])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 15, 16, 1000])
def test_choices_are_candidates_within_the_limit(costs: Costs, limit: int) -> None:
    policy = warmed_up(costs)
    rng = random.Random(limit)
    for _ in range(300):
        width = policy.choose(limit)
        assert width in policy.widths
        assert width <= limit
        accepted = rng.randrange(width)
        policy.record(width=width, n_tokens=accepted + 1, n_accepted=accepted, ms=costs(width))


@pytest.mark.parametrize("costs", [cpu, gpu, dear])
def test_a_useless_drafter_costs_three_percent_at_most_and_later_less(costs: Costs) -> None:
    policies = [warmed_up(costs) for _ in SEEDS]
    first = [decode(policy, costs, flat(0.0), seed) for seed, policy in zip(SEEDS, policies, strict=True)]
    assert min(run.slowest_share_of_plain(costs(1), 100) for run in first) >= 0.965
    assert mean(N_TOKENS * costs(1) / run.ms for run in first) >= 0.98
    later = [decode(policy, costs, flat(0.0), seed + 99) for seed, policy in zip(SEEDS, policies, strict=True)]
    assert min(run.slowest_share_of_plain(costs(1), 100) for run in later) >= 0.97
    assert mean(N_TOKENS * costs(1) / run.ms for run in later) >= 0.99


def test_a_useless_drafter_is_asked_less_and_less() -> None:
    policy = warmed_up(gpu)
    drafts = [sum(n for w, n in decode(policy, gpu, flat(0.0), i, 1000).widths.items() if w > 1) for i in range(6)]
    assert drafts[0] > 0
    assert sum(drafts[3:]) < sum(drafts[:3])
    assert max(drafts[3:]) <= 2


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("costs", [cpu, gpu, dear])
def test_near_the_best_fixed_width_once_costs_are_known(costs: Costs, rate: float) -> None:
    best = min(mean(decode(width, costs, flat(rate), seed).ms for seed in SEEDS) for width in candidate_widths(BLOCK))
    first, later = [], []
    for seed in SEEDS:
        policy = warmed_up(costs)
        first.append(decode(policy, costs, flat(rate), seed).ms)
        later += [decode(policy, costs, flat(rate), 1000 * seed + i).ms for i in range(3)]
    assert best / mean(first) >= 0.88
    assert best / mean(later) >= 0.93


def test_acceptance_that_falls_with_the_slot() -> None:
    slots = [0.8, 0.7, 0.5, 0.4, 0.3, 0.2] + [0.1] * 9
    best = min(mean(decode(width, gpu, lambda _done: slots, seed).ms for seed in SEEDS) for width in (1, 2, 4, 8, 16))
    policies = [warmed_up(gpu) for _ in SEEDS]
    for seed, policy in zip(SEEDS, policies, strict=True):
        decode(policy, gpu, lambda _done: slots, seed)
    later = [decode(policy, gpu, lambda _done: slots, seed + 50) for seed, policy in zip(SEEDS, policies, strict=True)]
    assert best / mean(run.ms for run in later) >= 0.94
    estimates = [mean(values) for values in zip(*(policy.acceptance()[:3] for policy in policies), strict=True)]
    assert estimates == pytest.approx(slots[:3], abs=0.12)


def test_drafting_comes_back_when_it_pays_again() -> None:
    """A text whose middle cannot be guessed."""

    def rates(done: int) -> Sequence[float]:
        return [0.0 if 300 <= done < 600 else 0.9] * (BLOCK - 1)

    for seed in SEEDS:
        policy = warmed_up(gpu)
        run = decode(policy, gpu, rates, seed, 1500)
        at = dict(run.curve)

        def ms_until(token: int, at: dict[int, float] = at) -> float:
            return next(ms for n, ms in at.items() if n >= token)

        plain = 300 * gpu(1)
        assert plain / ms_until(300) > 1.8
        assert plain / (ms_until(600) - ms_until(300)) > 0.85
        assert 2 * plain / (ms_until(1500) - ms_until(900)) > 1.8


def test_a_request_that_starts_badly_leaves_a_good_drafter_in_use() -> None:
    policy = warmed_up(gpu)
    decode(policy, gpu, flat(0.9), 1)
    decode(policy, gpu, flat(0.0), 2)
    run = decode(policy, gpu, flat(0.9), 3)
    assert N_TOKENS * gpu(1) / run.ms > 1.5


def test_plain_decoding_is_measured_again() -> None:
    """A plain step that got cheaper, as on a machine that is no longer busy, is noticed."""
    policy = warmed_up(gpu)
    decode(policy, gpu, flat(0.6), 1)
    run = decode(policy, lambda width: 4.0 if width == 1 else gpu(width), flat(0.6), 2, 2000)
    tail = Counter(b[0] - a[0] for a, b in zip(run.curve[-200:], run.curve[-199:], strict=False))
    assert tail[1] > 150


def test_costs_of_the_first_step_stand_until_there_is_a_second() -> None:
    costs = StepCosts((1, 2, 4))
    assert costs.measured(2) is None
    costs.add(2, 90.0)
    assert costs.measured(2) == 90.0
    for ms in (10.0, 12.0, 11.0, 300.0):
        costs.add(2, ms)
    assert costs.measured(2) == 11.0


def test_unmeasured_costs_are_filled_in() -> None:
    costs = StepCosts((1, 2, 4, 8, 16))
    for ms in (10.0, 10.0):
        costs.add(1, ms)
    guess = {width: costs.relative(width) for width in (2, 4, 8, 16)}
    assert sorted(guess.values()) == list(guess.values())
    for width, ms in ((4, 20.0), (16, 80.0)):
        costs.add(width, ms)
        costs.add(width, ms)
    assert costs.relative(8) == pytest.approx(4.0)
    assert costs.relative(2) == pytest.approx(2.0 * guess[2] / guess[4])
    costs.add(3, 5.0)
    assert costs.relative(4) == 2.0


def test_carried_time_belongs_to_the_step_before() -> None:
    policy = WidthPolicy(4)
    for _ in range(3):
        policy.record(width=4, n_tokens=4, n_accepted=3, ms=20.0, carried_ms=5.0)
        policy.record(width=1, n_tokens=1, n_accepted=0, ms=13.0, carried_ms=3.0)
    policy.record(width=4, n_tokens=4, n_accepted=3, ms=20.0, carried_ms=5.0)
    assert policy.cost(4) == pytest.approx((20 - 5 + 3) / (13 - 3 + 5))


def test_a_cut_step_says_nothing_about_the_next_slot() -> None:
    whole, cut = WidthPolicy(4), WidthPolicy(4)
    whole.record(width=4, n_tokens=2, n_accepted=1, ms=1.0)
    cut.record(width=4, n_tokens=2, n_accepted=1, ms=1.0, cut=True)
    assert cut.acceptance()[0] == whole.acceptance()[0]
    assert cut.acceptance()[1] > whole.acceptance()[1]


def test_expected_tokens_follow_the_formula() -> None:
    policy = WidthPolicy(4)
    for _ in range(30):
        policy.record(width=4, n_tokens=3, n_accepted=2, ms=1.0)
    a, b, c = policy.acceptance()
    assert policy.expected_tokens(1) == 1.0
    assert policy.expected_tokens(4) == pytest.approx(1 + a + a * b + a * b * c)
    assert a > 0.85
    assert c < 0.3


def test_repr_shows_what_was_learnt() -> None:
    assert repr(WidthPolicy(16)) == "WidthPolicy(widths=(1, 2, 4, 8, 16), acceptance=[0.75, 0.75, 0.75, 0.75, ...])"


def test_a_row_has_to_bring_what_it_costs() -> None:
    """Free rows are worth any chance; a row at the price of a plain step, only a good one."""
    for row_ms, least in ((0.0, 0.0), (0.05, 0.01), (1.0, 0.4)):
        policy = WidthPolicy(8)
        policy.begin()
        for width in policy.widths:
            for _ in range(4):
                policy.measured(width, 1.0 + row_ms * (width - 1))
        assert policy.least_chance(1) == 0.0
        chance = policy.least_chance(8)
        assert least <= chance <= 0.5
        row = row_ms / policy.cost(8)
        assert chance == pytest.approx(min(0.5, row * policy.expected_tokens(8)), abs=1e-6)
