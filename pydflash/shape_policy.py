"""Chain, tree or plain decoding for the next step: expected tokens over measured cost. Pure Python, no native import.

A chain of width w is what :mod:`pydflash.width_policy` chooses. A tree of n nodes runs the target on n + 1 rows and
goes on where a chain would have ended whenever another of its branches holds the token. With a_i as there and g the
share of such misses that a tree of this size makes good, a tree is expected to emit

    E(n) = c (1 + r_1 + r_1 r_2 + ...),   r_i = a_i + (1 - a_i) g

tokens, c being what trees of this size emitted so far over what this formula said. The shape with the largest E / cost
is taken; plain decoding is the chain of width 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydflash.errors import InvalidArgumentError
from pydflash.width_policy import (
    _EARLIER_WEIGHT,
    _INTERVAL_AFTER_SUCCESS,
    _KEEP_ACROSS_REQUESTS,
    _KEEP_IN_REQUEST,
    _LAST_INTERVAL,
    _MARGIN,
    _REMEASURE_AFTER,
    _TRIAL_AFTER,
    WidthPolicy,
    _expected,
)

# Share of a chain's misses that a tree makes good, before any tree was seen, and how many misses that is worth.
_FIRST_RESCUE = 0.25
_RESCUE_WEIGHT = 8.0
# Steps that the agreement of E(n) with what was emitted is worth before any.
_AGREEMENT_WEIGHT = 40.0
# A shape that was seen in few steps is judged generously: by 15 % at first, 5 % after 32 steps, 2 % after 200.
_HOPE = 0.3
_HOPE_STEPS = 4.0
# A tree is not asked for when fewer tokens than this are wanted.
_FEWEST_TOKENS = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the next target forward looks like.

    Attributes:
        width: rows: the token to consume and width - 1 proposals.
        tree: proposals when they form a tree, width - 1; 0: they form a chain, or there are none.
    """

    width: int
    tree: int = 0


class _TreeRecord:
    """What trees of one size did, newer steps counting for more."""

    __slots__ = ("emitted", "misses", "predicted", "rescued", "steps")

    def __init__(self) -> None:
        self.misses = self.rescued = self.emitted = self.predicted = self.steps = 0.0

    def add(self, *, missed: bool, rescued: bool, emitted: int, predicted: float) -> None:
        keep = _KEEP_ACROSS_REQUESTS
        self.steps = keep * self.steps + 1
        self.misses = keep * self.misses + missed
        self.rescued = keep * self.rescued + rescued
        self.emitted = keep * self.emitted + emitted
        self.predicted = keep * self.predicted + predicted

    @property
    def rescue(self) -> float:
        return (self.rescued + _RESCUE_WEIGHT * _FIRST_RESCUE) / (self.misses + _RESCUE_WEIGHT)

    @property
    def hope(self) -> float:
        """By how much more than E(n) a tree that was hardly tried is taken to emit, so that bad luck ends no trial."""
        return 1.0 + _HOPE / math.sqrt(_HOPE_STEPS + self.steps)

    @property
    def agreement(self) -> float:
        return (self.emitted + _AGREEMENT_WEIGHT) / (self.predicted + _AGREEMENT_WEIGHT)


