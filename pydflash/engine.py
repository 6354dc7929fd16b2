"""Engine: a target, perhaps a drafter, and what they need to answer requests."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from numbers import Integral
from types import TracebackType
from typing import Final, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pydflash.decoder import Decoder
from pydflash.draft_model import DraftModel
from pydflash.engine_prefix import EnginePrefix
from pydflash.errors import BusyError, CapacityError, ClosedError, InvalidArgumentError
from pydflash.generate import Request, collect
from pydflash.options import EngineOptions, SamplingOptions
from pydflash.results import GenerationResult, GenerationStats, Progress, StreamEvent
from pydflash.sequence import builtin_drafter_of, default_template, open_drafter, open_sequence
from pydflash.shape_policy import ShapePolicy
from pydflash.target_cache import TargetCache
from pydflash.target_model import TargetModel
from pydflash.text import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

ModelPath: TypeAlias = str | os.PathLike[str]
Message: TypeAlias = Mapping[str, object]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | npt.NDArray[np.integer]
"""Text (special tokens spelled out in it are recognised), token ids, or chat messages with "role" and "content"."""
ProgressFn: TypeAlias = Callable[[Progress], object]

_SEED_BITS: Final = 64


class Engine(EnginePrefix):
    """Answers requests, one at a time. A prompt that begins like an earlier one, or its answer, goes on from there.

    Holds a target and its cache, and with a drafter also the drafter, its context and, where it runs on another device,
    a feature mirror. Memory: the weights, ``TargetCache.plan(...)`` for ``n_ctx`` tokens, and the draft context.

    Threads: requests of several threads are refused with BusyError while one runs, they do not queue; cancel() may be
    called from any thread. Ctrl-C ends a request within one step or one chunk of the prompt; the engine stays usable.

    Use :meth:`open`; ``with`` or close() frees what open() opened. Opened models that were passed in stay open.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        options: EngineOptions,
        resources: ExitStack,
    ) -> None:
        """``resources`` owns what the engine has to close; see :meth:`open`."""
        self._target = target
        self._draft = draft
        self._options = options
        self._tokenizer = Tokenizer.from_metadata(target.metadata)
        self._template = default_template(self._tokenizer)
        sequence = open_sequence(target, draft, options, resources)
        self._cache, self._decoder, self._policy = sequence.cache, sequence.decoder, sequence.policy
        self._open_prefix(resources, sequence.decoder.draft_context)
        self._stats: GenerationStats | None = None
        self._running = threading.Lock()
        self._cancelled = threading.Event()
        self._resources = resources.pop_all()
        self._drafter_helps = True
        self._runner: int | None = None  # thread inside the running request
        self._streams: weakref.WeakSet[Generator[StreamEvent]] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def open(
        cls,
        target: TargetModel | ModelPath | None = None,
        draft: DraftModel | ModelPath | None = "auto",
        options: EngineOptions | None = None,
        *,
        progress: ProgressFn | None = None,
    ) -> Self:
        """Load models and make the caches.

        Args:
            target: a GGUF file or an opened model; None: the built-in model.
            draft: a GGUF file, a Hugging Face folder or an opened drafter; None: no drafter. "auto": the built-in
                drafter for the built-in target and none for any other, which the log then says.
            options: None: the defaults.
            progress: called while the target loads.

        Raises:
            NotFoundError: a file or device does not exist.
            FormatError, UnsupportedModelError: a file cannot be used.
            SnapshotMismatchError, InvalidArgumentError: the drafter does not fit the target, or an option its limits.
            OutOfMemoryError: weights or caches do not fit.
        """
        options = EngineOptions() if options is None else options
        with ExitStack() as resources:
            if not isinstance(target, TargetModel):
                target = resources.enter_context(
                    TargetModel.open(
                        target,
                        options.device,
                        n_threads=options.n_threads,
                        embedding=options.embedding,
                        pack_weights=options.pack_weights,
                        progress=progress,
                    )
                )
            if draft == "auto":
                draft = builtin_drafter_of(target)
            if draft is not None and not isinstance(draft, DraftModel):
                draft = resources.enter_context(open_drafter(draft, target, options))
            return cls(target, draft, options, resources)

    def __repr__(self) -> str:
        drafter = "no drafter" if self._draft is None else "with a drafter"
        state = "closed" if self._closed else f"n_ctx={self._options.n_ctx}"
        return f"<Engine of {self._target!r}, {drafter}, {state}>"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free caches and those models that open() loaded. Idempotent. An open stream is ended first.

        Raises:
            BusyError: called from inside a request of this engine, by its progress function.
        """
        if self._closed:
            return
        self.cancel()
        while not self._running.acquire(timeout=0.02):
            if self._runner == threading.get_ident() and self._active():
                raise BusyError("close() was called from inside a request of this engine")
            for stream in self._streams:
                if inspect.getgeneratorstate(stream) == inspect.GEN_SUSPENDED:
                    with suppress(ValueError):  # its own thread was faster to go on with it
                        stream.close()
        try:
            self._closed = True
            self._resources.close()
        finally:
            self._running.release()

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._closed

    @property
    def target(self) -> TargetModel:
        """The target's weights."""
        return self._target

    @property
    def draft(self) -> DraftModel | None:
        """The drafter's weights; None without a drafter."""
        return self._draft

    @property
    def options(self) -> EngineOptions:
        """What the engine was opened with."""
        return self._options

    @property
    def cache(self) -> TargetCache:
        """The target's cache. A request takes it over: it keeps what the prompt begins with, or nothing."""
        return self._cache

    @property
    def decoder(self) -> Decoder:
        """The token loop, to be driven by hand: begin(), prefill(), step(), settle(), reset()."""
        return self._decoder

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the target's file."""
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template of the target's file; None if it has none."""
        return self._template

    @property
    def width_policy(self) -> ShapePolicy | None:
        """What has been learnt about step costs and acceptance; None without a drafter."""
        return self._policy

    @property
    def stats(self) -> GenerationStats | None:
        """Of the last request that was not broken off; None before the first."""
        return self._stats

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **names: object,
    ) -> str:
        """Chat messages as prompt text, by the model's own template. See :meth:`ChatTemplate.render`.

        Raises:
            InvalidArgumentError: the model has no template, or the messages are malformed.
            ChatTemplateError: the template refuses them.
        """
        if self._template is None:
            raise InvalidArgumentError("messages", messages, "text or token ids: the model file has no chat template")
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **names)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, as generate() would use them.

        Raises:
            InvalidArgumentError: the prompt is empty, has ids outside the vocabulary, or messages that are malformed.
        """
        ids = self._ids_of(prompt)
        if not ids:
            raise InvalidArgumentError("prompt", prompt, "at least one token")
        n_vocab = self._target.n_vocab
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < n_vocab:
                raise InvalidArgumentError(f"prompt[{i}]", token_id, f"a token id from 0 to {n_vocab - 1}")
        return ids

    def _ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt, add_special=True))
        items: Sequence[object] = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            text = self.apply_template(cast("Sequence[Message]", items))
            return tuple(self._tokenizer.encode(text))
        if not all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
            raise InvalidArgumentError("prompt", prompt, "text, token ids, or chat messages")
        return tuple(int(cast("int", item)) for item in items)

    def generate(
        self, prompt: Prompt, options: SamplingOptions | None = None, *, progress: ProgressFn | None = None
    ) -> GenerationResult:
        """Answer a prompt.

        Args:
            prompt: text, token ids, or chat messages, which go through the model's template.
            options: None: greedy, until a stop token or the end of the context.
            progress: called with prompt tokens done, at most 20 times a second; raising from it ends the request.

        Raises:
            InvalidArgumentError: the prompt is empty or malformed.
            CapacityError: the prompt does not leave room for a single token.
            BusyError: another request of this engine is running or a stream of it is open.
            ClosedError: the engine was closed.
            DeviceError, InternalError: the computation failed; also the drafter's, unless on_draft_failure says else.
        """
        with closing(self.stream(prompt, options, progress=progress)) as events:
            return collect(events)

    def stream(
        self, prompt: Prompt, options: SamplingOptions | None = None, *, progress: ProgressFn | None = None
    ) -> Generator[StreamEvent]:
        """Answer a prompt piece by piece: one event a step at most, the last one with finish_reason and stats.

        Arguments and errors are those of :meth:`generate`; the request starts with the first event that is asked for.
        Closing the iterator early ends the request and leaves the engine usable; until then the engine is busy.
        """
        started = time.perf_counter()
        self._check_open()
        options = SamplingOptions() if options is None else options
        if self._policy is not None and (options.tree or 0) > self._decoder.max_tree:
            raise InvalidArgumentError(
                "tree", options.tree, f"at most {self._decoder.max_tree}, which this engine was opened for"
            )
        ids = self.encode(prompt)
        n_ctx = self._options.n_ctx
        if len(ids) >= n_ctx:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens, but a context of {n_ctx} takes at most {n_ctx - 1}",
                needed=len(ids) + 1,
                available=n_ctx,
            )
        if options.seed is None:
            options = replace(options, seed=secrets.randbits(_SEED_BITS))
        room = n_ctx - len(ids)
        budget = room if options.max_tokens is None else min(options.max_tokens, room)
        stream = self._run(ids, options, budget, started, progress)
        self._streams.add(stream)
        return stream

    def cancel(self) -> None:
        """End the running request within one step or one chunk of its prompt, with finish_reason "cancelled".

        Any thread. Nothing when no request runs: a later one is not affected.
        """
        self._cancelled.set()
        if not self._closed:
            self._decoder.cancel()

    def _run(
        self,
        ids: tuple[int, ...],
        options: SamplingOptions,
        budget: int,
        started: float,
        progress: ProgressFn | None,
    ) -> Generator[StreamEvent]:
        if not self._running.acquire(blocking=False):
            self._check_open()
            raise BusyError("another request of this engine is running, or a stream of it is still open")
        try:
            self._check_open()
            self._runner = threading.get_ident()
            self._cancelled.clear()
            prefix = self._prefix.begin(ids, use=options.cache_prompt)
            request = Request(
                decoder=self._decoder,
                tokenizer=self._tokenizer,
                policy=self._policy,
                ids=ids,
                options=options,
                budget=budget,
                started=started,
                cancelled=self._cancelled.is_set,
                progress=progress,
                prefix=prefix,
                stages=self._prefix.stages(ids, prefix.n),
                checkpoint=self._prefix.checkpoint,
            )
            answer: list[int] = []
            events = request.run()
            try:
                for event in events:
                    answer += event.token_ids
                    if event.stats is not None:
                        self._stats = event.stats
                        self._report_drafter(event.stats.drafter)
                        self._prefix.finish((*ids, *answer))
                    yield event
            except GeneratorExit:
                events.close()  # commits what was emitted
                self._prefix.stay()
                raise
        finally:
            self._runner = None
            self._running.release()

    def _report_drafter(self, state: str) -> None:
        """Warn when a drafter begins to be of no help; the stats say so for every request."""
        if state == "on":
            self._drafter_helps = True
        elif state != "off":
            level = logging.WARNING if self._drafter_helps else logging.DEBUG
            log.log(level, "the drafter does not help: %s", state)
            self._drafter_helps = False

    def _active(self) -> bool:
        return any(inspect.getgeneratorstate(stream) == inspect.GEN_RUNNING for stream in self._streams)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the Engine is closed")
