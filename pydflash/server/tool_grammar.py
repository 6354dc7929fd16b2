"""Tools that an answer may call: their descriptions, and the grammar of a call that has to be made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydflash.server.errors import refuse
from pydflash.server.grammar import THOUGHT_RULE, from_lark, with_short_spaces

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_TOOLS = 256

Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a tool may or has to be called, and which; no name: any."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def read_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> JSON Schema of the parameters. ApiError for a tool that is none."""
    if len(tools) > _MAX_TOOLS:
        raise refuse("tools", len(tools), f"at most {_MAX_TOOLS}")
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise refuse(f"tools[{i}].type", tool.get("type"), "function")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise refuse(f"tools[{i}].function", function, "an object")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refuse(f"tools[{i}].function.name", name, "1 to 128 letters, digits, dots, dashes and underscores")
        if name in schemas:
            raise refuse(f"tools[{i}].function.name", name, "a name that no other tool has")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise refuse(f"tools[{i}].function.parameters", parameters, "a JSON Schema object")
        schemas[name] = parameters
    return schemas


def tool_choice_of(given: str | Mapping[str, Any] | None, tools: Tools) -> ToolChoice:
    """OpenAI's tool_choice. ApiError for one that cannot be met."""
    if given is None:
        return ToolChoice("auto")
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise refuse("tool_choice", given, "none, auto, required or a function")
        if given == "required" and not tools:
            raise refuse("tool_choice", given, "none or auto where there are no tools")
        return ToolChoice("required" if given == "required" else "none" if given == "none" else "auto")
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type") != "function" or name not in tools:
        raise refuse("tool_choice", given, "a function that is one of the tools")
    return ToolChoice("required", name)


def tool_grammar(tools: Tools, *, several: bool, behind_thought: bool) -> str:
    """Grammar of one call, or of one and more, in the form that Qwen3.5 writes.

    Each parameter stands in order of the schema; those that are not required may be missing. A value that the schema
    calls a string is plain text, any other is JSON that fits.
    """
    rules: list[str] = []
    names: list[str] = []
    has_text = False
    for i, (tool, schema) in enumerate(tools.items()):
        parts: list[str] = [_quoted(f"<tool_call>\n<function={tool}>\n")]
        properties = schema.get("properties")
        required = schema.get("required")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for j, (key, value) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
            opening = _quoted(f"<parameter={key}>\n")
            closing = _quoted("\n</parameter>\n")
            options = value.get("enum") if isinstance(value, Mapping) else None
            if is_text(value) and isinstance(options, list) and options:
                body = "(" + " | ".join(_quoted(str(option)) for option in options) + f") {closing}"
            elif is_text(value):
                body, has_text = "text", True
            else:
                rules.append(f"value_{i}_{j}: %json {json.dumps(_with_definitions(value, definitions))}")
                body = f"value_{i}_{j} {closing}"
            is_required = isinstance(required, Sequence) and key in required
            parts.append(f"{opening} {body}" if is_required else f"({opening} {body})?")
        parts.append(_quoted("</function>\n</tool_call>"))
        names.append(f"call_{i}")
        rules.append(f"call_{i}: {' '.join(parts)}")
    calls = 'call ("\\n" call)*' if several else "call"
    rules.append(f"call: {' | '.join(names)}")
    if has_text:
        rules.append('text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/')
    if behind_thought:
        rules.append(THOUGHT_RULE)
    start = f"start: {'thought ' if behind_thought else ''}{calls}"
    return from_lark("\n".join([start, *rules]) + "\n")


def is_text(schema: object) -> bool:
    """True for a parameter whose value is plain text."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is None and isinstance(schema.get("enum"), list):
        return all(isinstance(option, str) for option in schema["enum"])
    return kind == "string" or (isinstance(kind, list) and set(kind) == {"string"})


def _with_definitions(schema: object, definitions: Mapping[str, object]) -> object:
    return with_short_spaces({**schema, **definitions}) if isinstance(schema, Mapping) else schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
