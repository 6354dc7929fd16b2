"""Chat templates: what they may do, what they see, and that a hostile one comes to an end."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pydflash.errors import ChatTemplateError, InvalidArgumentError
from pydflash.text import template_sandbox
from pydflash.text.chat_template import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]

# The template of the built-in model: strings only.
DEMO = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Uses most of what real templates use: macros, namespaces, loop controls, typed content, tools, thinking.
FULL = """\
{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type != 'text' %}
                {%- continue %}
            {%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.last_user < 0 %}
    {{- raise_exception('no message of the user') }}
{%- endif %}
{{- bos_token }}
{%- if tools %}
    {{- '[tools]\\n' }}
    {%- for tool in tools %}
        {{- loop.index ~ '. ' ~ (tool | tojson) ~ '\\n' }}
    {%- endfor %}
    {{- '[/tools]\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '[' + message.role + ']' }}
    {%- if message.reasoning_content and loop.index0 > ns.last_user %}
        {{- '(' + message.reasoning_content.strip() + ')' }}
    {%- endif %}
    {{- text_of(message.content) | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n!' + call.function.name }}
        {%- for name, value in call.function.arguments | items %}
            {{- ' ' + name + '=' + (value if value is string else value | tojson) }}
        {%- endfor %}
    {%- endfor %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '()' }}
    {%- endif %}
{%- endif %}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <b>'heute'</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3}}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": " hm ", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1"},
]
ASK = [{"role": "user", "content": "x"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(ASK if messages is None else messages, **options)


# --- rendering -------------------------------------------------------------------------------------------------------


def test_template_of_the_built_in_model() -> None:
    talk = [*ASK, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "<b>"}]
    assert render(DEMO, talk) == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\n<b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(DEMO, talk[:1], add_generation_prompt=False) == "<|im_start|>user\nx<|im_end|>\n"


def test_tools_calls_and_thinking() -> None:
    assert render(FULL, TOOL_TALK, tools=[WEATHER]) == (
        "<s>[tools]\n"
        '1. {"type": "function", "function": {"name": "weather", "description": "Wetter für <b>\'heute\'</b>", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}\n'
        "[/tools]\n"
        "[system]Be kind.</s>\n"
        "[user]Weather?</s>\n"
        "[assistant](hm)\n!weather city=Köln days=3</s>\n"
        '[tool]{"t": 3}</s>\n'
        "[assistant]"
    )


def test_further_names_reach_the_template() -> None:
    assert render(FULL, ASK).endswith("[assistant]")
    assert render(FULL, ASK, enable_thinking=True).endswith("[assistant]")
    assert render(FULL, ASK, enable_thinking=False).endswith("[assistant]()")


def test_tools_may_be_absent_or_empty() -> None:
    assert render(FULL, ASK, tools=[]) == render(FULL, ASK) == "<s>[user]x</s>\n[assistant]"
    assert render("{{ tools is none }}") == "True"


def test_blocks_are_trimmed() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_and_generation_blocks() -> None:
    loop = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(loop) == "013"
    assert render("{% generation %}{% set x = 1 %}hi{% endgeneration %}{{ x is defined }}") == "hiFalse"


def test_loop_variables_survive_the_limits() -> None:
    source = "{% for c in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ c }}{{ loop.nextitem or '.' }}{% endfor %}"
    assert render(source) == "1/3ab2/3bc3/3c."
    assert render("{% for c in [] %}x{% else %}none{% endfor %}") == "none"
    assert render("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}") == "12"


def test_tojson_keeps_order_and_characters() -> None:
    value = "{% set v = {'b': '<ö>&\\'', 'a': [1, none, true]} %}"
    assert render(value + "{{ v | tojson }}") == '{"b": "<ö>&\'", "a": [1, null, true]}'
    assert render(value + "{{ v | tojson(indent=1) }}").startswith('{\n "b": ')
    assert render("{{ {'k': 1} | tojson(separators=(',', ':')) }}") == '{"k":1}'
    assert render("{{ 'ö' | tojson(ensure_ascii=true) }}") == '"\\u00f6"'


def test_strftime_now_reads_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2031, 7, 4, tzinfo=UTC))
    assert template.render(ASK) == "04 Jul 2031"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(ASK) >= "2026"


