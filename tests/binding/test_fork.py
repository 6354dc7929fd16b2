"""A child made by fork() cannot use its parent's objects, can drop them, and leaves the parent's alone."""

import os
from collections.abc import Callable

import pytest

Script = Callable[..., object]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

HEAD = """
import os, sys, threading, time, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)  # threads and fork
import pydflash

def child(body):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException as error:
            print("child:", type(error).__name__, error, flush=True)
            os._exit(1)
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
"""

USE = """
target = pydflash.TargetModel.open(n_threads=1)
draft = pydflash.DraftModel.open(None, target)
cache = pydflash.TargetCache(target, 256, capture_layers=draft.config.target_layer_ids)
context = pydflash.DraftContext(draft)
mirror = pydflash.DraftFeatureMirror(draft, capacity=64)
decoder = pydflash.Decoder(cache, context)
file = pydflash.GgufFile.open(target.path)
cache.forward([1, 2, 3])
objects = [file, target, draft, cache, context, mirror, decoder]

def body():
    for call in (
        lambda: file.tensors,
        lambda: target.embed([1]),
        lambda: pydflash.TargetCache(target),
        lambda: pydflash.DraftContext(draft),
        lambda: cache.position,
        lambda: cache.forward([1]),
        lambda: context.append(cache, 0, 3),
        lambda: mirror.sync_tail(cache),
        lambda: decoder.begin(),
        lambda: pydflash.Decoder(cache),
    ):
        try:
            call()
        except pydflash.InvalidArgumentError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("worked in the child")
    assert all(f"of process {os.getppid()}" in repr(thing) for thing in objects)
    cache.cancel()
    for thing in objects:
        thing.close()
        assert thing.closed

assert child(body) == 0
assert child(lambda: None) == 0  # a child that ends without touching them
mirror.sync_tail(cache)
context.append(cache, 0, 3)
assert cache.forward([4]).logits.shape == (1, 4096)
assert cache.position == 4

def fresh():
    with pydflash.TargetModel.open(n_threads=1) as model, pydflash.TargetCache(model, 64) as own:
        own.forward([1, 2])
        assert own.position == 2

assert child(fresh) == 0
for thing in reversed(objects):
    thing.close()
print("parent done")
"""

WHILE_BUSY = """
target = pydflash.TargetModel.open(n_threads=1)
cache = pydflash.TargetCache(target, 8192, capture_layers=())
inside = threading.Event()
ended = []

def work():
    try:
        cache.forward([1] * 8000, "none", chunk=32, progress=lambda _: inside.set())
    except pydflash.Cancelled as error:
        ended.append(error)

thread = threading.Thread(target=work)
thread.start()
inside.wait()

def body():
    try:
        cache.position  # the lock is held by a thread that the child does not have
    except pydflash.InvalidArgumentError:
        pass
    else:
        raise AssertionError("worked in the child")
    cache.close()

begun = time.monotonic()
assert child(body) == 0
assert time.monotonic() - begun < 5.0  # the child waits for no thread of its parent
cache.cancel()
thread.join()
assert ended and 0 <= cache.position < 8000
cache.close()
target.close()
print("parent done")
"""


@pytest.mark.parametrize("source", [USE, WHILE_BUSY], ids=["idle", "busy"])
def test_fork(script: "Callable[[str], object]", source: str) -> None:
    done = script(HEAD + source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent done\n", "")  # type: ignore[attr-defined]
