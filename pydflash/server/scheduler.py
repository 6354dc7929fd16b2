"""Which slot works next: one step or chunk each, in turn."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from pydflash.errors import BusyError, InvalidArgumentError, PydflashError, UnsupportedModelError
from pydflash.prefix_cache import PrefixCache
from pydflash.prefix_store import PrefixStore
from pydflash.results import GenerationStats, StreamEvent
from pydflash.server.grammar import GrammarMask
from pydflash.server.messages import (
    Cancel,
    Done,
    Failure,
    FromWorker,
    Piece,
    PromptProgress,
    RequestTimes,
    SlotAction,
    SlotAnswer,
    Status,
    Submit,
)
from pydflash.server.slot import Slot, SlotRequest

log = logging.getLogger(__name__)

_STATUS_INTERVAL = 0.1
_NO_STATS = GenerationStats(
    prompt_tokens=0,
    emitted=0,
    steps=0,
    proposed=0,
    accepted=0,
    acceptance_by_slot=(),
    draft_ms=0.0,
    verify_ms=0.0,
    accept_ms=0.0,
    commit_ms=0.0,
    append_ms=0.0,
    prefill_ms=0.0,
    total_ms=0.0,
    drafter="off",
)


class Scheduler:
    """Requests, the slots that run them, and those that wait. One thread at a time.

    A request goes to the slot that it names; otherwise to the idle one that holds the longest part of its prompt, and
    among equals to the one that was idle for longest. Waiting requests start in order of arrival, except that one
    which waits for a certain slot does not hold up the others.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        send: Callable[[FromWorker], None],
        *,
        store: PrefixStore | None = None,
        prefix_cache: PrefixCache | None = None,
        memory_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._slots = list(slots)
        self._send = send
        self._store = store
        self._prefix_cache = prefix_cache
        self._memory_bytes = memory_bytes
        self._waiting: deque[tuple[Submit, GrammarMask | None, float]] = deque()
        self._actions: deque[SlotAction] = deque()
        self._cancelled: set[int] = set()  # before they arrived
        self._turn = 0
        self._status_at = 0.0
        self._changed = True

    @property
    def busy(self) -> bool:
        """True while anything is left to do."""
        return bool(self._waiting or self._actions) or any(slot.request is not None for slot in self._slots)

    def submit(self, submit: Submit, mask: GrammarMask | None) -> None:
        """Queue a request."""
        self._changed = True
        if submit.id in self._cancelled:
            self._cancelled.discard(submit.id)
            self._send(_cancelled_in_queue(submit, 0.0))
            return
        if submit.slot is not None and not 0 <= submit.slot < len(self._slots):
            error = InvalidArgumentError("id_slot", submit.slot, f"0 to {len(self._slots) - 1}")
            self._send(Failure(submit.id, type(error).__name__, error.message))
            return
        self._waiting.append((submit, mask, time.perf_counter()))

    def cancel(self, cancel: Cancel) -> None:
        """End a request, wherever it is; nothing for one that is over."""
        self._changed = True
        for slot in self._slots:
            if slot.submit is not None and slot.submit.id == cancel.id:
                self._cancel_running(slot)
                return
        for entry in self._waiting:
            if entry[0].id == cancel.id:
                self._waiting.remove(entry)
                self._send(_cancelled_in_queue(entry[0], (time.perf_counter() - entry[2]) * 1e3))
                return

    def expect_cancelled(self, request_id: int) -> None:
        """A request that is still being prepared is not wanted any more."""
        self._cancelled.add(request_id)

    def act(self, action: SlotAction) -> None:
        """Queue an action on a slot."""
        self._changed = True
        if not 0 <= action.slot < len(self._slots):
            error = InvalidArgumentError("id_slot", action.slot, f"0 to {len(self._slots) - 1}")
            self._send(SlotAnswer(id=action.id, error=type(error).__name__, message=error.message))
            return
        self._actions.append(action)

    def advance(self) -> None:
        """Start what can start, then let the next busy slot do one chunk or step."""
        self._start_actions()
        self._start_waiting()
        n = len(self._slots)
        for i in range(n):
            slot = self._slots[(self._turn + i) % n]
            if slot.request is not None:
                self._turn = (self._turn + i + 1) % n
                self._advance(slot, slot.request)
                break
        self.report()

    def report(self) -> None:
        """Send a status if it is time for one."""
        now = time.perf_counter()
        if self._changed or now >= self._status_at + _STATUS_INTERVAL:
            self._changed = False
            self._status_at = now
            states = tuple(slot.state() for slot in self._slots)
            kept = None if self._prefix_cache is None else self._prefix_cache.stats
            self._send(Status(states, len(self._waiting), self._memory_bytes(), kept))

    def _start_actions(self) -> None:
        for action in list(self._actions):
            slot = self._slots[action.slot]
            if slot.request is None:
                self._actions.remove(action)
                self._changed = True
                self._send(self._run_action(slot, action))

    def _run_action(self, slot: Slot, action: SlotAction) -> SlotAnswer:
        begun = time.perf_counter()
        try:
            if action.action == "erase":
                n_tokens, n_bytes = slot.erase(), 0
            elif self._store is None:
                raise UnsupportedModelError("slots cannot be saved or restored: no store is configured")
            elif action.action == "save":
                saved = self._store.save(action.name, slot.snapshot())
                n_tokens, n_bytes = saved.n_tokens, saved.n_bytes
            else:
                slot.restore(self._store.load(action.name))
                n_tokens, n_bytes = len(slot.held), self._store.path(action.name).stat().st_size
        except OSError as error:
            return SlotAnswer(id=action.id, error=type(error).__name__, message=f"{action.name}: {error.strerror}")
        except PydflashError as error:
            return SlotAnswer(id=action.id, error=type(error).__name__, message=error.message)
        ms = (time.perf_counter() - begun) * 1e3
        return SlotAnswer(id=action.id, n_tokens=n_tokens, n_bytes=n_bytes, ms=ms)

    def _start_waiting(self) -> None:
        reserved = {action.slot for action in self._actions}
        idle = [slot for slot in self._slots if slot.request is None and slot.index not in reserved]
        for entry in list(self._waiting):
            if not idle:
                return
            submit, mask, arrived = entry
            fits = [slot for slot in idle if submit.slot in (None, slot.index)]
            if not fits:
                continue
            slot = max(fits, key=lambda slot: (slot.reusable(submit.ids), -slot.last_used))
            idle.remove(slot)
            self._waiting.remove(entry)
            self._changed = True
            try:
                slot.begin(submit, mask, (time.perf_counter() - arrived) * 1e3)
            except PydflashError as error:
                self._fail(slot, submit, error)

    def _advance(self, slot: Slot, request: SlotRequest) -> None:
        submit = slot.submit
        if submit is None:
            raise BusyError("a slot runs a request that it does not know")
        fed = request.fed
        try:
            event = request.advance()
        except Exception as error:  # noqa: BLE001 - one request fails, the others go on
            self._fail(slot, submit, error)
            return
        if submit.progress and request.fed != fed:
            ms = (time.perf_counter() - request.begun_at) * 1e3
            total, cached = len(request.ids), request.prefix.n
            self._send(PromptProgress(submit.id, slot.index, total, cached, request.fed, ms))
        if event is None:
            return
        slot.note(event.token_ids)
        if event.finish_reason is None:
            prompt_ms = (request.first_at - request.begun_at) * 1e3
            predicted_ms = (request.last_at - request.first_at) * 1e3
            self._send(Piece(submit.id, slot.index, event, request.prefix.n, prompt_ms, predicted_ms))
        else:
            self._finish(slot, submit, request, event)

    def _finish(self, slot: Slot, submit: Submit, request: SlotRequest, event: StreamEvent) -> None:
        times = request.times(slot.queue_ms)
        try:
            slot.end()
        except PydflashError as error:
            log.warning("slot %d cannot keep its sequence: %s", slot.index, error.message)
            slot.erase()
        self._changed = True
        if event.stats is not None and event.stats.drafter not in ("on", "off"):
            log.info("slot %d: the drafter does not help: %s", slot.index, event.stats.drafter)
        self._send(
            Done(
                id=submit.id,
                slot=slot.index,
                event=event,
                times=times,
                held=len(slot.held),
                miss=slot.miss,
                grammar_stopped=request.grammar_stopped,
            )
        )

    def _cancel_running(self, slot: Slot) -> None:
        submit, request = slot.submit, slot.request
        if submit is None or request is None:
            return
        try:
            event = request.finish("cancelled")
        except PydflashError as error:
            self._fail(slot, submit, error)
            return
        slot.note(event.token_ids)
        self._finish(slot, submit, request, event)

    def _fail(self, slot: Slot, submit: Submit, error: Exception) -> None:
        if not isinstance(error, PydflashError):
            log.error("request %d failed", submit.id, exc_info=error)
        slot.erase()
        self._changed = True
        message = error.message if isinstance(error, PydflashError) else f"{type(error).__name__}: {error}"
        self._send(Failure(submit.id, type(error).__name__, message))


def _cancelled_in_queue(submit: Submit, ms: float) -> Done:
    event = StreamEvent(text="", finish_reason="cancelled", stats=_NO_STATS, seed=submit.options.seed)
    times = RequestTimes(queue_ms=ms, prompt_ms=0.0, predicted_ms=0.0)
    return Done(id=submit.id, slot=-1, event=event, times=times, miss="cancelled")
