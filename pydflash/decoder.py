"""Decoder: the token loop over one cache; a step is one native call."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import numpy as np

from pydflash._ffi import (
    NULL,
    CData,
    MaskCall,
    MaskFn,
    ProgressCall,
    TokenIds,
    as_c_array,
    as_ids,
    c_list,
    check,
    ffi,
    lib,
    text_of,
)
from pydflash._handle import NativeHandle, use, use_all
from pydflash.draft_context import DraftContext
from pydflash.draft_feature_mirror import DraftFeatureMirror
from pydflash.errors import InvalidArgumentError
from pydflash.options import MAX_LOGPROBS, DraftFailure, SamplingOptions, as_choice, as_integer
from pydflash.prefix_snapshot import PrefixSnapshot
from pydflash.results import DecoderStats, Progress, StepReason, StepResult
from pydflash.target_cache import TargetCache

__all__ = ["Decoder", "MaskFn"]

_REASONS: Final[dict[int, StepReason]] = {
    lib.DFLASH_STOP_NONE: "none",
    lib.DFLASH_STOP_TOKEN: "stop",
    lib.DFLASH_STOP_BUDGET: "budget",
}
_SAMPLING: Final = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "penalty_last_n", "ignore_eos"),
)
_COUNTS: Final = ("position", "room", "prompt_tokens", "emitted", "steps", "draft_steps", "proposed", "accepted")
_TIMES: Final = ("prefill_ms", "draft_ms", "verify_ms", "accept_ms", "commit_ms", "append_ms")


class Decoder(NativeHandle):
    """Prefill, then steps that emit tokens, with or without a drafter.

    A step verifies proposals and draws tokens; what it accepted is committed by the next step or by settle(), so that a
    caller may still cut it. Every draw depends on (seed, position) alone, so a drafter changes the speed and not the
    text, up to rounding between batch sizes.

    While the decoder lives, its cache, context and mirror may be used between its calls only. It keeps them alive. One
    thread at a time: a second one waits; cancel() may be called beside any call. Ctrl-C stops a prefill before its next
    chunk, and a step when it returns.
    """

    def __init__(
        self,
        cache: TargetCache,
        context: DraftContext | None = None,
        mirror: DraftFeatureMirror | None = None,
        *,
        prefill_chunk: int = 512,
        on_draft_failure: DraftFailure = "error",
    ) -> None:
        """Make a decoder that goes on from what the cache holds.

        Args:
            cache: with a drafter, one that captures the drafter's layers.
            context: of the drafter; None: no drafter.
            mirror: carries the features when the drafter is on another device than the cache.
            prefill_chunk: most prompt tokens of one forward.
            on_draft_failure: "error" raises it, "autoregressive" logs it and goes on without the drafter.

        Raises:
            SnapshotMismatchError: the cache captures other layers, or a mirror is needed.
            InvalidArgumentError: an option is outside its limits.
        """
        options = ffi.new("dflash_decoder_options *")
        lib.dflash_decoder_options_init(options)
        options.prefill_chunk = as_integer("prefill_chunk", prefill_chunk, 1)
        options.autoregressive_on_draft_failure = (
            as_choice("on_draft_failure", on_draft_failure, DraftFailure) == "autoregressive"
        )
        out = ffi.new("dflash_decoder **")
        optional = [part for part in (context, mirror) if part is not None]
        with use_all(cache, *optional) as (cache_ptr, *parts, err):
            context_ptr = parts.pop(0) if context is not None else NULL
            mirror_ptr = parts.pop(0) if mirror is not None else NULL
            status = lib.dflash_decoder_new(out, cache_ptr, context_ptr, mirror_ptr, options, err)
            check(status, err, "decoder_new")
        self._cache = cache
        self._context = context
        self._result = ffi.new("dflash_step_result *")
        self._c_state = ffi.new("dflash_decoder_state *")
        self._logprobs: int | None = None
        self._adopt(out[0], lib.dflash_decoder_free, cache, context, mirror, exclusive=True)

    def _facts(self) -> str:
        return f"over {self._cache.capacity} tokens, {'no' if self._context is None else 'with a'} drafter"

    def _state_text(self) -> str:
        with self._use() as (ptr, err):
            s = self._read_state(ptr, err)
            return f"position {s.position}, {s.emitted} emitted in {s.steps} steps"

    @property
    def cache(self) -> TargetCache:
        """The cache it decodes into."""
        return self._cache

    @property
    def draft_context(self) -> DraftContext | None:
        """The drafter's context; None without a drafter."""
        return self._context

    def begin(self, sampling: SamplingOptions | None = None, stop_ids: TokenIds | None = None) -> int:
        """Start a request: commits what is pending, clears the statistics and a cancel request; the cache stays.

        Args:
            sampling: how to draw; None: the defaults. ``stop``, ``max_tokens`` and ``width`` are for the caller.
            stop_ids: ids that end the request; None: the model's.

        Returns:
            The seed in use, drawn here if the options name none.

        Raises:
            InvalidArgumentError: an option or id does not fit the model.
        """
        sampling = SamplingOptions() if sampling is None else sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        options = ffi.new("dflash_sampling_options *")
        lib.dflash_sampling_options_init(options)
        for name in _SAMPLING:
            setattr(options, name, getattr(sampling, name))
        options.seed = seed
        bias_ids, bias_values = c_list("int32_t[]", list(sampling.logit_bias)), NULL
        if sampling.logit_bias:
            bias_values = ffi.new("float[]", list(sampling.logit_bias.values()))
        options.bias_ids, options.bias_values, options.n_bias = bias_ids, bias_values, len(sampling.logit_bias)
        options.logprobs = sampling.logprobs is not None
        options.n_logprobs = sampling.logprobs or 0
        if stop_ids is not None:
            ids = as_ids(stop_ids, "stop_ids")
            # NULL would mean the model's ids, so an empty list needs an address too.
            c_ids = ffi.new("int32_t[]", [*ids.tolist(), 0])
            options.stop_ids, options.n_stop_ids = c_ids, len(ids)
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_begin(ptr, options, err), err, "decoder_begin")
            self._logprobs = sampling.logprobs
        return seed

    def prefill(
        self,
        ids: TokenIds,
        budget: int,
        progress: Callable[[Progress], object] | None = None,
        *,
        mask: MaskFn | None = None,
    ) -> StepResult:
        """Append prompt tokens and draw the first one.

        Args:
            ids: int32 [n]; n may be 0 if a token of an earlier call is still to be consumed, or if the cache has the
                logits of its newest token.
            budget: most tokens to emit in this request from here on, at least 1.
            progress: called before each chunk and at the end, in tokens; raising from it stops the call.
            mask: says which tokens may be drawn, as for step(); excludes progress.

        Raises:
            CapacityError: the tokens do not fit.
            InvalidArgumentError: begin() was not called, or an id is outside the vocabulary.
            Cancelled: cancel() was called. Then, as after an exception from ``progress`` or Ctrl-C, the chunks that
                were done stay: position says how many tokens.
        """
        tokens = as_ids(ids)
        c_ids = as_c_array(tokens, "int32_t[]")
        result = self._result
        if mask is not None:
            if progress is not None:
                raise InvalidArgumentError("progress", progress, "None together with a mask")
            with MaskCall(mask) as call, self._use() as (ptr, err):
                status = lib.dflash_decoder_prefill_masked(
                    ptr, c_ids, len(tokens), budget, call.function, call.user, result, err
                )
                call.check(status, err, "decoder_prefill")
                return self._step_result(ptr, err)
        with ProgressCall(progress) as call, self._use() as (ptr, err):
            status = lib.dflash_decoder_prefill(ptr, c_ids, len(tokens), budget, call.function, call.user, result, err)
            call.check(status, err, "decoder_prefill")
            return self._step_result(ptr, err)

    def feed(self, ids: TokenIds, progress: Callable[[Progress], object] | None = None) -> None:
        """Append part of a prompt, at least one token, whose rest follows; nothing is drawn.

        Chunks begin at the first token given: parts that are multiples of ``prefill_chunk`` are computed in the same
        pieces as the whole. Errors are those of prefill().
        """
        tokens = as_ids(ids)
        c_ids = as_c_array(tokens, "int32_t[]")
        with ProgressCall(progress) as call, self._use() as (ptr, err):
            status = lib.dflash_decoder_feed(ptr, c_ids, len(tokens), call.function, call.user, err)
            call.check(status, err, "decoder_feed")

    def drop_anchor(self) -> None:
        """Forget the token that was emitted and not consumed: the next ones come right behind what the cache holds.

        What is pending is committed first.
        """
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_drop_anchor(ptr, err), err, "decoder_drop_anchor")

    def catch_up(self) -> None:
        """Let the drafter read the features that wait for it, so that a snapshot needs none of them.

        They wait while decoding plainly. Errors of the drafter as in step().
        """
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_catch_up(ptr, err), err, "decoder_catch_up")

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """Go on from a snapshot that knows its tokens: cache, context and history are replaced.

        Raises:
            InvalidArgumentError: its tokens are not known.
            SnapshotMismatchError, CapacityError, UnsupportedModelError: as PrefixSnapshot.restore_into(); then nothing
                changed.
        """
        with use(snapshot) as (source, _), self._use() as (ptr, err):
            check(lib.dflash_decoder_restore(ptr, source, err), err, "decoder_restore")
        self._cache._note_changed()  # noqa: SLF001 - the cache's verifies are stale now

    def step(self, width: int, budget: int, *, mask: MaskFn | None = None) -> StepResult:
        """Commit the step before, then emit at least one token and at most ``budget``.

        Args:
            width: rows of the target forward: the token to consume and width - 1 proposals. It is cut to max_width,
                to the budget and to the room that is left; 1 decodes plainly.
            budget: most tokens to emit, at least 1.
            mask: called on this thread for each row that is drawn from, with the tokens drawn by this call so far; sets
                the bits of those that may come next. Proposals stand while they are draws that it allows, so the text
                is that of masked plain decoding. An exception from it stops the call, whose tokens are dropped: reset()
                the decoder then.

        Raises:
            CapacityError: the context is full.
            Cancelled: cancel() was called since begin().
            InvalidArgumentError: there was no prefill, or the mask leaves no token.
            DeviceError, InternalError: the computation failed; also the drafter's unless that is not to be an error.
        """
        if mask is not None:
            with MaskCall(mask) as call, self._use() as (ptr, err):
                status = lib.dflash_decoder_step_masked(ptr, width, budget, call.function, call.user, self._result, err)
                call.check(status, err, "decoder_step")
                return self._step_result(ptr, err)
        with self._use() as (ptr, err):
            status = lib.dflash_decoder_step(ptr, width, budget, self._result, err)
            if status != 0:
                check(status, err, "decoder_step")
            return self._step_result(ptr, err)

    def step_tree(self, n_nodes: int, budget: int) -> StepResult:
        """step() with a tree of ``n_nodes`` proposals, of which one path can be accepted.

        The tree holds the drafter's first choices as a chain and, in the order of the drafter's probabilities, other
        choices beside it. Near the end of the context, where the rows do not fit, a chain takes its place.

        Args:
            n_nodes: 1 to max_tree; the target forward has one row more.
            budget: most tokens to emit, at least 1.

        Raises:
            InvalidArgumentError: n_nodes is outside its limits, or there was no prefill.
            CapacityError, Cancelled, DeviceError, InternalError: as for step().
        """
        n_nodes = as_integer("n_nodes", n_nodes, 1)
        with self._use() as (ptr, err):
            status = lib.dflash_decoder_step_tree(ptr, n_nodes, budget, self._result, err)
            if status != 0:
                check(status, err, "decoder_step_tree")
            return self._step_result(ptr, err)

    def set_min_chance(self, min_chance: float) -> None:
        """End chains early from the next step on, in front of the first proposal that hardly stands a chance.

        The chance to be reached and right is the drafter's own word; what is left is rounded up to 2, 4, 8, ... rows.
        Without effect on the tokens, and with drafters that do not say what their proposals are worth
        (``DraftModel.config.heads.says_chances``).

        Args:
            min_chance: 0 to below 1; 0, as at first: chains never end early.

        Raises:
            InvalidArgumentError: it is outside its limits.
        """
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_min_chance_set(ptr, min_chance, err), err, "decoder_min_chance_set")

    def settle(self, n_keep: int = -1) -> None:
        """Commit the step before, its first ``n_keep`` tokens only (negative: all), and wait for the device.

        Then cache, features and drafter agree on position, and the last kept token is the one to be consumed next.
        Nothing when all is committed.

        Raises:
            InvalidArgumentError: n_keep is 0, or more than the step emitted.
        """
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_settle(ptr, n_keep, err), err, "decoder_settle")

    def cancel(self) -> None:
        """Make a running prefill stop before its next chunk, and the next step fail; begin() clears it.

        Any thread; nothing on a closed decoder.
        """
        self._cancel(lib.dflash_decoder_cancel, "decoder_cancel")

    def reset(self) -> None:
        """Forget the sequence: cache, drafter, mirror and history."""
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_reset(ptr, err), err, "decoder_reset")

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, the one that is still to be consumed last."""
        n = ffi.new("int64_t *")
        with self._use() as (ptr, err):
            check(lib.dflash_decoder_tokens(ptr, NULL, 0, n, err), err, "decoder_tokens")
            ids = np.empty(n[0], np.int32)
            c_ids = as_c_array(ids, "int32_t[]", writable=True)
            check(lib.dflash_decoder_tokens(ptr, c_ids, ids.size, n, err), err, "decoder_tokens")
        tokens: list[int] = ids.tolist()
        return tokens

    @property
    def position(self) -> int:
        """Tokens in the cache once the last step is committed."""
        with self._use() as (ptr, err):
            return int(self._read_state(ptr, err).position)

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        with self._use() as (ptr, err):
            return int(self._read_state(ptr, err).room)

    @property
    def max_width(self) -> int:
        """Most rows a step can have: 1 without a drafter."""
        with self._use() as (ptr, err):
            return int(self._read_state(ptr, err).max_width)

    @property
    def max_tree(self) -> int:
        """Most nodes of a tree: 0 without a drafter."""
        with self._use() as (ptr, err):
            return int(self._read_state(ptr, err).max_tree)

    @property
    def has_drafter(self) -> bool:
        """False also after the drafter failed; stats.draft_disabled then says why."""
        with self._use() as (ptr, err):
            return bool(self._read_state(ptr, err).has_drafter)

    @property
    def stats(self) -> DecoderStats:
        """Totals since begin()."""
        with self._use() as (ptr, err):
            s = self._read_state(ptr, err)
            slots = next((i for i, n in enumerate(s.proposed_by_slot) if n == 0), len(s.proposed_by_slot))
            return DecoderStats(
                proposed_by_slot=tuple(s.proposed_by_slot[0:slots]),
                accepted_by_slot=tuple(s.accepted_by_slot[0:slots]),
                has_drafter=bool(s.has_drafter),
                max_width=s.max_width,
                draft_disabled=text_of(s.draft_disabled),
                **{name: getattr(s, name) for name in _COUNTS},
                **{name: getattr(s, name) for name in _TIMES},
            )

    def _read_state(self, ptr: CData, err: CData) -> CData:
        check(lib.dflash_decoder_state_get(ptr, self._c_state, err), err, "decoder_state_get")
        return self._c_state

    def _step_result(self, ptr: CData, err: CData) -> StepResult:
        r = self._result
        n = r.n_tokens
        logprobs = None if self._logprobs is None else tuple(ffi.unpack(r.logprobs, n))
        return StepResult(
            tuple(ffi.unpack(r.tokens, n)),
            logprobs,
            self._top_logprobs(ptr, n, err) if self._logprobs else None,
            r.width,
            r.n_proposed,
            r.n_accepted,
            _REASONS[r.reason],
            r.draft_ms,
            r.verify_ms,
            r.accept_ms,
            r.commit_ms,
            r.append_ms,
            r.tree,
            r.depth,
            r.n_chain,
            r.n_chain_accepted,
        )

    def _top_logprobs(self, ptr: CData, n_tokens: int, err: CData) -> tuple[tuple[tuple[int, float], ...], ...]:
        ids, values = ffi.new("int32_t[]", MAX_LOGPROBS), ffi.new("float[]", MAX_LOGPROBS)
        n = ffi.new("int64_t *")
        tops = []
        for i in range(n_tokens):
            status = lib.dflash_decoder_top_logprobs(ptr, i, ids, values, MAX_LOGPROBS, n, err)
            check(status, err, "decoder_top_logprobs")
            tops.append(tuple(zip(ffi.unpack(ids, n[0]), ffi.unpack(values, n[0]), strict=True)))
        return tuple(tops)
