"""Text <-> token ids, from the vocabulary stored in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from pydflash.errors import FormatError, InvalidArgumentError, UnsupportedModelError
from pydflash.text.vocabulary import FimTokens, TokenType, Vocabulary

# How text is cut into words before merging. The contractions are spelled out instead of using `(?i:...)`, which would
# also fold the long s: llama.cpp does not.
_CONTRACTIONS = r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Mapping[str, str] = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # Combining marks belong to the word they stand in.
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
}


def _byte_alphabet() -> dict[int, str]:
    """Byte -> printable character: bytes that print as Latin-1 stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(sorted(set(range(256)) - alphabet.keys())):
        alphabet[byte] = chr(0x100 + offset)
    return alphabet


_CHARACTER_OF_BYTE = _byte_alphabet()
# For str.translate: alphabet character -> the Latin-1 character with the byte's value.
_LATIN1_OF_CHARACTER = {ord(character): byte for byte, character in _CHARACTER_OF_BYTE.items()}


class Tokenizer:
    """Byte-level BPE of the Qwen family (pre-tokenizers ``qwen35`` and ``qwen2``).

    Gives the ids llama.cpp gives for the same file: special texts are cut out first (longest first), no Unicode
    normalisation. One known difference: characters added in Unicode 16 are letters, digits and marks here, while
    llama.cpp's tables end at Unicode 15.

    Immutable; any thread. Memory: about 0.4 KB per token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the encoder.

        Raises:
            UnsupportedModelError: the pre-tokenizer is not one of those above.
            FormatError: a merge uses or makes a piece that the vocabulary lacks.
        """
        pattern = _WORDS.get(vocabulary.pre)
        if pattern is None:
            known = ", ".join(map(repr, _WORDS))
            raise UnsupportedModelError(f"pre-tokenizer {vocabulary.pre!r} is not supported, only {known}")
        self._vocabulary = vocabulary
        # Every merge has exactly one space, so that the joined text falls apart into pairs again.
        halves = iter(" ".join(vocabulary.merges).split(" ")) if vocabulary.merges else iter(())
        try:
            bpe = models.BPE(vocab=dict(vocabulary.ids), merges=list(zip(halves, halves, strict=True)))
        except Exception as exc:  # the library raises bare Exception
            raise FormatError(f"merges do not fit the vocabulary: {exc}") from exc
        self._bpe = BpeTokenizer(bpe)
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        pieces = vocabulary.pieces
        self._missing_bytes = frozenset(b for b, c in _CHARACTER_OF_BYTE.items() if c not in vocabulary.ids)
        by_length = sorted(vocabulary.control | vocabulary.user_defined, key=lambda i: -len(pieces[i].encode()))
        self._specials = [(pieces[i], i) for i in by_length]
        self._always_special = [(piece, i) for piece, i in self._specials if i in vocabulary.user_defined]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build a tokenizer from the metadata of a GGUF file (see :meth:`Vocabulary.from_metadata`)."""
        return cls(Vocabulary.from_metadata(metadata))

    def __repr__(self) -> str:
        return f"Tokenizer(pre={self._vocabulary.pre!r}, n_vocab={self.n_vocab})"

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: any text that UTF-8 can express.
            add_special: put bos in front and eos behind where the file asks for it (Qwen's files do not).
            parse_special: texts of control tokens such as ``<|im_end|>`` become those tokens. False treats them as
                ordinary text, which is the safe way for text that comes from a user. User-defined tokens are
                recognised in both cases.

        Raises:
            InvalidArgumentError: the text holds a lone surrogate, or a byte for which the vocabulary has no token.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidArgumentError(
                "text", text[exc.start], f"no lone surrogates (found at character {exc.start})"
            ) from exc
        if self._missing_bytes and not self._missing_bytes.isdisjoint(data):
            byte = min(self._missing_bytes.intersection(data))
            raise InvalidArgumentError("text", text, f"only bytes with a token of their own; 0x{byte:02x} has none")
        ids: list[int] = []
        if add_special and self._vocabulary.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        for part in self._split(text, self._specials if parse_special else self._always_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._bpe.encode(part, add_special_tokens=False).ids)
        if add_special and self._vocabulary.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Text that arrives token by token goes through :class:`Utf8Stream` and :meth:`token_bytes` instead, since a
        character may be spread over several tokens.

        Args:
            ids: token ids.
            skip_special: leave out control tokens.

        Raises:
            InvalidArgumentError: an id is outside ``[0, n_vocab)``.
        """
        control = self._vocabulary.control
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in control))
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; empty for unused ids. Special tokens give their text.

        Raises:
            InvalidArgumentError: the id is outside ``[0, n_vocab)``.
        """
        piece = self.piece(token_id)
        if token_id in self._vocabulary.control or token_id in self._vocabulary.user_defined:
            return piece.encode()
        kind = self._vocabulary.types.get(token_id, TokenType.NORMAL)
        if kind is TokenType.NORMAL:
            try:
                return piece.translate(_LATIN1_OF_CHARACTER).encode("latin-1")
            except UnicodeEncodeError:
                # A piece outside the byte alphabet: an added token whose type was lost in conversion.
                return piece.encode()
        if kind is TokenType.BYTE:
            return _byte_of(piece)
        return b""

    def piece(self, token_id: int) -> str:
        """The vocabulary entry as stored: ordinary tokens in the byte-level alphabet (a space is ``Ġ``).

        Raises:
            InvalidArgumentError: the id is outside ``[0, n_vocab)``.
        """
        if not 0 <= index(token_id) < self.n_vocab:
            raise InvalidArgumentError("token id", token_id, f"0 <= id < {self.n_vocab}")
        return self._vocabulary.pieces[token_id]

    def id_of(self, piece: str) -> int | None:
        """Inverse of :meth:`piece`; None for a text that is not a vocabulary entry."""
        return self._vocabulary.ids.get(piece)

    @property
    def vocabulary(self) -> Vocabulary:
        """Everything the file says about its tokens."""
        return self._vocabulary

    @property
    def n_vocab(self) -> int:
        """Number of ids, unused ones included."""
        return len(self._vocabulary.pieces)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: parsed only with ``parse_special``, left out by ``skip_special``."""
        return self._vocabulary.control

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return self._vocabulary.stop_ids

    @property
    def bos_id(self) -> int | None:
        """Beginning of sequence."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """End of sequence; one of ``stop_ids``."""
        return self._vocabulary.eos_id

    @property
    def mask_id(self) -> int | None:
        """The token a drafter's empty slots hold, where the file names it."""
        return self._vocabulary.mask_id

    @property
    def fim(self) -> FimTokens:
        """Fill-in-the-middle tokens."""
        return self._vocabulary.fim

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name; ``"default"`` is the usual one."""
        return self._vocabulary.chat_templates

    @staticmethod
    def _split(text: str, specials: Iterable[tuple[str, int]]) -> list[str | int]:
        """Cut special texts out: ids stay where the text stood."""
        parts: list[str | int] = [text] if text else []
        for piece, token_id in specials:
            if piece not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for n, rest in enumerate(part.split(piece)):
                    if n:
                        cut.append(token_id)
                    if rest:
                        cut.append(rest)
            parts = cut
        return parts


def _byte_of(piece: str) -> bytes:
    """Value of a byte token, spelled ``<0xHH>``."""
    try:
        return bytes.fromhex(piece.removeprefix("<0x").removesuffix(">"))
    except ValueError as exc:
        raise FormatError(f"byte token {piece!r} is not of the form <0xHH>") from exc
