"""The engine process: models, slots and the loop that serves them. Started by server/process.py, with a socket."""

from __future__ import annotations

import logging
import os
import queue
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from pydflash.draft_model import DraftModel
from pydflash.engine_prefix import prefix_cache_of
from pydflash.errors import PydflashError
from pydflash.prefix_store import PrefixStore
from pydflash.sequence import builtin_drafter_of, open_drafter, open_sequence
from pydflash.server.grammar import GrammarCompiler, GrammarMask
from pydflash.server.messages import (
    Cancel,
    Failure,
    FromWorker,
    NotReady,
    Ready,
    SlotAction,
    Stop,
    Submit,
    ToWorker,
    WorkerSetup,
)
from pydflash.server.scheduler import Scheduler
from pydflash.server.slot import Slot
from pydflash.target_model import TargetModel
from pydflash.text import Tokenizer

log = logging.getLogger(__name__)


class Worker:
    """Reads messages on one thread, compiles grammars on a second, and computes on the one that calls run()."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[ToWorker | tuple[Submit, GrammarMask | None]] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._preparing: set[int] = set()  # requests whose grammar is being compiled

    def run(self) -> None:
        """Open what the first message names, then serve until Stop or the end of the connection."""
        setup = self._connection.recv()
        if not isinstance(setup, WorkerSetup):
            raise TypeError("the first message is no WorkerSetup")
        logging.getLogger("pydflash").setLevel(setup.log_level)
        with ExitStack() as resources:
            try:
                tokenizer, scheduler, ready = self._open(setup, resources)
            except PydflashError as error:
                self._send(NotReady(type(error).__name__, error.message))
                return
            self._send(ready)
            scheduler.report()
            threading.Thread(target=self._read, args=(tokenizer,), daemon=True, name="reader").start()
            self._serve(scheduler)

    def _open(self, setup: WorkerSetup, resources: ExitStack) -> tuple[Tokenizer, Scheduler, Ready]:
        options = setup.engine
        target = resources.enter_context(
            TargetModel.open(
                setup.model,
                options.device,
                n_threads=options.n_threads,
                embedding=options.embedding,
                pack_weights=options.pack_weights,
            )
        )
        path: str | os.PathLike[str] | None = setup.draft
        if path == "auto":
            path = builtin_drafter_of(target)
        draft: DraftModel | None = None
        if path is not None:
            draft = resources.enter_context(open_drafter(path, target, options))
        tokenizer = Tokenizer.from_metadata(target.metadata)
        sequences = [open_sequence(target, draft, options, resources) for _ in range(setup.n_slots)]
        first = sequences[0]
        prefix_cache = prefix_cache_of(target, draft, options, first.cache, first.decoder.draft_context)
        if prefix_cache is not None:
            resources.callback(prefix_cache.close)
        slots = [Slot(i, one, tokenizer, options, prefix_cache) for i, one in enumerate(sequences)]
        store = None if setup.slot_folder is None else PrefixStore(setup.slot_folder, target, draft)
        scheduler = Scheduler(slots, self._send, store=store, prefix_cache=prefix_cache, memory_bytes=_resident_bytes)
        decoder = slots[0].sequence.decoder
        ready = Ready(
            drafter="" if path is None else Path(path).name,
            max_width=decoder.max_width,
            memory_bytes=_resident_bytes(),
            device=target.device,
            digest=target.digest,
        )
        return tokenizer, scheduler, ready

    def _serve(self, scheduler: Scheduler) -> None:
        while True:
            wait = not scheduler.busy
            while True:
                try:
                    message = self._inbox.get(block=wait)
                except queue.Empty:
                    break
                wait = False  # what this message changed has to be reported
                if isinstance(message, Stop):
                    return
                if isinstance(message, tuple):
                    self._preparing.discard(message[0].id)
                    scheduler.submit(*message)
                elif isinstance(message, Cancel):
                    if message.id in self._preparing:
                        scheduler.expect_cancelled(message.id)
                    scheduler.cancel(message)
                elif isinstance(message, SlotAction):
                    scheduler.act(message)
            scheduler.advance()

    def _read(self, tokenizer: Tokenizer) -> None:
        with ThreadPoolExecutor(1, "grammar") as compiler:
            try:
                while True:
                    message = self._connection.recv()
                    if isinstance(message, Submit):
                        if message.grammar is None:
                            self._inbox.put((message, None))
                        else:
                            self._preparing.add(message.id)
                            compiler.submit(self._prepare, message, tokenizer)
                    else:
                        self._inbox.put(message)
            except (EOFError, OSError):
                # The server is gone. The engine's thread may be inside a long native call, so nothing is waited for.
                os._exit(0)

    def _prepare(self, submit: Submit, tokenizer: Tokenizer) -> None:
        try:
            if self._compiler is None:
                self._compiler = GrammarCompiler(tokenizer)
            self._inbox.put((submit, self._compiler.mask(submit.grammar or "")))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request hears of it
            self._preparing.discard(submit.id)
            message = error.message if isinstance(error, PydflashError) else str(error)
            self._send(Failure(submit.id, type(error).__name__, message))

    def _send(self, message: FromWorker) -> None:
        with self._send_lock:
            self._connection.send(message)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(descriptor: int) -> None:
    """Serve the socket with this number until the other side closes it."""
    # The server ends this process; a signal to the whole group must not, or running requests could not be finished.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        Worker(Connection(descriptor)).run()
    except (BrokenPipeError, ConnectionResetError):
        log.info("the server closed the connection")
    os._exit(0)  # the reader thread still waits for a message


if __name__ == "__main__":
    main(int(sys.argv[1]))
