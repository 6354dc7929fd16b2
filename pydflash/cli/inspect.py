"""pydflash inspect"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pydflash.cli import flags
from pydflash.cli.terminal import size
from pydflash.draft_context import DraftContext
from pydflash.draft_model import DraftModel
from pydflash.errors import NotFoundError, PydflashError
from pydflash.gguf_file import GgufFile
from pydflash.options import EngineOptions
from pydflash.target_cache import TargetCache
from pydflash.target_model import LayerKind, TargetConfig, TargetModel

_DRAFTERS = frozenset({"dflash", "qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft"})
_REFUSED = 1


@dataclass(slots=True)
class Report:
    """What is known of a model: facts and sizes by name, in the order to show them."""

    path: Path
    facts: dict[str, object] = field(default_factory=dict)
    tensor_bytes: dict[str, int] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            **self.facts,
            "tensor_bytes": self.tensor_bytes,
            "memory_bytes": self.memory_bytes,
            "refused": self.refused,
        }


def inspect(
    file: Annotated[Path, typer.Argument(help="GGUF file, or a drafter's Hugging Face folder.", show_default=False)],
    ctx_size: flags.CtxSize = 4096,
    cache_type_k: flags.TypeK = "f16",
    cache_type_v: flags.TypeV = "f16",
    model: flags.Model = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", "-d", help="Plan memory for this drafter too.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a model file holds, the memory it needs, and whether it can be run.

    Of a target it reads the metadata and one or two layers, whatever its size. A drafter is checked against its target,
    --model, which is loaded for that. The exit status is 1 if the model would be refused.

    \b
    Examples:
      pydflash inspect Qwen3.5-27B-Q4_K_M.gguf --ctx-size 32768 --cache-type-k q8_0 --cache-type-v q8_0
      pydflash inspect drafter.gguf --model Qwen3.5-27B-Q4_K_M.gguf
    """
    options = flags.engine_options(ctx_size, "cpu", 0, cache_type_k, cache_type_v)
    if not file.exists():
        raise NotFoundError(f"{file}: no such file or folder")
    report = Report(file)
    architecture = "" if file.is_dir() else _read_file(file, report)
    try:
        if file.is_dir() or architecture in _DRAFTERS:
            _inspect_drafter(report, model, options)
        else:
            _inspect_target(report, options, draft)
    except PydflashError as error:
        report.refused.append(error.message)
    if as_json:
        print(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _print(report)
    if report.refused:
        raise typer.Exit(_REFUSED)


def _read_file(path: Path, report: Report) -> str:
    """What the file itself says; its architecture."""
    with GgufFile.open(path) as file:
        architecture = file.metadata.get("general.architecture", "")
        report.facts["architecture"] = architecture
        report.facts["name"] = file.metadata.get("general.name", "")
        report.facts["tensors"] = len(file.tensors)
        by_type: Counter[str] = Counter()
        for tensor in file.tensors:
            by_type[tensor.type] += tensor.n_bytes
        report.tensor_bytes = dict(by_type.most_common())
        return architecture if isinstance(architecture, str) else ""


def _inspect_target(report: Report, options: EngineOptions, draft: Path | None) -> None:
    with _open_layer(report.path, 0) as target:
        config = target.config
        capture: tuple[int, ...] = ()
        if draft is not None:
            capture = _planned_drafter(report, draft, options)
        elif config.n_layer > 1:
            capture = target.default_capture_layers(min(5, config.n_layer))
        report.facts |= {
            "layers": config.n_layer,
            "layer_kinds": dict(Counter(config.layer_kinds)),
            "layer_order": _runs(config.layer_kinds),
            "multi_token_prediction_blocks_skipped": config.n_layer_nextn,
            "embedding": config.n_embd,
            "feed_forward": config.n_ff,
            "heads": {"query": config.n_head, "key_value": config.n_head_kv, "size": config.head_dim},
            "vocabulary": config.n_vocab,
            "trained_context": config.n_ctx_train,
            "experts": {"all": config.n_expert, "used": config.n_expert_used} if config.is_moe else None,
            "stop_ids": sorted(target.stop_ids),
            "capture_layers": list(capture),
        }
    report.memory_bytes |= _target_memory(report.path, config, options, len(capture) if draft is not None else 0)
    report.memory_bytes["weights_file"] = sum(report.tensor_bytes.values())
    _judge_context(report, config, options)


def _open_layer(path: Path, layer: int) -> TargetModel:
    """All checks of the file, and the weights of one layer."""
    return TargetModel.open(path, layers=(layer, layer + 1), load_output=False, embedding="host")


def _target_memory(path: Path, config: TargetConfig, options: EngineOptions, n_taps: int) -> dict[str, int]:
    """Bytes of a cache for the whole model: layers of one kind are alike, so one of each tells."""
    sums: Counter[str] = Counter()
    for kind, count in Counter(config.layer_kinds).items():
        layer = config.layer_kinds.index(kind)
        with _open_layer(path, layer) as one:
            plan = TargetCache.plan(
                one,
                options.n_ctx,
                options.k_type,
                options.v_type,
                capture_layers=(layer,),
                feature_capacity=options.feature_capacity,
                feature_type=options.feature_type,
            )
        for name in ("k_bytes", "v_bytes", "recurrent_bytes", "conv_bytes"):
            sums[name.removesuffix("_bytes")] += count * getattr(plan, name)
        sums["rotation"] = max(sums["rotation"], plan.rotation_bytes)
        sums["features"] = n_taps * plan.feature_bytes
    return {name: n for name, n in sums.items() if n}


def _planned_drafter(report: Report, draft: Path, options: EngineOptions) -> tuple[int, ...]:
    """Add a drafter's memory; the layers it captures."""
    with TargetModel.open(report.path, embedding="host") as target, DraftModel.open(draft, target) as drafter:
        report.memory_bytes |= _draft_memory(drafter, options)
        return drafter.config.target_layer_ids


def _draft_memory(drafter: DraftModel, options: EngineOptions) -> dict[str, int]:
    """Weights and context of a drafter. The context is small, so it is made to see what it takes."""
    with DraftContext(
        drafter, options.draft_k_type, options.draft_v_type, options.draft_full_rows, options.draft_slack
    ) as context:
        return {"drafter_weights": drafter.config.weight_bytes, "draft_context": context.state.memory_bytes}


def _judge_context(report: Report, config: TargetConfig, options: EngineOptions) -> None:
    if 0 < config.n_ctx_train < options.n_ctx:
        report.facts["note"] = f"trained for {config.n_ctx_train} tokens; {options.n_ctx} may give poor text"


def _inspect_drafter(report: Report, model: Path | None, options: EngineOptions) -> None:
    with (
        TargetModel.open(model, embedding="host") as target,
        DraftModel.open(report.path, target) as drafter,
    ):
        config = drafter.config
        report.facts |= {
            "form": config.form,
            "target": str(target.path),
            "layers": config.n_layer,
            "embedding": config.n_embd,
            "feed_forward": config.n_ff,
            "heads": {"query": config.n_head, "key_value": config.n_head_kv, "size": config.head_dim},
            "block_size": config.block_size,
            "proposals": config.n_proposals,
            "mask_token_id": config.mask_token_id,
            "capture_layers": list(config.target_layer_ids),
            "windows": list(config.windows),
            "causal": list(config.causal),
            "rope_theta": config.rope_theta,
            "output_head": "its own" if config.has_own_head else "the target's",
        }
        report.memory_bytes = _draft_memory(drafter, options)


def _runs(kinds: tuple[LayerKind, ...]) -> str:
    """3 recurrent, 1 attention, 3 recurrent ... with repetitions folded."""
    runs = [f"{len(list(group))} {kind}" for kind, group in groupby(kinds)]
    period = runs[:2]
    if len(runs) > 2 and len(runs) % 2 == 0 and runs == period * (len(runs) // 2):
        return f"({', '.join(period)}) x {len(runs) // 2}"
    return ", ".join(runs)


def _print(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(str(report.path), style="bold", markup=False)
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.facts.items():
        if value not in (None, "", [], 0):
            facts.add_row(name.replace("_", " "), _text_of(value))
    console.print(facts)
    for title, sizes in (("in the file, by type", report.tensor_bytes), ("memory", report.memory_bytes)):
        if sizes:
            table = Table(title, "size", box=None, pad_edge=False)
            for name, n in sizes.items():
                table.add_row(name.replace("_", " "), size(n))
            console.print(table)
    for reason in report.refused:
        console.print(f"refused: {reason}", style="red", markup=False)


def _text_of(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{item} {key}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