def test_nothing_of_one_rendering_is_left_for_the_next() -> None:
    template = ChatTemplate(FULL, "<s>", "</s>")
    first = template.render(TOOL_TALK, tools=[WEATHER])
    assert template.render(ASK, enable_thinking=False) == "<s>[user]x</s>\n[assistant]()"
    assert template.render(TOOL_TALK, tools=[WEATHER]) == first


def test_arguments_are_not_changed() -> None:
    talk = [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *TOOL_TALK[1:]]
    before = json.dumps(talk)
    render(DEMO, talk)
    render(FULL, talk)
    assert json.dumps(talk) == before


def test_one_template_in_several_threads() -> None:
    template = ChatTemplate(FULL, "<s>", "</s>")
    want = {n: render(FULL, [{"role": "user", "content": str(n)}]) for n in range(4)}
    got: dict[int, set[str]] = {n: set() for n in want}

    def work(n: int) -> None:
        for _ in range(50):
            got[n].add(template.render([{"role": "user", "content": str(n)}]))

    threads = [threading.Thread(target=work, args=(n,)) for n in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: {text} for n, text in want.items()}


# --- evening out -----------------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"


def test_parts_are_joined_for_a_template_of_strings() -> None:
    assert render(DEMO, [{"role": "user", "content": PARTS}]).startswith("<|im_start|>user\none\ntwo<|im_end|>")


def test_parts_are_left_alone_where_the_template_knows_them() -> None:
    assert render(FULL, [{"role": "user", "content": PARTS}]) == "<s>[user]onetwo</s>\n[assistant]"


def test_a_string_becomes_a_part_for_a_template_of_parts() -> None:
    assert render(PARTS_ONLY, [{"role": "user", "content": "x"}, {"role": "user", "content": PARTS}]) == "<x><one><two>"


def test_a_template_that_prints_any_content_gets_strings() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": PARTS}]) == "one\ntwo"
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": PARTS}]) == (
        '{"role": "user", "content": "one\\ntwo"}'
    )


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [*ASK, {"role": "assistant", "tool_calls": [call]}]


def test_json_arguments_become_an_object() -> None:
    text = render(FULL, with_arguments('{"city": "Köln", "days": [1, 2]}'))
    assert "!weather city=Köln days=[1, 2]</s>" in text
    assert text == render(FULL, with_arguments({"city": "Köln", "days": [1, 2]}))


