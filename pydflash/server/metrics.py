"""Counters of the server in Prometheus form: llama.cpp's names, and our own behind ``pydflash:``."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pydflash.server.messages import Done, Status

_STEP_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All figures of one server; they survive a restart of the engine. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._llama = _LlamaMetrics(self.registry)
        registry = self.registry
        self._accepted_length = Histogram(
            "pydflash:accepted_length", "Tokens that a step emitted", buckets=range(1, 17), registry=registry
        )
        self._step_ms = Histogram("pydflash:step_ms", "Engine time of a step", buckets=_STEP_MS, registry=registry)
        self._queue = Histogram(
            "pydflash:queue_seconds", "Time until a slot took a request", buckets=_SECONDS, registry=registry
        )
        self._first = Histogram(
            "pydflash:first_token_seconds", "Time to the first token", buckets=_SECONDS, registry=registry
        )
        self._proposed_at = Counter(
            "pydflash:proposed_per_pos", "Proposals verified, by position", ["position"], registry=registry
        )
        self._hits = Counter("pydflash:prefix_hits", "Requests that reused a prefix", registry=registry)
        self._misses = Counter(
            "pydflash:prefix_misses", "Requests that did not, and why", ["reason"], registry=registry
        )
        self._finished = Counter("pydflash:requests", "Requests by how they ended", ["finish"], registry=registry)
        self._responses = Counter("pydflash:responses", "HTTP responses", ["path", "status"], registry=registry)
        self._restarts = Gauge("pydflash:engine_restarts", "Times the engine was started again", registry=registry)
        self._memory = Gauge("pydflash:engine_memory_bytes", "Resident memory of the engine", registry=registry)
        self._held = Gauge("pydflash:slot_tokens", "Tokens that a slot holds", ["slot"], registry=registry)

    def note_done(self, done: Done) -> None:
        """A request is over, cancelled ones included."""
        stats, times = done.event.stats, done.times
        self._finished.labels(done.event.finish_reason or "none").inc()
        self._queue.observe(times.queue_ms / 1e3)
        if done.slot < 0 or stats is None:
            return
        self._llama.note_done(done)
        if done.times.prompt_ms and stats.emitted:
            self._first.observe((times.queue_ms + times.prompt_ms) / 1e3)
        for ms, n in zip(times.step_ms, times.step_tokens, strict=True):
            self._step_ms.observe(ms)
            self._accepted_length.observe(n)
        for i, n in enumerate(times.proposed_by_slot):
            self._proposed_at.labels(str(i)).inc(n)
        if done.miss:
            self._misses.labels(done.miss).inc()
        else:
            self._hits.inc()

    def note_failure(self, error: str) -> None:
        """A request failed with an exception of this class."""
        self._finished.labels(f"error: {error}").inc()

    def note_response(self, path: str, status: int) -> None:
        """A response was begun. ``path``: of the route, not what a client wrote."""
        self._responses.labels(path, str(status)).inc()

    def text(self, status: Status, restarts: int) -> bytes:
        """The page that Prometheus reads."""
        self._llama.busy.set(sum(slot.request is not None for slot in status.slots))
        self._llama.deferred.set(status.waiting)
        self._restarts.set(restarts)
        self._memory.set(status.memory_bytes)
        for slot in status.slots:
            self._held.labels(str(slot.slot)).set(slot.held)
        return generate_latest(self.registry)


class _LlamaMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"llamacpp:{name}", text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"llamacpp:{name}", text, registry=registry)

        self.prompt = counter("prompt_tokens", "Prompt tokens evaluated")
        self.cached = counter("prompt_tokens_cached", "Prompt tokens that were reused")
        self.prompt_seconds = counter("prompt_seconds", "Time of prompts")
        self.predicted = counter("tokens_predicted", "Tokens drawn")
        self.predicted_seconds = counter("tokens_predicted_seconds", "Time of drawing")
        self.decodes = counter("n_decode", "Target forwards behind prompts")
        self.longest = gauge("n_tokens_max", "Most tokens that a slot held")
        self.drafted = counter("spec_decode_num_draft_tokens", "Proposals verified")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Proposals accepted")
        self.drafts = counter("spec_decode_num_drafts", "Steps with proposals")
        self.accepted_at = Counter(
            "llamacpp:spec_decode_num_accepted_tokens_per_pos",
            "Proposals accepted, by position",
            ["position"],
            registry=registry,
        )
        self.prompt_rate = gauge("prompt_tokens_seconds", "Prompt tokens a second, of the last request")
        self.predicted_rate = gauge("predicted_tokens_seconds", "Tokens a second, of the last request")
        self.busy = gauge("requests_processing", "Requests that slots run")
        self.deferred = gauge("requests_deferred", "Requests that wait for a slot")
        self.busy_per_decode = gauge("n_busy_slots_per_decode", "Slots of a target forward; each has its own")
        self.busy_per_decode.set(1)
        self._longest = 0

    def note_done(self, done: Done) -> None:
        stats, times = done.event.stats, done.times
        if stats is None:
            return
        evaluated = stats.prompt_tokens - stats.cached_tokens
        self.prompt.inc(max(evaluated, 0))
        self.cached.inc(stats.cached_tokens)
        self.prompt_seconds.inc(times.prompt_ms / 1e3)
        self.predicted.inc(stats.emitted)
        self.predicted_seconds.inc(times.predicted_ms / 1e3)
        self.decodes.inc(stats.steps)
        self.drafted.inc(stats.proposed)
        self.accepted.inc(stats.accepted)
        self.drafts.inc(stats.draft_steps)
        for i, n in enumerate(times.accepted_by_slot):
            self.accepted_at.labels(str(i)).inc(n)
        self._longest = max(self._longest, done.held)
        self.longest.set(self._longest)
        if times.prompt_ms > 0:
            self.prompt_rate.set(evaluated / times.prompt_ms * 1e3)
        if times.predicted_ms > 0 and stats.emitted > 1:
            self.predicted_rate.set((stats.emitted - 1) / times.predicted_ms * 1e3)
