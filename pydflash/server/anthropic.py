"""POST /v1/messages: Anthropic's form."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pydflash.server.answer_parser import AnswerParser, Delta
from pydflash.server.chat_prompt import ChatFields, ChatPrompt, chat_prompt
from pydflash.server.errors import ApiError, refuse
from pydflash.server.fields import Fields, check_fields, read_fields
from pydflash.server.messages import Done, PromptProgress
from pydflash.server.openai_chat import chat_jobs
from pydflash.server.process import Answer
from pydflash.server.service import Service, collect, merge
from pydflash.server.streams import EventStream, event, unless_gone

_ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_THINKING: Final[Mapping[str, bool]] = {"disabled": False, "enabled": True, "adaptive": True}


class _Tool(Fields):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None


class _ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]


class CountFields(Fields):
    """Fields of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None


class MessagesFields(CountFields):
    """Fields of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


async def messages(service: Service, request: Request) -> Response:
    """POST /v1/messages."""
    fields = read_fields(MessagesFields, await request.body())
    chat = as_chat(fields)
    prompt = await chat_prompt(service, chat)
    [job] = chat_jobs(service, chat, prompt)
    answer = await service.start(job)
    writer = _MessageWriter(service, fields, prompt)
    if fields.stream:
        return EventStream(
            writer.stream(answer),
            ping_seconds=service.options.ping_seconds,
            on_error=lambda error: event(error_body(error), "error"),
            error_body=error_body,
        )
    outcome = await unless_gone(request, collect(answer))
    return JSONResponse(writer.whole(outcome.text, outcome.done, len(outcome.token_ids)))


async def count_tokens(service: Service, request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    fields = read_fields(CountFields, await request.body())
    prompt = await chat_prompt(service, as_chat(fields))
    return JSONResponse({"input_tokens": len(prompt.ids)})


def error_body(error: ApiError) -> dict[str, object]:
    """An error as Anthropic's clients read it."""
    kind = _ERROR_TYPES.get(error.code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, **error.extra}}


def as_chat(fields: CountFields) -> ChatFields:
    """The same request in OpenAI's form. ApiError for what has no counterpart."""
    chat: dict[str, object] = {"messages": _chat_messages(fields)}
    if fields.tools is not None:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({} if tool.description is None else {"description": tool.description}),
                },
            }
            for tool in fields.tools
        ]
    choice = fields.tool_choice
    if choice is not None:
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            chat["tool_choice"] = "required" if choice.type == "any" else choice.type
    if fields.thinking is not None:
        chat["enable_thinking"] = _THINKING[fields.thinking.type]
    if isinstance(fields, MessagesFields):
        given = {name: getattr(fields, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "stream")}
        chat |= {name: value for name, value in given.items() if value is not None}
        if fields.max_tokens < 1:
            raise refuse("max_tokens", fields.max_tokens, "an integer >= 1")
        if fields.stop_sequences:
            chat["stop"] = fields.stop_sequences
    return check_fields(ChatFields, chat)


