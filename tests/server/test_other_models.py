"""Model files that say other things: infill tokens, no end token, a template that opens a thought."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.gguf_edit import REMOVE, edit_gguf
from support.server import N_CTX, Server

import pydflash
from pydflash import builtin

PREFIX, SUFFIX, MIDDLE = 300, 301, 302
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edit_gguf(
        builtin.target_path(),
        tmp_path_factory.mktemp("models") / "other.gguf",
        {
            "tokenizer.ggml.fim_pre_token_id": PREFIX,
            "tokenizer.ggml.fim_suf_token_id": SUFFIX,
            "tokenizer.ggml.fim_mid_token_id": MIDDLE,
            "tokenizer.ggml.eos_token_id": REMOVE,
            "tokenizer.chat_template": TEMPLATE,
        },
    )


@pytest.fixture(scope="module")
def other(start: Callable[..., Server], model: Path) -> Iterator[Server]:
    drafter = str(builtin.draft_path())
    server = start("--model", str(model), "--model-draft", drafter, "--parallel", "2", "--alias", "first,second")
    yield server.wait_ready()
    assert server.stop() == 0


@pytest.fixture
def http(other: Server) -> Iterator[httpx.Client]:
    with other.client() as client:
        yield client


def test_what_belongs_in_between(http: httpx.Client, model: Path) -> None:
    body = {"input_prefix": "def add(a, b):\n", "input_suffix": "    return c\n", "prompt": "    c =", "n_predict": 10}
    result = http.post("/infill", json=body).json()
    options = pydflash.EngineOptions(n_threads=1, n_ctx=N_CTX)
    with pydflash.Engine.open(model, None, options) as engine:
        encode = engine.tokenizer.encode
        ids = [PREFIX, *encode("def add(a, b):\n    c ="), SUFFIX, *encode("    return c\n"), MIDDLE]
        alone = engine.generate(ids, pydflash.SamplingOptions(max_tokens=10))
    assert result["content"] == alone.text
    assert result["tokens_evaluated"] == len(ids)
    missing = http.post("/infill", json={"input_prefix": "x"})
    assert missing.status_code == 400
    assert "input_suffix is missing" in missing.json()["error"]["message"]


def test_a_file_without_an_end_token_is_warned_about_and_still_ends(other: Server, http: httpx.Client) -> None:
    """By the end of a turn that the vocabulary has, and by the limit."""
    assert "no end-of-sequence token" in other.log
    body = {"messages": MESSAGES, "max_tokens": 200}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("```python\ndef ")
    assert "<|im_end|>" not in choice["message"]["content"]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    answer = http.post("/completion", json={"prompt": "x", "json_schema": schema, "n_predict": 60}).json()
    assert "a" in json.loads(answer["content"])


def test_a_thought_that_the_prompt_opens(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "chat_template_kwargs": {"enable_thinking": True}}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    streamed = {"reasoning_content": "", "content": ""}
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for key in streamed:
                        streamed[key] += choice["delta"].get(key) or ""
    assert streamed == {"reasoning_content": message["reasoning_content"], "content": ""}
    raw = http.post("/v1/chat/completions", json={**body, "reasoning_format": "none"}).json()["choices"][0]["message"]
    assert "reasoning_content" not in raw
    assert raw["content"].strip() == message["reasoning_content"]
    for effort, thinks in (("none", False), (None, True)):
        given = {**body, "reasoning_effort": effort}
        message = http.post("/v1/chat/completions", json=given).json()["choices"][0]["message"]
        assert ("reasoning_content" in message) is thinks
    anthropic = {"model": "m", "max_tokens": 12, "messages": MESSAGES, "thinking": {"type": "enabled"}}
    [block] = http.post("/v1/messages", json=anthropic).json()["content"]
    assert block["type"] == "thinking"
    [item] = http.post(
        "/v1/responses", json={"input": "x", "max_output_tokens": 5, "reasoning": {"effort": "low"}}
    ).json()["output"]
    assert item["type"] == "message"


def test_an_answer_that_is_begun_goes_on(http: httpx.Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "```python\ndef add(a, b):\n"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n```python\ndef add(a, b):\n")
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 20}).json()
    assert "```python" not in answer["choices"][0]["message"]["content"]


def test_names_of_the_model(http: httpx.Client) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert model["id"] == "first"
    assert model["aliases"] == ["first", "second"]
