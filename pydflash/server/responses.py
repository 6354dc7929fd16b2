"""POST /v1/responses: OpenAI's newer form. Nothing is stored, so earlier responses cannot be referred to."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pydflash.server.answer_parser import Delta
from pydflash.server.chat_prompt import ChatFields, ChatPrompt, chat_prompt
from pydflash.server.errors import ApiError, refuse
from pydflash.server.fields import Fields, check_fields, read_fields
from pydflash.server.messages import Done, PromptProgress
from pydflash.server.openai_chat import chat_jobs
from pydflash.server.process import Answer
from pydflash.server.results import usage
from pydflash.server.service import Service, collect, merge
from pydflash.server.streams import EventStream, event, unless_gone

Item = dict[str, Any]


class _Reasoning(Fields):
    effort: str | None = None
    summary: Literal["auto"] | None = None


class _Text(Fields):
    format: dict[str, Any] | None = None


class ResponsesFields(Fields):
    """Fields of POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    previous_response_id: str | None = None


async def responses(service: Service, request: Request) -> Response:
    """POST /v1/responses, /responses."""
    fields = read_fields(ResponsesFields, await request.body())
    chat = _as_chat(fields)
    prompt = await chat_prompt(service, chat)
    [job] = chat_jobs(service, chat, prompt)
    answer = await service.start(job)
    writer = _ResponseWriter(service, fields, prompt)
    if fields.stream:
        return EventStream(
            writer.stream(answer),
            ping_seconds=service.options.ping_seconds,
            on_error=lambda error: event({"type": "error", "code": error.kind, "message": error.message}, "error"),
        )
    outcome = await unless_gone(request, collect(answer))
    return JSONResponse(writer.whole(outcome.text, outcome.done, len(outcome.token_ids)))


async def count_tokens(service: Service, request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    fields = read_fields(ResponsesFields, await request.body())
    prompt = await chat_prompt(service, _as_chat(fields))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


def _as_chat(fields: ResponsesFields) -> ChatFields:
    if fields.previous_response_id is not None:
        raise ApiError(400, "previous_response_id is not supported: responses are not stored")
    chat: dict[str, object] = {"messages": _chat_messages(fields), "parallel_tool_calls": fields.parallel_tool_calls}
    if fields.tools is not None:
        chat["tools"] = [_chat_tool(tool, i) for i, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    given = {
        "tool_choice": choice,
        "max_tokens": fields.max_output_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "stream": fields.stream,
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "response_format": _chat_format(fields.text),
    }
    return check_fields(ChatFields, chat | {name: value for name, value in given.items() if value is not None})


def _chat_tool(tool: dict[str, Any], i: int) -> dict[str, object]:
    if tool.get("type") != "function":
        raise refuse(f"tools[{i}].type", tool.get("type"), "function")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_format(text: _Text | None) -> dict[str, object] | None:
    if text is None or text.format is None:
        return None
    if text.format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": text.format.get("schema")}}
    return text.format


def _chat_messages(fields: ResponsesFields) -> list[dict[str, object]]:
    result: list[dict[str, object]] = []
    if fields.instructions is not None:
        result.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*result, {"role": "user", "content": fields.input}]
    for i, item in enumerate(fields.input):
        kind = item.get("type", "message")
        last = result[-1] if result else {}
        if kind == "message":
            content = _content_of(item.get("content"), i)
            result.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name", ""), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            calls = last.get("tool_calls")
            if last.get("role") == "assistant" and isinstance(calls, list):
                calls.append(call)
            elif last.get("role") == "assistant":
                last["tool_calls"] = [call]
            else:
                result.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            content = _content_of(item.get("output"), i)
            result.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": content})
        elif kind == "reasoning":
            thought = _content_of(item.get("content") or [], i)
            result.append({"role": "assistant", "content": "", "reasoning_content": thought})
        else:
            raise refuse(f"input[{i}].type", kind, "message, function_call, function_call_output or reasoning")
    return _merged(result)


def _merged(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """A thought and what follows it are one message of the assistant."""
    result: list[dict[str, object]] = []
    for message in messages:
        last = result[-1] if result else {}
        if "reasoning_content" in last and message.get("role") == "assistant" and not last.get("content"):
            result[-1] = {**message, "reasoning_content": last["reasoning_content"]}
        else:
            result.append(message)
    return result


def _content_of(content: object, i: int) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in ("input_text", "output_text", "text", "reasoning_text"):
            raise refuse(f"input[{i}].content.type", kind, "input_text or output_text (models here read text only)")
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)


class _ResponseWriter:
    def __init__(self, service: Service, fields: ResponsesFields, prompt: ChatPrompt) -> None:
        self._prompt = prompt
        self._tokenizer = service.tokenizer
        self._head: Item = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": fields.model or service.model_name,
            "error": None,
            "instructions": fields.instructions,
            "metadata": {},
            "parallel_tool_calls": fields.parallel_tool_calls,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
        }

    def whole(self, text: str, done: Done, n_tokens: int) -> Item:
        parser = self._prompt.parser()
        items = _Items()
        for delta in [*parser.feed(text), *parser.finish()]:
            items.take(delta)
        items.close()
        return self._ended(items, done, n_tokens)

    async def stream(self, answer: Answer) -> AsyncGenerator[bytes]:
        parser = self._prompt.parser()
        items = _Items()
        number = 0
        n_tokens = 0
        begun = False

        def numbered(item: Item) -> bytes:
            nonlocal number
            item["sequence_number"] = number
            number += 1
            return event(item, item["type"])

        async for _, part in merge([answer]):
            if not begun:
                begun = True
                for kind in ("response.created", "response.in_progress"):
                    started = {**self._head, "status": "in_progress", "output": [], "incomplete_details": None}
                    yield numbered({"type": kind, "response": {**started, "usage": None}})
            if isinstance(part, PromptProgress):
                continue
            n_tokens += len(part.event.token_ids)
            deltas = parser.feed(part.event.text)
            if isinstance(part, Done):
                deltas += parser.finish()
            for delta in deltas:
                for item in items.take(delta):
                    yield numbered(item)
            if isinstance(part, Done):
                for item in items.close():
                    yield numbered(item)
                ended = self._ended(items, part, n_tokens)
                yield numbered({"type": f"response.{ended['status']}", "response": ended})

    def _ended(self, items: _Items, done: Done, n_tokens: int) -> Item:
        cut = done.event.finish_reason == "length"
        used = usage([done], n_tokens)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items.output,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": n_tokens,
                "output_tokens_details": {"reasoning_tokens": self._count_reasoning(items)},
                "total_tokens": used["total_tokens"],
            },
        }

    def _count_reasoning(self, items: _Items) -> int:
        texts = [item["content"][0]["text"] for item in items.output if item["type"] == "reasoning"]
        return sum(len(self._tokenizer.encode(text)) for text in texts)


