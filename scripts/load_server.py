#!/usr/bin/env python3
"""Many clients at once against a running server: errors, latencies and throughput.

    pydflash serve --threads 1 --parallel 8 --max-queue 512 &
    python scripts/load_server.py --url http://127.0.0.1:8080 --clients 64 --requests 500

Half of the requests are streamed. The texts differ in length, and the numbers of the requests are their seeds. Ends
with status 1 if any request failed. Needs httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass

import httpx

WORDS = ("os", "sys", "re", "json", "math", "time", "random", "itertools", "functools", "pathlib", "typing")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: seconds to the first token and to the end, tokens, and what went wrong."""

    first: float
    total: float
    n_tokens: int
    error: str = ""


async def ask(client: httpx.AsyncClient, number: int) -> Outcome:
    dice = random.Random(number)
    text = "\n".join(f"import {dice.choice(WORDS)}" for _ in range(dice.randrange(1, 30))) + "\n"
    body = {"prompt": text, "n_predict": dice.randrange(4, 40), "temperature": 0.8, "seed": number, "ignore_eos": True}
    begun = time.perf_counter()
    first = 0.0
    try:
        if number % 2:
            response = await client.post("/completion", json=body)
            response.raise_for_status()
            result = response.json()
            first = time.perf_counter() - begun
        else:
            result = {}
            async with client.stream("POST", "/completion", json={**body, "stream": True}) as stream:
                stream.raise_for_status()
                async for line in stream.aiter_lines():
                    if line.startswith("data: "):
                        first = first or time.perf_counter() - begun
                        result = json.loads(line[6:])
        if "error" in result:
            return Outcome(first, time.perf_counter() - begun, 0, str(result["error"]))
        if result.get("tokens_predicted") != body["n_predict"]:
            return Outcome(first, time.perf_counter() - begun, 0, f"{result.get('tokens_predicted')} tokens")
        return Outcome(first, time.perf_counter() - begun, int(result["tokens_predicted"]))
    except httpx.HTTPError as error:
        return Outcome(first, time.perf_counter() - begun, 0, f"{type(error).__name__}: {error}")


async def run(url: str, n_clients: int, n_requests: int, key: str | None) -> list[Outcome]:
    numbers = iter(range(n_requests))
    outcomes: list[Outcome] = []
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=n_clients)

    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers, limits=limits) as client:

        async def work() -> None:
            for number in numbers:
                outcome = await ask(client, number)
                outcomes.append(outcome)

        await asyncio.gather(*(work() for _ in range(n_clients)))
    return outcomes


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    return "  ".join(
        f"p{share} {ordered[min(len(ordered) * share // 100, len(ordered) - 1)]:7.2f} s" for share in (50, 90, 99, 100)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--api-key")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    outcomes = asyncio.run(run(arguments.url, arguments.clients, arguments.requests, arguments.api_key))
    seconds = time.perf_counter() - begun
    failed = [outcome for outcome in outcomes if outcome.error]
    n_tokens = sum(outcome.n_tokens for outcome in outcomes)
    print(f"{len(outcomes)} requests of {arguments.clients} clients in {seconds:.1f} s: {len(failed)} failed")
    print(f"{n_tokens} tokens, {n_tokens / seconds:.1f} a second, {len(outcomes) / seconds:.2f} requests a second")
    good = [outcome for outcome in outcomes if not outcome.error]
    if good:
        print(f"first token  {percentiles([outcome.first for outcome in good])}")
        print(f"whole answer {percentiles([outcome.total for outcome in good])}")
    for outcome in failed[:10]:
        print(f"failed: {outcome.error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
