"""POST /v1/completions: OpenAI's form for plain text."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pydflash.results import StreamEvent, TokenLogprobs
from pydflash.server.chat_prompt import StreamFields
from pydflash.server.completion import Prompt, encode_prompt, grammar_of, split_prompts
from pydflash.server.fields import SamplingFields, read_fields, sampling_options
from pydflash.server.messages import Done, Piece, PromptProgress
from pydflash.server.native_api import build_info
from pydflash.server.process import Answer
from pydflash.server.results import DraftTrace, logprob_entries, timings, timings_so_far, usage
from pydflash.server.service import Job, Service, collect_all, merge
from pydflash.server.streams import DONE, EventStream, event, unless_gone


class TextFields(SamplingFields):
    """Fields of POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    stream_options: StreamFields | None = None


async def text_completions(service: Service, request: Request) -> Response:
    """POST /v1/completions."""
    fields = read_fields(TextFields, await request.body())
    prompts = [await encode_prompt(service, prompt) for prompt in split_prompts(fields.prompt)]
    grammar = grammar_of(fields)
    jobs = [
        Job(
            ids=ids,
            prompt=text,
            options=sampling_options(
                fields, service.options.sampling, service.tokenizer, logprobs=fields.logprobs, index=i
            ),
            grammar=grammar,
            cache_prompt=fields.cache_prompt,
            slot=fields.slot,
            max_predict_ms=fields.max_predict_ms,
        )
        for ids, text in prompts
        for i in range(fields.n_choices)
    ]
    answers = await service.start_all(jobs)
    writer = _TextWriter(service, fields)
    if fields.stream:
        ping = service.options.ping_seconds if fields.sse_ping_interval is None else float(fields.sse_ping_interval)
        return EventStream(writer.stream(answers), ping_seconds=ping)
    outcomes = await unless_gone(request, collect_all(answers))
    n_tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    done = [outcome.done for outcome in outcomes]
    choices = [
        writer.choice(i, outcome.text, outcome.logprobs, _finish(outcome.done.event))
        for i, outcome in enumerate(outcomes)
    ]
    used = _usage(done, n_tokens, len(prompts), fields.n_choices)
    return JSONResponse(
        {**writer.head, "choices": choices, "usage": used, "timings": timings(done[0], len(outcomes[0].token_ids))}
    )


def _usage(done: Sequence[Done], n_tokens: int, n_prompts: int, n_choices: int) -> dict[str, object]:
    """Of several prompts together: each counts once, however many answers it got."""
    if n_prompts == 1:
        return usage(done, n_tokens)
    ordered = list(done)
    of_each = [usage(ordered[i * n_choices : (i + 1) * n_choices], 0) for i in range(n_prompts)]
    prompt_tokens = sum(int(str(one["prompt_tokens"])) for one in of_each)
    result = usage(done, n_tokens)
    return {**result, "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + n_tokens}


def _finish(last: StreamEvent) -> str:
    return "length" if last.finish_reason == "length" else "stop"


class _TextWriter:
    def __init__(self, service: Service, fields: TextFields) -> None:
        self._service = service
        self._fields = fields
        self._offsets: dict[int, int] = {}
        self.head: dict[str, object] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": fields.model or service.model_name,
            "system_fingerprint": build_info(),
        }

    def choice(self, index: int, text: str, logprobs: Iterable[TokenLogprobs], finish: str | None) -> dict[str, object]:
        shown: dict[str, object] | None = None
        if self._fields.logprobs is not None:
            entries = logprob_entries(self._service.tokenizer, logprobs)
            offset = self._offsets.get(index, 0)
            offsets: list[int] = []
            for entry in entries:
                offsets.append(offset)
                offset += len(str(entry["token"]))
            self._offsets[index] = offset
            shown = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [_by_text(entry["top_logprobs"]) for entry in entries],
                "text_offset": offsets,
                "content": entries,
            }
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish}

    async def stream(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        fields = self._fields
        counts = [0] * len(answers)
        done: dict[int, Done] = {}
        traces = [DraftTrace(self._service.tokenizer) for _ in answers]
        async for index, part in merge(answers):
            if isinstance(part, PromptProgress):
                continue
            counts[index] += len(part.event.token_ids)
            extra: dict[str, object] = {}
            if fields.timings_per_token and isinstance(part, Piece):
                extra["timings"] = timings_so_far(part, len(answers[index].submit.ids), counts[index])
            if fields.return_drafts:
                extra["drafts"] = traces[index].of(part.event)
            if part.event.text or part.event.token_ids:
                piece = self.choice(index, part.event.text, part.event.logprobs or (), None)
                yield event({**self.head, "choices": [piece], **extra})
            if isinstance(part, Done):
                done[index] = part
                last = self.choice(index, "", (), _finish(part.event))
                yield event({**self.head, "choices": [last], "timings": timings(part, counts[index])})
        if fields.stream_options is not None and fields.stream_options.include_usage:
            ordered = [done[i] for i in sorted(done)]
            used = _usage(ordered, sum(counts), len(ordered) // fields.n_choices, fields.n_choices)
            yield event({**self.head, "choices": [], "usage": used})
        yield DONE


def _by_text(entries: object) -> dict[str, object]:
    return {str(entry["token"]): entry["logprob"] for entry in entries} if isinstance(entries, list) else {}