class _Items:
    """The output items of one response, and the events that make them."""

    def __init__(self) -> None:
        self.output: list[Item] = []
        self._open = False

    def take(self, delta: Delta) -> list[Item]:
        """Events of one piece."""
        kind = {"content": "message", "reasoning": "reasoning"}.get(delta.kind, "function_call")
        events: list[Item] = []
        if not self._open or delta.kind == "call" or self.output[-1]["type"] != kind:
            events += self.close()
            events += self._begin(kind, delta)
        item = self.output[-1]
        where = {"item_id": item["id"], "output_index": len(self.output) - 1}
        if delta.kind == "arguments":
            item["arguments"] += delta.text
            events.append({"type": "response.function_call_arguments.delta", **where, "delta": delta.text})
        elif delta.kind in ("content", "reasoning"):
            item["content"][0]["text"] += delta.text
            name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
            more: Item = {"logprobs": []} if kind == "message" else {}
            events.append({"type": name, **where, "content_index": 0, "delta": delta.text, **more})
        return events

    def _begin(self, kind: str, delta: Delta) -> list[Item]:
        self._open = True
        index = len(self.output)
        if kind == "function_call":
            item: Item = {
                "type": kind,
                "id": f"fc_{secrets.token_hex(12)}",
                "call_id": delta.id,
                "name": delta.name,
                "arguments": "",
                "status": "in_progress",
            }
            self.output.append(item)
            return [{"type": "response.output_item.added", "output_index": index, "item": dict(item)}]
        if kind == "message":
            part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": "in_progress"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "id": f"rs_{secrets.token_hex(12)}", "summary": [], "status": "in_progress"}
        self.output.append({**item, "content": [part]})
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        return [
            {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}},
            {"type": "response.content_part.added", **where, "part": dict(part)},
        ]

    def close(self) -> list[Item]:
        """Events that end the open item."""
        if not self._open:
            return []
        self._open = False
        item = self.output[-1]
        item["status"] = "completed"
        index = len(self.output) - 1
        where = {"item_id": item["id"], "output_index": index}
        ended = {"type": "response.output_item.done", "output_index": index, "item": item}
        if item["type"] == "function_call":
            done = {"type": "response.function_call_arguments.done", **where}
            return [{**done, "name": item["name"], "arguments": item["arguments"]}, ended]
        part = item["content"][0]
        name = "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
        more: Item = {"logprobs": []} if item["type"] == "message" else {}
        return [
            {"type": name, **where, "content_index": 0, "text": part["text"], **more},
            {"type": "response.content_part.done", **where, "content_index": 0, "part": part},
            ended,
        ]
