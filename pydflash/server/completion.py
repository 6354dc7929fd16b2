"""POST /completion and /infill: llama.cpp's own form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pydflash.options import SamplingOptions
from pydflash.results import StreamEvent
from pydflash.server.errors import ApiError, refuse
from pydflash.server.fields import SamplingFields, read_fields, sampling_options
from pydflash.server.grammar import from_json_schema, from_text
from pydflash.server.messages import Done, Piece, PromptProgress
from pydflash.server.process import Answer
from pydflash.server.results import DraftTrace, drafter, logprob_entries, progress, stop_type, timings, timings_so_far
from pydflash.server.service import Job, Outcome, Service, collect_all, merge
from pydflash.server.streams import EventStream, event, unless_gone

Prompt = str | list[Any]


class CompletionFields(SamplingFields):
    """Fields of POST /completion."""

    prompt: Prompt
    n_probs: int | None = None
    logprobs: int | None = None
    response_fields: list[str] | None = None

    @property
    def n_logprobs(self) -> int | None:
        """Likeliest tokens wanted; None: none."""
        n = self.n_probs if self.n_probs is not None else self.logprobs
        return n or None


class InfillFields(CompletionFields):
    """Fields of POST /infill."""

    prompt: Prompt = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[dict[str, str]] | None = None


async def completion(service: Service, request: Request) -> Response:
    """POST /completion, /completions."""
    fields = read_fields(CompletionFields, await request.body())
    prompts = [await encode_prompt(service, prompt) for prompt in split_prompts(fields.prompt)]
    return await _answer(service, request, fields, prompts)


async def infill(service: Service, request: Request) -> Response:
    """POST /infill: what belongs between a prefix and a suffix."""
    fields = read_fields(InfillFields, await request.body())
    fim = service.tokenizer.fim
    if fim.prefix is None or fim.suffix is None or fim.middle is None:
        raise ApiError(501, "the model has no fill-in-the-middle tokens")
    ids: list[int] = []
    for extra in fields.input_extra or ():
        if set(extra) - {"filename", "text"}:
            raise refuse("input_extra", extra, "objects of filename and text")
        if fim.file_separator is not None:
            ids += [fim.file_separator, *await service.encode(extra.get("filename", "") + "\n", add_special=False)]
        ids += await service.encode(extra.get("text", "") + "\n", add_special=False, parse_special=False)
    if not isinstance(fields.prompt, str):
        raise refuse("prompt", fields.prompt, "text")
    prefix = await service.encode(fields.input_prefix + fields.prompt, add_special=False, parse_special=False)
    suffix = await service.encode(fields.input_suffix, add_special=False, parse_special=False)
    ids += [fim.prefix, *prefix, fim.suffix, *suffix, fim.middle]
    return await _answer(service, request, fields, [(tuple(ids), service.tokenizer.decode(ids))])


async def _answer(
    service: Service, request: Request, fields: CompletionFields, prompts: Sequence[tuple[tuple[int, ...], str]]
) -> Response:
    grammar = grammar_of(fields)
    n_logprobs = fields.n_logprobs
    jobs = [
        Job(
            ids=ids,
            prompt=text,
            options=sampling_options(fields, service.options.sampling, service.tokenizer, logprobs=n_logprobs, index=i),
            grammar=grammar,
            cache_prompt=fields.cache_prompt,
            slot=fields.slot,
            progress=fields.return_progress and fields.stream,
            max_predict_ms=fields.max_predict_ms,
        )
        for ids, text in prompts
        for i in range(fields.n_choices)
    ]
    answers = await service.start_all(jobs)
    writer = _Writer(service, fields, jobs)
    if fields.stream:
        ping = service.options.ping_seconds if fields.sse_ping_interval is None else float(fields.sse_ping_interval)
        return EventStream(writer.stream(answers), ping_seconds=ping)
    outcomes = await unless_gone(request, collect_all(answers))
    results = [
        writer.whole(i, answer, outcome) for i, (answer, outcome) in enumerate(zip(answers, outcomes, strict=True))
    ]
    return JSONResponse(results[0] if len(results) == 1 else results)


class _Writer:
    def __init__(self, service: Service, fields: CompletionFields, jobs: Sequence[Job]) -> None:
        self._service = service
        self._fields = fields
        self._jobs = jobs

    def whole(self, index: int, answer: Answer, outcome: Outcome) -> dict[str, object]:
        result = self._last(index, answer, outcome.done, outcome.text, len(outcome.token_ids))
        result["tokens"] = list(outcome.token_ids) if self._fields.return_tokens else []
        if self._fields.n_logprobs:
            result["completion_probabilities"] = logprob_entries(self._service.tokenizer, outcome.logprobs)
        return _selected(result, self._fields.response_fields)

    async def stream(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        n_tokens = [0] * len(answers)
        texts = [""] * len(answers)
        traces = [DraftTrace(self._service.tokenizer) for _ in answers]
        async for index, part in merge(answers):
            if isinstance(part, PromptProgress):
                nothing = self._partial(index, StreamEvent(text=""), part.slot, 0)
                yield event({**nothing, "prompt_progress": progress(part)})
                continue
            n_tokens[index] += len(part.event.token_ids)
            texts[index] += part.event.text
            is_last = isinstance(part, Done)
            if part.event.text or part.event.token_ids or not is_last:
                piece = self._partial(index, part.event, part.slot, n_tokens[index])
                if self._fields.timings_per_token and isinstance(part, Piece):
                    piece["timings"] = timings_so_far(part, len(self._jobs[index].ids), n_tokens[index])
                if self._fields.return_drafts:
                    piece["drafts"] = traces[index].of(part.event)
                yield event(piece)
            if isinstance(part, Done):
                last = self._last(index, answers[index], part, texts[index], n_tokens[index])
                last["content"] = ""
                last["tokens"] = []
                yield event(_selected(last, self._fields.response_fields))

    def _partial(self, index: int, piece: StreamEvent, slot: int, n_predicted: int) -> dict[str, object]:
        result: dict[str, object] = {
            "index": index,
            "content": piece.text,
            "tokens": list(piece.token_ids),
            "stop": False,
            "id_slot": slot,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": len(self._jobs[index].ids),
        }
        if self._fields.n_logprobs and piece.logprobs:
            result["completion_probabilities"] = logprob_entries(self._service.tokenizer, piece.logprobs)
        return result

    def _last(self, index: int, answer: Answer, done: Done, text: str, n_predicted: int) -> dict[str, object]:
        job = self._jobs[index]
        return {
            "index": index,
            "content": text,
            "tokens": [],
            "id_slot": done.slot,
            "stop": True,
            "model": self._service.model_name,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": len(job.ids),
            "generation_settings": generation_settings(self._service, answer.submit.options, answer.submit.grammar),
            "prompt": job.prompt,
            "has_new_line": "\n" in text,
            "truncated": done.event.finish_reason == "length" and done.held + 1 >= self._service.n_ctx,
            "stop_type": stop_type(done.event),
            "stopping_word": done.event.stop_text or "",
            "tokens_cached": done.held,
            "drafter": drafter(done),
            "timings": timings(done, n_predicted),
        }


def grammar_of(fields: SamplingFields, *, behind_thought: bool = False) -> str | None:
    """The grammar that json_schema or grammar asks for. ApiError if both do."""
    if fields.json_schema is not None and fields.grammar:
        raise ApiError(400, "json_schema and grammar exclude each other")
    if fields.json_schema is not None:
        return from_json_schema(fields.json_schema, behind_thought=behind_thought)
    return from_text(fields.grammar) if fields.grammar else None


def split_prompts(prompt: Prompt) -> list[Prompt]:
    """A text, or a list with ids in it, is one prompt; a list of texts or lists is several."""
    if isinstance(prompt, str) or any(_is_id(item) for item in prompt):
        return [prompt]
    if not prompt or len(prompt) > 128:
        raise refuse("prompt", prompt, "a text, token ids, or a list of 1 to 128 of those")
    for item in prompt:
        if not isinstance(item, str | list):
            raise refuse("prompt", item, "texts, token ids, or lists of those")
    return list(prompt)


async def encode_prompt(service: Service, prompt: Prompt) -> tuple[tuple[int, ...], str]:
    """Ids and text of one prompt."""
    if isinstance(prompt, str):
        return await service.encode(prompt), prompt
    ids: list[int] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            ids += await service.encode(item, add_special=i == 0)
        elif _is_id(item):
            ids.append(item)
        else:
            raise refuse("prompt", item, "texts and token ids")
    service.check_ids("prompt", ids)
    return tuple(ids), service.tokenizer.decode(ids)


def generation_settings(service: Service, options: SamplingOptions, grammar: str | None = None) -> dict[str, object]:
    """llama.cpp's names for how an answer is drawn."""
    most = -1 if options.max_tokens is None else options.max_tokens
    ready = service.process.ready
    return {
        "seed": options.seed if options.seed is not None else 2**32 - 1,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        "repeat_last_n": options.penalty_last_n,
        "repeat_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "stop": list(options.stop),
        "max_tokens": most,
        "n_predict": most,
        "ignore_eos": options.ignore_eos,
        "n_probs": options.logprobs or 0,
        "logit_bias": [[token, bias if bias != float("-inf") else False] for token, bias in options.logit_bias.items()],
        "grammar": grammar or "",
        "samplers": ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"],
        "speculative.n_max": (ready.max_width - 1 if ready is not None else 0)
        if options.width is None
        else options.width - 1,
    }


def _selected(result: dict[str, object], names: Sequence[str] | None) -> dict[str, object]:
    """The fields that response_fields names; a path such as generation_settings/n_predict keeps its last part."""
    if not names:
        return result
    chosen: dict[str, object] = {}
    for name in names:
        value: object = result
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[name.rsplit("/", 1)[-1]] = value
    return chosen


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
