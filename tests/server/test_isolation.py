"""Four slots, four secrets: nothing of one conversation reaches another, whatever is cancelled in between."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
from support.http import Stream
from support.server import Server

# More rounds by hand: PYDFLASH_ISOLATION_ROUNDS=50 pytest tests/server/test_isolation.py
ROUNDS = int(os.environ.get("PYDFLASH_ISOLATION_ROUNDS", "2"))
SECRETS = ("crimson", "walnut", "harbour", "tundra")
TOKENS = 24


def prompt(secret: str, turn: int) -> str:
    return f"# the password is {secret}\npassword = '{secret}'\n\n\ndef check_{turn}(text):\n    return text == '"


def test_four_secrets_under_random_cancels(server: Server) -> None:
    dice = random.Random(20)
    url = f"{server.url}/completion"

    def ask(secret: str, turn: int, *, cache: bool, slot: int = -1, temperature: float = 0.0) -> str:
        body = {
            "prompt": prompt(secret, turn),
            "n_predict": TOKENS,
            "cache_prompt": cache,
            "id_slot": slot,
            "temperature": temperature,
            "seed": turn,
        }
        response = httpx.post(url, json=body, timeout=120)
        assert response.status_code == 200, response.text
        return str(response.json()["content"])

    def solo(secret: str, turn: int, temperature: float) -> str:
        key = (secret, turn, temperature)
        with lock:
            if key not in expected:
                expected[key] = ask(secret, turn, cache=False, temperature=temperature)
            return expected[key]

    lock = threading.Lock()
    expected: dict[tuple[str, int, float], str] = {}
    for secret in SECRETS:
        for turn in range(3):
            solo(secret, turn, 0.8 if turn == 2 else 0.0)
    assert any(secret in expected[secret, 0, 0.0] for secret in SECRETS)

    for _ in range(ROUNDS):
        noise = [
            Stream(
                server.url,
                prompt=prompt(dice.choice(SECRETS), dice.randrange(9)) * dice.randrange(1, 9),
                n_predict=400,
                ignore_eos=True,
                stream=bool(dice.randrange(2)),
            )
            for _ in range(3)
        ]
        timers = [threading.Timer(dice.random(), stream.close) for stream in noise]
        for timer in timers:
            timer.start()
        jobs = [(secret, dice.randrange(3), bool(dice.randrange(2))) for secret in SECRETS for _ in range(2)]
        dice.shuffle(jobs)
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda job: ask(job[0], job[1], cache=job[2], temperature=0.8 if job[1] == 2 else 0.0), jobs)
            )
        for timer in timers:
            timer.join()
        for (secret, turn, _cache), answer in zip(jobs, answers, strict=True):
            assert answer == solo(secret, turn, 0.8 if turn == 2 else 0.0)
            assert not any(other in answer for other in SECRETS if other != secret)
    server.wait_idle()
