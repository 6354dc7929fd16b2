#!/usr/bin/env python3
"""Draw the JSON of bench_gpu.py: parts of a step by width, tokens per second by acceptance and by context.

    python plot_bench.py bench.json FOLDER [--title "27B, one H200"]

Writes steps.png, acceptance.png and contexts.png. Needs matplotlib, which the `dev` extra brings.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# Colours that also differ in brightness, for print and for colour-blind readers.
_COLOURS = {
    "draft": "#0072B2",
    "verify": "#56B4E9",
    "accept": "#CC79A7",
    "commit": "#009E73",
    "append": "#E69F00",
    "gap": "#999999",
}


def draw_steps(axes: Axes, data: Mapping[str, Any]) -> None:
    """Stacked parts: as the decoder reports them, and beside it each one alone."""
    reported = {row["width"]: row for row in data["steps"]}
    alone = {row["width"]: row for row in data.get("parts", []) if row["context"] == 0}
    at = range(len(reported))
    for offset, rows, hatch in ((-0.2, reported, None), (0.2, alone, "//")):
        places = [i + offset for i, width in zip(at, reported, strict=True) if width in rows]
        chosen = [rows[width] for width in reported if width in rows]
        floor = [0.0] * len(chosen)
        for name, colour in _COLOURS.items():
            heights = [row.get(f"{name}_ms", 0.0) for row in chosen]
            label = name if hatch is None else None
            axes.bar(
                places, heights, 0.38, floor, color=colour, label=label, hatch=hatch, edgecolor="white", linewidth=0.4
            )
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
    axes.set_xticks(list(at), [str(width) for width in reported])
    axes.set_xlabel("rows of a step (right, hatched: each part alone, device included)")
    axes.set_ylabel("ms")
    axes.legend()


def draw_acceptance(axes: Axes, data: Mapping[str, Any]) -> None:
    """Bars: one request of each kind; a line for plain decoding."""
    rows = data["requests"]
    plain = next((row["tok_s"] for row in rows if row["name"] == "no drafter"), None)
    shown = [row for row in rows if row["name"] != "no drafter"]
    axes.barh([row["name"] for row in shown], [row["tok_s"] for row in shown], color=_COLOURS["draft"])
    for i, row in enumerate(shown):
        axes.annotate(f" {row['tok_s']:.0f}", (row["tok_s"], i), va="center")
    if plain is not None:
        axes.axvline(plain, color="black", linestyle="--", label=f"no drafter: {plain:.0f}")
    for row in best_of_peer(data):
        axes.axvline(
            row["tok_s"],
            color=_COLOURS["append"],
            linestyle=":",
            label=f"llama.cpp, {row['draft']}: {row['tok_s']:.0f}",
        )
    axes.set_xlabel("tokens/s")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3, frameon=False)


def best_of_peer(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """llama.cpp's fastest number of drafts for each drafter."""
    best: dict[str, dict[str, Any]] = {}
    for row in data.get("peer", {}).get("drafted", []):
        if row["tok_s"] > best.get(row["draft"], {"tok_s": 0.0})["tok_s"]:
            best[row["draft"]] = row
    return list(best.values())


def draw_contexts(axes: Axes, data: Mapping[str, Any]) -> None:
    """Plain decoding and prefill over the number of prompt tokens."""
    theirs = data.get("peer", {})
    for rows, label, style in (
        (data["autoregressive"], "pydflash", "o-"),
        (theirs.get("autoregressive", []), "llama.cpp", "s--"),
    ):
        if rows:
            axes.plot([row["context"] for row in rows], [row["tok_s"] for row in rows], style, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens before the first new one")
    axes.set_ylabel("tokens/s without a drafter")
    axes.legend()


DRAWINGS = {
    "steps": (draw_steps, ("steps",)),
    "acceptance": (draw_acceptance, ("requests",)),
    "contexts": (draw_contexts, ("autoregressive",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--title", help="default: the device's name")
    args = parser.parse_args()
    data = json.loads(args.json.read_text(encoding="utf-8"))
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, needed) in DRAWINGS.items():
        if any(section not in data for section in needed):
            print(f"{name}: the run has no such section")
            continue
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        draw(axes, data)
        axes.set_title(args.title or data["run"]["device_description"])
        axes.spines[["top", "right"]].set_visible(False)
        path = args.folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
