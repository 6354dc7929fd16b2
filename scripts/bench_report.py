"""What bench_gpu.py prints and writes: tables, one JSON file, and ratios to the peer's numbers."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Row = dict[str, float | int | str | None]


class Report:
    """The numbers so far, on the terminal and in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._began = time.monotonic()
        self.data: dict[str, object] = {}

    def add(self, name: str, value: object) -> None:
        self.data[name] = value
        self.data["seconds"] = round(time.monotonic() - self._began, 1)
        if self._path is not None:
            self._path.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    def table(self, name: str, rows: Sequence[Row], leave_out: Sequence[str] = ()) -> None:
        """Keep all columns, print those that are not left out."""
        self.add(name, list(rows))
        print(f"\n{name} ({time.monotonic() - self._began:.0f} s)", flush=True)
        for line in table_lines(rows, leave_out):
            print("  " + line, flush=True)


def table_lines(rows: Sequence[Mapping[str, object]], leave_out: Sequence[str] = ()) -> Iterable[str]:
    """Columns as wide as they need, in the order of the first row."""
    if not rows:
        return
    names = [name for name in rows[0] if name not in leave_out]
    cells = [names, *([cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        yield "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


def ratios(data: Mapping[str, object]) -> list[Row]:
    """Ours over llama.cpp's, above 1 where pydflash is faster."""
    theirs = data.get("peer")
    if not isinstance(theirs, dict):
        return []
    rows: list[Row] = []
    for section, key in (("autoregressive", "context"), ("prefill", "tokens")):
        ours = {row[key]: row["tok_s"] for row in as_rows(data.get(section))}
        both = [row for row in as_rows(theirs.get(section)) if row[key] in ours]
        rows += [ratio_row(f"{section} {row[key]}", ours[row[key]], row["tok_s"]) for row in both]
    requests = {str(row["name"]): row["tok_s"] for row in as_rows(data.get("requests"))}
    for kind in ("all", "none"):
        speeds = [float(row["tok_s"]) for row in as_rows(theirs.get("drafted")) if row["draft"] == f"draft-{kind}.gguf"]
        for name, ours_speed in requests.items():
            if name.startswith(f"{kind} accepted") and speeds:
                rows.append(ratio_row(name, ours_speed, max(speeds)))
    return rows


def as_rows(value: object) -> list[dict[str, float | str]]:
    return value if isinstance(value, list) else []


def ratio_row(name: str, ours: float | str, theirs: float | str) -> Row:
    return {"what": name, "pydflash": float(ours), "llama.cpp": float(theirs), "ratio": float(ours) / float(theirs)}
