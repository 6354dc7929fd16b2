"""Chat messages -> prompt text, by the Jinja template stored in a model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import TracebackType

from jinja2.exceptions import TemplateSyntaxError

from pydflash.errors import ChatTemplateError, InvalidArgumentError
from pydflash.text.chat_messages import Message, TemplateNeeds, adapt, plain, plain_messages
from pydflash.text.template_sandbox import TemplateEnvironment, budget


def _local_time() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """A compiled chat template.

    Templates run in a sandbox with limits (see :mod:`pydflash.text.template_sandbox`), see only JSON values, and may
    use what ``transformers`` offers them. Differences between templates are evened out as llama.cpp does it: parts of
    content are joined with newlines for a template that takes strings only, JSON text in the arguments of a tool call
    is parsed for one that writes objects, ``developer`` becomes ``system`` for one that does not know that role.

    Immutable; any thread.

    Args:
        source: the Jinja source.
        bos_token, eos_token: texts of these tokens, which a template may insert.
        clock: what ``strftime_now`` reads; local time by default.

    Raises:
        ChatTemplateError: the source is no valid template.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        clock: Callable[[], datetime] = _local_time,
    ) -> None:
        self.source = source
        self._names: dict[str, object] = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            with budget():
                self._template = TemplateEnvironment(clock).from_string(source)
        except TemplateSyntaxError as exc:
            raise ChatTemplateError(exc.message or "syntax error", line=exc.lineno) from exc
        except RecursionError as exc:
            raise ChatTemplateError("nested too deeply") from exc

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source)} characters)"

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Prompt text for a conversation.

        Args:
            messages: each with ``role`` and ``content`` (a string, or a list of ``{"type": "text", "text": ...}``);
                ``tool_calls``, ``reasoning_content`` and whatever else the template knows are passed on.
            tools: function descriptions as JSON Schema objects.
            add_generation_prompt: end with the opening of the assistant's answer.
            **kwargs: further names for the template, such as ``enable_thinking=False``.

        Raises:
            InvalidArgumentError: a message is malformed, or a value is no JSON value.
            ChatTemplateError: the template refused the messages, failed, or went over its limits.
        """
        copies = plain_messages(messages)
        if "developer" not in self.source:
            for message in copies:
                if message["role"] == "developer":
                    message["role"] = "system"
        adapt(copies, self._needs)
        names = {name: plain(value, name) for name, value in kwargs.items()}
        listed = None if tools is None else plain(tools, "tools")
        if isinstance(listed, dict | str):
            raise InvalidArgumentError("tools", tools, "a sequence of function descriptions")
        return self._run(copies, listed, add_generation_prompt, names)

    def _run(self, messages: Sequence[Message], tools: object, prompt: bool, names: Mapping[str, object]) -> str:
        given = {**self._names, "messages": messages, "tools": tools, "add_generation_prompt": prompt, **names}
        try:
            with budget():
                return self._template.render(given)
        except Exception as exc:  # whatever a template manages to raise is its own failure
            text = str(exc) or type(exc).__name__
            if isinstance(exc, RecursionError | MemoryError):
                text = f"{type(exc).__name__}: {text}"
            raise ChatTemplateError(text, line=_template_line(exc.__traceback__)) from exc

    @cached_property
    def _needs(self) -> TemplateNeeds:
        """Found out by rendering small conversations in both forms and looking for what should come out."""
        mark, name, value = "a mark in the text", "argument_name", "argument value"
        asks: Message = {"role": "user", "content": mark}
        takes_text = mark in self._try([asks])
        parted = self._try([{"role": "user", "content": [{"type": "text", "text": mark}]}])
        takes_parts = mark in parted and "'text'" not in parted and '"text"' not in parted

        def called(arguments: object) -> str:
            call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
            return self._try(
                [
                    asks,
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": "result", "tool_call_id": "call00001"},
                    {"role": "assistant", "content": "done"},
                    asks,
                ]
            )

        as_object = called({name: value})
        takes_object = name in as_object and value in as_object and f"'{name}'" not in as_object
        as_text = called(f'{{"{name}": "{value}"}}')
        takes_json = f'{{"{name}": "{value}"}}' in as_text
        return TemplateNeeds(
            flat_content=takes_text and not takes_parts,
            parted_content=takes_parts and not takes_text,
            object_arguments=takes_object,
            text_arguments=takes_json and not takes_object,
        )

    def _try(self, messages: Sequence[Message]) -> str:
        tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
        try:
            return self._run(messages, [tool], True, {})
        except ChatTemplateError:
            return ""


def _template_line(trace: TracebackType | None) -> int | None:
    """Line of the template that was running when an exception left it; of nested macros the innermost."""
    line = None
    while trace is not None:
        # Jinja puts a frame with this name into the traceback for each frame of template code.
        if "__jinja_exception__" in trace.tb_frame.f_globals:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
