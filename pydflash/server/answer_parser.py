"""Text of an answer -> thoughts, content and tool calls, while it arrives.

Two forms of calls are read, both between ``<tool_call>`` and ``</tool_call>``: Qwen3.5's ``<function=NAME>`` with
``<parameter=NAME>`` entries, and Qwen3's JSON object of ``name`` and ``arguments``. Whatever does not follow them is
content: nothing that the model wrote is lost, except white space around tags.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydflash.server.tool_grammar import is_text

_THINK: Final = "<think>"
_END_THINK: Final = "</think>"
_CALL: Final = "<tool_call>"
_END_CALL: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_END_FUNCTION: Final = "</function>"
_PARAMETER: Final = "<parameter="
# A parameter ends where another one, or the end of the function, follows: its text may hold the tag itself.
_END_PARAMETER: Final = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")

State = Literal["start", "thought", "content", "head", "json", "parameters", "tail"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: text of a thought or of the content, the beginning of a call, or some of its arguments."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str = ""
    index: int = 0
    name: str = ""
    id: str = ""


class AnswerParser:
    """One answer. One thread at a time."""

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, in_thought: bool = False, split_thought: bool = True
    ) -> None:
        """``tools``: those that may be called, by name; ``in_thought``: the prompt has opened a thought already."""
        self._tools = tools
        self._state: State = "thought" if in_thought else "start" if split_thought else "content"
        self._buffer = ""
        self._skip_space = in_thought  # white space behind a tag is dropped
        self._deltas: list[Delta] = []
        self._n_calls = 0
        self._schema: Mapping[str, Any] = {}
        self._n_arguments = 0

    @property
    def n_calls(self) -> int:
        """Calls that were begun."""
        return self._n_calls

    def feed(self, text: str) -> list[Delta]:
        """Take more text; what has become certain."""
        self._buffer += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """No more text follows: what was held back."""
        rest, self._buffer = self._buffer, ""
        if self._state == "thought":
            self._emit("reasoning", rest.rstrip())
        elif self._state in ("start", "content"):
            self._emit("content", rest)
        elif self._state == "json":
            if not self._json_call(rest):
                self._emit("content", _CALL + rest)
        elif self._state == "head":
            self._emit("content", _CALL + rest)
        # What is left of parameters was cut off inside a value, and the arguments stay cut off there.
        return self._take()

    def _advance(self) -> bool:
        """Consume some of the buffer; False when more text is needed."""
        return bool(getattr(self, f"_in_{self._state}")())

    def _in_start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_THINK):
            self._buffer = text[len(_THINK) :]
            self._state, self._skip_space = "thought", True
            return True
        if _THINK.startswith(text):
            return False
        self._state = "content"
        return True

    def _in_thought(self) -> bool:
        if not self._begin_text():
            return False
        before, tag, behind = self._buffer.partition(_END_THINK)
        if tag:
            self._emit("reasoning", before.rstrip())
            self._buffer = behind
            self._state, self._skip_space = "content", True
            return True
        self._emit_certain("reasoning", _END_THINK)
        return False

    def _in_content(self) -> bool:
        if not self._begin_text():
            return False
        if not self._tools:
            text, self._buffer = self._buffer, ""
            self._emit("content", text)
            return False
        before, tag, behind = self._buffer.partition(_CALL)
        if tag:
            self._emit("content", before.rstrip())
            self._buffer = behind
            self._state = "head"
            return True
        self._emit_certain("content", _CALL)
        return False

    def _begin_text(self) -> bool:
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
            self._skip_space = not self._buffer
        return bool(self._buffer)

    def _in_head(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith("{"):
            self._state = "json"
            return True
        if text.startswith(_FUNCTION) and ">" in text:
            name, _, self._buffer = text[len(_FUNCTION) :].partition(">")
            self._begin_call(name.strip())
            self._emit_arguments("{")
            self._state, self._n_arguments = "parameters", 0
            return True
        if _FUNCTION.startswith(text) or text.startswith(_FUNCTION):
            return False
        self._back_to_content(_CALL + self._buffer)
        return True

    def _in_json(self) -> bool:
        at = self._buffer.find(_END_CALL)
        while at >= 0:
            if self._json_call(self._buffer[:at]):
                self._buffer = self._buffer[at + len(_END_CALL) :]
                self._state, self._skip_space = "content", True
                return True
            at = self._buffer.find(_END_CALL, at + 1)
        return False

    def _in_parameters(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_END_FUNCTION):
            self._emit_arguments("}")
            self._buffer = text[len(_END_FUNCTION) :]
            self._state = "tail"
            return True
        if text.startswith(_PARAMETER):
            key, closed, behind = text[len(_PARAMETER) :].partition(">")
            end = _END_PARAMETER.search(behind) if closed else None
            if end is None:
                return False
            self._argument(key.strip(), behind[: end.start()].removeprefix("\n"))
            self._buffer = behind[end.end() :]
            return True
        if _END_FUNCTION.startswith(text) or _PARAMETER.startswith(text):
            return False
        self._emit_arguments("}")
        self._back_to_content(self._buffer)
        return True

    def _in_tail(self) -> bool:
        text = self._buffer.lstrip()
        if _END_CALL.startswith(text) and text != _END_CALL:
            return False
        self._buffer = text.removeprefix(_END_CALL)
        self._state, self._skip_space = "content", True
        return True

    def _back_to_content(self, text: str) -> None:
        """Text that looked like a call and is none."""
        self._emit("content", text)
        self._buffer = ""
        self._state = "content"

    def _json_call(self, text: str) -> bool:
        try:
            call = json.loads(text)
        except ValueError:
            return False
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", {})
        self._begin_call(call["name"])
        self._emit_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        return True

    def _begin_call(self, name: str) -> None:
        self._schema = self._tools.get(name, {})
        self._deltas.append(Delta("call", index=self._n_calls, name=name, id=f"call_{secrets.token_hex(12)}"))
        self._n_calls += 1

    def _argument(self, key: str, text: str) -> None:
        comma = ", " if self._n_arguments else ""
        self._n_arguments += 1
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        value = json.dumps(_value_of(text, schema), ensure_ascii=False)
        self._emit_arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}")

    def _emit_arguments(self, text: str) -> None:
        self._deltas.append(Delta("arguments", text, index=self._n_calls - 1))

    def _emit_certain(self, kind: Literal["reasoning", "content"], tag: str) -> None:
        """Emit what cannot belong to a tag, nor be white space in front of one."""
        text = self._buffer
        held = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
        certain = text[: len(text) - held].rstrip()
        self._emit(kind, certain)
        self._buffer = text[len(certain) :]

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            self._deltas.append(Delta(kind, text))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _value_of(text: str, schema: object) -> object:
    """A parameter's value: text where the schema says so, else JSON if it is some."""
    if is_text(schema):
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(schema, Mapping) or isinstance(value, dict | list):
        return value
    return text
