"""Parts of responses that several request forms share: timings, usage, log-probabilities, drafts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydflash.results import StreamEvent, TokenLogprobs
from pydflash.server.messages import Done, Piece, PromptProgress
from pydflash.text import Tokenizer, Utf8Stream

_LEAST_LOGPROB = -9999.0


def timings(done: Done, n_predicted: int) -> dict[str, object]:
    """llama.cpp's timings: wall clock, the first token counted with the prompt; draft_n if anything was drafted."""
    stats, times = done.event.stats, done.times
    cached = 0 if stats is None else stats.cached_tokens
    n_prompt = 0 if stats is None else stats.prompt_tokens - cached
    result = _timings(cached, n_prompt, times.prompt_ms, n_predicted, times.predicted_ms)
    if stats is not None and stats.proposed > 0:
        result["draft_n"] = stats.proposed
        result["draft_n_accepted"] = stats.accepted
    return result


def timings_so_far(piece: Piece, n_prompt: int, n_predicted: int) -> dict[str, object]:
    """The same in the middle of an answer to a prompt of ``n_prompt`` tokens, without the drafter's counts."""
    return _timings(piece.cached, n_prompt - piece.cached, piece.prompt_ms, n_predicted, piece.predicted_ms)


def _timings(cached: int, n_prompt: int, prompt_ms: float, n_predicted: int, predicted_ms: float) -> dict[str, object]:
    rated = max(n_predicted - 1, 0)
    return {
        "cache_n": cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, n_prompt),
        "prompt_per_second": _ratio(1e3 * n_prompt, prompt_ms),
        "predicted_n": n_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, rated),
        "predicted_per_second": _ratio(1e3 * rated, predicted_ms),
    }


def drafter(done: Done) -> str:
    """ "on", "off", or why the drafter was of no help: our own field, so that nobody is slow without knowing."""
    return "off" if done.event.stats is None else done.event.stats.drafter


def progress(part: PromptProgress) -> dict[str, object]:
    """llama.cpp's prompt_progress."""
    return {"total": part.total, "cache": part.cached, "processed": part.processed, "time_ms": part.ms}


def usage(done: Iterable[Done], n_predicted: int) -> dict[str, object]:
    """OpenAI's usage, of all answers to one prompt."""
    of_all = [part.event.stats for part in done]
    n_prompt = max((stats.prompt_tokens for stats in of_all if stats is not None), default=0)
    cached = max((stats.cached_tokens for stats in of_all if stats is not None), default=0)
    return {
        "completion_tokens": n_predicted,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stop_type(event: StreamEvent) -> str:
    """llama.cpp's word for why an answer ended."""
    if event.stop_text is not None:
        return "word"
    return {"stop": "eos", "length": "limit"}.get(event.finish_reason or "", "none")


def token_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    """A token with its log-probability, text and bytes."""
    data = tokenizer.token_bytes(token_id)
    return {
        "id": token_id,
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": logprob if math.isfinite(logprob) else _LEAST_LOGPROB,
    }


def logprob_entries(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, object]]:
    """One entry for each token that has text, with the likeliest ones at its place."""
    return [
        {
            **token_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [token_entry(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in logprobs
        if entry.token_id not in tokenizer.special_ids
    ]


class DraftTrace:
    """Which pieces of text the drafter proposed: our own ``drafts`` of a streamed chunk, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = Utf8Stream()

    def of(self, event: StreamEvent) -> list[list[object]]:
        """[text, accepted] of each token that completes a character."""
        pieces: list[list[object]] = []
        for token_id, accepted in zip(event.token_ids, event.accepted, strict=True):
            if token_id in self._tokenizer.special_ids:
                continue
            text = self._utf8.feed(self._tokenizer.token_bytes(token_id))
            if text:
                pieces.append([text, accepted])
        return pieces


def without_nones(values: Mapping[str, object]) -> dict[str, object]:
    """The entries that have a value."""
    return {name: value for name, value in values.items() if value is not None}


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
