"""What the server and its engine process tell each other. Small frozen values; no arrays, no code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from pydflash.options import EngineOptions, SamplingOptions
from pydflash.prefix_cache import PrefixCacheStats
from pydflash.results import StreamEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What the engine process opens: the models and ``n_slots`` sequences over them."""

    model: str | None
    draft: str | None
    engine: EngineOptions
    n_slots: int
    slot_folder: str | None
    log_level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request.

    Attributes:
        ids: the whole prompt.
        options: with a seed.
        grammar: what the answer has to match, as llguidance writes it; None: anything.
        cache_prompt: False evaluates the whole prompt.
        slot: the slot that has to run it; None: any.
        progress: True reports each chunk of the prompt.
        max_predict_ms: ends the answer after so long a decoding; None: never.
    """

    id: int
    ids: tuple[int, ...]
    options: SamplingOptions
    grammar: str | None = None
    cache_prompt: bool = True
    slot: int | None = None
    progress: bool = False
    max_predict_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request within one step or chunk; a Done with finish_reason "cancelled" follows."""

    id: int


@dataclass(frozen=True, slots=True)
class SlotAction:
    """ "save", "restore" or "erase" of a slot; a SlotAnswer follows once the slot is idle."""

    id: int
    slot: int
    action: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the process."""


ToWorker: TypeAlias = Submit | Cancel | SlotAction | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The models are open."""

    drafter: str
    max_width: int
    memory_bytes: int
    device: str
    digest: str


@dataclass(frozen=True, slots=True)
class NotReady:
    """The models could not be opened; the process ends."""

    error: str
    message: str


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt has been evaluated."""

    id: int
    slot: int
    total: int
    cached: int
    processed: int
    ms: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer that is not the last one; tokens cached and milliseconds as in its Done."""

    id: int
    slot: int
    event: StreamEvent
    cached: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Of one request, in milliseconds of wall clock, other slots' steps included.

    Attributes:
        queue_ms: until a slot took it; prompt_ms: from then to the first token; predicted_ms: from there to the last.
        step_ms, step_tokens: the engine's own time of each step, and the tokens it gave.
        proposed_by_slot, accepted_by_slot: proposals by distance behind the consumed token.
    """

    queue_ms: float
    prompt_ms: float
    predicted_ms: float
    step_ms: tuple[float, ...] = ()
    step_tokens: tuple[int, ...] = ()
    proposed_by_slot: tuple[int, ...] = ()
    accepted_by_slot: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The last part of an answer, with finish_reason and stats.

    Attributes:
        slot: that ran it; -1: it was cancelled while it waited.
        held: tokens that the slot holds now.
        miss: why nothing of the prompt was cached; "" if something was.
        grammar_stopped: True if the grammar left nothing to add, and no stop token came.
    """

    id: int
    slot: int
    event: StreamEvent
    times: RequestTimes
    held: int = 0
    miss: str = ""
    grammar_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A request failed; ``error`` is the class of the exception."""

    id: int
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAnswer:
    """What a SlotAction did; ``error`` names an exception class, "" if there was none."""

    id: int
    error: str = ""
    message: str = ""
    n_tokens: int = 0
    n_bytes: int = 0
    ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """A slot at one moment. ``request`` is None while it is idle."""

    slot: int
    request: int | None
    held: int
    prompt_tokens: int = 0
    processed: int = 0
    cached: int = 0
    emitted: int = 0
    remaining: int = 0
    speculative: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """All slots, how many requests wait, and what the prefix cache has done (None: there is none).

    Sent when it changes, and at most ten times a second in between.
    """

    slots: tuple[SlotState, ...] = field(default_factory=tuple)
    waiting: int = 0
    memory_bytes: int = 0
    prefix_cache: PrefixCacheStats | None = None


FromWorker: TypeAlias = Ready | NotReady | PromptProgress | Piece | Done | Failure | SlotAnswer | Status
