"""The real client library of Anthropic."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from support.server import Server

import pydflash

MESSAGES: list[Any] = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def alone(engine: pydflash.Engine) -> pydflash.GenerationResult:
    return engine.generate(MESSAGES, pydflash.SamplingOptions(max_tokens=40))


def test_a_message(client: anthropic.Anthropic, alone: pydflash.GenerationResult) -> None:
    answer = client.messages.create(model="any", max_tokens=40, messages=MESSAGES)
    [block] = answer.content
    assert block.type == "text"
    assert block.text == alone.text
    assert answer.role == "assistant"
    assert answer.model == "any"
    assert answer.stop_reason == ("end_turn" if alone.finish_reason == "stop" else "max_tokens")
    assert answer.usage.output_tokens == len(alone.token_ids)
    read = answer.usage.cache_read_input_tokens or 0
    assert answer.usage.input_tokens + read == alone.stats.prompt_tokens


def test_a_streamed_message(client: anthropic.Anthropic, alone: pydflash.GenerationResult) -> None:
    with client.messages.stream(model="any", max_tokens=40, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == alone.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == len(alone.token_ids)
    kinds = [event.type for event in client.messages.create(model="m", max_tokens=5, messages=MESSAGES, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_limits_and_stop_sequences(client: anthropic.Anthropic, alone: pydflash.GenerationResult) -> None:
    assert client.messages.create(model="m", max_tokens=2, messages=MESSAGES).stop_reason == "max_tokens"
    stop = alone.text[12:18]
    answer = client.messages.create(model="m", max_tokens=40, messages=MESSAGES, stop_sequences=[stop])
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == stop
    assert answer.content[0].type == "text"
    assert answer.content[0].text == alone.text[: alone.text.index(stop)]


def test_a_tool(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(model="m", max_tokens=100, messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    [block] = whole.content
    assert block.type == "tool_use"
    assert block.name == "get_weather"
    assert block.input["city"] in ("Paris", "Rome")
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(
        model="m", max_tokens=100, messages=MESSAGES, tools=[TOOL], tool_choice=choice
    ) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == block.input
    follow = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, whole.content[0].model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model="m", max_tokens=3, messages=follow, tools=[TOOL], system=system)  # type: ignore[arg-type]
    assert answer.stop_reason == "max_tokens"


def test_tokens_are_counted(client: anthropic.Anthropic, engine: pydflash.Engine) -> None:
    assert client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens == len(engine.encode(MESSAGES))


@pytest.mark.parametrize(
    "fields",
    [
        {"no_such": 1},
        {"max_tokens": 0},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"top_p": 2},
    ],
)
def test_what_is_refused(client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    given: Any = {"model": "m", "max_tokens": 4, "messages": MESSAGES}
    with pytest.raises(anthropic.BadRequestError) as failure:
        client.messages.create(**given, extra_body=fields)
    body: Any = failure.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
