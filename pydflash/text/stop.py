"""Stop strings, found while text arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydflash.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string was found, in characters since the matcher was made.

    The text to show ends at ``begin``. The stop string itself is ``[begin, end)``; text that was fed beyond ``end``
    belongs to nobody, and tokens that lie there should not be counted.
    """

    stop: str
    begin: int
    end: int


class _PrefixAutomaton:
    """How many characters of one string the text seen so far ends with (Knuth, Morris and Pratt)."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # _fallback[i]: the longest proper prefix of stop that also ends stop[: i + 1].
        self._fallback = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def step(self, character: str) -> bool:
        """Take one more character; True when the whole string has just been seen."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


class StopMatcher:
    """Looks for any of several strings in a stream of text.

    The match that is complete first wins; of several that end at the same character, the longest. That makes the
    result independent of how the text was cut into pieces. Text that may still turn out to be the start of a stop
    string is held back, and no more than that. Time is linear in the text, memory in the stop strings.

    Not thread-safe: one matcher belongs to one generation.

    Raises:
        InvalidArgumentError: a stop string is empty or not a string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise InvalidArgumentError("stops", stops, "a sequence of strings, not one string")
        given: Sequence[object] = stops
        for stop in given:
            if not isinstance(stop, str) or not stop:
                raise InvalidArgumentError("stops", stop, "non-empty strings")
        # Longest first, so that the first one to complete at a character is the one to report.
        self._automata = [_PrefixAutomaton(stop) for stop in sorted(set(stops), key=lambda s: (-len(s), s))]
        self._held = ""
        self._emitted = 0
        self._match: StopMatch | None = None

    @property
    def match(self) -> StopMatch | None:
        """The match, once there is one."""
        return self._match

    @property
    def held(self) -> str:
        """Text that was fed but neither returned nor ruled out yet."""
        return self._held

    def feed(self, text: str) -> str:
        """Take more text; return what can be shown now.

        After a match has been found (``match`` is not None) the returned text ends right before the stop string and
        nothing more may be fed.

        Raises:
            InvalidArgumentError: the matcher has already matched.
        """
        if self._match is not None:
            raise InvalidArgumentError("text", text, f"nothing after the stop string {self._match.stop!r}")
        pending = self._held + text
        for end, character in enumerate(text, start=self._emitted + len(self._held) + 1):
            # Every automaton has to see the character, so no short-circuit here.
            complete = [automaton.stop for automaton in self._automata if automaton.step(character)]
            if complete:
                match = StopMatch(complete[0], end - len(complete[0]), end)
                self._match = match
                self._held = ""
                return self._emit(pending[: match.begin - self._emitted])
        keep = max((automaton.matched for automaton in self._automata), default=0)
        self._held = pending[len(pending) - keep :]
        return self._emit(pending[: len(pending) - keep])

    def flush(self) -> str:
        """End the stream: return the text that was held back. Empty after a match.

        The matcher then starts over, with positions that go on counting.
        """
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return self._emit(held)

    def _emit(self, text: str) -> str:
        self._emitted += len(text)
        return text
