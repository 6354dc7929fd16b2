"""The vocabulary part of a GGUF file: pieces, their kinds, and the ids with a meaning of their own.

Key names: GGUF's ``tokenizer.ggml.*``. Which texts count as special follows llama.cpp, so that both engines cut a
prompt into the same tokens and stop at the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import index, methodcaller
from typing import SupportsIndex

from pydflash.errors import FormatError, UnsupportedModelError

log = logging.getLogger(__name__)

_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """Ids for fill-in-the-middle prompts; None where the vocabulary has no such token."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    pad: int | None = None
    repo: int | None = None
    file_separator: int | None = None


# Texts that end a turn, from the one most models with several of them mean by "end of turn" on.
_TURN_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "<end_of_utterance>",
)
_END_TEXTS = (*_TURN_END_TEXTS, "<|eom_id|>", "<eos>", "</s>")
# Role -> (metadata keys, the second one deprecated; texts that stand in for a missing key).
_FIM: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefix": (
        ("fim_pre_token_id", "prefix_token_id"),
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>"),
    ),
    "suffix": (
        ("fim_suf_token_id", "suffix_token_id"),
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>"),
    ),
    "middle": (
        ("fim_mid_token_id", "middle_token_id"),
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>"),
    ),
    "pad": (("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>")),
    "repo": (("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "file_separator": (("fim_sep_token_id",), ("<|file_sep|>",)),
}
_ID_KEYS: Mapping[str, str] = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unk": "unknown",
    "sep": "seperator",  # codespell:ignore seperator - GGUF's spelling
    "pad": "padding",
    "mask": "mask",
}
_CONTROL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
_SPECIAL_TYPES = _CONTROL_TYPES | {TokenType.USER_DEFINED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says about its tokens. Immutable; any thread.

    Attributes:
        model, pre: ``tokenizer.ggml.model`` and ``.pre``.
        pieces: text of every id as stored (byte-level alphabet for ordinary tokens, plain text for special ones).
        ids: piece -> id.
        merges: ``"left right"`` in order of rank, without repetitions.
        types: type of every id that is not NORMAL.
        control: ids whose text is parsed only with ``parse_special`` and left out by ``skip_special``.
        user_defined: ids whose text is always cut out of a prompt before anything else.
        stop_ids: ids that end a generation: the named eos, eot and eom, every well-known end text, and the
            fill-in-the-middle pad, repository and file separators.
        chat_templates: name -> Jinja source; ``"default"`` is the usual one.
    """

    model: str
    pre: str
    pieces: tuple[str, ...]
    ids: Mapping[str, int]
    merges: tuple[str, ...]
    types: Mapping[int, TokenType]
    control: frozenset[int]
    user_defined: frozenset[int]
    stop_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unk_id: int | None
    sep_id: int | None
    pad_id: int | None
    mask_id: int | None
    fim: FimTokens
    add_bos: bool
    add_eos: bool
    chat_templates: Mapping[str, str]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read the ``tokenizer.*`` keys of a GGUF file.

        Args:
            metadata: key -> value; arrays as sequences. Other keys are ignored.

        Raises:
            FormatError: a key is missing, has the wrong type, or contradicts another.
            UnsupportedModelError: the tokenizer is not a byte-level BPE (``gpt2``).
        """
        keys = _Keys(metadata)
        model = keys.text("model")
        if model != "gpt2":
            raise UnsupportedModelError(f"tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
        pieces = tuple(piece or f"[EMPTY_{i}]" for i, piece in enumerate(keys.strings("tokens")))
        ids = dict(zip(pieces, range(len(pieces)), strict=True))
        if len(ids) != len(pieces):
            twice = next(piece for i, piece in enumerate(pieces) if ids[piece] != i)
            raise FormatError(f"{_GGML}tokens holds {twice!r} twice")
        types = keys.types(len(pieces))
        named = {name: keys.token_id((f"{key}_token_id",), len(pieces)) for name, key in _ID_KEYS.items()}
        add_bos, add_eos = keys.flag("add_bos_token"), keys.flag("add_eos_token")
        for added, name in ((add_bos, "bos"), (add_eos, "eos")):
            if added and named[name] is None:
                raise FormatError(f"{_GGML}add_{name}_token is true, but there is no usable {_GGML}{name}_token_id")
        special = _find_special(keys, pieces, ids, types, named)
        control = special.recognised.union(i for i, kind in types.items() if kind in _CONTROL_TYPES)
        user_defined = {i for i, kind in types.items() if kind is TokenType.USER_DEFINED}
        return cls(
            model=model,
            pre=keys.text("pre", default=""),
            pieces=pieces,
            ids=ids,
            merges=keys.merges(),
            types=types,
            control=control,
            user_defined=frozenset(user_defined - control),
            stop_ids=special.ends,
            bos_id=named["bos"],
            eos_id=named["eos"],
            eot_id=special.eot,
            eom_id=special.eom,
            unk_id=named["unk"],
            sep_id=named["sep"],
            pad_id=named["pad"],
            mask_id=named["mask"],
            fim=special.fim,
            add_bos=add_bos,
            add_eos=add_eos,
            chat_templates=keys.templates(),
        )


@dataclass(frozen=True, slots=True)
class _Special:
    """Tokens found by their text. ``recognised`` are control tokens, whatever type the file gives them."""

    eot: int | None
    eom: int | None
    fim: FimTokens
    ends: frozenset[int]
    recognised: frozenset[int]


def _find_special(
    keys: _Keys,
    pieces: Sequence[str],
    ids: Mapping[str, int],
    types: Mapping[int, TokenType],
    named: Mapping[str, int | None],
) -> _Special:
    def present(texts: Iterable[str]) -> list[int]:
        """Ids of those texts that are special here.

        A `<|...|>` marker is, whatever its stored type; a text like `</s>`, which also stands in ordinary prose and
        code, only if the file says so.
        """
        found = (ids[text] for text in texts if text in ids)
        return [i for i in found if types.get(i) in _SPECIAL_TYPES or pieces[i].startswith("<|")]

    ends = set(present(_END_TEXTS))
    eot, eom = named["eot"], named["eom"]
    if eot is None:
        eot = next(iter(present(_TURN_END_TEXTS)), None)
    if eom is None:
        eom = next(iter(present(("<|eom_id|>",))), None)
    ends.update(i for i in (named["eos"], eot, eom) if i is not None)
    recognised = {i for i in ends if pieces[i] in _END_TEXTS}
    roles: dict[str, int | None] = {}
    for role, (id_keys, texts) in _FIM.items():
        roles[role] = keys.token_id(id_keys, len(pieces))
        if roles[role] is None:
            found = present(texts)[:1]
            recognised.update(found)
            roles[role] = next(iter(found), None)
    fim = FimTokens(**roles)
    ends.update(i for i in (fim.pad, fim.repo, fim.file_separator) if i is not None)
    for i in sorted(recognised):
        if types.get(i) not in _SPECIAL_TYPES:
            log.warning("token %d %r is stored as an ordinary token; treated as a control token", i, pieces[i])
    if named["eos"] is None:
        log.warning("the vocabulary names no end-of-sequence token")
    return _Special(eot, eom, fim, frozenset(ends), frozenset(recognised))


class _Keys:
    """Typed look-ups in GGUF metadata."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(_GGML + name, default)
        if not isinstance(value, str):
            raise FormatError(f"{_GGML}{name} is {type(value).__name__}, expected a string")
        return value

    def strings(self, name: str) -> Sequence[str]:
        value = self._metadata.get(_GGML + name)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise FormatError(f"{_GGML}{name} is {type(value).__name__}, expected an array of strings")
        if not set(map(type, value)) <= {str}:
            wrong = next(i for i, item in enumerate(value) if not isinstance(item, str))
            raise FormatError(f"{_GGML}{name}[{wrong}] is {type(value[wrong]).__name__}, expected a string")
        return value

    def types(self, n_tokens: int) -> dict[int, TokenType]:
        value = self._metadata.get(_GGML + "token_type")
        if value is None:
            return {}
        if not isinstance(value, Iterable) or isinstance(value, str | bytes):
            raise FormatError(f"{_GGML}token_type is {type(value).__name__}, expected an array of integers")
        kinds = list(value)[:n_tokens]
        if len(kinds) < n_tokens:
            raise FormatError(f"{_GGML}token_type has {len(kinds)} entries for {n_tokens} tokens")
        known = {int(kind): kind for kind in TokenType}
        normal = int(TokenType.NORMAL)  # comparing with the member itself is four times as slow
        return {i: known.get(kind, TokenType.UNDEFINED) for i, kind in enumerate(kinds) if kind != normal}

    def token_id(self, names: Iterable[str], n_tokens: int) -> int | None:
        """The first of these keys that holds an id of this vocabulary."""
        for name in names:
            value = self._metadata.get(_GGML + name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, SupportsIndex):
                raise FormatError(f"{_GGML}{name} is {type(value).__name__}, expected an integer")
            if 0 <= (i := index(value)) < n_tokens:
                return i
            log.warning("%s%s is %d, but there are %d tokens; ignored", _GGML, name, i, n_tokens)
        return None

    def flag(self, name: str) -> bool:
        value = self._metadata.get(_GGML + name, False)
        if not isinstance(value, bool):
            raise FormatError(f"{_GGML}{name} is {type(value).__name__}, expected a boolean")
        return value

    def merges(self) -> tuple[str, ...]:
        merges = tuple(self.strings("merges"))
        if len(set(merges)) != len(merges):
            merges = tuple(dict.fromkeys(merges))
        if not set(map(methodcaller("count", " "), merges)) <= {1}:
            wrong = next(merge for merge in merges if merge.count(" ") != 1)
            raise FormatError(f"{_GGML}merges holds {wrong!r}, expected two pieces and one space")
        return merges

    def templates(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in self._metadata.items():
            if key == _TEMPLATE or key.startswith(_TEMPLATE + "."):
                if not isinstance(value, str):
                    raise FormatError(f"{key} is {type(value).__name__}, expected a string")
                found[key[len(_TEMPLATE) + 1 :] or "default"] = value
        return found
