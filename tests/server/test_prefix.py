"""Prefixes that slots share, and slots that are saved: what is not evaluated again changes no text."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.server import Server

import pydflash

CHAT = "# A module of small functions.\n\n\ndef add(a, b):\n    return a + b\n\n\n"


def complete(http: httpx.Client, prompt: object, **fields: object) -> dict[str, object]:
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "return_tokens": True, **fields}
    response = http.post("/completion", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def misses(http: httpx.Client) -> float:
    lines = [
        line for line in http.get("/metrics").text.splitlines() if line.startswith("pydflash:prefix_misses_total{")
    ]
    return sum(float(line.split()[-1]) for line in lines)


def test_another_slot_goes_on_from_what_the_first_one_kept(http: httpx.Client, engine: pydflash.Engine) -> None:
    prompt = engine.encode(f"{CHAT}def shared(a):\n")
    first = complete(http, prompt, id_slot=0)
    longer = [*prompt, *first["tokens"], *engine.encode("\n\n\ndef next(a):\n")]
    other = complete(http, longer, id_slot=3)
    held = len(prompt) + len(first["tokens"]) - 1
    assert other["timings"]["cache_n"] == held
    assert other["timings"]["prompt_n"] == len(longer) - held
    cold = complete(http, longer, id_slot=1, cache_prompt=False)
    assert cold["timings"]["cache_n"] == 0
    assert cold["content"] == other["content"]
    kept = http.get("/props").json()["prefix_cache"]
    assert kept["hits"] >= 1
    assert kept["hit_tokens"] >= held
    assert 0 < kept["n_bytes"] <= kept["max_bytes"]


def test_two_conversations_take_turns_in_one_slot(http: httpx.Client, engine: pydflash.Engine) -> None:
    """Each turn evaluates only what is new, though the other conversation had the slot in between."""
    talks = [engine.encode(f"{CHAT}def {name}(x):\n") for name in ("first", "second")]
    for turn in range(3):
        for i, ids in enumerate(talks):
            before = misses(http)
            answer = complete(http, ids, id_slot=2, n_predict=8)
            if turn > 0:
                assert answer["timings"]["prompt_n"] <= 12
                assert answer["timings"]["cache_n"] == len(ids) - answer["timings"]["prompt_n"]
                assert misses(http) == before
            talks[i] = [*ids, *answer["tokens"], *engine.encode(f"\n\n# {turn}\n")]


def test_a_saved_slot_goes_on_after_a_restart(
    start: Callable[..., Server], engine: pydflash.Engine, tmp_path: Path
) -> None:
    options = ("--parallel", "2", "--slot-save-path", str(tmp_path))
    prompt = engine.encode(f"{CHAT}def saved(a):\n")
    server = start(*options).wait_ready()
    with server.client() as http:
        assert http.post("/slots/1?action=save", json={"filename": "empty"}).status_code == 400
        first = complete(http, prompt, id_slot=1)
        saved = http.post("/slots/1?action=save", json={"filename": "one.bin"}).json()
        held = len(prompt) + len(first["tokens"]) - 1
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "one.bin", held)
        assert saved["n_written"] == sum(file.stat().st_size for file in tmp_path.iterdir())
        for name in ("../one", "a/b", "", ".hidden", "x" * 129, "none\x00"):
            for action in ("save", "restore"):
                response = http.post(f"/slots/1?action={action}", json={"filename": name})
                assert response.status_code == 400, (action, name)
    assert server.stop() == 0
    server = start(*options).wait_ready()
    with server.client() as http:
        assert http.post("/slots/0?action=restore", json={"filename": "two"}).status_code == 400
        back = http.post("/slots/0?action=restore", json={"filename": "one.bin"}).json()
        assert (back["n_restored"], back["n_read"]) == (held, saved["n_written"])
        longer = [*prompt, *first["tokens"], *engine.encode("\n\n\ndef more(a):\n")]
        again = complete(http, longer, id_slot=0)
        assert again["timings"]["cache_n"] == held
        assert again["content"] == complete(http, longer, id_slot=1, cache_prompt=False)["content"]
        assert http.post("/slots/0?action=erase").json()["n_erased"] > 0
        [file] = tmp_path.iterdir()
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
        refused = http.post("/slots/0?action=restore", json={"filename": "one.bin"})
        assert refused.status_code == 400
        assert complete(http, prompt, id_slot=0)["content"] == first["content"]
    assert server.stop() == 0


@pytest.mark.parametrize("action", ["save", "restore"])
def test_without_a_folder_slots_are_not_saved(http: httpx.Client, action: str) -> None:
    assert http.post(f"/slots/0?action={action}", json={"filename": "a"}).status_code == 501
