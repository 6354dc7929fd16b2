"""Grammars on answers: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from pydflash.errors import InternalError, InvalidArgumentError
from pydflash.text import Tokenizer

_MAX_GRAMMAR = 1 << 20


class _Vocabulary:
    """A tokenizer in the form llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, parse_special=False)


class GrammarCompiler:
    """Makes masks for one vocabulary. Immutable; any thread. Memory: the vocabulary once more, as a prefix tree."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        stops = sorted(tokenizer.stop_ids)
        if not stops:
            raise InvalidArgumentError("grammar", "...", "a vocabulary with a stop token, which ends the answer")
        first = tokenizer.eos_id if tokenizer.eos_id is not None else stops[0]
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, first))
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=tokenizer.n_vocab, eos_token=[first])
        self._stop_ids = tokenizer.stop_ids

    def check(self, grammar: str) -> None:
        """InvalidArgumentError with the compiler's own words when a grammar cannot be used."""
        failed, texts = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            raise InvalidArgumentError("grammar", "...", "a valid grammar: " + " ".join(" ".join(texts).split()))

    def mask(self, grammar: str) -> GrammarMask:
        """A matcher at the start of an answer."""
        return GrammarMask(LLMatcher(self._tokenizer, grammar), self._stop_ids)


class GrammarMask:
    """Follows one answer; called by the decoder for each row that is drawn from. One thread at a time."""

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._in_call = 0  # tokens of the running decoder call that the matcher has seen
        self._raise_on_error()

    def begin_call(self) -> None:
        """The next call of the decoder counts its tokens from zero."""
        self._in_call = 0

    def end_call(self, tokens: tuple[int, ...]) -> None:
        """Take those tokens of a finished call that no later row asked about."""
        self._take(tokens)

    def __call__(self, emitted: tuple[int, ...], allowed: npt.NDArray[np.uint32]) -> None:
        self._take(emitted)
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        n = min(len(mask), len(allowed))
        allowed[:n] = mask[:n]
        if self._matcher.is_stopped() or not allowed.any():
            self._raise_on_error()
            allowed[:] = 0
            for token in self._stop_ids:
                allowed[token // 32] |= np.uint32(1 << (token % 32))
        elif self._matcher.is_accepting():
            for token in self._stop_ids:
                allowed[token // 32] |= np.uint32(1 << (token % 32))

    @property
    def stopped(self) -> bool:
        """True when nothing but a stop token may follow."""
        return bool(self._matcher.is_stopped())

    def _take(self, tokens: tuple[int, ...]) -> None:
        for token in tokens[self._in_call :]:
            if token not in self._stop_ids and not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._raise_on_error()
        self._in_call = max(self._in_call, len(tokens))

    def _raise_on_error(self) -> None:
        if self._matcher.is_error():
            text = " ".join(self._matcher.get_error().split())[:500]
            raise InternalError(f"the grammar matcher failed: {text}")


def from_json_schema(schema: object, *, behind_thought: bool = False) -> str:
    """Grammar of the JSON texts that fit a schema. InvalidArgumentError unless it is an object or a boolean.

    ``behind_thought``: the prompt left a thought open, which comes first and ends with ``</think>``.
    """
    if not isinstance(schema, Mapping):
        raise InvalidArgumentError("json_schema", schema, "a JSON Schema object")
    text = json.dumps(with_short_spaces(schema), ensure_ascii=False)
    if len(text) > _MAX_GRAMMAR:
        raise InvalidArgumentError("json_schema", len(text), f"at most {_MAX_GRAMMAR} characters")
    if not behind_thought:
        return str(LLMatcher.grammar_from_json_schema(text))
    return from_lark(f"start: thought body\n{THOUGHT_RULE}\nbody: %json {text}\n")


def with_short_spaces(schema: Mapping[str, object]) -> dict[str, object]:
    """A schema whose JSON has little white space between its parts: a model could go on with that for ever."""
    return {"x-guidance": {"whitespace_pattern": r"( ?|\n[ \t]{0,20})"}, **schema}


THOUGHT_RULE = 'thought[suffix="</think>\\n\\n"]: /(.|\\n)*/'


def from_lark(text: str) -> str:
    """Grammar in llguidance's Lark dialect."""
    return str(LLMatcher.grammar_from_lark(text))


def from_text(text: str) -> str:
    """A request's ``grammar``: GBNF, or Lark behind a line that begins with ``%llguidance``.

    Raises:
        InvalidArgumentError: the GBNF cannot be read.
    """
    if len(text) > _MAX_GRAMMAR:
        raise InvalidArgumentError("grammar", len(text), f"at most {_MAX_GRAMMAR} characters")
    if text.lstrip().startswith("%llguidance"):
        return from_lark(text)
    try:
        return from_lark(gbnf_to_lark(text))
    except Exception as error:  # the converter raises bare exceptions
        raise InvalidArgumentError("grammar", text, f"GBNF ({error})") from error
