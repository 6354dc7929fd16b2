"""How many rows the next target forward gets: expected tokens over measured cost. Pure Python, no native import.

A step of *width* w runs the target on w rows: the token that was emitted last and w - 1 proposals. Width 1 is plain
decoding, so "stop drafting" is no separate mode but the choice of width 1.

With a_i the probability that slot i is accepted once the slots before it were, a step of width w emits

    E(w) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_(w-1)

tokens on average, and the width with the largest E(w) / cost(w) is the fastest. Both sides are learnt while decoding.
All quantities that carry the unit *steps* below are multiples of the cost of one plain step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydflash.errors import InvalidArgumentError

# Acceptance that is assumed before anything was seen, and how many observations such an assumption is worth.
_FIRST_GUESS = 0.75
_GUESS_WEIGHT = 2.0
_EARLIER_WEIGHT = 4.0
# What an observation is still worth after one more draft: within a request (about 16 drafts count), across requests
# (about 200), and after one more token that was decoded without drafting.
_KEEP_IN_REQUEST = 0.94
_KEEP_ACROSS_REQUESTS = 0.995
_KEEP_WITHOUT_DRAFT = 0.99
# Cost of a drafted step before any was measured, in steps: the draft itself, and each further row.
_GUESS_DRAFTED = 1.2
_GUESS_ROW = 0.15
_RECENT_COSTS = 12
_LARGEST_UNIT = 1e100
# Where plain decoding was chosen, it stays so for as many steps: the choice costs about 0.05 ms.
_STAY_PLAIN = 8
# How much slower than plain decoding drafting may make an engine: an advance, and a share of each token.
_ADVANCE = 2.0
_ALLOWED_LOSS = 0.005
# Gains of a request that a later one may lose again, in steps.
_MOST_KEPT = 8.0
# Steps that a request may spend on trying widths that do not look best.
_TRIAL_ADVANCE = 0.75
_TRIAL_SHARE = 0.005
_TRIAL_AFTER = 32  # steps since a neighbouring width was last tried
_REMEASURE_AFTER = 64  # steps since plain decoding was last measured
# A drafter that does not pay is asked again after so many tokens, twice as many after each failure.
_FIRST_INTERVAL = 16
_LAST_INTERVAL = 1024
_INTERVAL_AFTER_SUCCESS = 4
_PROBE_WIDTH = 4
_VERY_GOOD = 0.95
# Measured costs are that uncertain: a drafted step has to look better by more than this.
_MARGIN = 0.02


def candidate_widths(max_width: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to ``max_width``, and ``max_width`` itself.

    Raises:
        InvalidArgumentError: ``max_width`` is below 1.
    """
    if max_width < 1:
        raise InvalidArgumentError("max_width", max_width, ">= 1")
    widths = {1 << i for i in range(max_width.bit_length())} | {max_width}
    return tuple(sorted(widths))


@dataclass(slots=True)
class _Slots:
    """Decaying counts of accepted and decided proposals, by slot."""

    n: int
    accepted: list[float] = field(init=False)
    decided: list[float] = field(init=False)
    unit: float = 1.0

    def __post_init__(self) -> None:
        self.accepted = [0.0] * self.n
        self.decided = [0.0] * self.n

    def forget(self, keep: float) -> None:
        # Instead of making all counts smaller, everything added from now on counts for more.
        self.unit /= keep
        if self.unit > _LARGEST_UNIT:
            self.accepted = [value / self.unit for value in self.accepted]
            self.decided = [value / self.unit for value in self.decided]
            self.unit = 1.0

    def add(self, n_decided: int, n_accepted: int) -> None:
        for i in range(n_decided):
            self.decided[i] += self.unit
            if i < n_accepted:
                self.accepted[i] += self.unit

    def mean(self, i: int, guess: float, weight: float) -> float:
        weight *= self.unit
        return (self.accepted[i] + weight * guess) / (self.decided[i] + weight)


