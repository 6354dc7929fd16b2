"""What all request forms have in common: text to tokens, a request to the engine, and its parts on the way back."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydflash import builtin
from pydflash.gguf_file import GgufFile
from pydflash.options import SamplingOptions
from pydflash.results import FinishReason, TokenLogprobs
from pydflash.sequence import default_template
from pydflash.server.errors import ApiError, context_exceeded, refuse
from pydflash.server.grammar import GrammarCompiler
from pydflash.server.messages import Done, Piece, PromptProgress, Submit, WorkerSetup
from pydflash.server.metrics import Metrics
from pydflash.server.options import ServerOptions
from pydflash.server.process import Answer, EngineProcess
from pydflash.text import Tokenizer

log = logging.getLogger(__name__)

_SEED_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request on its way to the engine.

    Attributes:
        ids: the whole prompt; prompt: its text, "" for one that was given as ids.
        options: how to draw; a seed is added where there is none.
    """

    ids: tuple[int, ...]
    options: SamplingOptions
    prompt: str = ""
    grammar: str | None = None
    cache_prompt: bool = True
    slot: int | None = None
    progress: bool = False
    max_predict_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    done: Done

    @property
    def finish(self) -> FinishReason:
        """Why it ended."""
        return self.done.event.finish_reason or "cancelled"


class Service:
    """The model's text side, the engine's process, and the books. Belongs to one event loop."""

    def __init__(self, options: ServerOptions) -> None:
        """Read the model's metadata; the engine is not started yet.

        Raises:
            NotFoundError, FormatError, UnsupportedModelError: the file cannot be used.
        """
        self.options = options
        self.path = Path(builtin.target_path() if options.model is None else options.model)
        with GgufFile.open(self.path) as file:
            self.metadata: Mapping[str, object] = {
                key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.ggml.merges")
            }
            self.tokenizer = Tokenizer.from_metadata(file.metadata)
            self.n_parameters = sum(_count(tensor.shape) for tensor in file.tensors)
            self.n_bytes = self.path.stat().st_size
        self.template = default_template(self.tokenizer)
        self.metrics = Metrics()
        self.started = time.time()
        self._compiler: GrammarCompiler | None = None
        self._compiling = asyncio.Lock()
        self.process = EngineProcess(
            WorkerSetup(
                model=None if options.model is None else str(options.model),
                draft=options.draft,
                engine=options.engine,
                n_slots=options.n_slots,
                slot_folder=None if options.slot_folder is None else str(options.slot_folder),
                log_level=logging.getLogger("pydflash").getEffectiveLevel(),
            ),
            max_queue=options.max_queue,
            max_buffer=options.max_buffer,
            on_done=self.metrics.note_done,
            on_failure=self.metrics.note_failure,
        )

    @property
    def model_name(self) -> str:
        """What responses call the model."""
        return self.options.alias[0] if self.options.alias else self.path.name

    @property
    def n_ctx(self) -> int:
        """Most tokens of a slot."""
        return self.options.engine.n_ctx

    def meta(self, key: str, default: object = None) -> object:
        """A value of the model file, behind its architecture's name."""
        return self.metadata.get(f"{self.metadata.get('general.architecture', '')}.{key}", default)

    async def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]:
        """Token ids of a text; a long one is encoded on another thread."""
        if len(text) < 4096:
            return tuple(self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special))
        ids = await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special, parse_special=parse_special)
        return tuple(ids)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """400 unless all are tokens of the model."""
        for i, token in enumerate(ids):
            if not 0 <= token < self.tokenizer.n_vocab:
                raise refuse(f"{name}[{i}]", token, f"a token id from 0 to {self.tokenizer.n_vocab - 1}")

    async def check_grammar(self, grammar: str) -> None:
        """400 with the compiler's words for a grammar that cannot be used."""
        async with self._compiling:
            if self._compiler is None:
                self._compiler = await asyncio.to_thread(GrammarCompiler, self.tokenizer)
            await asyncio.to_thread(self._compiler.check, grammar)

    async def start(self, job: Job) -> Answer:
        """Hand a job to the engine.

        Raises:
            ApiError: 400 for one that cannot be run, 429 and 503 when there is no room or no engine.
        """
        if not job.ids:
            raise refuse("prompt", job.prompt, "at least one token")
        if len(job.ids) >= self.n_ctx:
            raise context_exceeded(len(job.ids), self.n_ctx)
        for token in job.options.logit_bias:
            if token >= self.tokenizer.n_vocab:
                raise refuse("token id in logit_bias", token, f"0 to {self.tokenizer.n_vocab - 1}")
        if job.slot is not None and job.slot >= self.options.n_slots:
            raise refuse("id_slot", job.slot, f"0 to {self.options.n_slots - 1}")
        if job.grammar is not None:
            await self.check_grammar(job.grammar)
        options = job.options
        if options.seed is None:
            options = replace(options, seed=secrets.randbits(_SEED_BITS))
        return self.process.submit(
            Submit(
                id=0,
                ids=job.ids,
                options=options,
                grammar=job.grammar,
                cache_prompt=job.cache_prompt,
                slot=job.slot,
                progress=job.progress,
                max_predict_ms=job.max_predict_ms,
            )
        )

    async def start_all(self, jobs: Sequence[Job]) -> list[Answer]:
        """Hand several to the engine, or none."""
        answers: list[Answer] = []
        try:
            for job in jobs:
                answers.append(await self.start(job))  # noqa: PERF401 - those that were started have to be known
        except BaseException:
            for answer in answers:
                answer.close()
            raise
        return answers


async def collect(answer: Answer) -> Outcome:
    """The whole answer. Cancelling the task cancels the request.

    Raises:
        ApiError: it failed.
    """
    text: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    try:
        async for part in answer:
            if isinstance(part, PromptProgress):
                continue
            text.append(part.event.text)
            ids += part.event.token_ids
            logprobs += part.event.logprobs or ()
            if isinstance(part, Done):
                if part.event.finish_reason == "cancelled":
                    raise ApiError(503, "the request was cancelled")
                return Outcome("".join(text), tuple(ids), tuple(logprobs), part)
    finally:
        answer.close()
    raise ApiError(500, "the answer ended without a result")


async def collect_all(answers: Sequence[Answer]) -> list[Outcome]:
    """All of them; when one fails the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(answer)) for answer in answers]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        for answer in answers:
            answer.close()
    return [task.result() for task in tasks]


async def merge(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece | PromptProgress | Done]]:
    """Parts of several answers in the order in which they come, with the index of the answer."""
    if len(answers) == 1:
        try:
            async for part in answers[0]:
                yield 0, part
        finally:
            answers[0].close()
        return
    parts: asyncio.Queue[tuple[int, Piece | PromptProgress | Done | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, answer: Answer) -> None:
        try:
            async for part in answer:
                await parts.put((index, part))
        except ApiError as error:
            await parts.put((index, error))

    tasks = [asyncio.create_task(pump(i, answer)) for i, answer in enumerate(answers)]
    try:
        open_ones = len(answers)
        while open_ones:
            index, item = await parts.get()
            if isinstance(item, Exception):
                raise item
            open_ones -= isinstance(item, Done)
            yield index, item
    finally:
        for answer in answers:
            answer.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _count(shape: Sequence[int]) -> int:
    n = 1
    for extent in shape:
        n *= int(extent)
    return n
