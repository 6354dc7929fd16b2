"""Chat requests: their fields, and the prompt and grammar that they stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydflash.server.answer_parser import AnswerParser
from pydflash.server.completion import grammar_of
from pydflash.server.errors import ApiError, refuse
from pydflash.server.fields import Fields, SamplingFields
from pydflash.server.grammar import from_json_schema
from pydflash.server.service import Service
from pydflash.server.tool_grammar import ToolChoice, read_tools, tool_choice_of, tool_grammar

ThoughtForm = Literal["none", "auto", "deepseek", "deepseek-legacy"]


class StreamFields(Fields):
    """OpenAI's stream_options."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatFields(SamplingFields):
    """Fields of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    stream_options: StreamFields | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    reasoning_format: ThoughtForm = "auto"
    enable_thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat request stands for.

    Attributes:
        text, ids: the prompt.
        grammar: what the answer has to match.
        in_thought: the prompt ends inside an opened thought.
        tools: name -> JSON Schema of the parameters, of those the answer may call.
        split_thought: whether thoughts are told apart from the answer.
    """

    text: str
    ids: tuple[int, ...]
    grammar: str | None
    in_thought: bool
    tools: Mapping[str, Mapping[str, Any]]
    split_thought: bool

    def parser(self) -> AnswerParser:
        """For one answer to it."""
        return AnswerParser(self.tools, in_thought=self.in_thought, split_thought=self.split_thought)


async def chat_prompt(service: Service, fields: ChatFields) -> ChatPrompt:
    """Put messages through the model's template.

    Raises:
        ApiError, InvalidArgumentError, ChatTemplateError: the messages, tools or formats cannot be used.
    """
    if not fields.messages:
        raise refuse("messages", fields.messages, "at least one message")
    tools = read_tools(fields.tools or ())
    choice = tool_choice_of(fields.tool_choice, tools)
    offered = {} if choice.mode == "none" else tools
    text = await asyncio.to_thread(_render, service, fields, fields.tools if offered else None)
    in_thought = text.rstrip().endswith("<think>")
    split = fields.reasoning_format != "none"
    grammar = _grammar(fields, choice, offered, in_thought)
    ids = await service.encode(text, add_special=False)
    return ChatPrompt(
        text=text, ids=ids, grammar=grammar, in_thought=in_thought and split, tools=offered, split_thought=split
    )


def _render(service: Service, fields: ChatFields, tools: Sequence[Mapping[str, Any]] | None) -> str:
    template = service.template
    if template is None:
        raise ApiError(400, "the model file has no chat template")
    names = dict(fields.chat_template_kwargs or {})
    reserved = names.keys() & {"messages", "tools", "add_generation_prompt"}
    if reserved:
        raise refuse("chat_template_kwargs", sorted(reserved), "names that the request has no field for")
    if fields.enable_thinking is not None:
        names["enable_thinking"] = fields.enable_thinking
    if fields.reasoning_effort is not None:
        names["reasoning_effort"] = fields.reasoning_effort
        if fields.reasoning_effort == "none":
            names["enable_thinking"] = False
    messages = list(fields.messages)
    prefill = ""
    if messages and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls"):
        content = messages[-1].get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str | None):
            raise refuse("messages[-1].content", content, "text")
        prefill = content or ""
        messages.pop()
        if not messages:
            raise refuse("messages", fields.messages, "a message before the assistant's")
    elif fields.continue_final_message:
        raise refuse("continue_final_message", True, "false, or a last message of the assistant")
    prompt = fields.add_generation_prompt or bool(prefill)
    return template.render(messages, tools=tools, add_generation_prompt=prompt, **names) + prefill


def _grammar(
    fields: ChatFields, choice: ToolChoice, tools: Mapping[str, Mapping[str, Any]], in_thought: bool
) -> str | None:
    format_grammar = _format_grammar(fields.response_format, in_thought)
    own = grammar_of(fields, behind_thought=in_thought)
    if format_grammar is not None and own is not None:
        raise ApiError(400, "response_format excludes json_schema and grammar")
    given = format_grammar or own
    if choice.mode != "required":
        if given is not None and tools:
            raise ApiError(400, "a format of the answer and tools exclude each other, unless tool_choice is none")
        return given
    if given is not None:
        raise ApiError(400, "tool_choice excludes a format of the answer")
    names = [choice.name] if choice.name else list(tools)
    return tool_grammar(
        {name: tools[name] for name in names}, several=fields.parallel_tool_calls, behind_thought=in_thought
    )


def _format_grammar(response_format: Mapping[str, Any] | None, in_thought: bool) -> str | None:
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema") or {"type": "object"}
        return from_json_schema(schema, behind_thought=in_thought)
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else response_format.get("schema")
        if not isinstance(schema, Mapping):
            raise refuse("response_format.json_schema.schema", schema, "a JSON Schema object")
        return from_json_schema(schema, behind_thought=in_thought)
    raise refuse("response_format.type", kind, "text, json_object or json_schema")