class StepCosts:
    """Milliseconds of a step by width, from recent measurements.

    The first step of a width also builds its graph, so it counts only as long as there is no other; what remains is
    judged by the lower median, which a busy machine moves little. Widths that were not measured are filled in from
    those that were.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._recent: dict[int, deque[float]] = {width: deque(maxlen=_RECENT_COSTS) for width in widths}
        self._first: dict[int, float] = {}
        self._known: dict[int, float] = {}  # median of _recent, or _first

    def include(self, keys: Iterable[int]) -> None:
        """Also take steps of other kinds, known by keys below 0: the number of a tree's nodes."""
        self._recent.update((key, deque(maxlen=_RECENT_COSTS)) for key in keys)

    def add(self, width: int, ms: float) -> None:
        """Note one step. Widths outside the candidates are ignored."""
        if width not in self._recent:
            return
        if width not in self._first:
            self._first[width] = self._known[width] = ms
            return
        recent = self._recent[width]
        recent.append(ms)
        self._known[width] = sorted(recent)[(len(recent) - 1) // 2]

    def measured(self, width: int) -> float | None:
        """Cost in ms, None before the first step of this width."""
        return self._known.get(width)

    def relative(self, width: int) -> float:
        """Cost in steps: 1.0 for width 1."""
        if width == 1:
            return 1.0
        plain = self._known.get(1)
        if plain is None:
            return _guessed_cost(width if width > 0 else 1 - width)
        if width < 0 and width not in self._known:
            width = 1 - width  # a tree's rows cost at least what a chain's do
        if width in self._known:
            return self._known[width] / plain
        known = [point for point in self._known.items() if point[0] > 1]
        if not known:
            return _guessed_cost(width)
        below = max((point for point in known if point[0] <= width), default=None)
        above = min((point for point in known if point[0] >= width), default=None)
        if below is not None and above is not None:
            share = (width - below[0]) / (above[0] - below[0])
            ms = below[1] + share * (above[1] - below[1])
        else:
            nearest, cost = below or above or known[0]
            ms = cost * _guessed_cost(width) / _guessed_cost(nearest)
        return ms / plain


def _expected(rates: Sequence[float], width: int) -> float:
    expected = reach = 1.0
    for rate in rates[: width - 1]:
        reach *= rate
        expected += reach
    return expected


def _guessed_cost(width: int) -> float:
    return _GUESS_DRAFTED + _GUESS_ROW * (width - 1)


class WidthPolicy:
    """Chooses widths for the requests of one engine, one after the other.

    What it guarantees, up to noise in the measured times: over the life of an engine, drafting loses no more than 2
    steps plus 0.5 % of the tokens against plain decoding, so a useless drafter costs at most 3 % of the first 100
    tokens and less later; a request may lose up to 8 steps again that earlier ones gained. Trials of widths that do not
    look best cost a request at most 0.75 steps plus 0.5 % of its tokens. (Graphs that are built on the first use of a
    width come on top, once per engine.)

    Across requests it remembers costs, a weak memory of acceptance, what it may still lose, and how long to wait before
    a drafter that did not pay is asked again.

    Not thread-safe: it belongs to the thread that runs the engine. Choices depend on measured times, so two runs may
    choose differently; the emitted tokens do not depend on the choice, up to rounding in forwards of different widths.

    Args:
        max_width: rows of the widest step, 1 without a drafter.
    """

    def __init__(self, max_width: int) -> None:
        self.widths = candidate_widths(max_width)
        self._costs = StepCosts(self.widths)
        self._earlier = _Slots(max_width - 1)
        self._balance = _ADVANCE
        self._interval = _FIRST_INTERVAL
        self._since_draft = 0
        self._uncarried: tuple[int, float] | None = None
        self.begin()

    def __repr__(self) -> str:
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance()[:4])
        return f"WidthPolicy(widths={self.widths}, acceptance=[{rates}{', ...' if self.widths[-1] > 5 else ''}])"

    def begin(self) -> None:
        """Start a request."""
        self._slots = _Slots(self.widths[-1] - 1)
        self._balance = min(self._balance, _MOST_KEPT)
        self._trial_credit = _TRIAL_ADVANCE
        self._steps = 0
        self._last_step_of: dict[int, int] = {}
        self._uncarried = None
        self._plain_steps_left = 0

    def acceptance(self) -> tuple[float, ...]:
        """Estimated a_1, a_2, ...: the chance of each slot once those before it were accepted."""
        return self._rates(hope=True)

    def _rates(self, *, hope: bool) -> tuple[float, ...]:
        """Acceptance by slot. Without hope, what was not seen counts as rejected."""
        if not hope:
            return tuple(
                max(slots.mean(i, 0.0, _EARLIER_WEIGHT) for slots in (self._slots, self._earlier))
                for i in range(self._slots.n)
            )
        rates: list[float] = []
        earlier = rate = _FIRST_GUESS
        for i in range(self._slots.n):
            # A slot that was hardly seen is taken to be like the one before it.
            earlier = self._earlier.mean(i, earlier, _GUESS_WEIGHT)
            guess = earlier if i == 0 else (earlier + rate) / 2
            rate = self._slots.mean(i, guess, _EARLIER_WEIGHT)
            rates.append(rate)
        return tuple(rates)

    def expected_tokens(self, width: int) -> float:
        """E(width) by the present estimates."""
        return _expected(self.acceptance(), width)

    def cost(self, width: int) -> float:
        """Cost of a step of this width in plain steps."""
        return self._costs.relative(width)

    def least_chance(self, width: int) -> float:
        """How likely a proposal must be reached and right for its row to pay in a chain of this width.

        With E tokens for a cost C, a row that costs c more and brings a token with chance s is worth having while
        (E + s) / (C + c) >= E / C, which is s >= c E / C. At most 0.5, so that a bad measurement ends no chain that is
        likely right.
        """
        narrower = max((other for other in self.widths if other < width), default=width)
        if narrower == width:
            return 0.0
        row = (self.cost(width) - self.cost(narrower)) / (width - narrower)
        return min(max(row * self.expected_tokens(width) / self.cost(width), 0.0), 0.5)

    def choose(self, limit: int) -> int:
        """Width of the next step: one of ``widths``, at most ``limit`` (tokens still wanted, or room left).

        Raises:
            InvalidArgumentError: ``limit`` is below 1.
        """
        if limit < 1:
            raise InvalidArgumentError("limit", limit, ">= 1")
        if self._plain_steps_left > 0:
            self._plain_steps_left -= 1
            return 1
        widths = [width for width in self.widths if width <= limit]
        if len(widths) == 1 or self._costs.measured(1) is None:
            return 1
        rates, safe = self._rates(hope=True), self._rates(hope=False)
        expected = {width: _expected(rates, width) for width in widths}
        cost = {width: self.cost(width) for width in widths}
        affordable = [w for w in widths if w == 1 or cost[w] - _expected(safe, w) <= self._balance]
        best = max(affordable, key=lambda w: (expected[w] / cost[w] * (1.0 if w == 1 else 1.0 - _MARGIN), -w))
        if best == 1:
            best = self._probe(affordable)
            self._plain_steps_left = _STAY_PLAIN - 1 if best == 1 else 0
            return best
        return self._trial(best, affordable, expected, cost) or best

    def record(
        self, *, width: int, n_tokens: int, n_accepted: int, ms: float, carried_ms: float = 0.0, cut: bool = False
    ) -> None:
        """Note what a step did.

        Args:
            width: rows it ran.
            n_tokens: tokens it emitted.
            n_accepted: proposals accepted.
            ms: time of the whole call.
            carried_ms: the part of ``ms`` that belongs to the step before (its commit and its draft context).
            cut: a stop id or the budget ended the step, so the slot behind the last accepted one was not decided.
        """
        self._note_step(width, n_tokens, ms, carried_ms)
        if width > 1:
            self._since_draft = 0
            self._note_draft(width, n_tokens, n_accepted, cut)
        else:
            self._since_draft += n_tokens
            self._slots.forget(_KEEP_WITHOUT_DRAFT)

    def _note_step(self, width: int, n_tokens: int, ms: float, carried_ms: float) -> None:
        if self._uncarried is not None:
            earlier_width, earlier_ms = self._uncarried
            self._costs.add(earlier_width, earlier_ms + carried_ms)
        self._uncarried = (width, ms - carried_ms)
        self._steps += 1
        self._last_step_of[width] = self._steps
        if self._balance < self._allowance():
            self._balance += _ALLOWED_LOSS * n_tokens
        self._trial_credit += _TRIAL_SHARE * n_tokens

    def measured(self, width: int, ms: float) -> None:
        """Note what a step of this width costs, its commit included, without one having been part of a request."""
        self._costs.add(width, ms)

    def _allowance(self) -> float:
        """Steps that may be lost: the advance, or one draft where even the cheapest costs more than that."""
        return max(_ADVANCE, self.cost(self.widths[1]) - 1.0) if len(self.widths) > 1 else 0.0

    def _note_draft(self, width: int, n_tokens: int, n_accepted: int, cut: bool) -> None:
        n_decided = min(width - 1, n_accepted + (not cut))
        for slots, keep in ((self._slots, _KEEP_IN_REQUEST), (self._earlier, _KEEP_ACROSS_REQUESTS)):
            slots.forget(keep)
            slots.add(n_decided, n_accepted)
        self._balance -= self.cost(width) - n_tokens
        self._interval = _INTERVAL_AFTER_SUCCESS if n_accepted else min(2 * self._interval, _LAST_INTERVAL)

    def _probe(self, affordable: Sequence[int]) -> int:
        """A narrow draft now and then where plain decoding looks best."""
        if self._since_draft < self._interval or not self._could_pay(affordable):
            return 1
        return max((width for width in affordable if width <= _PROBE_WIDTH), default=1)

    def _could_pay(self, widths: Sequence[int]) -> bool:
        """Whether even a very good drafter could be worth its cost."""
        rates = (_VERY_GOOD,) * self._slots.n
        return any(_expected(rates, width) > self.cost(width) for width in widths if width > 1)

    def _trial(
        self, best: int, affordable: Sequence[int], expected: dict[int, float], cost: dict[int, float]
    ) -> int | None:
        """Another width than the best, where a look at it is cheap and overdue."""
        at = affordable.index(best)
        overdue: list[int] = [
            width for width in affordable[at + 1 : at + 2] if self._steps_since(width) >= _TRIAL_AFTER
        ]
        overdue += [width for width in affordable[max(at - 1, 1) : at] if self._costs.measured(width) is None]
        if self._steps_since(1) >= _REMEASURE_AFTER:
            overdue.append(1)
        pace = expected[best] / cost[best]
        for width in overdue:
            loss = cost[width] - expected[width] / pace
            if loss <= self._trial_credit:
                self._trial_credit -= loss
                return width
        return None

    def _steps_since(self, width: int) -> int:
        last = self._last_step_of.get(width)
        return self._steps + _REMEASURE_AFTER if last is None and width > 1 else self._steps - (last or 0)
