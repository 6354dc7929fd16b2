"""POST /v1/chat/completions: OpenAI's form, with llama.cpp's extensions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pydflash.results import StreamEvent
from pydflash.server.answer_parser import AnswerParser, Delta
from pydflash.server.chat_prompt import ChatFields, ChatPrompt, chat_prompt
from pydflash.server.errors import refuse
from pydflash.server.fields import read_fields, sampling_options
from pydflash.server.messages import Done, Piece, PromptProgress
from pydflash.server.native_api import build_info
from pydflash.server.process import Answer
from pydflash.server.results import DraftTrace, drafter, logprob_entries, progress, timings, timings_so_far, usage
from pydflash.server.service import Job, Outcome, Service, collect_all, merge
from pydflash.server.streams import DONE, EventStream, event, unless_gone


async def chat_completions(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions, /chat/completions."""
    fields = read_fields(ChatFields, await request.body())
    prompt = await chat_prompt(service, fields)
    answers = await service.start_all(chat_jobs(service, fields, prompt))
    writer = _ChatWriter(service, fields, prompt)
    if fields.stream:
        ping = service.options.ping_seconds if fields.sse_ping_interval is None else float(fields.sse_ping_interval)
        return EventStream(writer.stream(answers), ping_seconds=ping)
    outcomes = await unless_gone(request, collect_all(answers))
    return JSONResponse(writer.whole(outcomes))


def chat_jobs(service: Service, fields: ChatFields, prompt: ChatPrompt, stop: Sequence[str] = ()) -> list[Job]:
    """One job for each choice that is wanted."""
    logprobs: int | None = None
    if fields.logprobs:
        logprobs = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise refuse("top_logprobs", fields.top_logprobs, "nothing unless logprobs is true")
    return [
        Job(
            ids=prompt.ids,
            prompt=prompt.text,
            options=sampling_options(
                fields, service.options.sampling, service.tokenizer, logprobs=logprobs, index=i, extra_stop=stop
            ),
            grammar=prompt.grammar,
            cache_prompt=fields.cache_prompt,
            slot=fields.slot,
            progress=fields.return_progress and fields.stream,
            max_predict_ms=fields.max_predict_ms,
        )
        for i in range(fields.n_choices)
    ]


def assistant_message(deltas: Iterable[Delta]) -> dict[str, object]:
    """The deltas of an answer as one message."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, object]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.kind == "content":
            content.append(delta.text)
        elif delta.kind == "reasoning":
            reasoning.append(delta.text)
        elif delta.kind == "call":
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name}})
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    message: dict[str, object] = {"role": "assistant", "content": "".join(content)}
    if calls and not content:
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [
            {**call, "function": {**_function(call), "arguments": "".join(parts)}}
            for call, parts in zip(calls, arguments, strict=True)
        ]
    return message


def _function(call: dict[str, object]) -> dict[str, object]:
    function = call["function"]
    return function if isinstance(function, dict) else {}


def finish_reason(finish: StreamEvent, parser: AnswerParser) -> str:
    """OpenAI's word for why an answer ended."""
    if finish.finish_reason == "length":
        return "length"
    return "tool_calls" if parser.n_calls else "stop"


def wire_delta(delta: Delta) -> dict[str, object]:
    """A piece as OpenAI's streams have it."""
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        function: dict[str, object] = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


class _ChatWriter:
    def __init__(self, service: Service, fields: ChatFields, prompt: ChatPrompt) -> None:
        self._service = service
        self._fields = fields
        self._prompt = prompt
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": fields.model or service.model_name,
            "system_fingerprint": build_info(),
        }

    def whole(self, outcomes: Sequence[Outcome]) -> dict[str, object]:
        choices: list[dict[str, object]] = []
        for i, outcome in enumerate(outcomes):
            parser = self._prompt.parser()
            message = assistant_message([*parser.feed(outcome.text), *parser.finish()])
            choice: dict[str, object] = {
                "index": i,
                "message": message,
                "finish_reason": finish_reason(outcome.done.event, parser),
            }
            if self._fields.logprobs:
                choice["logprobs"] = {"content": logprob_entries(self._service.tokenizer, outcome.logprobs)}
            choices.append(choice)
        n_tokens = sum(len(outcome.token_ids) for outcome in outcomes)
        done = [outcome.done for outcome in outcomes]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(done, n_tokens),
            "drafter": drafter(done[0]),
            "timings": timings(done[0], len(outcomes[0].token_ids)),
        }

    async def stream(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        fields = self._fields
        parsers = [self._prompt.parser() for _ in answers]
        traces = [DraftTrace(self._service.tokenizer) for _ in answers]
        counts = [0] * len(answers)
        begun = [False] * len(answers)
        done: list[Done] = []
        async for index, part in merge(answers):
            if not begun[index]:
                begun[index] = True
                yield self._chunk(index, {"role": "assistant", "content": None})
            if isinstance(part, PromptProgress):
                yield self._chunk(index, {}, extra={"prompt_progress": progress(part)})
                continue
            counts[index] += len(part.event.token_ids)
            deltas = parsers[index].feed(part.event.text)
            if isinstance(part, Done):
                deltas += parsers[index].finish()
            extra: dict[str, object] = {}
            if fields.timings_per_token and isinstance(part, Piece):
                extra["timings"] = timings_so_far(part, len(self._prompt.ids), counts[index])
            if fields.return_drafts:
                extra["drafts"] = traces[index].of(part.event)
            for i, delta in enumerate(_joined(deltas) or ([None] if self._has_more(part.event, extra) else [])):
                shown = wire_delta(delta) if delta is not None else {}
                yield self._chunk(index, shown, part.event if i == 0 else None, extra=extra if i == 0 else None)
            if isinstance(part, Done):
                done.append(part)
                finish = finish_reason(part.event, parsers[index])
                times: dict[str, object] = {"drafter": drafter(part), "timings": timings(part, counts[index])}
                yield self._chunk(index, {}, finish=finish, extra=times)
        if fields.stream_options is not None and fields.stream_options.include_usage:
            last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(done, sum(counts))}
            last["timings"] = timings(done[0], counts[0])
            yield event(last)
        yield DONE

    def _has_more(self, piece: StreamEvent, extra: dict[str, object]) -> bool:
        """True for a piece without text that carries something else."""
        return bool(extra.get("drafts")) or bool(self._fields.logprobs and piece.logprobs)

    def _chunk(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: StreamEvent | None = None,
        *,
        finish: str | None = None,
        extra: dict[str, object] | None = None,
    ) -> bytes:
        choice: dict[str, object] = {"index": index, "delta": delta, "finish_reason": finish}
        if self._fields.logprobs and logprobs is not None and logprobs.logprobs:
            choice["logprobs"] = {"content": logprob_entries(self._service.tokenizer, logprobs.logprobs)}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **(extra or {})})


def _joined(deltas: Sequence[Delta]) -> list[Delta | None]:
    """Neighbouring pieces of one kind as one."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and delta.kind != "call" and (last.kind, last.index) == (delta.kind, delta.index):
            joined[-1] = Delta(delta.kind, last.text + delta.text, index=delta.index)
        else:
            joined.append(delta)
    return list(joined)
