"""What calls return: frozen dataclasses of plain Python values, safe to keep, compare and pickle.

Times are milliseconds of wall clock. Arrays live in the modules of the classes that return them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Self, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""Why a request ended: a stop token or text; as many tokens as were allowed or fit; cancel()."""
StepReason: TypeAlias = Literal["none", "stop", "budget"]
"""Why a step ended: it did not end the request; its last token is a stop id; as many tokens as were allowed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long call is. ``done`` of ``total``, in tokens for a prefill and in thousandths for loading."""

    done: int
    total: int

    @property
    def fraction(self) -> float:
        """0 to 1; 1 when there is nothing to do."""
        return self.done / self.total if self.total > 0 else 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one prefill or step of a decoder did.

    Attributes:
        tokens: emitted ids in order.
        logprobs: natural log-probability of each token under the unprocessed distribution; None unless asked for.
        top_logprobs: for each token the likeliest (id, log-probability) pairs, most likely first; None unless asked
            for.
        width: rows of the target forward.
        n_proposed: proposals of the drafter that were verified; n_accepted of them were right.
        tree: nodes of the tree that was verified; 0: a chain, or nothing.
        depth: of the deepest proposal, n_proposed for a chain.
        n_chain: the drafter's first choices one behind the other; n_chain_accepted of them were right in a row.
        reason: "stop", "budget" or "none".
        draft_ms, verify_ms, accept_ms: of this step.
        commit_ms, append_ms: of the step before, which this call committed; appending also covers features that this
            step had to catch up with.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    width: int
    n_proposed: int
    n_accepted: int
    reason: StepReason
    draft_ms: float
    verify_ms: float
    accept_ms: float
    commit_ms: float
    append_ms: float
    tree: int = 0
    depth: int = 0
    n_chain: int = 0
    n_chain_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStats:
    """Totals of a decoder since begin().

    Attributes:
        position: tokens in the cache once the last step is committed; room: how many still fit.
        prompt_tokens: given to prefill().
        emitted: tokens, also the one that the prefill itself draws.
        steps: target forwards after the prefill; draft_steps of them verified proposals.
        proposed, accepted: proposals verified and found right.
        proposed_by_slot, accepted_by_slot: the same by distance behind the consumed token, one entry for each slot
            that was ever verified.
        has_drafter: False also after the drafter failed; draft_disabled then says why.
        max_width: most rows a step can have now.
    """

    position: int
    room: int
    prompt_tokens: int
    emitted: int
    steps: int
    draft_steps: int
    proposed: int
    accepted: int
    proposed_by_slot: tuple[int, ...]
    accepted_by_slot: tuple[int, ...]
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    accept_ms: float
    commit_ms: float
    append_ms: float
    has_drafter: bool
    max_width: int
    draft_disabled: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Counts and times of one request.

    Attributes:
        prompt_tokens: of the whole prompt; cached_tokens of them were known already, evaluated_tokens are the rest.
        prefix_source: where the known ones came from: "live" (still in the cache), "memory", "disk", "none", or "off";
            prefix_reason says why there were not more.
        emitted: tokens drawn, the first one by the prefill, a stop token included.
        steps: target forwards after the prefill; draft_steps of them verified proposals of the drafter.
        proposed, accepted: proposals verified and found right.
        acceptance_by_slot: share of right ones among the proposals verified at each distance behind the consumed token.
        prefill_ms, draft_ms, verify_ms, accept_ms, commit_ms, append_ms: where the time went.
        total_ms: from the call to the last token, tokenising and waiting included.
        drafter: "on", "off", or why it does not work.
        widths: rows of a target forward -> steps that had as many.
        trees: nodes of a tree -> steps that verified one of as many; the other steps had a chain or nothing.
    """

    prompt_tokens: int
    emitted: int
    steps: int
    proposed: int
    accepted: int
    acceptance_by_slot: tuple[float, ...]
    draft_ms: float
    verify_ms: float
    accept_ms: float
    commit_ms: float
    append_ms: float
    prefill_ms: float
    total_ms: float
    drafter: str
    draft_steps: int = 0
    cached_tokens: int = 0
    widths: Mapping[int, int] = field(default_factory=dict, hash=False)
    prefix_source: str = "off"
    prefix_reason: str = ""
    trees: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def evaluated_tokens(self) -> int:
        """Tokens of the prompt that went through the model."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted by steps, divided by steps; 0 without a step.

        The token that the prefill draws costs no step and does not count. Plain decoding gives 1; a step whose first n
        proposals are right emits n + 1 tokens, n + 1 being its accepted length.
        """
        return (self.emitted - 1) / self.steps if self.steps > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding: tokens after the first, divided by the time after the prefill; 0 without such a token."""
        seconds = (self.total_ms - self.prefill_ms) / 1e3
        return (self.emitted - 1) / seconds if self.emitted > 1 and seconds > 0 else 0.0

    @classmethod
    def of(
        cls,
        decoder: DecoderStats,
        *,
        total_ms: float,
        drafter: str,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
        widths: Mapping[int, int] | None = None,
        prefix_source: str = "off",
        prefix_reason: str = "",
        trees: Mapping[int, int] | None = None,
    ) -> Self:
        """The totals of a decoder, with what only the caller knows.

        ``prompt_tokens`` None takes the decoder's count plus ``cached_tokens``.
        """
        by_slot = zip(decoder.accepted_by_slot, decoder.proposed_by_slot, strict=True)
        return cls(
            prompt_tokens=decoder.prompt_tokens + cached_tokens if prompt_tokens is None else prompt_tokens,
            cached_tokens=cached_tokens,
            emitted=decoder.emitted,
            steps=decoder.steps,
            draft_steps=decoder.draft_steps,
            proposed=decoder.proposed,
            accepted=decoder.accepted,
            acceptance_by_slot=tuple(accepted / proposed for accepted, proposed in by_slot),
            draft_ms=decoder.draft_ms,
            verify_ms=decoder.verify_ms,
            accept_ms=decoder.accept_ms,
            commit_ms=decoder.commit_ms,
            append_ms=decoder.append_ms,
            prefill_ms=decoder.prefill_ms,
            total_ms=total_ms,
            drafter=drafter,
            widths={} if widths is None else dict(widths),
            prefix_source=prefix_source,
            prefix_reason=prefix_reason,
            trees={} if trees is None else dict(trees),
        )

    def to_dict(self) -> dict[str, object]:
        """All fields, evaluated_tokens and the two rates."""
        rates: dict[str, float] = {"evaluated_tokens": self.evaluated_tokens}
        rates |= {"mean_accepted_length": self.mean_accepted_length, "tokens_per_second": self.tokens_per_second}
        return {**asdict(self), "acceptance_by_slot": list(self.acceptance_by_slot), **rates}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probability of one emitted token, and the likeliest (id, log-probability) pairs at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One piece of a streamed answer.

    Attributes:
        text: whole characters that are certain not to belong to a stop text; may be empty.
        token_ids: ids emitted since the event before.
        accepted: for each id, True if the drafter had proposed it.
        logprobs: one entry for each id; None unless asked for.
        finish_reason: set in the last event only, as are stats.
        stop_text: in the last event, the stop text that was found.
        seed: of the request's random numbers, in the last event.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    accepted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None
    stop_text: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished request.

    Attributes:
        text: the answer without the stop text.
        token_ids: all ids that were emitted, a stop token included.
        finish_reason: "stop", "length" or "cancelled".
        stop_text: the stop text that ended it; None otherwise.
        stats: counts and times.
        logprobs: one entry for each id; None unless asked for.
        seed: of the random numbers; the same seed and options give the same text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    stop_text: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    seed: int | None = None

    def to_dict(self) -> dict[str, object]:
        """The fields as values that JSON knows; a log-probability of minus infinity becomes None."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_text": self.stop_text,
            "seed": self.seed,
            "logprobs": None if self.logprobs is None else [_logprobs_dict(entry) for entry in self.logprobs],
            "stats": self.stats.to_dict(),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """to_dict() as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=indent)


def _logprobs_dict(entry: TokenLogprobs) -> dict[str, object]:
    return {
        "token_id": entry.token_id,
        "logprob": _finite(entry.logprob),
        "top": [[token_id, _finite(logprob)] for token_id, logprob in entry.top],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
