"""EnginePrefix: the part of an engine that keeps what prompts begin with."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, cast

from pydflash.decoder import Decoder
from pydflash.draft_context import DraftContext
from pydflash.draft_model import DraftModel
from pydflash.errors import BusyError, InvalidArgumentError
from pydflash.options import EngineOptions, SamplingOptions
from pydflash.prefix_cache import PrefixCache
from pydflash.prefix_folder import PrefixFolder
from pydflash.prefix_keys import state_key_of_cache
from pydflash.prefix_snapshot import PrefixSnapshot
from pydflash.prefix_store import PrefixStore, SavedPrefix
from pydflash.sequence_prefix import SequencePrefix
from pydflash.session import Session
from pydflash.target_cache import TargetCache
from pydflash.target_model import TargetModel
from pydflash.text import Tokenizer

if TYPE_CHECKING:
    from pydflash.engine import Engine

_MESSAGE_START: Final = "<|im_start|>"


class EnginePrefix(ABC):
    """Base of Engine, which sets what is declared here."""

    _target: TargetModel
    _draft: DraftModel | None
    _options: EngineOptions
    _tokenizer: Tokenizer
    _cache: TargetCache
    _decoder: Decoder
    _running: threading.Lock
    _prefix_cache: PrefixCache | None
    _prefix: SequencePrefix
    _store: PrefixStore | None

    def _open_prefix(self, resources: ExitStack, context: DraftContext | None) -> None:
        options = self._options
        self._prefix_cache = prefix_cache_of(self._target, self._draft, options, self._cache, context)
        if self._prefix_cache is not None:
            resources.callback(self._prefix_cache.close)
        self._prefix = SequencePrefix(
            self._decoder,
            self._prefix_cache,
            chunk=options.prefill_chunk,
            interval=options.prefix_interval,
            message_ids=message_ids(self._tokenizer),
            place=options.prefix_place,
        )
        folder = options.save_directory
        self._store = None if folder is None else PrefixStore(folder, self._target, self._draft)

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Snapshots of prompts and answers, for all sequences over these models; None if the options say so."""
        return self._prefix_cache

    @property
    def snapshots(self) -> tuple[PrefixSnapshot, ...]:
        """What the prefix cache has in memory, the one that was used least recently first."""
        return () if self._prefix_cache is None else tuple(self._prefix_cache)

    def session(self, messages: Sequence[Mapping[str, object]] = (), options: SamplingOptions | None = None) -> Session:
        """A conversation; ``messages`` were said before. See :class:`Session`.

        Raises:
            InvalidArgumentError: the model has no chat template.
        """
        return Session(cast("Engine", self), messages=messages, options=options)

    def save(self, name: str) -> SavedPrefix:
        """Save what the newest request left in the cache, prompt and answer, to a file in ``save_directory``.

        Raises:
            InvalidArgumentError: there is no save_directory, the name is not allowed, or the cache is empty.
            BusyError: a request is running.
            OSError: the file cannot be written.
        """
        with self._idle():
            return self._named().save(name, self._prefix.snapshot())

    def load(self, name: str) -> SavedPrefix:
        """Put a saved state back: a prompt that begins with its tokens goes on from there.

        Raises:
            InvalidArgumentError: there is no save_directory, or the name is not allowed.
            NotFoundError: nothing is saved under the name. FormatError: the file is damaged.
            SnapshotMismatchError: it is of another model, drafter, or kind of cache. CapacityError: it does not fit.
            BusyError: a request is running.
        """
        with self._idle():
            started = time.perf_counter()
            snapshot = self._named().load(name)
            self._prefix.restore(snapshot)
            if self._prefix_cache is not None:
                self._prefix_cache.insert(snapshot)
            ms = (time.perf_counter() - started) * 1e3
            return SavedPrefix(name, snapshot.position, snapshot.n_bytes, ms)

    def erase(self, name: str) -> SavedPrefix:
        """Remove a saved state.

        Raises:
            InvalidArgumentError: there is no save_directory, or the name is not allowed.
            NotFoundError: nothing is saved under the name.
        """
        self._check_open()
        return self._named().erase(name)

    def rewind(self, position: int) -> int:
        """Make the cache hold its first ``position`` tokens only; how many of them had to be evaluated for it.

        A recurrent state cannot go back: the nearest snapshot before the position is restored, and the tokens behind it
        are evaluated again.

        Raises:
            InvalidArgumentError: the cache holds fewer tokens.
            BusyError: a request is running.
        """
        with self._idle():
            return self._prefix.rewind(position)

    @property
    def store(self) -> PrefixStore | None:
        """What is saved by name; None without a save_directory."""
        return self._store

    def _named(self) -> PrefixStore:
        if self._store is None:
            raise InvalidArgumentError("save_directory", None, "a folder, in EngineOptions")
        return self._store

    @contextmanager
    def _idle(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            self._check_open()
            raise BusyError("a request of this engine is running, or a stream of it is still open")
        try:
            self._check_open()
            yield
        finally:
            self._running.release()

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ClosedError if the engine is closed."""


def prefix_cache_of(
    target: TargetModel,
    draft: DraftModel | None,
    options: EngineOptions,
    cache: TargetCache,
    context: DraftContext | None,
) -> PrefixCache | None:
    """The cache that the options ask for, for sequences like this one; close() it. Errors are those of PrefixFolder."""
    if not options.prefix_cache:
        return None
    state_key = state_key_of_cache(cache, context)
    folder = None
    if options.prefix_directory is not None:
        limit = options.prefix_directory_bytes
        folder = PrefixFolder(options.prefix_directory, state_key, target, draft, limit)
    return PrefixCache(state_key, max_bytes=options.prefix_bytes, folder=folder)


def message_ids(tokenizer: Tokenizer) -> list[int]:
    """The control token that a message begins with in this family's templates, if the vocabulary has it."""
    return [i for i in tokenizer.special_ids if tokenizer.piece(i) == _MESSAGE_START]
