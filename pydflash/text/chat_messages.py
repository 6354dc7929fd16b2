"""Chat messages as callers write them -> as a template wants them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydflash.errors import InvalidArgumentError

Message = dict[str, object]

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateNeeds:
    """What a template cannot do by itself.

    Attributes:
        flat_content: it only takes a string as content, not a list of parts.
        parted_content: it only takes a list of parts.
        object_arguments: it writes the arguments of a tool call from an object.
        text_arguments: it only takes them as JSON text.
    """

    flat_content: bool = False
    parted_content: bool = False
    object_arguments: bool = False
    text_arguments: bool = False


def plain(value: object, where: str, depth: int = 0) -> object:
    """Copy made of exact JSON types, so that a template sees no methods but theirs.

    Raises:
        InvalidArgumentError: something is no JSON value, or nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise InvalidArgumentError(where, "...", f"nesting no deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        copy: dict[str, object] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgumentError(f"key in {where}", key, "a string")
            copy[str.__str__(key)] = plain(item, f"{where}.{key}", depth + 1)
        return copy
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidArgumentError(where, value, "None, bool, int, float, str, a sequence or a mapping")


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Check and copy messages.

    Each has a ``role``; content that is absent or None becomes ``""``, as in llama.cpp; parts must be text.

    Raises:
        InvalidArgumentError: naming the message at fault, for example ``messages[2].content``.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidArgumentError("messages", messages, "a sequence of messages")
    copies: list[Message] = []
    given: Sequence[object] = messages
    for n, message in enumerate(given):
        where = f"messages[{n}]"
        if not isinstance(message, Mapping):
            raise InvalidArgumentError(where, message, "a mapping with role and content")
        copy: Message = {}
        for key, value in message.items():
            copy[str(key)] = plain(value, f"{where}.{key}")
        if not isinstance(copy.get("role"), str):
            raise InvalidArgumentError(f"{where}.role", copy.get("role"), "a string")
        content = copy.get("content")
        if content is None:
            copy["content"] = ""
        elif isinstance(content, list):
            for i, part in enumerate(content):
                text_of(part, f"{where}.content[{i}]")
        elif not isinstance(content, str):
            raise InvalidArgumentError(f"{where}.content", content, "a string or a list of text parts")
        copies.append(copy)
    return copies


def text_of(part: object, where: str) -> str:
    """Text of a content part ``{"type": "text", "text": ...}``.

    Raises:
        InvalidArgumentError: the part is something else, for instance an image.
    """
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise InvalidArgumentError(f"{where}.type", kind, "'text' (the models run here read text only)")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{where}.text", text, "a string")
    return text


def adapt(messages: Iterable[Message], needs: TemplateNeeds) -> None:
    """Rewrite messages in place into the form that a template takes.

    Raises:
        InvalidArgumentError: the arguments of a tool call are no JSON object.
    """
    for n, message in enumerate(messages):
        content = message["content"]
        if needs.flat_content and isinstance(content, list):
            message["content"] = "\n".join(text_of(part, f"messages[{n}].content") for part in content)
        elif needs.parted_content and isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
        calls = message.get("tool_calls")
        for i, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                where = f"messages[{n}].tool_calls[{i}].function.arguments"
                function["arguments"] = _arguments(function["arguments"], needs, where)


def _arguments(value: object, needs: TemplateNeeds, where: str) -> object:
    if needs.object_arguments and isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError as exc:
            raise InvalidArgumentError(where, value, f"a JSON object ({exc})") from exc
        if not isinstance(parsed, dict):
            raise InvalidArgumentError(where, value, "a JSON object")
        return plain(parsed, where)
    if needs.text_arguments and isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return value
