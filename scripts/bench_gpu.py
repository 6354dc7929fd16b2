#!/usr/bin/env python3
"""Measure pydflash on one model pair, print tables and write all numbers as JSON; with --vs also llama.cpp's.

    python make_random_pair.py pair --size 27B --acceptance all none --window 0 2048
    python bench_gpu.py --pair pair --device cuda --json bench.json [--vs LLAMA_BIN_DIR] [--quick]

--pair FOLDER takes target.gguf, draft-all.gguf, draft-none.gguf and draft-all-w*.gguf from a folder, where they exist;
--target, --draft, --draft-none and --draft-window name files. What lacks its files is left out. The JSON is rewritten
after every section, so that a run that is cut short leaves what it had.

Sections (--only takes some of them):
    copy        rate of a large device copy, by PyTorch where it is installed
    plain       autoregressive decoding behind contexts of several lengths; prefill
    steps       steps of fixed width: wall clock, its parts as the decoder reports them, work counters
    parts       each part alone, waiting for the device
    requests    whole requests: plain, all drafts accepted, none, and in between by sampling
    window      draft and append of a drafter with sliding windows, by context
    peer        llama.cpp, and our numbers divided by its numbers
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import bench_parts as parts
import bench_peer as peer
from bench_device import measured_copy, used_memory, weight_bytes
from bench_parts import Plan, Prompts, Row
from bench_report import Report, cell, ratios

import pydflash

FULL = Plan(
    contexts=(0, 4096, 16384),
    prefills=(512, 2048, 8192),
    widths=(1, 2, 4, 8, 16),
    trees=(16, 22, 32, 64),
    rates=(0.5, 0.7, 0.8, 0.9),
    short_prompt=64,
    n_new=512,
    n_tokens=128,
    n_steps=24,
    repeats=3,
    prefill_chunk=512,
)
QUICK = Plan(
    contexts=(0, 1024),
    prefills=(512,),
    widths=(1, 4, 16),
    trees=(22,),
    rates=(0.8,),
    short_prompt=64,
    n_new=128,
    n_tokens=64,
    n_steps=8,
    repeats=1,
    prefill_chunk=512,
)
SECTIONS = ("copy", "plain", "steps", "parts", "requests", "window", "peer")


@dataclass(frozen=True)
class Files:
    target: Path
    draft: Path | None
    draft_none: Path | None
    draft_window: Path | None


def find_files(args: argparse.Namespace) -> Files:
    """Named files first, then those of the pair's folder; drafters may be missing, the target may not."""

    def found(named: Path | None, pattern: str) -> Path | None:
        if named is not None or args.pair is None:
            return named
        return next(iter(sorted(args.pair.glob(pattern))), None)

    target = found(args.target, "target.gguf")
    if target is None:
        raise SystemExit("no target: give --target FILE or --pair FOLDER with a target.gguf")
    files = Files(
        target,
        found(args.draft, "draft-all.gguf"),
        found(args.draft_none, "draft-none.gguf"),
        found(args.draft_window, "draft-all-w*.gguf"),
    )
    for path in (files.target, files.draft, files.draft_none, files.draft_window):
        if path is not None and not path.exists():
            raise SystemExit(f"{path} does not exist")
    return files


