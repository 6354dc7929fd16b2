"""Bytes of tokens -> complete characters.

A token may end in the middle of a character (an emoji is often two to four tokens), so text leaves the engine through
a :class:`Utf8Stream`, which keeps the unfinished bytes until the rest arrives.
"""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """Incremental UTF-8 decoder that never raises on bad input.

    Each invalid sequence becomes U+FFFD as in ``bytes.decode(errors="replace")``; the texts of all ``feed`` calls and
    the final ``flush``, joined, equal that call on all bytes at once, however they were cut.

    Not thread-safe: one stream belongs to one generation.
    """

    def __init__(self) -> None:
        self._decoder = _new_decoder(errors="replace")

    @property
    def pending(self) -> int:
        """Bytes held back because their character is not complete (0 to 3)."""
        return len(self._decoder.getstate()[0])

    def feed(self, data: bytes) -> str:
        """Take more bytes; return the characters they complete (possibly none)."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the stream: an incomplete tail becomes U+FFFD. The stream is then empty and may be used again."""
        tail = self._decoder.decode(b"", True)
        self._decoder.reset()
        return tail
