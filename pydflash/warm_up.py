"""Steps that nobody asked for, so that the first request finds graphs built and knows what each width costs."""

from __future__ import annotations

import time
from typing import Final

from pydflash.decoder import Decoder
from pydflash.options import SamplingOptions
from pydflash.shape_policy import ShapePolicy

_ROUNDS: Final = 4
_SECONDS: Final = 0.5


def warm_up(decoder: Decoder, policy: ShapePolicy, n_ctx: int) -> None:
    """Take a few steps of every width and tree and tell the policy their cost; the decoder is empty afterwards.

    Ends after half a second, whatever has been measured until then: with a model so slow that little was, building a
    graph takes no time worth mentioning and the first steps of a request tell enough. Nothing is done in a context too
    small for it.
    """
    largest_tree = max(policy.trees, default=0)
    if n_ctx <= 1 + sum(policy.widths) + len(policy.trees) * policy.widths[-1] + largest_tree:
        return
    deadline = time.perf_counter() + _SECONDS
    for _ in range(_ROUNDS):
        decoder.reset()
        decoder.begin(SamplingOptions(), stop_ids=[])
        decoder.prefill([0], n_ctx)
        for width in policy.widths:
            begun = time.perf_counter()
            if begun > deadline:
                decoder.reset()
                return
            decoder.step(width, n_ctx)
            decoder.settle()
            policy.measured(width, (time.perf_counter() - begun) * 1e3)
        for n_nodes in policy.trees:
            begun = time.perf_counter()
            if begun > deadline:
                decoder.reset()
                return
            if decoder.step_tree(n_nodes, n_ctx).tree:
                decoder.settle()
                policy.measured_tree(n_nodes, (time.perf_counter() - begun) * 1e3)
    decoder.reset()