class Bench:
    """Opened models and what is measured with them."""

    def __init__(self, args: argparse.Namespace, files: Files, report: Report, stack: ExitStack) -> None:
        self.args, self.files, self.report = args, files, report
        self.plan = chosen_plan(args)
        began = time.perf_counter()
        target = pydflash.TargetModel.open(files.target, args.device, n_threads=args.n_threads)
        self.target = stack.enter_context(target)
        self.prompts = Prompts(self.target)
        longest = self.target.config.n_ctx_train or self.plan.capacity
        if self.plan.capacity > longest:
            self.plan = shortened(self.plan, longest)
        self.draft = self._open_draft(stack, files.draft)
        self.draft_none = self._open_draft(stack, files.draft_none)
        self.load_seconds = time.perf_counter() - began
        self._peak = 0

    def _open_draft(self, stack: ExitStack, path: Path | None) -> pydflash.DraftModel | None:
        if path is None:
            return None
        return stack.enter_context(pydflash.DraftModel.open(path, self.target, self.args.draft_device))

    def note_memory(self) -> None:
        self._peak = max(self._peak, used_memory(self.target.device))
        self.report.add("peak_device_bytes", self._peak)

    def meta(self) -> None:
        device = next(d for d in pydflash.devices() if d.name == self.target.device)
        plain, drafted = weight_bytes(self.target, self.draft)
        self.report.add(
            "run",
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "pydflash": pydflash.__version__,
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
                "device": device.name,
                "own_kernel_rows": pydflash.own_kernel_rows(),
                "device_description": device.description,
                "target": repr(self.target),
                "draft": None if self.draft is None else repr(self.draft),
                "n_layer": self.target.config.n_layer,
                "load_seconds": self.load_seconds,
                "weight_bytes_plain": plain,
                "weight_bytes_drafted": drafted,
                "plan": vars_of(self.plan),
                "arguments": sys.argv[1:],
            },
        )
        print(f"{self.target!r}\n{self.draft!r}\non {device.description}, loaded in {self.load_seconds:.1f} s")
        print(f"weights read by a plain step {plain / 1e9:.2f} GB, by a drafted one {drafted / 1e9:.2f} GB")

    def copy(self) -> None:
        rate = None if self.target.device == "CPU" else measured_copy()
        self.report.add("copy", rate)
        print("\ncopy: not measured" if rate is None else f"\ncopy: {float(rate['bytes_per_second']) / 1e12:.2f} TB/s")

    def _add_rates(self, rows: list[Row], time_name: str) -> list[Row]:
        """Weight bytes per second of each row, and their share of the copy rate."""
        plain, drafted = weight_bytes(self.target, self.draft)
        copy = self.report.data.get("copy")
        for row in rows:
            n_bytes = drafted if int(row.get("width") or 1) > 1 else plain
            rate = n_bytes / (float(row[time_name] or 0) / 1e3)
            row["weights_tb_s"] = rate / 1e12
            row["share_of_copy"] = rate / float(copy["bytes_per_second"]) if isinstance(copy, dict) else None
        return rows

    def plain(self) -> None:
        with parts.open_loop(self.target, None, self.plan) as loop:
            rows = parts.autoregressive(loop, self.plan, self.prompts)
            self.report.table("autoregressive", self._add_rates(rows, "step_ms"))
            self.report.table("prefill", parts.prefill(loop, self.plan, self.prompts))
            self.note_memory()
        if self.draft is not None:
            with parts.open_loop(self.target, self.draft, self.plan) as loop:
                self.report.table("prefill_with_drafter", parts.prefill(loop, self.plan, self.prompts))
                self.note_memory()

    def steps(self) -> None:
        with parts.open_loop(self.target, self.draft, self.plan) as loop:
            rows = parts.steps(loop, self.plan, self.prompts)
            self.report.table("steps", self._add_rates(rows, "wall_ms"), ("slowest_ms", "accepted_per_step"))
            self.note_memory()

    def parts(self) -> None:
        if self.draft is None:
            return
        with parts.open_loop(self.target, self.draft, self.plan) as loop:
            self.report.table("parts", parts.isolated_parts(loop, self.plan, self.prompts, self.plan.contexts))
            self.note_memory()

    def requests(self) -> None:
        plan, rows = self.plan, []
        options = pydflash.EngineOptions(
            n_ctx=plan.short_prompt + plan.n_new + 32,
            device=self.args.device,
            draft_device=self.args.draft_device,
            n_threads=self.args.n_threads,
            prefill_chunk=plan.prefill_chunk,
            prefix_cache=False,
        )

        def run(engine: pydflash.Engine, name: str, **sampling: float | int | None) -> None:
            asked = pydflash.SamplingOptions(max_tokens=plan.n_new, **sampling)  # type: ignore[arg-type]
            rows.append(parts.requests(engine, plan, self.prompts, name, asked))
            self.report.add("requests", rows)
            print(f"  {name}: {cell(rows[-1]['tok_s'])} tok/s", flush=True)

        print("\nrequests, median of each", flush=True)
        with pydflash.Engine.open(self.target, None, options) as engine:
            run(engine, "no drafter")
        if self.draft_none is not None:
            for width in (None, self.draft_none.config.block_size):
                with pydflash.Engine.open(self.target, self.draft_none, options) as engine:
                    run(engine, f"none accepted, width {width or 'chosen'}", width=width)
        if self.draft is not None:
            with pydflash.Engine.open(self.target, self.draft, options) as engine:
                for width in (self.draft.config.block_size, None):
                    run(engine, f"all accepted, width {width or 'chosen'}", width=width)
            self._sampled(run, options)
        self.report.table("requests", rows)
        self.note_memory()

    def _sampled(self, run: Callable[..., None], options: pydflash.EngineOptions) -> None:
        """Acceptance rates in between, where the pair is a made-up one: sampling draws its favourite now and then."""
        with parts.open_loop(self.target, None, self.plan) as loop:
            logits = parts.favourite_logits(loop, self.prompts)
        if logits is None:
            return
        for rate in self.plan.rates:
            with pydflash.Engine.open(self.target, self.draft, options) as engine:
                run(engine, f"rate {rate}", temperature=parts.temperature_for(logits, rate), seed=1)

    def window(self) -> None:
        if self.files.draft_window is None:
            return
        with ExitStack() as stack:
            draft = self._open_draft(stack, self.files.draft_window)
            loop = stack.enter_context(parts.open_loop(self.target, draft, self.plan))
            contexts = tuple(sorted({min(1024, max(self.plan.contexts)), *filter(None, self.plan.contexts)}))
            rows = parts.isolated_parts(loop, self.plan, self.prompts, contexts)
            wide = [row for row in rows if row["width"] == self.plan.widths[-1]]
            for row in wide:
                row["draft_side_ms"] = float(row["draft_ms"] or 0) + float(row["append_ms"] or 0)
            self.report.table("window", wide)
            self.note_memory()

    def peer(self) -> None:
        if self.args.vs is None:
            return
        folder, plan, layers = self.args.vs, self.plan, 0 if self.target.device == "CPU" else 999
        found: dict[str, object] = dict(
            peer.plain(folder, self.files.target, plan.contexts, plan.prefills, plan.n_tokens, layers)
        )
        self.report.add("peer", found)
        rows = []
        log = (self.args.json or Path("bench.json")).with_suffix(".llama-server.log")
        prompts = [self.prompts.take(plan.short_prompt).tolist() for _ in range(2 + plan.repeats)]
        for draft in (self.files.draft, self.files.draft_none):
            for n_max in self.args.peer_n_max if draft is not None else ():
                rows.append(peer.drafted(folder, self.files.target, draft, n_max, prompts, plan.n_new, layers, log))
                found["drafted"] = rows
                self.report.add("peer", found)
        self.report.table("ratios", ratios(self.report.data))


