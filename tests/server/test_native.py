"""llama.cpp's own requests, by plain HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.http import Stream

import pydflash

CODE = "import os\nimport sys\n\n\ndef main(argv):\n"


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/completion", json={"prompt": CODE, "n_predict": 24, **fields})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def events(http: httpx.Client, path: str, **fields: Any) -> Iterator[dict[str, Any]]:
    with http.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def test_health(http: httpx.Client) -> None:
    for path in ("/health", "/v1/health"):
        response = http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_completion_is_the_engines_answer(http: httpx.Client, engine: pydflash.Engine) -> None:
    result = complete(http, return_tokens=True, **{"speculative.n_max": 7})
    alone = engine.generate(CODE, pydflash.SamplingOptions(max_tokens=24))
    assert result["content"] == alone.text
    assert result["tokens"] == list(alone.token_ids)
    assert result["stop"] is True
    assert result["stop_type"] == "limit"
    assert result["stopping_word"] == ""
    assert result["tokens_predicted"] == 24
    assert result["tokens_evaluated"] == len(engine.encode(CODE))
    assert result["truncated"] is False
    assert result["prompt"] == CODE
    assert result["has_new_line"] is ("\n" in alone.text)
    settings = result["generation_settings"]
    assert settings["temperature"] == 0.0
    assert settings["n_predict"] == 24
    times = result["timings"]
    for name in ("prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second", "predicted_per_token_ms"):
        assert times[name] > 0, name
    assert times["predicted_n"] == 24
    assert times["prompt_n"] + times["cache_n"] == result["tokens_evaluated"]
    assert 0 <= times["draft_n_accepted"] <= times["draft_n"]


def test_a_stream_is_the_whole_answer_in_pieces(http: httpx.Client) -> None:
    whole = complete(http, cache_prompt=False, return_tokens=True)
    *pieces, last = events(http, "/completion", prompt=CODE, n_predict=24, cache_prompt=False)
    assert len(pieces) > 3
    assert all(piece["stop"] is False for piece in pieces)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert last["stop"] is True
    assert last["content"] == ""
    assert last["tokens_predicted"] == 24
    assert {key: type(value) for key, value in last.items()} == {key: type(value) for key, value in whole.items()}


def test_drafts_change_nothing_and_are_counted(http: httpx.Client) -> None:
    drafted = complete(http, cache_prompt=False, **{"speculative.n_max": 15})
    plain = complete(http, cache_prompt=False, **{"speculative.n_max": 0})
    assert drafted["content"] == plain["content"]
    assert drafted["timings"]["draft_n"] > 0
    assert (drafted["drafter"], plain["drafter"]) == ("on", "off")
    assert "draft_n" not in plain["timings"]
    assert "draft_n_accepted" not in plain["timings"]


def test_a_seed_gives_the_same_text_again(http: httpx.Client) -> None:
    first, second, other = (
        complete(http, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)["content"] for seed in (1, 1, 2)
    )
    assert first == second != other


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_llama_cpps_ways_to_ask_for_a_random_seed(http: httpx.Client, seed: int) -> None:
    seeds = {complete(http, n_predict=1, seed=seed)["generation_settings"]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_several_prompts_and_several_answers(http: httpx.Client) -> None:
    results = http.post("/completion", json={"prompt": ["import os\n", "import re\n"], "n_predict": 6}).json()
    assert [result["index"] for result in results] == [0, 1]
    alone = [complete(http, prompt=text, n_predict=6)["content"] for text in ("import os\n", "import re\n")]
    assert [result["content"] for result in results] == alone
    choices = http.post(
        "/completion", json={"prompt": CODE, "n_predict": 8, "n": 3, "temperature": 1.5, "seed": 5, "top_k": 0}
    ).json()
    assert len({choice["content"] for choice in choices}) > 1
    assert [choice["generation_settings"]["seed"] for choice in choices] == [5, 6, 7]


def test_prompts_of_ids_and_of_ids_and_text(http: httpx.Client, engine: pydflash.Engine) -> None:
    ids = list(engine.encode(CODE))
    assert complete(http, prompt=ids)["content"] == complete(http)["content"]
    mixed = complete(http, prompt=[*engine.encode("import os\n"), "import sys\n\n\ndef main(argv):\n"])
    assert mixed["tokens_evaluated"] == len(ids)
    assert mixed["content"] == complete(http)["content"]


def test_log_probabilities(http: httpx.Client, engine: pydflash.Engine) -> None:
    result = complete(http, n_probs=4, n_predict=10)
    entries = result["completion_probabilities"]
    alone = engine.generate(CODE, pydflash.SamplingOptions(max_tokens=10, logprobs=4, width=1))
    assert alone.logprobs is not None
    assert [entry["id"] for entry in entries] == [entry.token_id for entry in alone.logprobs]
    for entry, expected in zip(entries, alone.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(expected.logprob, abs=0.02)
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert [top["id"] for top in entry["top_logprobs"]] == [token for token, _ in expected.top]
    streamed = [
        entry
        for piece in events(http, "/completion", prompt=CODE, n_predict=10, n_probs=4)
        for entry in piece.get("completion_probabilities", ())
    ]
    assert [entry["id"] for entry in streamed] == [entry["id"] for entry in entries]


@pytest.mark.parametrize("width", [1, 16])
def test_a_stop_text_across_accepted_tokens(http: httpx.Client, engine: pydflash.Engine, width: int) -> None:
    """The text ends before it, the usage counts what is kept, and no stream leaks any of it."""
    alone = engine.generate(CODE, pydflash.SamplingOptions(max_tokens=60, width=16))
    pieces = [engine.tokenizer.decode([token]) for token in alone.token_ids]
    starts = [sum(map(len, pieces[:i])) for i in range(len(pieces) + 1)]
    text = "".join(pieces)
    # Of three tokens, from the middle of the first one, at a place where that text stands for the first time.
    at = next(
        i
        for i in range(8, 50)
        if len(pieces[i]) > 1 and text.find(text[starts[i] + 1 : starts[i + 3]]) == starts[i] + 1
    )
    stop = text[starts[at] + 1 : starts[at + 3]]
    fields = {"prompt": CODE, "n_predict": 60, "stop": [stop], "speculative.n_max": width - 1, "cache_prompt": False}
    drawn = metric(http, "llamacpp:tokens_predicted_total")
    whole = complete(http, **fields)
    assert metric(http, "llamacpp:tokens_predicted_total") - drawn <= at + 3 + width
    assert whole["content"] == text[: starts[at] + 1]
    assert whole["stop_type"] == "word"
    assert whole["stopping_word"] == stop
    assert whole["tokens_predicted"] == at + 1
    *parts, last = events(http, "/completion", **fields)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert last["tokens_predicted"] == whole["tokens_predicted"]


def test_characters_of_several_tokens_are_never_torn(http: httpx.Client, engine: pydflash.Engine) -> None:
    """A grammar makes the model write them; limits fall inside characters, and status is asked for meanwhile."""
    text = "日本🦙é日本🦙é"
    n_tokens = len(engine.tokenizer.encode(text))
    assert n_tokens > len(text)
    grammar = f'root ::= "{text}"'
    for limit in range(1, 9):
        fields = {"prompt": CODE, "n_predict": limit, "grammar": grammar}
        whole = complete(http, **fields)["content"]
        parts = []
        for piece in events(http, "/completion", **fields):
            parts.append(piece["content"])
            assert http.get("/slots").status_code == 200
        assert "".join(parts) == whole
        assert text.startswith(whole.rstrip("\ufffd"))
        assert all("\ufffd" not in part for part in parts[:-2])
    assert complete(http, prompt=CODE, n_predict=100, grammar=grammar)["content"] == text


def test_a_grammar_keeps_drafting_on(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "n": {"type": "integer", "minimum": 0, "maximum": 999},  # the model likes long numbers
            "ok": {"type": "boolean"},
        },
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    }
    results = [
        complete(http, json_schema=schema, n_predict=200, cache_prompt=False, **{"speculative.n_max": n})
        for n in (15, 0)
    ]
    value = json.loads(results[0]["content"])
    assert set(value) == {"name", "n", "ok"}
    assert isinstance(value["n"], int)
    assert results[0]["content"] == results[1]["content"]
    assert results[0]["stop_type"] == "eos"
    assert results[0]["timings"]["draft_n"] > 0


def test_grammars_that_cannot_be_used(http: httpx.Client) -> None:
    for fields in (
        {"grammar": "root ::= missing"},
        {"grammar": "%llguidance {}\nstart: nothing"},
        {"json_schema": {"type": "no such type"}},
        {"grammar": 'root ::= "a"', "json_schema": {"type": "object"}},
    ):
        response = http.post("/completion", json={"prompt": "x", "n_predict": 4, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_prefix_of_a_slot_is_reused(http: httpx.Client, engine: pydflash.Engine) -> None:
    first = complete(http, n_predict=12, return_tokens=True, id_slot=2)
    longer = [*engine.encode(CODE), *first["tokens"], *engine.encode("\n\ndef other():\n")]
    again = complete(http, prompt=longer, n_predict=12, id_slot=2)
    assert again["timings"]["cache_n"] == len(engine.encode(CODE)) + len(first["tokens"]) - 1
    assert again["timings"]["prompt_n"] == len(longer) - again["timings"]["cache_n"]
    cold = complete(http, prompt=longer, n_predict=12, id_slot=2, cache_prompt=False)
    assert cold["timings"]["cache_n"] == 0
    assert cold["content"] == again["content"]
    shorter = complete(http, prompt=longer[: len(engine.encode(CODE)) + 4], n_predict=4, id_slot=2)
    assert shorter["timings"]["cache_n"] == len(engine.encode(CODE)), "states cannot go back, snapshots can"


def test_the_context_is_a_limit(http: httpx.Client, engine: pydflash.Engine) -> None:
    n_ctx = http.get("/props").json()["default_generation_settings"]["n_ctx"]
    [token] = engine.encode("x")
    for n in (n_ctx, n_ctx + 1, 3 * n_ctx):
        response = http.post("/completion", json={"prompt": [token] * n})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "exceed_context_size_error"
        assert "exceeds the available context size" in error["message"]
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (n, n_ctx)
    full = complete(http, prompt=[token] * (n_ctx - 3), n_predict=-1, ignore_eos=True)
    assert full["tokens_predicted"] == 3
    assert full["stop_type"] == "limit"
    assert full["truncated"] is True


def test_timings_of_every_piece(http: httpx.Client) -> None:
    *pieces, last = events(http, "/completion", prompt=CODE, n_predict=12, timings_per_token=True)
    seen = [piece["timings"]["predicted_n"] for piece in pieces if "timings" in piece]
    assert seen == sorted(set(seen))
    assert len(seen) >= len(pieces) - 1
    assert last["timings"]["predicted_n"] == 12
    assert "timings" not in next(events(http, "/completion", prompt=CODE, n_predict=2))


def test_response_fields_and_progress(http: httpx.Client, engine: pydflash.Engine) -> None:
    chosen = complete(http, response_fields=["content", "generation_settings/n_predict", "timings/predicted_n"])
    assert set(chosen) == {"content", "n_predict", "predicted_n"}
    [token] = engine.encode("x")
    seen = [
        piece["prompt_progress"]
        for piece in events(
            http, "/completion", prompt=[token] * 300, n_predict=1, return_progress=True, cache_prompt=False
        )
        if "prompt_progress" in piece
    ]
    assert seen[-1]["processed"] == seen[-1]["total"] == 300
    assert [entry["processed"] for entry in seen] == sorted({entry["processed"] for entry in seen})


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"no_such_field": 1}, "no_such_field is not supported"),
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora is not supported"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": True}, "n_predict"),
        ({"stop": [1]}, "stop"),
        ({"n_probs": 21}, "log-probabilities"),
        ({"id_slot": 99}, "id_slot"),
        ({"seed": -5}, "seed"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": {"999999": 1.0}}, "logit_bias"),
        ({"prompt": [4096]}, r"prompt\[0\]"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "surrogate"),
    ],
)
def test_what_is_not_supported_or_wrong_is_refused(http: httpx.Client, fields: dict[str, Any], part: str) -> None:
    body = json.dumps({"prompt": "x", "n_predict": 4, **fields})
    response = http.post("/completion", content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == 400
    assert error["type"] == "invalid_request_error"
    assert part.replace("\\", "") in error["message"]


def test_the_first_error_of_a_stream_is_an_ordinary_one(http: httpx.Client) -> None:
    response = http.post("/completion", json={"prompt": "x", "stream": True, "top_p": 7})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_neutral_values_of_what_is_not_supported_are_taken(http: httpx.Client) -> None:
    result = complete(
        http,
        mirostat=0,
        dry_multiplier=0.0,
        xtc_probability=0,
        n_keep=5,
        top_n_sigma=-1.0,
        lora=[],
        min_keep=0,
        dynatemp_range=0,
        temperature=None,
        typ_p=1.0,
        top_k=-1,
    )
    assert result["tokens_predicted"] == 24


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"prompt": "x"', b"\xff", b"[" * 100000])
def test_bodies_that_are_no_json_objects(http: httpx.Client, body: bytes) -> None:
    response = http.post("/completion", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_logit_bias_in_every_form(http: httpx.Client, engine: pydflash.Engine) -> None:
    [token] = engine.encode("z")
    for bias in ([[token, 100.0]], {str(token): 100.0}, [["z", 100.0]]):
        assert complete(http, n_predict=3, logit_bias=bias)["content"] == "zzz"
    free = complete(http, n_predict=1, return_tokens=True)["tokens"][0]
    assert complete(http, n_predict=1, return_tokens=True, logit_bias=[[free, False]])["tokens"][0] != free


def test_tokens_and_templates(http: httpx.Client, engine: pydflash.Engine) -> None:
    text = "def f():\n    return '🦙'<|im_end|>"
    ids = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == engine.tokenizer.encode(text)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    plain = http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert plain == engine.tokenizer.encode(text, parse_special=False) != ids
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == text
    assert any(isinstance(piece["piece"], list) for piece in pieces)
    messages = [{"role": "user", "content": "Hi"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == engine.apply_template(messages)
    assert http.post("/detokenize", json={"tokens": [4096]}).status_code == 400


def test_properties_models_and_slots(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["params"]["temperature"] == 0.0
    assert props["default_generation_settings"]["params"]["speculative.n_max"] == 15
    assert "<|im_start|>" in props["chat_template"]
    assert "/" not in props["model_path"]
    [model] = http.get("/v1/models").json()["data"]
    assert model["id"] == "demo-target-q8_0.gguf"
    assert model["meta"]["n_vocab"] == 4096
    assert model["meta"]["n_params"] > 12_000_000
    assert http.get("/models").json() == http.get("/v1/models").json()
    slots = http.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert all(slot["speculative"] is True and slot["n_ctx"] == 1024 for slot in slots)
    assert http.get("/slots?fail_on_no_slot=1").status_code == 200


def test_slots_tell_how_a_running_answer_is_drawn(http: httpx.Client) -> None:
    drawn: dict[str, object] = {"temperature": 0.75, "top_k": 7, "seed": 11, "n_predict": 800, "ignore_eos": True}
    stream = Stream(str(http.base_url), **drawn, stop=["never so"], stream=True)
    try:
        stream.read_some()
        [slot] = [slot for slot in http.get("/slots").json() if slot["is_processing"]]
    finally:
        stream.close()
    assert drawn.items() <= slot["params"].items()
    assert (slot["params"]["stop"], slot["params"]["grammar"]) == (["never so"], "")
    assert slot["params"]["speculative.types"] == "dflash"


def test_slots_are_erased_but_not_saved_without_a_folder(http: httpx.Client) -> None:
    complete(http, id_slot=1)
    erased = http.post("/slots/1?action=erase").json()
    assert erased["id_slot"] == 1
    assert erased["n_erased"] > 0
    assert http.post("/slots/1?action=erase").json()["n_erased"] == 0
    for action in ("save", "restore"):
        response = http.post(f"/slots/1?action={action}", json={"filename": "a.bin"})
        assert response.status_code == 501
        assert response.json()["error"]["type"] == "not_supported_error"
    for path in ("/slots/9?action=erase", "/slots/x?action=erase", "/slots/1?action=sell", "/slots/1"):
        assert http.post(path).status_code == 400


def metric(http: httpx.Client, name: str) -> float:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4"
    assert int(response.headers["process-start-time-unix"]) > 0
    [line] = [line for line in response.text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_metrics(http: httpx.Client) -> None:
    names = (
        *("llamacpp:tokens_predicted_total", "llamacpp:n_decode_total", "llamacpp:spec_decode_num_draft_tokens_total"),
        *("llamacpp:prompt_tokens_total", "pydflash:step_ms_count", "pydflash:accepted_length_sum"),
    )
    before = {name: metric(http, name) for name in names}
    result = complete(http, cache_prompt=False)
    after = {name: metric(http, name) for name in names}
    gained = {name: after[name] - before[name] for name in names}
    assert gained["llamacpp:tokens_predicted_total"] == 24
    assert gained["llamacpp:prompt_tokens_total"] == result["tokens_evaluated"]
    assert gained["llamacpp:spec_decode_num_draft_tokens_total"] == result["timings"].get("draft_n", 0)
    assert gained["llamacpp:n_decode_total"] == gained["pydflash:step_ms_count"]
    assert gained["pydflash:accepted_length_sum"] == 23
    text = http.get("/metrics").text
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in text
    assert 'pydflash:prefix_misses_total{reason="not asked for"}' in text
    assert metric(http, "llamacpp:requests_processing") == 0


def test_other_paths(http: httpx.Client) -> None:
    response = http.get("/no/such/path")
    assert response.status_code == 404
    assert response.json()["error"] == {"code": 404, "message": "File Not Found", "type": "not_found_error"}
    assert http.get("/completion").status_code == 405
    for path in ("/embedding", "/v1/embeddings", "/rerank", "/v1/audio/transcriptions"):
        assert http.post(path, json={}).json()["error"]["type"] == "not_supported_error"
    response = http.post("/infill", json={"input_prefix": "def f(", "input_suffix": "return 1"})
    assert response.status_code == 501
    assert http.post("/props", json={}).status_code == 501
    assert http.get("/lora-adapters").json() == []
