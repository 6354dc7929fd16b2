"""Utf8Stream: any cutting of any bytes gives what decoding them at once gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydflash.text.utf8 import Utf8Stream

FACE = "\U0001f600".encode()


def run(chunks: list[bytes]) -> list[str]:
    stream = Utf8Stream()
    out = [stream.feed(chunk) for chunk in chunks]
    out.append(stream.flush())
    return out


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


# Bytes that are likely to form good, cut and overlong sequences, surrogates and values above U+10FFFF.
tricky_bytes = st.lists(
    st.sampled_from(
        [0x00, 0x41, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF8, 0xFF]
    ),
    max_size=40,
).map(bytes)


@given(st.one_of(st.binary(max_size=60), tricky_bytes, st.text(max_size=30).map(lambda s: s.encode(errors="replace"))),
       st.lists(st.integers(0, 100), max_size=12))  # fmt: skip
def test_joined_equals_decoding_at_once(data: bytes, places: list[int]) -> None:
    assert "".join(run(cut(data, places))) == data.decode(errors="replace")


@given(st.one_of(st.binary(max_size=40), tricky_bytes))
def test_byte_by_byte(data: bytes) -> None:
    assert "".join(run([data[i : i + 1] for i in range(len(data))])) == data.decode(errors="replace")


@given(st.text(max_size=30).filter(lambda s: s.isascii() or all(not 0xD800 <= ord(c) < 0xE000 for c in s)),
       st.lists(st.integers(0, 200), max_size=12))  # fmt: skip
def test_valid_text_is_cut_between_characters_only(text: str, places: list[int]) -> None:
    parts = run(cut(text.encode(), places))
    assert "".join(parts) == text
    assert parts[-1] == ""


def test_nothing_comes_out_before_the_last_byte_of_a_character() -> None:
    stream = Utf8Stream()
    assert [stream.feed(FACE[i : i + 1]) for i in range(4)] == ["", "", "", "\U0001f600"]


def test_pending_counts_the_bytes_held_back() -> None:
    stream = Utf8Stream()
    stream.feed(b"ab" + FACE[:3])
    assert stream.pending == 3
    stream.feed(FACE[3:])
    assert stream.pending == 0


def test_flush_replaces_the_tail_and_empties_the_stream() -> None:
    stream = Utf8Stream()
    assert stream.feed(b"a" + FACE[:2]) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.feed(b"b") == "b"


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\xe2\x28\xa1b", b"\xe2\x82"]
)
def test_invalid_bytes_never_raise(data: bytes) -> None:
    out = "".join(run([data]))
    assert out == data.decode(errors="replace")
    assert "\ufffd" in out
