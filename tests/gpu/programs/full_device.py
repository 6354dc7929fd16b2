"""Fill a device, provoke one error of too little memory, and say whether all goes on afterwards.

    python full_device.py DEVICE load|draft|engine|prefill

The last line of the output is a JSON object. A process of its own, so that a crash is seen as one.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

import pydflash

KEEP = 6 << 20  # bytes left over: less than the weights of the built-in target, its cache or a wide prefill need


def free_bytes(device: str) -> int:
    return next(info for info in pydflash.devices() if info.name == device).memory_free


def fill(target: pydflash.TargetModel, device: str, stack: ExitStack) -> None:
    """Caches of falling sizes until nearly nothing is free."""
    fixed = pydflash.TargetCache.plan(target, 256, capture_layers=()).total_bytes
    per_token = (pydflash.TargetCache.plan(target, 2560, capture_layers=()).total_bytes - fixed) // 2304
    for _ in range(40):
        spare = free_bytes(device) - KEEP
        if spare < fixed + 256 * per_token:
            break
        # The driver gives memory out in larger pieces than asked for, so the last bytes take several rounds.
        capacity = max(256, (spare - fixed) // per_token * 9 // 10)
        try:
            stack.enter_context(pydflash.TargetCache(target, min(capacity, 1 << 24), capture_layers=()))
        except pydflash.OutOfMemoryError:
            break


def provoke(what: str, target: pydflash.TargetModel, device: str, cache: pydflash.TargetCache) -> Callable[[], object]:
    ids = np.random.default_rng(0).integers(0, target.n_vocab, 4096).astype(np.int32)
    return {
        "load": lambda: pydflash.TargetModel.open(None, device),
        "draft": lambda: [pydflash.DraftModel.open(None, target) for _ in range(4)],
        "engine": lambda: pydflash.Engine.open(target, None, pydflash.EngineOptions(n_ctx=65536, device=device)),
        "prefill": lambda: cache.forward(ids, chunk=4096),
    }[what]


def main() -> None:
    device, what = sys.argv[1:]
    report: dict[str, object] = {"error": None, "message": "", "works_afterwards": False}
    with pydflash.TargetModel.open(None, device) as target, pydflash.TargetCache(target, 8192) as cache:
        ids = np.arange(300, 340, dtype=np.int32)
        wanted = cache.forward(ids, logits="last").logits
        cache.reset()
        before = free_bytes(device)
        with ExitStack() as hog:
            fill(target, device, hog)
            sys.stdout.write(f"{free_bytes(device)} bytes are left of {before}\n")
            try:
                provoke(what, target, device, cache)()
            except pydflash.PydflashError as error:
                report["error"], report["message"] = type(error).__name__, str(error)
        report["lost_bytes"] = before - free_bytes(device)
        cache.reset()
        report["works_afterwards"] = bool(np.allclose(cache.forward(ids, logits="last").logits, wanted, atol=1e-3))
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
