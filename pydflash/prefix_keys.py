"""Keys of prefixes: chained hashes of token blocks, so that two prompts share the keys of what they share."""

from __future__ import annotations

import hashlib
import json
from typing import Final

import numpy as np

from pydflash._ffi import IntArray, TokenIds, as_ids
from pydflash.draft_context import DraftContext
from pydflash.options import as_integer
from pydflash.snapshot_info import SnapshotInfo
from pydflash.target_cache import TargetCache

_VERSION: Final = 1
_HEX: Final = 32


def state_key_of_snapshot(info: SnapshotInfo) -> str:
    """32 hexadecimal digits of everything that decides whether two states of equal tokens may replace each other."""
    return _digest(
        info.architecture,
        info.target_digest,
        (info.layer_begin, info.layer_end),
        (info.k_type, info.v_type, info.fa_window),
        (info.capture_layers, info.feature_type),
        (info.draft_digest, info.draft_k_type, info.draft_v_type) if info.draft_digest else (),
    )


def state_key_of_cache(cache: TargetCache, context: DraftContext | None) -> str:
    """The same of what would be taken of a cache and a context."""
    target, options = cache.model, cache.options
    layers = options.layers or (target.config.layer_begin, target.config.layer_end)
    return _digest(
        target.config.architecture,
        target.digest,
        layers,
        (options.k_type, options.v_type, options.fa_window),
        (cache.capture_layers, options.feature_type if cache.capture_layers else ""),
        () if context is None else (context.model.digest, context.k_type, context.v_type),
    )


def _digest(*fields: object) -> str:
    text = json.dumps([_VERSION, *fields], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX]


class PrefixKeys:
    """Keys of every prefix of a list of tokens.

    ``blocks[i]`` is the hash of the first ``i`` whole blocks, each made of the one before and the tokens of a block.
    """

    def __init__(self, state_key: str, ids: TokenIds, block_size: int) -> None:
        """Hash the whole blocks of ``ids`` for a kind of state."""
        self.ids: IntArray = np.ascontiguousarray(as_ids(ids), dtype="<i4")
        self.block_size = as_integer("block_size", block_size, 1)
        self.blocks = [hashlib.sha256(state_key.encode()).digest()]
        for begin in range(0, len(self.ids) - block_size + 1, block_size):
            block = self.ids[begin : begin + block_size]
            self.blocks.append(hashlib.sha256(self.blocks[-1] + block.tobytes()).digest())

    def block_of(self, n: int) -> bytes:
        """Hash of the whole blocks among the first n tokens."""
        return self.blocks[n // self.block_size]

    def key(self, n: int) -> str:
        """32 hexadecimal digits for the first n tokens."""
        rest = self.ids[n - n % self.block_size : n]
        return hashlib.sha256(self.block_of(n) + rest.tobytes()).hexdigest()[:_HEX]
