"""One sequence of the server, and a request on it that advances by one chunk or step at a time."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from pydflash.draft_model import DraftModel
from pydflash.errors import PydflashError
from pydflash.generate import Request
from pydflash.options import EngineOptions
from pydflash.results import FinishReason, StepResult, StreamEvent
from pydflash.sequence import TokenSequence, open_sequence
from pydflash.sequence_prefix import PrefixUse
from pydflash.server.grammar import GrammarMask
from pydflash.server.messages import RequestTimes, SlotState, Submit
from pydflash.target_model import TargetModel
from pydflash.text import Tokenizer


class PrefixSource(Protocol):
    """Where prefixes are kept that all slots share. Called on the engine's thread, between steps."""

    def restore(self, ids: tuple[int, ...], sequence: TokenSequence) -> int:
        """Make an empty sequence hold a kept prefix of ``ids`` shorter than them; its length, 0 if there is none."""

    def keep(self, sequence: TokenSequence) -> None:
        """A request is over: keep what the sequence holds, if that is worth it."""


@dataclass(slots=True, kw_only=True)
class SlotRequest(Request):
    """A request as a state machine: advance() until it gives an event with finish_reason.

    Attributes:
        chunk: most prompt tokens of one advance().
        given: tokens of the prompt that the decoder has. One more than ``prefix.n``, which are not evaluated again, if
            the last of them was drawn by an earlier request and never consumed.
        mask: of the answer's grammar.
        max_predict_ms: ends the answer after so long a decoding.
    """

    chunk: int
    given: int = 0
    mask: GrammarMask | None = None
    max_predict_ms: int | None = None
    fed: int = field(init=False, default=-1)  # of the prompt; -1: not begun
    begun_at: float = field(init=False, default=0.0)
    first_at: float = field(init=False, default=0.0)
    last_at: float = field(init=False, default=0.0)
    grammar_stopped: bool = field(init=False, default=False)
    step_ms: list[float] = field(init=False, default_factory=list)
    step_tokens: list[int] = field(init=False, default_factory=list)

    @property
    def emitted(self) -> int:
        """Tokens drawn so far."""
        return self._emitted

    def advance(self) -> StreamEvent | None:
        """One chunk of the prompt, or one step. None when nothing is certain yet; the last event has finish_reason.

        Raises:
            PydflashError: what the decoder raised; it has to be reset then.
        """
        if self.fed < 0:
            self.fed = self.given
            self.begun_at = time.perf_counter()
            if self.policy is not None:
                self.policy.begin()
            self.decoder.begin(self.options)
        rest = self.ids[self.fed :]
        if self._emitted == 0 and len(rest) > self.chunk:
            self.decoder.feed(rest[: self.chunk])
            self.fed += self.chunk
            return None
        if self.mask is not None:
            self.mask.begin_call()
        begun = time.perf_counter()
        if self._emitted == 0:
            result = self.decoder.prefill(rest, self.budget, mask=self.mask)
            self.fed = len(self.ids)
            self.first_at = time.perf_counter()
        else:
            result = self._step(self.mask)
            self.step_ms.append((time.perf_counter() - begun) * 1e3)
            self.step_tokens.append(len(result.tokens))
        self.last_at = time.perf_counter()
        finish = self._finish_of(result)
        if finish is None:
            event = self._answer.take()
            return event if event.text or event.token_ids else None
        return self.finish(finish)

    def _finish_of(self, result: StepResult) -> FinishReason | None:
        finish = self._take(result)
        if self.mask is not None and self._answer.stop_text is None:
            self.mask.end_call(result.tokens)
            if finish is None and self.mask.stopped:
                self.grammar_stopped = True
                finish = "stop"
        if finish is None and self.max_predict_ms is not None:
            late = (self.last_at - self.first_at) * 1e3 >= self.max_predict_ms
            finish = "length" if late else None
        return finish

    def finish(self, reason: FinishReason) -> StreamEvent:
        """End the request between two calls of advance(): its last event; the decoder is settled."""
        if self.fed < 0:
            self.fed = self.given
        if reason != "cancelled":
            self._answer.finish()
        last = self._answer.take(last=reason != "cancelled")
        if self._emitted > 0:
            if reason == "cancelled":
                self.decoder.settle()
            else:
                self._settle()
        stop_text = self._answer.stop_text
        return replace(
            last,
            finish_reason=reason if stop_text is None else "stop",
            stats=self._stats((time.perf_counter() - self.started) * 1e3),
            stop_text=stop_text,
            seed=self.options.seed,
        )

    def times(self, queue_ms: float) -> RequestTimes:
        """Times and steps so far."""
        decoder = self.decoder.stats
        first = self.first_at or time.perf_counter()
        return RequestTimes(
            queue_ms=queue_ms,
            prompt_ms=(first - self.begun_at) * 1e3 if self.begun_at else 0.0,
            predicted_ms=(self.last_at - self.first_at) * 1e3 if self.first_at else 0.0,
            step_ms=tuple(self.step_ms),
            step_tokens=tuple(self.step_tokens),
            proposed_by_slot=decoder.proposed_by_slot if self.begun_at else (),
            accepted_by_slot=decoder.accepted_by_slot if self.begun_at else (),
        )


