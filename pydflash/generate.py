"""The token loop of one request: prefill, steps, stop rules, and the text that comes out.

Everything here is policy; a step of the model is one call of :class:`pydflash.decoder.Decoder`.

Which tokens count. A stop token (the model's end of turn) is the last entry of ``token_ids`` and gives no text; control
tokens give no text either. When a stop text ends the request, ``token_ids`` ends with the last token that began before
the place where the stop text begins: a token counts if the text known when it was drawn was shorter than the text kept.
So tokens that only carry the stop text, or what lies behind it, are not part of the result, and one that carries the
last kept character and the first of the stop text is. The decoder is cut there too: what it holds when the request is
over is the prompt and these tokens, unless the stop text began in an earlier step than the one that completed it. Rows
of earlier steps cannot be taken back, so in that case the decoder keeps what they emitted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pydflash.decoder import Decoder, MaskFn
from pydflash.errors import Cancelled
from pydflash.options import SamplingOptions
from pydflash.results import (
    FinishReason,
    GenerationResult,
    GenerationStats,
    Progress,
    StepResult,
    StreamEvent,
    TokenLogprobs,
)
from pydflash.sequence_prefix import PrefixUse
from pydflash.shape_policy import ShapePolicy, StepShape
from pydflash.text import StopMatcher, Tokenizer, Utf8Stream

# A request shorter than this says little about a drafter.
_ENOUGH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Token:
    token_id: int
    accepted: bool
    logprobs: TokenLogprobs | None
    begin: int  # characters that were complete before it


class AnswerText:
    """Tokens in; text that is certain, and the tokens it belongs to, out.

    Characters are whole, and no text is given out that may still turn out to be the start of a stop text. A token is
    given out together with the first text that it may have a share in.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = Utf8Stream()
        self._matcher = StopMatcher(tuple(stop))
        self._waiting: deque[_Token] = deque()
        self._complete = 0  # characters
        self._shown = 0
        self._text: list[str] = []
        self.n_kept = 0

    @property
    def stop_text(self) -> str | None:
        """The stop text that was found."""
        match = self._matcher.match
        return None if match is None else match.stop

    def push(self, token_id: int, *, accepted: bool, logprobs: TokenLogprobs | None) -> bool:
        """Take one more token. False when it completed a stop text: nothing more may be pushed."""
        self._waiting.append(_Token(token_id, accepted, logprobs, self._complete))
        if token_id not in self._tokenizer.special_ids:
            self._add(self._utf8.feed(self._tokenizer.token_bytes(token_id)))
        return self._matcher.match is None

    def finish(self) -> None:
        """No more tokens follow: what was held back is certain now, or is dropped with the stop text."""
        if self._matcher.match is None:
            self._add(self._utf8.flush())
        if self._matcher.match is None:
            self._show(self._matcher.flush())

    def take(self, *, last: bool = False) -> StreamEvent:
        """What has become certain since the last call, possibly nothing. ``last``: after finish()."""
        everything = last and self._matcher.match is None
        tokens: list[_Token] = []
        while self._waiting and (everything or self._waiting[0].begin < self._shown):
            tokens.append(self._waiting.popleft())
        self.n_kept += len(tokens)
        text, self._text = "".join(self._text), []
        logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
        return StreamEvent(
            text=text,
            token_ids=tuple(token.token_id for token in tokens),
            accepted=tuple(token.accepted for token in tokens),
            logprobs=logprobs if len(logprobs) == len(tokens) > 0 else None,
        )

    def _add(self, text: str) -> None:
        self._complete += len(text)
        if text:
            self._show(self._matcher.feed(text))

    def _show(self, text: str) -> None:
        self._shown += len(text)
        self._text.append(text)