def _chat_messages(fields: CountFields) -> list[dict[str, object]]:
    result: list[dict[str, object]] = []
    if fields.system is not None:
        result.append({"role": "system", "content": _text_of(fields.system, "system")})
    for i, message in enumerate(fields.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise refuse(f"messages[{i}].role", role, "user or assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise refuse(f"messages[{i}].content", content, "text or a list of blocks")
        result += _assistant(blocks, i) if role == "assistant" else _user(role, blocks, i)
    return result


def _user(role: str, blocks: Sequence[object], i: int) -> list[dict[str, object]]:
    result: list[dict[str, object]] = []
    texts: list[str] = []
    for j, block in enumerate(blocks):
        where = f"messages[{i}].content[{j}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, dict) and kind == "tool_result":
            content = block.get("content", "")
            result.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": _text_of(content, where)}
            )
        else:
            texts.append(_text_of([block], where))
    if texts or not result:
        result.append({"role": role, "content": "\n".join(texts)})
    return result


def _assistant(blocks: Sequence[object], i: int) -> list[dict[str, object]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for j, block in enumerate(blocks):
        where = f"messages[{i}].content[{j}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, dict) and kind == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            function = {"name": block.get("name", ""), "arguments": arguments}
            calls.append({"id": block.get("id", ""), "type": "function", "function": function})
        elif isinstance(block, dict) and kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            texts.append(_text_of([block], where))
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise refuse(f"{where}.type", kind, "'text' (the models run here read text only)")
        texts.append(block["text"])
    return "\n".join(texts)


class _MessageWriter:
    def __init__(self, service: Service, fields: MessagesFields, prompt: ChatPrompt) -> None:
        self._prompt = prompt
        self._head: dict[str, object] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": fields.model or service.model_name,
        }

    def whole(self, text: str, done: Done, n_tokens: int) -> dict[str, object]:
        parser = self._prompt.parser()
        blocks = _Blocks()
        for delta in [*parser.feed(text), *parser.finish()]:
            blocks.take(delta)
        return {**self._head, "content": blocks.content(), **_ending(done, parser), "usage": _usage(done, n_tokens)}

    async def stream(self, answer: Answer) -> AsyncGenerator[bytes]:
        parser = self._prompt.parser()
        blocks = _Blocks()
        n_tokens = 0
        begun = False
        async for _, part in merge([answer]):
            if not begun:
                begun = True
                counts = {"input_tokens": len(self._prompt.ids), "output_tokens": 0, "cache_read_input_tokens": 0}
                start = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
                yield event({"type": "message_start", "message": start}, "message_start")
            if isinstance(part, PromptProgress):
                continue
            n_tokens += len(part.event.token_ids)
            deltas = parser.feed(part.event.text)
            if isinstance(part, Done):
                deltas += parser.finish()
            for delta in deltas:
                for item in blocks.take(delta):
                    yield event(item, str(item["type"]))
            if isinstance(part, Done):
                for item in blocks.close():
                    yield event(item, str(item["type"]))
                last = {"type": "message_delta", "delta": _ending(part, parser), "usage": _usage(part, n_tokens)}
                yield event(last, "message_delta")
                yield event({"type": "message_stop"}, "message_stop")


class _Blocks:
    """The content blocks of one answer, and the events that make them."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, object]] = []
        self._texts: list[list[str]] = []
        self._open = False

    def take(self, delta: Delta) -> list[dict[str, object]]:
        """Events of one piece."""
        events: list[dict[str, object]] = []
        kind = {"content": "text", "reasoning": "thinking"}.get(delta.kind, "tool_use")
        if not self._open or delta.kind == "call" or self._blocks[-1]["type"] != kind:
            events += self.close()
            block: dict[str, object] = {"type": kind}
            if kind == "tool_use":
                block |= {"id": delta.id.replace("call_", "toolu_"), "name": delta.name, "input": {}}
            elif kind == "thinking":
                block |= {"thinking": "", "signature": ""}
            else:
                block |= {"text": ""}
            self._blocks.append(block)
            self._texts.append([])
            self._open = True
            events.append({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)})
        if delta.kind == "call":
            return events
        self._texts[-1].append(delta.text)
        shape = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
        name, key = shape.get(kind, ("input_json_delta", "partial_json"))
        piece = {"type": name, key: delta.text}
        return [*events, {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": piece}]

    def close(self) -> list[dict[str, object]]:
        """Events that end the open block."""
        if not self._open:
            return []
        self._open = False
        index = len(self._blocks) - 1
        events: list[dict[str, object]] = [{"type": "content_block_stop", "index": index}]
        if self._blocks[-1]["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            events.insert(0, {"type": "content_block_delta", "index": index, "delta": signature})
        return events

    def content(self) -> list[dict[str, object]]:
        """All blocks with what is in them."""
        result: list[dict[str, object]] = []
        for block, texts in zip(self._blocks, self._texts, strict=True):
            text = "".join(texts)
            if block["type"] == "tool_use":
                result.append({**block, "input": _object_of(text)})
            else:
                result.append({**block, str(block["type"]): text})
        return result


def _object_of(text: str) -> object:
    """Arguments of a call; those of one that was cut off are given as text."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return {"_incomplete": text}
    return value


def _ending(done: Done, parser: AnswerParser) -> dict[str, object]:
    reason = "end_turn"
    if done.event.finish_reason == "length":
        reason = "max_tokens"
    elif parser.n_calls:
        reason = "tool_use"
    elif done.event.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": done.event.stop_text}


def _usage(done: Done, n_tokens: int) -> dict[str, object]:
    stats = done.event.stats
    cached = 0 if stats is None else stats.cached_tokens
    n_prompt = 0 if stats is None else stats.prompt_tokens - cached
    return {"input_tokens": n_prompt, "cache_read_input_tokens": cached, "output_tokens": n_tokens}
