"""The real client library of OpenAI, and litellm on top of it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from support.server import Server

import pydflash

MESSAGES: list[Any] = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def alone(engine: pydflash.Engine) -> pydflash.GenerationResult:
    return engine.generate(MESSAGES, pydflash.SamplingOptions(max_tokens=40))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo-target-q8_0.gguf"]


def test_chat(client: openai.OpenAI, alone: pydflash.GenerationResult) -> None:
    answer = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=40)
    [choice] = answer.choices
    assert choice.message.content == alone.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == alone.finish_reason
    assert answer.model == "any"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(alone.token_ids)
    assert answer.usage.prompt_tokens == alone.stats.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["predicted_n"] == len(alone.token_ids)


def test_a_streamed_chat(client: openai.OpenAI, alone: pydflash.GenerationResult) -> None:
    chunks = list(
        client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == alone.finish_reason
    assert set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == len(alone.token_ids)
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["timings"]["predicted_n"] == len(alone.token_ids)


def test_the_limit_is_a_length(client: openai.OpenAI) -> None:
    for stream in (True, False):
        answer: Any = client.chat.completions.create(
            model="m", messages=MESSAGES, max_completion_tokens=3, stream=stream
        )
        last = list(answer)[-1] if stream else answer
        assert last.choices[0].finish_reason == "length"


def test_log_probabilities_are_those_of_plain_decoding(client: openai.OpenAI, engine: pydflash.Engine) -> None:
    alone = engine.generate(MESSAGES, pydflash.SamplingOptions(max_tokens=12, logprobs=3, width=1))
    assert alone.logprobs is not None
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=3, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert len(entries) == 12
        for entry, expected in zip(entries, alone.logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=0.02)
            assert bytes(entry.bytes) == engine.tokenizer.token_bytes(expected.token_id)
            for top, (_, logprob) in zip(entry.top_logprobs, expected.top, strict=True):
                assert top.logprob == pytest.approx(logprob, abs=0.02)


def test_several_choices(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    whole = create(model="m", messages=MESSAGES, max_tokens=8, n=3, temperature=1.5, seed=11, extra_body={"top_k": 0})
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in create(
        model="m", messages=MESSAGES, max_tokens=8, n=3, temperature=1.5, seed=11, stream=True, extra_body={"top_k": 0}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_stop_and_logit_bias(client: openai.OpenAI, engine: pydflash.Engine) -> None:
    [token] = engine.encode("z")
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "zzz"
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=9, logit_bias={str(token): 100}, stop=["zzzz"]
    )
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_in_a_schema(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=10)
        age: int

    parsed = client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Person, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=30
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_a_tool_that_has_to_be_called(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        whole: Any = client.chat.completions.create(
            model="m", messages=MESSAGES, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        )
        [call] = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Paris", "Rome")
        assert 1 <= arguments["days"] <= 9
        with client.chat.completions.stream(
            model="m", messages=MESSAGES, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        ) as stream:
            final = stream.get_final_completion()
        [streamed] = final.choices[0].message.tool_calls or []
        assert streamed.function.name == call.function.name
        assert streamed.function.arguments == call.function.arguments
        assert final.choices[0].finish_reason == "tool_calls"


def test_five_tools_and_a_long_system_text(start: Callable[..., Server]) -> None:
    """Greedy, streamed and not, drafted and not: the same valid call behind 6,000 characters."""
    server = start("--ctx-size", "4096", "--ubatch-size", "512", "--parallel", "1").wait_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    tools = [
        {**WEATHER, "function": {**WEATHER["function"], "name": f"tool_{name}"}} for name in ("a", "b", "c", "d", "e")
    ]
    system = "You are careful. " * 360
    messages = [{"role": "system", "content": system}, *MESSAGES]
    calls = set()
    for stream in (False, True):
        for n_draft in (0, 15) if not stream else (15,):
            answer: Any = client.chat.completions.create(
                model="m",
                messages=messages,
                tools=tools,
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=150,
                stream=stream,
                extra_body={"speculative.n_max": n_draft, "cache_prompt": False},
            )
            if stream:
                parts = [part for chunk in answer if chunk.choices for part in chunk.choices[0].delta.tool_calls or ()]
                name = parts[0].function.name
                arguments = "".join(part.function.arguments or "" for part in parts)
            else:
                [call] = answer.choices[0].message.tool_calls
                name, arguments = call.function.name, call.function.arguments
            assert name in {tool["function"]["name"] for tool in tools}
            assert set(json.loads(arguments)) == {"city", "days"}
            calls.add((name, arguments))
    assert len(calls) == 1
    assert server.stop() == 0


def test_a_conversation_with_tool_results(client: openai.OpenAI) -> None:
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="m", messages=messages, tools=[WEATHER], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_text_completions(client: openai.OpenAI, engine: pydflash.Engine) -> None:
    alone = engine.generate("import os\n", pydflash.SamplingOptions(max_tokens=12))
    answer = client.completions.create(model="m", prompt="import os\n", max_tokens=12, logprobs=2)
    assert answer.choices[0].text == alone.text
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or ()) == 12
    assert "".join(logprobs.tokens or ()) == alone.text
    stream = client.completions.create(
        model="m", prompt="import os\n", max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == alone.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    several = client.completions.create(model="m", prompt=["import os\n", "import re\n"], max_tokens=3, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage is not None
    assert several.usage.prompt_tokens == len(engine.encode("import os\n")) + len(engine.encode("import re\n"))


def test_responses(client: openai.OpenAI, alone: pydflash.GenerationResult) -> None:
    answer = client.responses.create(model="m", input=MESSAGES[0]["content"], max_output_tokens=40)
    assert answer.output_text == alone.text
    assert answer.status == ("completed" if alone.finish_reason == "stop" else "incomplete")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(alone.token_ids)
    text, kinds = "", []
    for event in client.responses.create(model="m", input=MESSAGES, max_output_tokens=40, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == alone.text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == f"response.{answer.status}"
    tool = {"type": "function", **WEATHER["function"]}
    called: Any = client.responses.create(
        model="m", input="x", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200
    )
    [call] = called.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    follow: Any = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model="m", input=follow, max_output_tokens=3).status == "incomplete"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="m", input="x", previous_response_id="resp_1")


@pytest.mark.parametrize(
    "fields",
    [
        {"no_such": 1},
        {"messages": []},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"max_tokens": 0},
        {"n": 0},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"tools": [{"type": "retrieval"}]},
        {"tools": [WEATHER, WEATHER]},
        {"tools": [WEATHER], "tool_choice": "sometimes"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required"},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"modalities": ["audio"]},
        {"store": True},
        {"chat_template_kwargs": {"messages": []}},
        {"stream_options": {"include_more": True}},
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(model="m", messages=MESSAGES, extra_body=fields)
    assert failure.value.type == "invalid_request_error"


def test_too_long_a_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x = 1\n" * 2000}])


LITELLM = """
import json, sys
import litellm
url, messages = sys.argv[1], json.loads(sys.argv[2])
common = {"api_key": "none", "messages": messages, "max_tokens": 40}
whole = litellm.completion(model="openai/any", api_base=f"{url}/v1", **common)
stream = litellm.completion(model="openai/any", api_base=f"{url}/v1", stream=True, **common)
other = litellm.completion(model="anthropic/any", api_base=url, **common)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
    "other": other.choices[0].message.content,
}))
"""


@pytest.mark.slow
def test_litellm(server: Server, alone: pydflash.GenerationResult) -> None:
    """In a process of its own: it leaves event loops and sockets open."""
    pytest.importorskip("litellm")
    command = [sys.executable, "-c", LITELLM, server.url, json.dumps(MESSAGES)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    assert answers == {
        "whole": alone.text,
        "tokens": len(alone.token_ids),
        "stream": alone.text,
        "other": alone.text,
    }