def test_object_arguments_become_json_for_a_template_of_text() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '!' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert render(source, with_arguments({"city": "Köln"})) == 'x!{"city": "Köln"}'
    assert render(source, with_arguments('{"city":"Köln"}')) == 'x!{"city":"Köln"}'


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '{"a": ' + "[" * 200 + "]" * 200 + "}"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        render(FULL, with_arguments(arguments))


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    talk = [{"role": "developer", "content": "d"}, *ASK]
    assert render(FULL, talk).startswith("<s>[system]d</s>")
    assert render(FULL + "{# developer #}", talk).startswith("<s>[developer]d</s>")


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is 'hi', expected a sequence"),
        ({"role": "user"}, "expected a sequence of messages"),
        (["hi"], r"messages\[0\] is 'hi', expected a mapping"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role is 1"),
        ([*ASK, {"role": "user", "content": 7}], r"messages\[1\]\.content is 7"),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content is \{"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]\.type is 'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text is None"),
        (
            [{"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {}}]}],
            r"\[2\]\.type is 'image_url'",
        ),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra is <object"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], r"key in messages\[0\]\.extra is 1"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content is b'x'"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ChatTemplate(FULL).render(messages)


def test_endless_nesting_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArgumentError, match="nesting no deeper than 64"):
        render(FULL, [{"role": "user", "content": "x", "extra": loop}])


@pytest.mark.parametrize("tools", [{"type": "function"}, "weather", object(), [object()]])
def test_malformed_tools(tools: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="tools"):
        render(FULL, tools=tools)


def test_a_template_sees_values_and_no_methods_of_the_caller() -> None:
    class Shouting(str):
        __slots__ = ()

        def shout(self) -> str:
            raise AssertionError("called by a template")

    with pytest.raises(ChatTemplateError, match="has no attribute 'shout'"):
        render("{{ messages[0].content.shout() }}", [{"role": "user", "content": Shouting("x")}])
    with pytest.raises(InvalidArgumentError, match="hook is <function"):
        render("{{ hook() }}", hook=lambda: 1)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("a\nb\n{{ raise_exception('no system here') }}", 3, "no system here"),
        ("\n{% macro f() %}\n\n{{ raise_exception('inside') }}{% endmacro %}\n\n\n{{ f() }}", 4, "inside"),
        ("\n\n{{ nope.x }}", 3, "'nope' is undefined"),
        ("\n{{ 1 // 0 }}", 2, "division"),
        ("\n{{ 'a' + 1 }}", 2, "can only concatenate str"),
        ("\n{{ ''.__class__.__mro__ }}", 2, "unsafe"),
        ("\n{{ messages.append(1) }}", 2, "unsafe"),
        ("{% set n = namespace(_x=1) %}", 1, "'_x' may not be set"),
        ("\n{% set n = namespace() %}{% set n.__class__ = 1 %}", 2, "'__class__' may not be set"),
        ("\n{% include 'x' %}", 2, "no loader"),
        ("\n{{ tools | tojson(nosuch=1) }}", 2, "nosuch"),
    ],
)
def test_failures_name_the_line(source: str, line: int, message: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateError, match=message) as caught:
        template.render(ASK)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"chat template line {line}: ")
    assert isinstance(caught.value, InvalidArgumentError)


@pytest.mark.parametrize(
    ("source", "line"), [("a\n{% if %}", 2), ("{% for x in y %}\n", 1), ("\n\n{{ x | nosuchfilter }}", 3), ("{{ 'a", 1)]
)
def test_malformed_sources(source: str, line: int) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source)
    assert caught.value.line == line


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 2000 + "{% endif %}" * 2000]
)
def test_sources_nested_too_deeply(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        ChatTemplate(source)


# --- hostile templates -----------------------------------------------------------------------------------------------

DOUBLE = "{%% set ns = namespace(s=%s) %%}{%% for i in range(90) %%}{%% set ns.s = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loop iterations and calls"),
        ("{% set r = range(9999) %}{% for a in r %}{% for b in r %}{{ a }}{% endfor %}{% endfor %}", "iterations"),
        ("{% for a in [1, 2] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}", "calls"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "calls"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "the number 1000000000 as an argument"),
        ("{% for a in range(10 ** 7) %}{% endfor %}", "Range too big"),
        (DOUBLE % ("'x'", "ns.s + ns.s"), "a text of"),
        (DOUBLE % ("'x'", "ns.s ~ ns.s"), "a text of"),
        (DOUBLE % ("'x'", "[ns.s, ns.s] | join"), "a text of"),
        (DOUBLE % ("'x'", "''.join([ns.s, ns.s])"), "a text of"),
        (DOUBLE % ("[1]", "ns.s + ns.s"), "a collection of"),
        (DOUBLE % ("3", "ns.s * ns.s"), "an integer of"),
        (DOUBLE.replace("{%% set ns.s", "{%% set y %%}{{ ns.s }}{{ ns.s }}{%% endset %%}{%% set ns.s") % ("'x'", "y"),
         "characters of output"),
        ("{% for a in range(9000) %}{{ 'x' * 9000 }}{% endfor %}", "characters of output"),
        ("{{ 'x' * 10 ** 12 }}", "a repetition of"),
        ("{{ 10 ** 12 * 'x' }}", "a repetition of"),
        ("{{ ([1] * 10 ** 9) | length }}", "a repetition of"),
        ("{{ 10 ** (10 ** 10) }}", "an integer of"),
        ("{{ 'x' | center(10 ** 11) }}", "as an argument"),
        ("{{ 'x\n' | indent(10 ** 11) }}", "as an argument"),
        ("{{ 'x'.ljust(width=10 ** 11) }}", "as an argument"),
        ("{{ '{:>999999999}'.format(1) }}", "the format"),
        ("{{ '{:>{}}'.format(1, '999999999') }}", "the format"),
        ("{{ '{x:>999999999}'.format_map({'x': 1}) }}", "the format"),
        ("{{ '%999999999d' % 1 }}", "the format"),
        ("{{ '%*d' % (999999999, 1) }}", "the format"),
        ("{{ '%.999999999f' | format(1.5) }}", "the format"),
    ],
)  # fmt: skip
def test_work_and_size_are_bounded(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 20_000)
    begin = time.process_time()
    with pytest.raises(ChatTemplateError, match=message):
        render(source)
    assert time.process_time() - begin < 5


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(ChatTemplateError, match=r"more than 0\.05 seconds of processor time"):
        render("{% for i in range(9999) %}{% set x = range(9999) | list | sort(reverse=true) %}{% endfor %}")


