#!/usr/bin/env python3
"""Time snapshots and restores of a sequence, and hold their bytes against the formula.

    python scripts/bench_snapshot.py --target big.gguf --draft drafter.gguf --device cuda --k-type q8_0 --v-type q8_0

For each position: full snapshot, delta behind the snapshot before, restore, each the median of several rounds, as
milliseconds and bytes per second. "queued" is what take() itself needs, after which a prefill goes on; "done" waits for
the copies. With --stall the prefill of a stretch of chunks is timed with and without a delta behind each, on a CPU in
processor time, which other programs disturb little. A device's link is measured by PyTorch where it is installed, with
pinned memory, in both directions.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pydflash
from pydflash import PrefixSnapshot

_LINK_PROGRAM = """
import json, statistics, torch
n = 1 << 30
host = torch.empty(n, dtype=torch.uint8, pin_memory=True)
there = torch.empty(n, dtype=torch.uint8, device="cuda")
rates = {}
for name, copy in (("to_host", lambda: host.copy_(there, True)), ("to_device", lambda: there.copy_(host, True))):
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(); copy(); end.record(); torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    rates[name] = n / statistics.median(times[2:]) * 1e3
print(json.dumps(rates))
"""
_BLOCK_BYTES = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18}


def link_rates() -> dict[str, float] | None:
    """Bytes per second between pinned host memory and the first GPU; None without PyTorch or a GPU."""
    done = subprocess.run([sys.executable, "-c", _LINK_PROGRAM], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def row_bytes(values: int, kind: str) -> int:
    return values // 32 * _BLOCK_BYTES[kind]


def formula(snapshot: PrefixSnapshot, target: pydflash.TargetModel, draft: pydflash.DraftModel | None) -> int:
    """Bytes that a snapshot should have, from the shapes of the models alone."""
    c, i = target.config, snapshot.info
    attention = sum(kind == "attention" for kind in c.layer_kinds)
    width = c.n_head_kv * c.head_dim
    total = (i.position - i.kv_begin) * attention * (row_bytes(width, i.k_type) + row_bytes(width, i.v_type))
    state = 4 * (c.ssm_dt_rank * c.ssm_d_state**2 + (c.ssm_d_conv - 1) * c.conv_channels)
    total += (c.n_layer - attention) * state
    total += (i.feature_end - i.feature_begin) * len(i.capture_layers) * row_bytes(c.n_embd, i.feature_type or "f32")
    if draft is not None and snapshot.has_draft:
        d = draft.config
        row = row_bytes(d.n_head_kv * d.head_dim, i.draft_k_type) + row_bytes(d.n_head_kv * d.head_dim, i.draft_v_type)
        total += sum(i.draft_cursor - begin for begin in i.draft_rows) * row
    return total + 4 * i.position + (4 * c.n_vocab if snapshot.has_logits else 0)


def median_ms(rounds: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds + 1):  # the first one allocates
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


class Bench:
    def __init__(self, args: argparse.Namespace, target: pydflash.TargetModel, draft: pydflash.DraftModel | None):
        self.args, self.target, self.draft = args, target, draft
        capacity = max(args.positions) + args.stall * args.chunk + 64
        capture = () if draft is None else draft.config.target_layer_ids
        self.cache = pydflash.TargetCache(target, capacity, args.k_type, args.v_type, capture_layers=capture)
        self.context = None if draft is None else pydflash.DraftContext(draft)
        self.decoder = pydflash.Decoder(self.cache, self.context, prefill_chunk=args.chunk)
        self.rng = np.random.default_rng(1)
        self.link = link_rates() if args.device.lower() != "cpu" else None

    def feed(self, n: int) -> float:
        ids = self.rng.integers(0, self.target.n_vocab, n).astype(np.int32)
        begin = time.perf_counter()
        self.decoder.feed(ids)
        return (time.perf_counter() - begin) * 1e3

    def take(self, parent: PrefixSnapshot | None = None) -> PrefixSnapshot:
        tokens = self.decoder.tokens[: self.cache.position]
        return PrefixSnapshot.take(self.cache, self.context, tokens=tokens, parent=parent, place=self.args.place)

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """As an engine does it: into a sequence that was emptied, so that nothing has to be kept aside."""
        self.decoder.reset()
        self.decoder.restore(snapshot)

    def row(self, name: str, n_bytes: int, ms: float, direction: str) -> dict[str, object]:
        rate = n_bytes / ms * 1e3
        out: dict[str, object] = {"what": name, "position": self.cache.position, "bytes": n_bytes, "ms": round(ms, 3)}
        out["GB_s"] = round(rate / 1e9, 2)
        if self.link is not None:
            out["of_link"] = round(rate / self.link[direction], 3)
        return out

    def at(self, position: int) -> list[dict[str, object]]:
        rounds = self.args.rounds
        while self.cache.position < position:
            self.feed(min(position - self.cache.position, 16 * self.args.chunk))
        snapshot = self.take()
        snapshot.wait()
        wanted = formula(snapshot, self.target, self.draft)
        print(f"position {position}: {snapshot.n_bytes} bytes, formula {wanted}", flush=True)
        if snapshot.n_bytes != wanted:
            raise SystemExit(f"bytes differ from the formula by {snapshot.n_bytes - wanted}")
        kept: list[PrefixSnapshot] = []

        def queue() -> None:
            kept[:] = [self.take()]

        queued = 0.0
        times = []
        for _ in range(rounds + 1):
            kept.clear()
            begin = time.perf_counter()
            queue()
            queued = (time.perf_counter() - begin) * 1e3
            kept[0].wait()
            times.append((time.perf_counter() - begin) * 1e3)
        rows = [self.row("snapshot", snapshot.n_bytes, statistics.median(times[1:]), "to_host")]
        rows[0]["queued_ms"] = round(queued, 3)
        kept.clear()
        restore = median_ms(rounds, lambda: self.restore(snapshot))
        rows.append(self.row("restore", snapshot.n_bytes, restore, "to_device"))
        self.feed(self.args.chunk)
        delta = self.take(snapshot)
        delta.wait()
        rows.append(self.row("delta", delta.n_bytes, median_ms(rounds, lambda: self.take(snapshot).wait()), "to_host"))
        chain = median_ms(rounds, lambda: self.restore(delta))
        rows.append(self.row("restore of a delta", delta.total_bytes, chain, "to_device"))
        self.decoder.restore(snapshot)
        return rows

    def stall(self) -> dict[str, object]:
        """Milliseconds of a chunk without, and with, a delta behind it."""
        n, chunk = self.args.stall, self.args.chunk
        base = self.take()
        times: dict[bool, list[float]] = {True: [], False: []}
        clock = time.process_time if self.args.device.lower() == "cpu" else time.perf_counter
        for _ in range(self.args.rounds):
            for taking in (False, True):
                self.decoder.restore(base)
                newest, begin = base, clock()
                for _ in range(n):
                    self.feed(chunk)
                    if taking:
                        newest = self.take(newest)
                newest.wait()
                times[taking].append((clock() - begin) * 1e3 / n)
        self.decoder.restore(base)
        plain, taken = statistics.median(times[False]), statistics.median(times[True])
        return {
            "what": "prefill of a chunk",
            "position": base.position,
            "ms": round(plain, 3),
            "with_delta_ms": round(taken, 3),
            "stall": round(taken / plain - 1, 4),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="GGUF; the built-in pair by default")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per hardware thread")
    parser.add_argument("--place", choices=("host", "device"), default="host")
    parser.add_argument("--k-type", default="q8_0")
    parser.add_argument("--v-type", default="q8_0")
    parser.add_argument("--positions", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stall", type=int, default=8, help="chunks of the prefill that is timed; 0: none")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()
    with pydflash.TargetModel.open(args.target, args.device, n_threads=args.threads) as target:
        path = args.draft
        draft = pydflash.DraftModel.open(path, target) if path is not None or args.target is None else None
        bench = Bench(args, target, draft)
        if bench.link is not None:
            print("link: " + ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in bench.link.items()))
        rows: list[dict[str, object]] = []
        for position in sorted(args.positions):
            rows += bench.at(position)
            if args.stall:
                rows.append(bench.stall())
            for row in rows[-5:]:
                print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps({"link": bench.link, "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