@dataclass(slots=True, kw_only=True)
class Request:
    """One request and what it runs on. run() may be used once.

    Attributes:
        decoder: holds the first ``prefix.n`` tokens of the prompt and nothing else.
        policy: chooses shapes, unless ``options.width`` or ``options.tree`` fixes them; None without a drafter.
        ids: the whole prompt.
        options: with a seed.
        budget: most tokens to emit, at least 1.
        started: time.perf_counter() of the call, for total_ms.
        cancelled: asked between steps.
        progress: called during the prefill.
        prefix: how many tokens of the prompt the decoder holds, and why.
        stages: positions that the prompt is fed up to one after the other, all behind ``prefix.n``.
        checkpoint: called when the decoder holds the prompt up to a stage, and when it holds all of it.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    policy: ShapePolicy | None
    ids: tuple[int, ...]
    options: SamplingOptions
    budget: int
    started: float
    cancelled: Callable[[], bool]
    progress: Callable[[Progress], object] | None = None
    prefix: PrefixUse = field(default_factory=lambda: PrefixUse(0, "off"))
    stages: Sequence[int] = ()
    checkpoint: Callable[[], object] | None = None
    _answer: AnswerText = field(init=False)
    _widths: Counter[int] = field(init=False)
    _trees: Counter[int] = field(init=False)
    _emitted: int = field(init=False, default=0)
    _last_tokens: int = field(init=False, default=0)
    _drafted_before: bool = field(init=False, default=False)
    _says_chances: bool = field(init=False)

    def __post_init__(self) -> None:
        context = self.decoder.draft_context
        self._says_chances = context is not None and context.model.config.heads.says_chances
        self._answer = AnswerText(self.tokenizer, self.options.stop)
        self._widths, self._trees = Counter(), Counter()

    def run(self) -> Generator[StreamEvent]:
        """Events of the request. The last one carries finish_reason; then the decoder is settled.

        Raises:
            PydflashError: what the decoder raised, Cancelled excepted; the decoder then has to be reset.
        """
        finish: FinishReason | None = None
        total_ms = 0.0
        steps = self._steps()
        while finish is None:
            try:
                result = next(steps)
            except Cancelled:
                finish = "cancelled"
            else:
                finish = self._take(result)
            total_ms = (time.perf_counter() - self.started) * 1e3
            if finish is None and ((event := self._answer.take()).text or event.token_ids):
                try:
                    yield event
                except GeneratorExit:
                    self.decoder.settle()
                    raise
        self._answer.finish()
        last = self._answer.take(last=True)
        self._settle()
        stop_text = self._answer.stop_text
        yield replace(
            last,
            finish_reason=finish if stop_text is None else "stop",
            stats=self._stats(total_ms),
            stop_text=stop_text,
            seed=self.options.seed,
        )

    def _steps(self) -> Iterator[StepResult]:
        """The prefill, then steps for as long as they are asked for."""
        if self.policy is not None:
            self.policy.begin()
        self.decoder.begin(self.options)
        self._raise_if_cancelled()
        begin = self.prefix.n
        for end in self.stages:
            self.decoder.feed(self.ids[begin:end], self._progress_from(begin))
            begin = end
            self._checkpoint()
            self._raise_if_cancelled()
        yield self.decoder.prefill(self.ids[begin:], self.budget, progress=self._progress_from(begin))
        self._checkpoint()
        while True:
            self._raise_if_cancelled()
            yield self._step()

    def _step(self, mask: MaskFn | None = None) -> StepResult:
        """One step of the decoder, and what the policy learns from it. Draws under a mask come from chains."""
        budget = self.budget - self._emitted
        shape = self._choose_shape(budget, chain=mask is not None)
        begun = time.perf_counter()
        if shape.tree:
            result = self.decoder.step_tree(shape.tree, budget)
        else:
            if self._says_chances:
                self.decoder.set_min_chance(self._least_chance(shape.width))
            result = self.decoder.step(shape.width, budget, mask=mask)
        ms = (time.perf_counter() - begun) * 1e3
        self._note(result, shape, ms, result.commit_ms + result.append_ms if self._drafted_before else 0.0)
        self._drafted_before = result.n_proposed > 0
        return result

    def _least_chance(self, width: int) -> float:
        """A drafter that says what its proposals are worth ends a chain of a width that was not asked for."""
        if self.policy is None or self.options.width is not None:
            return 0.0
        return self.policy.least_chance(width)

    def _checkpoint(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint()

    def _progress_from(self, begin: int) -> Callable[[Progress], object] | None:
        """Progress of one part of the prompt as that of all that is evaluated."""
        report = self.progress
        if report is None:
            return None
        before, whole = begin - self.prefix.n, len(self.ids) - self.prefix.n
        return lambda part: report(Progress(before + part.done, whole))

    def _choose_shape(self, limit: int, *, chain: bool) -> StepShape:
        if self.policy is None:
            return StepShape(1)
        if self.options.tree and not chain:
            return StepShape(self.options.tree + 1, self.options.tree)
        if self.options.width is not None:
            return StepShape(min(self.options.width, limit))
        if self.options.tree == 0 or chain:
            return StepShape(self.policy.choose(limit))
        return self.policy.choose_shape(limit)

    def _note(self, result: StepResult, asked: StepShape, ms: float, carried_ms: float) -> None:
        self._widths[result.width] += 1
        if result.tree:
            self._trees[asked.tree] += 1
        if self.policy is None:
            return
        n_tokens, n_accepted, cut = len(result.tokens), result.n_accepted, result.reason != "none"
        if result.tree:
            self.policy.record_tree(
                n_nodes=asked.tree,
                n_tokens=n_tokens,
                n_accepted=n_accepted,
                n_chain=result.n_chain,
                n_chain_accepted=result.n_chain_accepted,
                ms=ms,
                carried_ms=carried_ms,
                cut=cut,
            )
        else:
            self.policy.record(
                width=result.width,
                n_tokens=n_tokens,
                n_accepted=n_accepted,
                ms=ms,
                carried_ms=carried_ms,
                cut=cut,
            )

    def _raise_if_cancelled(self) -> None:
        if self.cancelled():
            raise Cancelled("the request was cancelled")

    def _take(self, result: StepResult) -> FinishReason | None:
        """Hand the tokens of a step to the answer."""
        self._last_tokens = len(result.tokens)
        self._emitted += len(result.tokens)
        for i, token_id in enumerate(result.tokens):
            if not self._answer.push(token_id, accepted=i < result.n_accepted, logprobs=_logprobs(result, i)):
                return "stop"
        if result.reason == "stop":
            return "stop"
        return "length" if self._emitted >= self.budget else None

    def _settle(self) -> None:
        """Commit the last step up to the last token that counts (or its first one, see the module's text)."""
        kept_of_last = self._answer.n_kept - (self._emitted - self._last_tokens)
        self.decoder.settle(max(kept_of_last, 1) if kept_of_last < self._last_tokens else -1)

    def _stats(self, total_ms: float) -> GenerationStats:
        decoder = self.decoder.stats
        return GenerationStats.of(
            decoder,
            total_ms=total_ms,
            drafter=self._drafter_state(),
            prompt_tokens=len(self.ids),
            cached_tokens=self.prefix.n,
            prefix_source=self.prefix.source,
            prefix_reason=self.prefix.reason,
            widths=dict(sorted(self._widths.items())),
            trees=dict(sorted(self._trees.items())),
        )

    def _drafter_state(self) -> str:
        """ "on", "off", or why the drafter does not help."""
        if self.policy is None or self.options.width == 1:
            return "off"
        stats = self.decoder.stats
        if stats.draft_disabled:
            return f"failed: {stats.draft_disabled}"
        if stats.emitted >= _ENOUGH_TOKENS and stats.proposed == 0:
            return f"no proposal was verified in {stats.emitted} tokens; plain decoding is faster"
        if stats.emitted >= _ENOUGH_TOKENS and stats.accepted == 0:
            return f"none of {stats.proposed} proposals was accepted in {stats.emitted} tokens"
        return "on"


def _logprobs(result: StepResult, i: int) -> TokenLogprobs | None:
    if result.logprobs is None:
        return None
    top = () if result.top_logprobs is None else result.top_logprobs[i]
    return TokenLogprobs(result.tokens[i], result.logprobs[i], top)


def collect(events: Iterable[StreamEvent]) -> GenerationResult:
    """The events of one request as one result."""
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for event in events:
        text.append(event.text)
        token_ids += event.token_ids
        logprobs += event.logprobs or ()
        if event.finish_reason is not None and event.stats is not None:
            return GenerationResult(
                text="".join(text),
                token_ids=tuple(token_ids),
                finish_reason=event.finish_reason,
                stats=event.stats,
                stop_text=event.stop_text,
                logprobs=tuple(logprobs) if logprobs else None,
                seed=event.seed,
            )
    raise Cancelled("the request ended without a result")
