"""One sequence of the server, and a request on it that advances by one chunk or step at a time."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydflash.engine_prefix import message_ids
from pydflash.errors import PydflashError
from pydflash.generate import Request
from pydflash.options import EngineOptions
from pydflash.prefix_cache import PrefixCache
from pydflash.prefix_snapshot import PrefixSnapshot
from pydflash.results import FinishReason, StepResult, StreamEvent
from pydflash.sequence import TokenSequence
from pydflash.sequence_prefix import SequencePrefix
from pydflash.server.grammar import GrammarMask
from pydflash.server.messages import RequestTimes, SlotState, Submit
from pydflash.text import Tokenizer


@dataclass(slots=True, kw_only=True)
class SlotRequest(Request):
    """A request as a state machine: advance() until it gives an event with finish_reason.

    Attributes:
        chunk: most prompt tokens of one advance().
        mask: of the answer's grammar.
        max_predict_ms: ends the answer after so long a decoding.
    """

    chunk: int
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
            self.fed = self.prefix.n
            self.begun_at = time.perf_counter()
            if self.policy is not None:
                self.policy.begin()
            self.decoder.begin(self.options)
        rest = self.ids[self.fed :]
        if self._emitted == 0 and (len(rest) > self.chunk or self.fed + self.chunk in self.stages):
            self.decoder.feed(rest[: self.chunk])
            self.fed += self.chunk
            if self.fed in self.stages:
                self._checkpoint()
            return None
        if self.mask is not None:
            self.mask.begin_call()
        begun = time.perf_counter()
        if self._emitted == 0:
            result = self.decoder.prefill(rest, self.budget, mask=self.mask)
            self.fed = len(self.ids)
            self.first_at = time.perf_counter()
            self._checkpoint()
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
            self.fed = self.prefix.n
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
    """A sequence and what it holds. A prompt goes on from that if it extends it, or else from a kept prefix."""

    def __init__(
        self,
        index: int,
        sequence: TokenSequence,
        tokenizer: Tokenizer,
        options: EngineOptions,
        prefix_cache: PrefixCache | None,
    ) -> None:
        """``prefix_cache`` is shared by all slots; None: nothing is kept but what slots hold."""
        self.index = index
        self.sequence = sequence
        self.last_used = 0.0
        self.submit: Submit | None = None
        self.request: SlotRequest | None = None
        self.queue_ms = 0.0
        self.miss = ""
        self._tokenizer = tokenizer
        self._chunk = options.prefill_chunk
        self._n_ctx = options.n_ctx
        self._prefix = SequencePrefix(
            sequence.decoder,
            prefix_cache,
            chunk=options.prefill_chunk,
            interval=options.prefix_interval,
            message_ids=message_ids(tokenizer),
            place=options.prefix_place,
        )
        self._answer: list[int] = []
        self._tokens: tuple[int, ...] = ()  # what the decoder holds

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of the sequence."""
        return self._tokens

    def reusable(self, ids: tuple[int, ...]) -> int:
        """How many tokens of a prompt the slot itself holds and would not evaluate again."""
        n = len(self._tokens)
        return n if 0 < n < len(ids) and ids[:n] == self._tokens else 0

    def begin(self, submit: Submit, mask: GrammarMask | None, queue_ms: float) -> None:
        """Take a request. Nothing is computed before the first advance(); a kept prefix is copied here."""
        self._tokens, self._answer = (), []
        prefix = self._prefix.begin(submit.ids, use=submit.cache_prompt)
        self.miss = "" if prefix.n else "not asked for" if prefix.source == "off" else prefix.reason or "nothing kept"
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
            prefix=prefix,
            stages=self._prefix.stages(submit.ids, prefix.n),
            checkpoint=self._prefix.checkpoint,
            chunk=self._chunk,
            mask=mask,
            max_predict_ms=submit.max_predict_ms,
        )

    def note(self, token_ids: tuple[int, ...]) -> None:
        """Tokens that the running request's answer has got."""
        self._answer += token_ids

    def end(self) -> None:
        """The request is over and its decoder settled: what it holds is kept."""
        submit, self.submit, self.request = self.submit, None, None
        if submit is not None:
            self._prefix.finish((*submit.ids, *self._answer))
        self._took()

    def erase(self) -> int:
        """Forget the sequence; how many tokens it held."""
        n, self._tokens, self._answer = len(self._tokens), (), []
        self.submit = self.request = None
        self._prefix.forget()
        with suppress(PydflashError):
            self.sequence.decoder.reset()
        return n

    def snapshot(self) -> PrefixSnapshot:
        """What the idle slot holds. InvalidArgumentError if that is nothing."""
        return self._prefix.snapshot()

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """Make the idle slot hold a snapshot; errors are those of Decoder.restore(), then the slot is as before."""
        self._prefix.restore(snapshot)
        self._took()

    def _took(self) -> None:
        decoder = self.sequence.decoder
        self._tokens = tuple(decoder.tokens[: decoder.cache.position])
        self.last_used = time.perf_counter()

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