class ShapePolicy(WidthPolicy):
    """WidthPolicy with trees among the choices; what that one guarantees holds for trees too.

    A tree also shows how far the drafter's first choices were right, so chains are judged while trees run, and the
    other way round.

    Args:
        max_width: rows of the widest chain, 1 without a drafter.
        trees: node counts to choose from, possibly none.

    Raises:
        InvalidArgumentError: a width or node count below 1.
    """

    def __init__(self, max_width: int, trees: Sequence[int] = ()) -> None:
        if any(n < 1 for n in trees):
            raise InvalidArgumentError("trees", tuple(trees), "node counts >= 1")
        self.trees = tuple(sorted(set(trees))) if max_width > 1 else ()
        self._records = {n: _TreeRecord() for n in self.trees}
        self._seen: dict[int, list[float]] = {}
        super().__init__(max_width)
        self._costs.include(-n for n in self.trees)

    def begin(self) -> None:
        """Start a request."""
        super().begin()
        self._seen = {n: [0.0, 0.0] for n in self.trees}  # steps and tokens of this request

    def tree_cost(self, n_nodes: int) -> float:
        """Cost of a step with a tree in plain steps."""
        return self._costs.relative(-n_nodes)

    def expected_tree_tokens(self, n_nodes: int) -> float:
        """E(n) by the present estimates."""
        return self._predicted(n_nodes) * self._records[n_nodes].agreement

    def choose_shape(self, limit: int) -> StepShape:
        """Shape of the next step, for at most ``limit`` tokens.

        Raises:
            InvalidArgumentError: ``limit`` is below 1.
        """
        staying = self._plain_steps_left > 0
        remeasure = self._steps_since(1) >= _REMEASURE_AFTER
        width = self.choose(limit)
        known = self._costs.measured(1) is not None
        if staying or not known or limit < _FEWEST_TOKENS or (width == 1 and remeasure and self._steps > 0):
            return StepShape(width)
        tree = self._better_tree(width, limit)
        if tree is None:
            return StepShape(width)
        self._plain_steps_left = 0
        return StepShape(tree + 1, tree)

    def record_tree(
        self,
        *,
        n_nodes: int,
        n_tokens: int,
        n_accepted: int,
        n_chain: int,
        n_chain_accepted: int,
        ms: float,
        carried_ms: float = 0.0,
        cut: bool = False,
    ) -> None:
        """record() for a step with a tree.

        Args:
            n_nodes: of the tree that was asked for.
            n_tokens, n_accepted, ms, carried_ms, cut: as for record().
            n_chain: the drafter's first choices that the tree holds one behind the other.
            n_chain_accepted: of these, in a row.
        """
        left_chain = n_accepted > n_chain_accepted
        decided = n_chain_accepted < n_chain and (left_chain or not cut)
        if n_nodes in self._records:
            predicted = min(self._predicted(n_nodes), n_tokens) if cut else self._predicted(n_nodes)
            self._records[n_nodes].add(
                missed=decided, rescued=decided and left_chain, emitted=n_tokens, predicted=predicted
            )
            seen = self._seen[n_nodes]
            seen[0], seen[1] = _KEEP_IN_REQUEST * seen[0] + 1, _KEEP_IN_REQUEST * seen[1] + n_tokens
        self._note_step(-n_nodes, n_tokens, ms, carried_ms)
        self._since_draft = 0
        n_decided = min(n_chain_accepted + decided, self._slots.n)
        for slots, keep in ((self._slots, _KEEP_IN_REQUEST), (self._earlier, _KEEP_ACROSS_REQUESTS)):
            slots.forget(keep)
            slots.add(n_decided, n_chain_accepted)
        self._balance -= self.tree_cost(n_nodes) - n_tokens
        self._interval = _INTERVAL_AFTER_SUCCESS if n_accepted else min(2 * self._interval, _LAST_INTERVAL)

    def measured_tree(self, n_nodes: int, ms: float) -> None:
        """Note what a step with a tree costs, its commit included, without one having been part of a request."""
        self._costs.add(-n_nodes, ms)

    def _predicted(self, n_nodes: int) -> float:
        rescue = self._records[n_nodes].rescue
        return _expected([rate + (1.0 - rate) * rescue for rate in self.acceptance()[:n_nodes]], n_nodes + 1)

    def _safe_tokens(self, n_nodes: int) -> float:
        """Tokens of a step with a tree if whatever was not seen in this request is wrong."""
        steps, tokens = self._seen[n_nodes]
        chain = _expected(self._rates(hope=False), n_nodes // 4 + 1)
        return max(chain, (tokens + _EARLIER_WEIGHT) / (steps + _EARLIER_WEIGHT))

    def _better_tree(self, width: int, limit: int) -> int | None:
        """A tree that is faster than the chain of this width, or one that is worth a trial."""
        pace = self.expected_tokens(width) / self.cost(width) if width > 1 else 1.0
        best: int | None = None
        overdue: list[tuple[float, int]] = []
        for n in self.trees:
            hope = self._records[n].hope if pace > 1.0 else 1.0
            cost, expected = self.tree_cost(n), min(self.expected_tree_tokens(n) * hope, float(limit))
            if cost - self._safe_tokens(n) > self._balance:
                continue
            if expected / cost * (1.0 - _MARGIN) > pace:
                best, pace = n, expected / cost * (1.0 - _MARGIN)
            elif width > 1 and self._steps_since(-n) >= _TRIAL_AFTER:
                overdue.append((cost - expected / pace, n))
        if best is None and overdue:
            loss, n = min(overdue)
            if loss <= self._trial_credit:
                self._trial_credit -= loss
                return n
        return best