def chosen_plan(args: argparse.Namespace) -> Plan:
    """The usual plan with what the command line changes of it."""
    plan = vars_of(QUICK if args.quick else FULL)
    given = {name: getattr(args, name) for name in plan if getattr(args, name) is not None}
    changed = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Plan(**{**plan, **changed})  # type: ignore[arg-type]


def vars_of(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def shortened(plan: Plan, longest: int) -> Plan:
    """The plan without what a model's context does not hold."""
    extra = plan.capacity - max(*plan.contexts, *plan.prefills)
    fits = [n for n in (*plan.contexts, *plan.prefills) if n + extra <= longest]
    if not fits:
        raise SystemExit(f"the model's context of {longest} tokens is too short to measure anything")
    changed = {
        "contexts": tuple(n for n in plan.contexts if n in fits),
        "prefills": tuple(n for n in plan.prefills if n in fits) or (max(fits),),
    }
    return Plan(**{**vars_of(plan), **changed})  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, metavar="FOLDER")
    for name in ("--target", "--draft", "--draft-none", "--draft-window"):
        parser.add_argument(name, type=Path, metavar="FILE")
    parser.add_argument("--device", default="auto", help="default: %(default)s, the first GPU")
    parser.add_argument("--draft-device", help="default: the target's")
    parser.add_argument(
        "--own-kernel-rows", type=int, metavar="N", help="on CUDA: most rows that own kernels take; 0: ggml's alone"
    )
    parser.add_argument("--n-threads", type=int, default=0, help="CPU threads; default: as many as there are, up to 16")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, one repeat")
    sizes = parser.add_argument_group("what to measure; defaults without and with --quick")
    for name, usual in vars_of(FULL).items():
        several = isinstance(usual, tuple)
        kind = float if name == "rates" else int
        text = f"{usual} / {getattr(QUICK, name)}"
        sizes.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs="+" if several else None, help=text)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    parser.add_argument("--vs", type=Path, metavar="LLAMA_BIN_DIR", help="folder of llama-bench and llama-server")
    parser.add_argument("--peer-n-max", type=int, nargs="+", default=[15, 7], help="its drafts a step")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    files, report = find_files(args), Report(args.json)
    if args.own_kernel_rows is not None:
        pydflash.own_kernel_rows(args.own_kernel_rows)
    with ExitStack() as stack:
        bench = Bench(args, files, report, stack)
        bench.meta()
        bench.note_memory()
        for section in SECTIONS:
            if section in args.only:
                getattr(bench, section)()
    print(f"\npeak device memory {float(str(report.data['peak_device_bytes'])) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
