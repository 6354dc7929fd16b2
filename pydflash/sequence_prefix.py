"""SequencePrefix: what one sequence takes from a prefix cache, and gives to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pydflash._ffi import TokenIds, as_ids
from pydflash.decoder import Decoder
from pydflash.errors import CapacityError, OutOfMemoryError, SnapshotMismatchError
from pydflash.options import SnapshotPlace, as_integer
from pydflash.prefix_cache import PrefixCache, common_prefix
from pydflash.prefix_snapshot import PrefixSnapshot

log = logging.getLogger(__name__)

_MAX_DEPTH = 200  # parents of a delta, below the limit of native code


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Tokens that need not be evaluated, and where they came from.

    ``source`` is "live" (the sequence held them already), "memory", "disk", "off", or "none"; ``reason`` says why not
    more.
    """

    n: int
    source: str
    reason: str = ""


class SequencePrefix:
    """The beginning of each request of one sequence: it goes on from what the sequence holds, or from a snapshot.

    A request is: begin(), feed up to each of stages() with checkpoint() behind it, prefill, checkpoint(), steps,
    settle, finish(). Snapshots are taken at chunk boundaries only while a prompt is fed, so that nothing is computed in
    other pieces than without them.

    One thread at a time, like the decoder; the prefix cache may be shared.
    """

    def __init__(
        self,
        decoder: Decoder,
        prefix_cache: PrefixCache | None,
        *,
        chunk: int = 512,
        interval: int = 4096,
        message_ids: Sequence[int] = (),
        place: SnapshotPlace = "host",
    ) -> None:
        """Bind a sequence to a cache of snapshots.

        Args:
            decoder: of the sequence.
            prefix_cache: None: nothing is kept or looked up, but what the sequence holds may still serve.
            chunk: prefill_chunk of the decoder.
            interval: tokens between snapshots of a long prompt, rounded up to whole chunks.
            message_ids: tokens that a message begins with; a snapshot is taken at the last chunk boundary before the
                last two of them.
            place: where the bytes of snapshots go.
        """
        self._decoder = decoder
        self._prefix_cache = prefix_cache
        self._chunk = as_integer("chunk", chunk, 1)
        interval = as_integer("interval", interval, 1)
        self._interval = -(-interval // chunk) * chunk
        self._place: SnapshotPlace = place
        self._message_ids = np.array(sorted(set(message_ids)), np.int32)
        self._newest: PrefixSnapshot | None = None  # of what the sequence holds
        self._live: int | None = None  # changes of the cache until the end of the last request
        self._uses = True

    @property
    def newest(self) -> PrefixSnapshot | None:
        """The newest snapshot of what the sequence holds now."""
        return self._newest

    def forget(self) -> None:
        """The decoder holds something else than what requests left in it."""
        self._newest, self._live = None, None

    def begin(self, ids: TokenIds, *, use: bool = True) -> PrefixUse:
        """Make the decoder hold the first n tokens of a prompt and nothing else.

        n is all of them only if the logits behind the last one are known; then prefill() may be called without tokens.

        Args:
            ids: the prompt.
            use: False: begin from nothing, and take no snapshots.
        """
        live, self._live, self._uses = self._live, None, use
        if not use:
            self._newest = None
            self._decoder.reset()
            return PrefixUse(0, "off")
        tokens = as_ids(ids)
        held = self._held(tokens) if live is not None and live == self._decoder.cache.n_changes else 0
        found = None if self._prefix_cache is None else self._prefix_cache.lookup(tokens, above=held)
        if held > 0 and (found is None or found.snapshot is None):
            self._decoder.drop_anchor()
            if self._newest is not None and self._newest.position > held:
                self._newest = None
            return PrefixUse(held, "live")
        self._newest = None
        # An empty sequence has nothing that a restore would have to keep aside.
        self._decoder.reset()
        if found is not None and found.snapshot is not None:
            try:
                self._decoder.restore(found.snapshot)
            except (SnapshotMismatchError, CapacityError) as error:
                log.info("a snapshot of %d tokens is of no use: %s", found.n, error)
                return PrefixUse(0, "none", f"it does not fit: {error.message}")
            self._newest = found.snapshot
            return PrefixUse(found.n, found.source, found.reason)
        return PrefixUse(0, "none", "off" if found is None else found.reason)

    def _held(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        """Tokens that the decoder holds and the prompt begins with; 0 if it holds others too."""
        decoder = self._decoder
        n = decoder.cache.position
        if decoder.position != n or n == 0 or n >= len(ids) or decoder.stats.draft_disabled:
            return 0
        return n if common_prefix(decoder.tokens[:n], ids[:n]) == n else 0

    def stages(self, ids: TokenIds, n: int) -> tuple[int, ...]:
        """Positions to feed a prompt up to, one after the other, behind the n tokens that are there; the rest is for
        prefill(). All are whole chunks away from n."""
        tokens = as_ids(ids)
        if self._prefix_cache is None or not self._uses:
            return ()
        last = n + (len(tokens) - n - 1) // self._chunk * self._chunk
        wanted = set(range(n + self._interval, last + 1, self._interval))
        for boundary in np.flatnonzero(np.isin(tokens, self._message_ids))[-2:].tolist():
            wanted.add(n + (boundary - n) // self._chunk * self._chunk)
        return tuple(sorted(position for position in wanted if n < position <= last))

    def checkpoint(self) -> PrefixSnapshot | None:
        """Keep a snapshot of what the decoder holds, unless there is one; pending rows are not part of it."""
        if self._prefix_cache is None or not self._uses:
            return None
        decoder, newest = self._decoder, self._newest
        position = decoder.cache.position
        if position == 0 or (newest is not None and newest.position == position):
            return newest
        decoder.catch_up()
        parent = newest if newest is not None and newest.position < position and newest.depth < _MAX_DEPTH else None
        context = decoder.draft_context
        try:
            snapshot = PrefixSnapshot.take(
                decoder.cache, context, tokens=decoder.tokens[:position], parent=parent, place=self._place
            )
        except OutOfMemoryError as error:
            log.warning("no snapshot of %d tokens: %s", position, error)
            return None
        if context is not None and not snapshot.has_draft:
            return None  # the drafter has failed; what it lost cannot be put back
        # Behind one that is too large for the budget, the next one has to be whole.
        self._newest = snapshot if self._prefix_cache.insert(snapshot) else None
        return snapshot

    def finish(self, ids: TokenIds) -> bool:
        """The request is over and the decoder settled; ids are the prompt and the answer as the caller has it.

        What the decoder holds is kept unless it has tokens that are not part of these, as when a stop text was complete
        only after later tokens were committed. False then.
        """
        decoder = self._decoder
        position = decoder.cache.position
        tokens = as_ids(ids)
        own = common_prefix(decoder.tokens[:position], tokens) == position
        if own:
            self.checkpoint()
        self.stay()
        return own

    def snapshot(self) -> PrefixSnapshot:
        """A snapshot of what the decoder holds now, kept or not; a step that is pending is committed first.

        Raises:
            InvalidArgumentError: it holds nothing.
        """
        decoder = self._decoder
        decoder.settle()
        position = decoder.cache.position
        if self._newest is not None and self._newest.position == position:
            return self._newest
        decoder.catch_up()
        return PrefixSnapshot.take(decoder.cache, decoder.draft_context, tokens=decoder.tokens[:position])

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """Make the decoder hold what a snapshot does; errors are those of Decoder.restore()."""
        self.forget()
        self._decoder.restore(snapshot)
        self._uses = True
        self.stay()

    def rewind(self, position: int) -> int:
        """Make the decoder hold its first ``position`` tokens only; how many had to be evaluated for it.

        A recurrent state cannot go back, so the nearest snapshot before is restored and the rest is fed again.

        Raises:
            InvalidArgumentError: the decoder holds fewer tokens.
        """
        decoder = self._decoder
        decoder.drop_anchor()
        held = decoder.cache.position
        position = as_integer("position", position, 0, held)
        if position == held:
            return 0
        tokens = decoder.tokens[:position]
        found = None
        if self._prefix_cache is not None and position > 0:
            found = self._prefix_cache.lookup(tokens, need_logits=False).snapshot
        if found is None:
            self.forget()
            decoder.reset()
        else:
            self.restore(found)
            self._newest = found
        begin = 0 if found is None else found.position
        if begin < position:
            decoder.feed(tokens[begin:])
        self._uses = True
        self.stay()
        return position - begin

    def stay(self) -> None:
        """The decoder is settled, and the next request may go on from what it holds, unless this one kept nothing."""
        self._live = self._decoder.cache.n_changes if self._uses else None
