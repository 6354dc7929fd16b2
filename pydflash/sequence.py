"""What one sequence needs besides the weights: a cache, a decoder, and what was learnt about widths."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydflash import builtin
from pydflash.decoder import Decoder
from pydflash.draft_context import DraftContext
from pydflash.draft_feature_mirror import DraftFeatureMirror
from pydflash.draft_model import DraftModel
from pydflash.options import EngineOptions, tree_sizes
from pydflash.shape_policy import ShapePolicy
from pydflash.target_cache import TargetCache
from pydflash.target_model import TargetModel
from pydflash.text import ChatTemplate, Tokenizer
from pydflash.warm_up import warm_up

log = logging.getLogger("pydflash.engine")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The state of one sequence. Several may share the weights; one thread at a time for each."""

    cache: TargetCache
    decoder: Decoder
    policy: ShapePolicy | None


def open_sequence(
    target: TargetModel, draft: DraftModel | None, options: EngineOptions, resources: ExitStack
) -> TokenSequence:
    """An empty sequence; ``resources`` owns what has to be closed.

    Raises:
        SnapshotMismatchError, InvalidArgumentError: the drafter does not fit the target, or an option its limits.
        OutOfMemoryError: the caches do not fit.
    """
    capture = () if draft is None else draft.config.target_layer_ids
    trees = () if draft is None else tree_sizes(options)
    cache = resources.enter_context(
        TargetCache(
            target,
            options.n_ctx,
            options.k_type,
            options.v_type,
            max([options.max_verify, *(n + 1 for n in trees)]),
            capture_layers=capture,
            feature_capacity=options.feature_capacity,
            feature_type=options.feature_type,
            fa_window=options.fa_window,
        )
    )
    context: DraftContext | None = None
    mirror: DraftFeatureMirror | None = None
    if draft is not None:
        context = resources.enter_context(
            DraftContext(
                draft, options.draft_k_type, options.draft_v_type, options.draft_full_rows, options.draft_slack
            )
        )
        if draft.device != target.device:
            mirror = DraftFeatureMirror(draft=draft, capacity=cache.feature_capacity, dtype=options.mirror_type)
            resources.enter_context(mirror)
    decoder = resources.enter_context(
        Decoder(
            cache,
            context,
            mirror,
            prefill_chunk=options.prefill_chunk,
            on_draft_failure=options.on_draft_failure,
        )
    )
    policy: ShapePolicy | None = None
    if draft is not None:
        policy = ShapePolicy(min(decoder.max_width, options.max_verify), trees)
    if policy is not None:
        warm_up(decoder, policy, options.n_ctx)
    return TokenSequence(cache, decoder, policy)


def open_drafter(path: str | os.PathLike[str], target: TargetModel, options: EngineOptions) -> DraftModel:
    """The drafter at a path, its weights stored as the options say. Errors are those of DraftModel.open()."""
    weights = options.draft_weights
    if weights == "auto":
        weights = "q8_0" if (options.draft_device or target.device).upper() == "CPU" else "file"
    return DraftModel.open(path, target, options.draft_device, weights=weights)


def default_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model file; None if it has none."""
    source = tokenizer.chat_templates.get("default")
    if source is None:
        return None
    texts = ("" if i is None else tokenizer.piece(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(source, *texts)


def builtin_drafter_of(target: TargetModel) -> Path | None:
    """The drafter made for the built-in target; None, with a line in the log, for another target."""
    if target.path.samefile(builtin.target_path()):
        return builtin.draft_path()
    log.info("no drafter was named for %s: decoding without one", target.path.name)
    return None
