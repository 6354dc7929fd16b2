"""The interpreter ends quietly with status 0, whatever is alive, running or half made."""

from collections.abc import Callable

import pytest

OPEN = """
import sys, threading, time
import pydflash
target = pydflash.TargetModel.open(n_threads=1)
draft = pydflash.DraftModel.open(None, target)
cache = pydflash.TargetCache(target, 4096, capture_layers=draft.config.target_layer_ids)
context = pydflash.DraftContext(draft)
decoder = pydflash.Decoder(cache, context)
"""

ALIVE = """
file = pydflash.GgufFile.open(target.path)
mirror = pydflash.DraftFeatureMirror(draft)
decoder.begin()
decoder.prefill([1, 2, 3], 100)
decoder.step(16, 100)
verify = cache.verify([1, 2])
"""

ALIVE_IN_A_CYCLE = """
class Holder:
    pass

holder = Holder()
holder.me, holder.decoder, holder.cache = holder, decoder, cache
target.holder = holder
"""

INSIDE_GENERATION = """
def tokens():
    decoder.begin(pydflash.SamplingOptions(ignore_eos=True))
    yield from decoder.prefill([1, 2, 3], 4000).tokens
    while True:
        yield from decoder.step(16, 4000).tokens

for i, token in enumerate(tokens()):
    if i == 20:
        sys.exit(0)
"""

INSIDE_A_CALLBACK = """
def progress(report):
    if report.done > 0:
        sys.exit(0)
    time.sleep(0.06)

cache.forward([1] * 2000, chunk=100, progress=progress)
"""

FAILED_CONSTRUCTORS = """
for make in (
    lambda: pydflash.TargetCache(target, 0),
    lambda: pydflash.TargetCache(target, 1 << 24, "f32", "f32", capture_layers=(99,)),
    lambda: pydflash.TargetModel.open("missing"),
    lambda: pydflash.TargetModel.open(device="toaster"),
    lambda: pydflash.DraftModel.open("missing", target),
    lambda: pydflash.DraftContext(draft, "q4_k"),
    lambda: pydflash.DraftFeatureMirror(capacity=5),
    lambda: pydflash.Decoder(cache, context, prefill_chunk=0),
    lambda: pydflash.GgufFile.open("missing"),
):
    try:
        thing = make()
    except pydflash.PydflashError as error:
        kept = error
    else:
        raise AssertionError(thing)
half = pydflash.TargetCache.__new__(pydflash.TargetCache)
del half
half = pydflash.Decoder.__new__(pydflash.Decoder)
"""

DAEMON_THREAD_IN_A_CALL = """
inside = threading.Event()

def work():
    while True:
        cache.reset()
        cache.forward([1] * 4000, "none", progress=lambda _: inside.set())

threading.Thread(target=work, daemon=True).start()
inside.wait()
"""

DAEMON_THREAD_WITHOUT_CALLBACK = """
def work():
    while True:
        cache.reset()
        cache.forward([1] * 100, "none", chunk=7)

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""

DAEMON_THREAD_IN_STEPS = """
started = threading.Event()

def work():
    while True:
        decoder.reset()
        decoder.begin(pydflash.SamplingOptions(ignore_eos=True))
        decoder.prefill([1, 2, 3], 4000)
        for _ in range(50):
            decoder.step(16, 4000)
            started.set()

threading.Thread(target=work, daemon=True).start()
started.wait()
"""

AN_ERROR_IN_FLIGHT = """
try:
    cache.forward([5000])
except pydflash.InvalidArgumentError as error:
    sys.kept = error
"""


@pytest.mark.parametrize(
    "source",
    [
        ALIVE,
        ALIVE_IN_A_CYCLE,
        INSIDE_GENERATION,
        INSIDE_A_CALLBACK,
        FAILED_CONSTRUCTORS,
        DAEMON_THREAD_IN_A_CALL,
        DAEMON_THREAD_WITHOUT_CALLBACK,
        DAEMON_THREAD_IN_STEPS,
        AN_ERROR_IN_FLIGHT,
    ],
    ids=[
        "alive",
        "cycle",
        "generation",
        "callback",
        "constructors",
        "daemon",
        "daemons-without-callback",
        "daemon-steps",
        "error",
    ],
)
def test_exit(script: "Callable[[str], object]", source: str) -> None:
    done = script(OPEN + source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")  # type: ignore[attr-defined]
