"""Tokens -> text and tokens that count: stop texts, unfinished characters, control tokens."""

import random
from dataclasses import dataclass, field

import pytest

from pydflash.generate import AnswerText
from pydflash.results import StreamEvent, TokenLogprobs


@dataclass
class Pieces:
    """Stands in for a tokenizer: ids are indices of byte strings."""

    pieces: list[bytes]
    special_ids: frozenset[int] = field(default_factory=frozenset)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def answer(pieces: list[bytes], stop: tuple[str, ...] = (), special: frozenset[int] = frozenset()) -> list[StreamEvent]:
    """Events of an answer made of all pieces in order."""
    text = AnswerText(Pieces(pieces, special), stop)  # type: ignore[arg-type]
    events = []
    for i in range(len(pieces)):
        logprobs = TokenLogprobs(i, -float(i))
        if not text.push(i, accepted=i % 2 == 0, logprobs=logprobs):
            break
        events.append(text.take())
    text.finish()
    events.append(text.take(last=True))
    assert text.n_kept == sum(len(event.token_ids) for event in events)
    return events


def joined(events: list[StreamEvent]) -> tuple[str, tuple[int, ...]]:
    return "".join(event.text for event in events), tuple(i for event in events for i in event.token_ids)


def test_without_stop_texts_every_token_comes_at_once() -> None:
    events = answer([b"ab", b"c", b"def"])
    assert [event.text for event in events] == ["ab", "c", "def", ""]
    assert [event.token_ids for event in events] == [(0,), (1,), (2,), ()]
    assert [event.accepted for event in events] == [(True,), (False,), (True,), ()]
    assert events[1].logprobs == (TokenLogprobs(1, -1.0),)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "kept"),
    [
        ([b"one ", b"tw", b"o th", b"ree", b" four"], ("two three",), "one ", (0,)),
        ([b"one t", b"w", b"o", b" x"], ("two",), "one ", (0,)),
        ([b"one", b" two", b" three"], ("two",), "one ", (0, 1)),
        ([b"one", b" two", b" three"], ("one",), "", ()),
        ([b"a", b"b", b"c"], ("c",), "ab", (0, 1)),
        ([b"a", b"b", b"c"], ("x",), "abc", (0, 1, 2)),
        ([b"ab", b"ab", b"c"], ("abc", "bab"), "a", (0,)),
        ([b"tw", b"", b"o", b"!"], ("two",), "", ()),
        ([b"x", b"", b"two"], ("two",), "x", (0,)),
    ],
)
def test_text_and_tokens_end_before_the_stop_text(
    pieces: list[bytes], stop: tuple[str, ...], text: str, kept: tuple[int, ...]
) -> None:
    assert joined(answer(pieces, stop)) == (text, kept)


def test_text_that_might_become_a_stop_text_waits_with_its_tokens() -> None:
    events = answer([b"a", b"st", b"o", b"re", b"b"], ("stop",))
    assert [event.text for event in events] == ["a", "", "", "store", "b", ""]
    assert [event.token_ids for event in events] == [(0,), (), (), (1, 2, 3), (4,), ()]


def test_held_text_comes_at_the_end() -> None:
    events = answer([b"a", b"sto"], ("stop",))
    assert [event.text for event in events] == ["a", "", "sto"]
    assert joined(events)[1] == (0, 1)


def test_control_tokens_count_but_give_no_text() -> None:
    events = answer([b"a", b"<|im_end|>", b"b", b"<|im_end|>"], special=frozenset({1, 3}))
    assert joined(events) == ("ab", (0, 1, 2, 3))


def test_a_stop_text_is_not_found_in_control_tokens() -> None:
    assert joined(answer([b"a", b"<|x|>", b"b"], ("<|x|>",), frozenset({1}))) == ("ab", (0, 1, 2))


def test_unfinished_characters_wait_and_end_as_replacement() -> None:
    snake = "🐍".encode()
    events = answer([b"a", snake[:1], snake[1:3], snake[3:], snake[:2]])
    assert [event.text for event in events] == ["a", "", "", "🐍", "", "\ufffd"]
    assert joined(events)[1] == (0, 1, 2, 3, 4)


def test_any_cut_of_any_text_gives_the_same_answer() -> None:
    rng = random.Random(7)
    for _ in range(400):
        data = "".join(rng.choice("ab🐍é") for _ in range(rng.randrange(1, 24))).encode()
        if rng.random() < 0.5:
            data += bytes([rng.choice([0xF0, 0x9F, 0x80, 0xFF])])
        stop = tuple("".join(rng.choice("abé") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(3)))
        whole = data.decode(errors="replace")
        cuts = sorted(rng.sample(range(len(data) + 1), rng.randrange(min(len(data), 6) + 1)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        text, kept = joined(answer(pieces, stop))
        assert text == joined(answer([data], stop))[0]
        assert whole.startswith(text)
        assert not any(s in text for s in stop)
        assert kept == tuple(range(len(kept)))
        if text == whole:
            assert len(kept) == len(pieces) or any(s in whole for s in stop)
        # The first token left out began at or behind the end of the text.
        assert len(b"".join(pieces[: len(kept)]).decode(errors="ignore")) >= len(text) or text == whole