def test_limits_are_per_rendering() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}")
    assert [template.render(ASK) for _ in range(15)] == ["x"] * 15


def test_a_long_conversation_is_within_the_limits() -> None:
    talk = [{"role": role, "content": "word " * 50} for _ in range(2500) for role in ("user", "assistant")]
    assert render(FULL, talk).count("[user]") == 2500


def test_formats_of_ordinary_width_work() -> None:
    assert render("{{ '%5.1f' % 2.25 }}|{{ '%s' | format('a') }}|{{ '{:>4}{n}'.format(7, n=8) }}") == "  2.2|a|   78"
    assert render("{{ '100%' + ' of {10000}' }}") == "100% of {10000}"


# --- against llama.cpp -----------------------------------------------------------------------------------------------


def _load_script() -> ModuleType:
    path = ROOT / "scripts" / "make_tokenizer_goldens.py"
    spec = importlib.util.spec_from_file_location("make_tokenizer_goldens", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp (xllamacpp) is not installed")
@pytest.mark.parametrize("source", [DEMO, FULL], ids=["demo", "full"])
def test_same_prompts_as_llama_cpp(source: str, tmp_path: Path) -> None:
    script = _load_script()
    metadata = script.read_stored("nano")["metadata"]
    # Without a bos id llama.cpp takes token 11, whatever that is.
    bos = {"tokenizer.ggml.bos_token_id": metadata["tokenizer.ggml.tokens"].index("<think>")}
    script.write_model(tmp_path / "model.gguf", {**metadata, **bos, "tokenizer.chat_template": source})
    called = json.loads(json.dumps(TOOL_TALK))
    # Arguments as the OpenAI API writes them.
    called[2]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln", "days": 3}'
    cases: list[dict[str, Any]] = [
        {"messages": ASK},
        {"messages": [{"role": "system", "content": "s"}, *ASK, {"role": "assistant", "content": "ä"}, *ASK]},
        {"messages": [{"role": "user", "content": PARTS}]},
        {"messages": [{"role": "developer", "content": "d"}, *ASK]},
    ]
    if source is FULL:
        cases += [{"messages": ASK, "tools": [WEATHER]}, {"messages": called, "tools": [WEATHER]}]
    requests = [{"route": "/apply-template", "body": case} for case in cases]
    answers = script.ask_elsewhere(tmp_path / "model.gguf", requests)
    template = ChatTemplate(source, "<think>", "<|im_end|>")
    assert [template.render(**case) for case in cases] == [answer.get("prompt", answer) for answer in answers]
