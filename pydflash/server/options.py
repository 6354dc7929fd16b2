"""What whoever starts a server may choose."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydflash.errors import InvalidArgumentError
from pydflash.options import EngineOptions, SamplingOptions, as_flag, as_integer, as_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is set up. ``engine.n_ctx`` is the context of each slot.

    Attributes:
        model, draft: as Engine.open() takes them.
        engine: options of every slot.
        n_slots: sequences that are decoded side by side, each with its own caches.
        sampling: defaults for fields that a request leaves out.
        host, port: address; port 0 takes a free one.
        alias: names under which the model is listed; the file's name by default.
        api_keys: keys of which a request has to bring one; none: no key is asked for.
        metrics, slots, props: whether GET /metrics, GET /slots and POST /props are there.
        slot_folder: where slots are saved; None: they cannot be.
        max_queue: requests that may wait for a slot; more are refused with 429.
        max_body: most bytes of a request's body.
        max_buffer: most pieces of an answer that wait for a slow reader before its request is cancelled.
        ping_seconds: a stream that is silent for so long gets a comment line; 0: never.
        drain_seconds: how long running requests may go on after SIGTERM.
        web_page: whether there is a page at /.
        cors_origins: origins that browsers may call from; "*": any.
    """

    model: Path | None = None
    draft: str | None = "auto"
    engine: EngineOptions = field(default_factory=EngineOptions)
    n_slots: int = 4
    sampling: SamplingOptions = field(
        default_factory=lambda: SamplingOptions(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    )
    host: str = "127.0.0.1"
    port: int = 8080
    alias: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    metrics: bool = False
    slots: bool = True
    props: bool = False
    slot_folder: Path | None = None
    max_queue: int = 256
    max_body: int = 32 * 2**20
    max_buffer: int = 4096
    ping_seconds: float = 30.0
    drain_seconds: float = 30.0
    web_page: bool = True
    cors_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        as_integer("n_slots", self.n_slots, 1, 256)
        as_integer("port", self.port, 0, 65535)
        as_integer("max_queue", self.max_queue, 0)
        as_integer("max_body", self.max_body, 1024)
        as_integer("max_buffer", self.max_buffer, 1)
        as_number("ping_seconds", self.ping_seconds, 0.0, 86400.0, "0 to 86400")
        as_number("drain_seconds", self.drain_seconds, 0.0, 86400.0, "0 to 86400")
        for name in ("metrics", "slots", "props", "web_page"):
            as_flag(name, getattr(self, name))
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable():
                raise InvalidArgumentError("api_keys", "...", "keys of printable ASCII characters")

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
