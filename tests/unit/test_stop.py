"""StopMatcher against a search over the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydflash.errors import InvalidArgumentError
from pydflash.text.stop import StopMatch, StopMatcher

few_letters = st.text("ab", min_size=0, max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> StopMatch | None:
    """The match that ends first; of those with the same end, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.match:
            return shown
    return shown + matcher.flush()


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(few_letters, stop_lists, st.lists(st.integers(0, 30), max_size=8))
def test_equals_a_search_over_the_whole_text(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = feed_all(matcher, cut(text, places))
    want = expected(text, stops)
    assert matcher.match == want
    assert shown == (text if want is None else text[: want.begin])


@given(few_letters, stop_lists)
def test_holds_back_exactly_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for i, character in enumerate(text):
        shown += matcher.feed(character)
        if matcher.match:
            break
        seen = text[: i + 1]
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((n for n in range(1, len(seen) + 1) if seen[-n:] in starts), default=0)
        assert shown == seen[: len(seen) - longest]
        assert matcher.held == seen[len(seen) - longest :]


def test_across_tokens_in_the_middle_of_a_block() -> None:
    matcher = StopMatcher(["\nUser:", "###"])
    assert matcher.feed("Sure") == "Sure"
    assert matcher.feed(".\n") == "."
    assert matcher.held == "\n"
    assert matcher.feed("Us") == ""
    assert matcher.feed("er: what") == ""
    assert matcher.match == StopMatch("\nUser:", 5, 11)
    assert matcher.flush() == ""


def test_a_false_alarm_is_given_out_again() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.feed("a\nUse") == "a"
    assert matcher.feed("d") == "\nUsed"
    assert matcher.match is None


def test_repeated_beginning() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aaa") == "a"
    assert matcher.feed("b") == ""
    assert matcher.match == StopMatch("aab", 1, 4)


def test_the_longest_of_those_that_end_together_is_reported() -> None:
    matcher = StopMatcher(["c", "bc", "abc"])
    assert matcher.feed("xabc") == "x"
    assert matcher.match == StopMatch("abc", 1, 4)


def test_the_first_to_be_complete_wins_however_the_text_is_cut() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["abc", "d"]):
        matcher = StopMatcher(["abcd", "bc"])
        assert feed_all(matcher, pieces) == "a"
        assert matcher.match == StopMatch("bc", 1, 3)


def test_flush_gives_out_what_was_held() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") == "the "
    assert matcher.flush() == "EN"
    assert matcher.match is None


def test_flush_forgets_the_beginning_that_was_given_out() -> None:
    matcher = StopMatcher(["END"])
    matcher.feed("EN")
    matcher.flush()
    assert matcher.feed("D, END") == "D, "
    assert matcher.match == StopMatch("END", 5, 8)


def test_without_stop_strings_all_text_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("any") == "any"
    assert matcher.flush() == ""


def test_nothing_may_follow_a_match() -> None:
    matcher = StopMatcher(["."])
    matcher.feed("a.")
    with pytest.raises(InvalidArgumentError, match="nothing after the stop string"):
        matcher.feed("b")


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [1], [None], [b"a"]])
def test_refuses_empty_and_wrong_stop_strings(stops: list[str]) -> None:
    with pytest.raises(InvalidArgumentError):
        StopMatcher(stops)


def test_time_is_linear_for_a_long_stop_string_that_almost_matches() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"])
    shown = sum(len(matcher.feed("a" * 100)) for _ in range(1000))
    assert shown == 100_000 - 20_000
    assert len(matcher.held) == 20_000