class Slot:
    """A sequence and what it holds. Hybrid state cannot go back, so a prefix is only reused if a prompt extends it."""

    def __init__(
        self,
        index: int,
        target: TargetModel,
        draft: DraftModel | None,
        tokenizer: Tokenizer,
        options: EngineOptions,
        resources: ExitStack,
        prefixes: PrefixSource | None = None,
    ) -> None:
        self.index = index
        self.sequence = open_sequence(target, draft, options, resources)
        self.last_used = 0.0
        self.submit: Submit | None = None
        self.request: SlotRequest | None = None
        self.queue_ms = 0.0
        self.miss = ""
        self._tokenizer = tokenizer
        self._chunk = options.prefill_chunk
        self._n_ctx = options.n_ctx
        self._prefixes = prefixes
        self._tokens: tuple[int, ...] = ()  # what the decoder holds
        self._open_end = False  # the last of them is still to be consumed

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of the sequence."""
        return self._tokens

    def reusable(self, ids: tuple[int, ...]) -> int:
        """How many tokens of a prompt would not have to be evaluated again."""
        n = len(self._tokens)
        if n == 0 or ids[:n] != self._tokens:
            return 0
        if self._open_end:
            return n - 1
        return n if len(ids) > n else 0

    def begin(self, submit: Submit, mask: GrammarMask | None, queue_ms: float) -> None:
        """Take a request. Nothing is computed before the first advance()."""
        reusable = self.reusable(submit.ids) if submit.cache_prompt else 0
        given = 0
        if reusable:
            # The token still to be consumed is evaluated by the decoder before what it is given.
            given = reusable + 1 if self._open_end else reusable
            self.miss = ""
        else:
            self.sequence.decoder.reset()
            if submit.cache_prompt and self._prefixes is not None:
                given = reusable = self._prefixes.restore(submit.ids, self.sequence)
            self.miss = "" if reusable else self._why_missed(submit)
        self._tokens, self._open_end = (), False
        room = self._n_ctx - len(submit.ids)
        most = submit.options.max_tokens
        self.submit, self.queue_ms = submit, queue_ms
        self.request = SlotRequest(
            decoder=self.sequence.decoder,
            tokenizer=self._tokenizer,
            policy=self.sequence.policy,
            ids=submit.ids,
            options=submit.options,
            budget=room if most is None else min(most, room),
            started=time.perf_counter(),
            cancelled=_never,
            prefix=PrefixUse(reusable, "live" if reusable else "none", self.miss),
            given=given,
            chunk=self._chunk,
            mask=mask,
            max_predict_ms=submit.max_predict_ms,
        )

    def _why_missed(self, submit: Submit) -> str:
        if not submit.cache_prompt:
            return "not asked for"
        if not self._tokens:
            return "empty slot"
        if submit.ids == self._tokens[: len(submit.ids)]:
            return "shorter than what the slot holds"
        return "another prefix"

    def end(self) -> None:
        """The request is over and its decoder settled."""
        request, self.submit, self.request = self.request, None, None
        decoder = self.sequence.decoder
        self._tokens = tuple(decoder.tokens)
        self._open_end = request is not None and request.emitted > 0
        self.last_used = time.perf_counter()
        if self._prefixes is not None and self._tokens:
            self._prefixes.keep(self.sequence)

    def erase(self) -> int:
        """Forget the sequence; how many tokens it held."""
        n, self._tokens, self._open_end = len(self._tokens), (), False
        self.submit = self.request = None
        with suppress(PydflashError):
            self.sequence.decoder.reset()
        return n

    def adopt(self, tokens: tuple[int, ...], *, open_end: bool) -> None:
        """The sequence was changed from outside: what it holds now."""
        self._tokens, self._open_end = tokens, open_end

    def state(self) -> SlotState:
        """For /slots."""
        request, submit = self.request, self.submit
        if request is None or submit is None:
            return SlotState(
                slot=self.index, request=None, held=len(self._tokens), speculative=self.sequence.policy is not None
            )
        return SlotState(
            slot=self.index,
            request=submit.id,
            held=max(request.fed, 0) + request.emitted,
            prompt_tokens=len(request.ids),
            processed=max(request.fed, 0),
            cached=request.prefix.n,
            emitted=request.emitted,
            remaining=request.budget - request.emitted,
            speculative=self.sequence.policy is not None,
        )


def _never() -> bool:
    return False
