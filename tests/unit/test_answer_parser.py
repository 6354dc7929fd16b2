"""Thoughts, content and tool calls, however the text is cut into pieces."""

import json
import random
from typing import Any

import pytest

from pydflash.server.answer_parser import AnswerParser

TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["integer", "null"]},
            "note": {"type": "string"},
            "tags": {"type": "array"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}


def parse(text: str, pieces: list[str], **options: Any) -> dict[str, Any]:
    parser = AnswerParser(options.pop("tools", TOOLS), **options)
    assert "".join(pieces) == text
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.kind == "call":
            assert delta.index == len(calls)
            assert delta.id.startswith("call_")
            calls.append([delta.name, ""])
        elif delta.kind == "arguments":
            calls[delta.index][1] += delta.text
    return {
        "content": "".join(delta.text for delta in deltas if delta.kind == "content"),
        "reasoning": "".join(delta.text for delta in deltas if delta.kind == "reasoning"),
        "calls": [tuple(call) for call in calls],
    }


def every_cut(text: str, **options: Any) -> dict[str, Any]:
    """The result, which has to be the same for the whole text, single characters, and random pieces."""
    whole = parse(text, [text], **dict(options))
    assert parse(text, list(text), **dict(options)) == whole
    dice = random.Random(3)
    for _ in range(20):
        pieces, rest = [], text
        while rest:
            n = dice.randrange(1, 9)
            pieces.append(rest[:n])
            rest = rest[n:]
        assert parse(text, pieces, **dict(options)) == whole
    return whole


def test_plain_text_is_content_to_the_last_character() -> None:
    for text in ("", " ", "a\n\n", "x < y and <b>", "<tool", "a <tool_cal", "\n\n<thin", "if a </think> b"):
        assert every_cut(text) == {"content": text, "reasoning": "", "calls": []}


def test_a_call_in_qwens_form() -> None:
    text = (
        "I will add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nnull\n</parameter>\n"
        '<parameter=note>\n12\n</parameter>\n<parameter=tags>\n["x", {"y": 1}]\n</parameter>\n</function>\n</tool_call>'
    )
    result = every_cut(text)
    [(name, arguments)] = result["calls"]
    assert name == "add"
    assert json.loads(arguments) == {"a": 1, "b": None, "note": "12", "tags": ["x", {"y": 1}]}
    assert result["content"] == "I will add."


def test_values_keep_their_lines_and_tags() -> None:
    value = "\n  if a < b:\n    print('</parameter>')\n</function\n\n"
    text = f"<tool_call>\n<function=add>\n<parameter=note>\n{value}\n</parameter>\n</function>\n</tool_call>"
    [(_, arguments)] = every_cut(text)["calls"]
    assert json.loads(arguments) == {"note": value}


def test_several_calls_and_text_between() -> None:
    call = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    result = every_cut(f"a {call}\n{call}\nb")
    assert result["calls"] == [("stop", "{}"), ("stop", "{}")]
    assert result["content"] == "ab"


def test_a_call_as_json() -> None:
    text = 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "</tool_call> é"}}\n</tool_call>'
    result = every_cut(text)
    [(name, arguments)] = result["calls"]
    assert (name, json.loads(arguments)) == ("add", {"a": 1, "note": "</tool_call> é"})
    assert result["content"] == "Yes."


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnothing of the kind\n</tool_call>",
        '<tool_call>{"no": "name"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        "<tool_call>\n<function=add",
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    result = every_cut(text)
    assert result["calls"] == []
    assert result["content"] == text


def test_a_call_that_is_cut_off_keeps_its_finished_arguments() -> None:
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nhel"
    [(name, arguments)] = every_cut(text)["calls"]
    assert (name, arguments) == ("add", '{"a": 1')


def test_no_tools_no_calls() -> None:
    text = "<tool_call>\n<function=add>\n</function>\n</tool_call>"
    assert every_cut(text, tools={})["content"] == text


@pytest.mark.parametrize("in_thought", [False, True])
def test_thoughts(in_thought: bool) -> None:
    body = "\nLet me see: a < b\n\nso </thin is no tag\n</think>\n\nThe answer."
    text = body if in_thought else f"\n<think>{body}"
    result = every_cut(text, in_thought=in_thought)
    assert result["reasoning"] == "Let me see: a < b\n\nso </thin is no tag"
    assert result["content"] == "The answer."
    cut = every_cut(text.partition("</think>")[0], in_thought=in_thought)
    assert (cut["reasoning"], cut["content"]) == (result["reasoning"], "")


def test_thoughts_stay_in_the_text_if_that_is_wanted() -> None:
    text = "<think>\nx\n</think>\n\ny"
    assert every_cut(text, split_thought=False) == {"content": text, "reasoning": "", "calls": []}


def test_a_thought_and_a_call() -> None:
    text = "<think>\nhm\n</think>\n\n<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    assert every_cut(text) == {"content": "", "reasoning": "hm", "calls": [("stop", "{}")]}
