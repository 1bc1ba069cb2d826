"""What was measured of a scheme, read from the rows in `docs/results` when the site is built."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rope_patch.evaluation.scheme_specs import WINDOW, display_name

RESULTS = Path(__file__).resolve().parents[1] / "results"
MULTIPLES = (1, 2, 4, 8)
"""The columns, in training lengths."""

PLACES = {
    "[embedded checkpoint](../../how-to/measure.md)": (
        "demo/perplexity.jsonl",
        "new_schemes/perplexity.jsonl",
        "new_schemes/ms_poe.jsonl",
    ),
    "[its sweep](../../sweep.md)": ("sweep/sweep.jsonl",),
    "[SmolLM2-135M](../../real.md)": ("real/smollm2-135m/perplexity.jsonl",),
    "[TinyLlama-1.1B](../../real.md)": ("real/tinyllama-1.1b/perplexity.jsonl",),
    "[stories15m](../../real.md)": ("real/stories15m/perplexity.jsonl",),
    "[trained from scratch](../../encodings.md), per byte": ("encodings/summary.json",),
}
"""The rows of the table, and the files of their figures."""


class Cell(NamedTuple):
    """NLL in nats per token (per byte from scratch), and its standard deviation over seeds where there are several."""

    nll: float
    spread: float | None = None


def table(name: str) -> str:
    """Loss against length wherever the scheme was measured, above the sliding window on the same text."""
    lines = []
    for where, files in PLACES.items():
        found = {line: cells for file in files for line, cells in losses(file).items()}
        if line := best_line(name, found):
            lines.append(_row(where, f"`{line}`", found[line]))
            if line != WINDOW and WINDOW in found:
                lines.append(_row("", display_name(WINDOW), found[WINDOW]))
    if not lines:
        return "No file of results has this scheme yet."
    columns = " | ".join(f"{k}L" for k in MULTIPLES)
    head = [f"| where | scheme | {columns} |", "|---|---|" + "---:|" * len(MULTIPLES)]
    sentence = "The table shows the NLL of the same tokens at each length, in nats per token."
    return "\n".join([sentence, "", *head, *lines])


def best_line(name: str, found: dict[str, dict[int, Cell]]) -> str | None:
    """The line of a scheme that is best at 4L, alone if it was measured alone."""
    alone = [line for line in found if _schemes(line) == {name}]
    lines = alone or [line for line in found if name in _schemes(line) and "[" not in line]
    return min(lines, key=lambda line: found[line][4].nll if 4 in found[line] else math.inf, default=None)


@cache
def losses(file: str) -> dict[str, dict[int, Cell]]:
    """Every line of a file, by length in training lengths."""
    found: dict[str, dict[int, Cell]] = {}
    text = (RESULTS / file).read_text()
    if file.endswith(".json"):
        cells = json.loads(text)["cells"]
        shortest = min(cell["length"] for cell in cells)
        for cell in cells:
            found.setdefault(cell["encoding"], {})[cell["length"] // shortest] = Cell(cell["mean"], cell["std"])
        return found
    for row in map(json.loads, text.splitlines()):
        if row["nll"] is not None and row["length"] % row["training_length"] == 0:
            found.setdefault(row["line"], {})[row["length"] // row["training_length"]] = Cell(row["nll"])
    return found


def _schemes(line: str) -> set[str]:
    names = {part.partition(":")[0] for part in line.split("+")}
    return names - {"rope"} or names


def _row(where: str, line: str, cells: dict[int, Cell]) -> str:
    shown = [f"{cells[k].nll:.3f}" if k in cells else "" for k in MULTIPLES]
    return f"| {where} | {line} | {' | '.join(shown)} |"
