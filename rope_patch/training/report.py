"""A comparison in numbers: summary, table for the terminal, Markdown."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from rope_patch.evaluation.report import NumberTable, check_shared
from rope_patch.training.costs import YARDSTICK
from rope_patch.training.records import CostRow, RunRow

BASELINE = "nope"
"""The encoding that says nothing of positions: what is not below it at the training length has taught nothing."""

PANELS = ("frequencies", "bias", "values", "embedding")
"""The slots that tables and charts are ordered by."""


@dataclass(frozen=True)
class Cell:
    """One encoding at one length.

    Attributes:
        mean, spread: of the NLL over the seeds, nats per byte; the spread is the sample standard deviation, NaN of a
            single seed, and the mean NaN where all seeds failed.
        seeds: how many are in the mean.
    """

    mean: float
    spread: float
    seeds: int


@dataclass(frozen=True)
class Entry:
    """One encoding.

    Attributes:
        encoding: as the description names it.
        slot: of `PANELS`, the one that it is shown under.
        parameters: that it brought.
        cells: by length.
        failures: why runs have no number, each reason once.
        below_baseline: whether its mean at the training length is below that of `nope`; None where one is missing.
        cost: None where none was measured.
    """

    encoding: str
    slot: str
    parameters: int
    cells: dict[int, Cell]
    failures: tuple[str, ...]
    below_baseline: bool | None
    cost: CostRow | None


@dataclass(frozen=True)
class Summary:
    """A comparison, encoding by encoding, by slot and then in the order of the rows.

    Attributes:
        entries: one per encoding.
        lengths: in bytes, ascending.
        training_length: L.
        notes: what a reader needs to know beside the numbers, one sentence each.
    """

    entries: tuple[Entry, ...]
    lengths: tuple[int, ...]
    training_length: int
    notes: tuple[str, ...]

    def best(self, length: int) -> float:
        """The lowest mean at a length, NaN where there is none."""
        means = [entry.cells[length].mean for entry in self.entries if length in entry.cells]
        return min((mean for mean in means if not math.isnan(mean)), default=math.nan)


def summarise(rows: Sequence[RunRow], costs: Sequence[CostRow] = ()) -> Summary:
    """Mean and spread over the seeds of every encoding and length.

    Raises:
        EvaluationError: see `check_shared`.
    """
    check_shared("rows", rows, ["settings"])
    lengths = tuple(sorted({row.length for row in rows}))
    training_length = rows[0].training_length
    by_encoding: dict[str, list[RunRow]] = {}
    for row in rows:
        by_encoding.setdefault(row.encoding, []).append(row)
    cells = {spec: {length: _cell(own, length) for length in lengths} for spec, own in by_encoding.items()}
    baseline = cells.get(BASELINE, {}).get(training_length)
    cost_of = {row.encoding: row for row in costs}
    entries = [
        Entry(
            encoding=spec,
            slot=panel_of(own[0].slots),
            parameters=max(row.encoding_parameters for row in own),
            cells=cells[spec],
            failures=tuple(dict.fromkeys(row.failure for row in own if row.failure is not None)),
            below_baseline=_below(cells[spec].get(training_length), None if spec == BASELINE else baseline),
            cost=cost_of.get(spec),
        )
        for spec, own in by_encoding.items()
    ]
    entries.sort(key=lambda entry: PANELS.index(entry.slot))
    return Summary(tuple(entries), lengths, training_length, _notes(rows, cost_of))


def panel_of(slots: Sequence[str]) -> str:
    """The slot that an encoding is shown under; one of several slots under the rarest of them."""
    return next((slot for slot in ("values", "embedding", "bias") if slot in slots), "frequencies")


def _cell(rows: Sequence[RunRow], length: int) -> Cell:
    found = [row.nll for row in rows if row.length == length and row.failure is None]
    mean = statistics.fmean(found) if found else math.nan
    return Cell(mean, statistics.stdev(found) if len(found) > 1 else math.nan, len(found))


def _below(cell: Cell | None, baseline: Cell | None) -> bool | None:
    if cell is None or baseline is None or math.isnan(cell.mean) or math.isnan(baseline.mean):
        return None
    return cell.mean < baseline.mean


def _notes(rows: Sequence[RunRow], costs: Mapping[str, CostRow]) -> tuple[str, ...]:
    row = rows[0]
    seeds = len({row.seed for row in rows})
    plural = "" if seeds == 1 else "s"
    notes = [
        f"trained from scratch at L = {row.training_length} bytes for {row.steps} steps ({row.tokens_seen / 1e6:.2f} "
        f"million bytes), {seeds} seed{plural}, {row.precision}",
        f"NLL in nats per byte of the same last {row.targets} bytes of {row.windows} windows from {row.documents} "
        f"documents, protocol {row.protocol}" + ("; mean ± standard deviation over the seeds" if seeds > 1 else ""),
    ]
    if (states := len({row.code for row in rows})) > 1:
        notes.append(f"the rows were made with {states} states of this library, see `code` and `commit` in each")
    if costs:
        cost = next(iter(costs.values()))
        notes.append(
            f"speed: tokens per second of a training step over those of {YARDSTICK}, taken in turn, median with "
            f"quartiles; memory: bytes {cost.memory_kind} over those of {YARDSTICK} ({cost.device}, threads: "
            f"{cost.threads})"
        )
    return tuple(notes)


def header(summary: Summary) -> list[str]:
    """The columns of the table."""
    lengths = [f"{length / summary.training_length:g}L" for length in summary.lengths]
    costs = ["speed", "memory"] if any(entry.cost for entry in summary.entries) else []
    return ["encoding", "slot", "new parameters", *lengths, "below nope", *costs]


def cells(summary: Summary, entry: Entry) -> list[str]:
    """One row of the table."""
    verdict = {True: "yes", False: "no", None: "-"}[entry.below_baseline]
    costs = [_speed(entry.cost), _memory(entry.cost)] if any(other.cost for other in summary.entries) else []
    numbers = [_number(entry.cells[length], summary.best(length)) for length in summary.lengths]
    return [entry.encoding, entry.slot, f"{entry.parameters:,}", *numbers, verdict, *costs]


def _number(cell: Cell, best: float) -> str:
    if math.isnan(cell.mean):
        return "failed"
    star = "*" if f"{cell.mean:.3f}" == f"{best:.3f}" else ""
    return f"{cell.mean:.3f}{star}" + ("" if math.isnan(cell.spread) else f" ± {cell.spread:.3f}")


def _speed(cost: CostRow | None) -> str:
    if cost is None or cost.failure is not None:
        return "-"
    return f"{cost.relative_speed:.2f}x ({cost.slowest:.2f} to {cost.fastest:.2f})"


def _memory(cost: CostRow | None) -> str:
    return "-" if cost is None or cost.failure is not None else f"{cost.relative_memory:.2f}x"


def markdown(summary: Summary) -> str:
    """The table, with its notes below."""
    columns = header(summary)
    lines = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    lines += [[f"`{name}`", *rest] for name, *rest in (cells(summary, entry) for entry in summary.entries)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {note}" for note in (*summary.notes, *_marks(summary))) + "\n"


def _marks(summary: Summary) -> list[str]:
    failures = [f"{entry.encoding}: {reason}" for entry in summary.entries for reason in entry.failures]
    return ["* the best of its column", *failures]


def table(summary: Summary) -> Group:
    """Something that `rich` prints, in the width that the terminal has."""
    # two facts to a cell, so that it fits 80 columns
    timed = any(entry.cost for entry in summary.entries)
    columns = [*header(summary)[3 : 3 + len(summary.lengths)], "below\nnope", *(["speed\nmemory"] * timed)]
    shown = NumberTable({"encoding\nslot, new parameters": 14}, columns, show_lines=True)
    for entry in summary.entries:
        name, slot, parameters, *rest = cells(summary, entry)
        numbers, costs = rest[: len(summary.lengths) + 1], rest[len(summary.lengths) + 1 :]
        stacked = [number.replace(" ±", "\n±") for number in numbers]
        costs = ["\n".join(cost.partition(" (")[0] for cost in costs)] if timed else []
        first = Text.assemble((name, "bold"), f"\n{slot}, {parameters}")
        shown.add_row(first, *stacked, *costs)
    notes = [Text(note, style="dim") for note in (*_marks(summary), *summary.notes)]
    return Group(Text("Position encodings, trained from scratch", style="bold"), shown, *notes)


def print_table(summary: Summary, console: Console | None = None) -> None:
    """Print `table(summary)`."""
    (console or Console()).print(table(summary))


def to_dict(summary: Summary, curves: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The summary as plain JSON types; NaN becomes null.

    Args:
        summary: of all rows.
        curves: the logs of the runs by encoding and seed.
    """
    encodings = [
        {
            "encoding": entry.encoding,
            "slot": entry.slot,
            "encoding_parameters": entry.parameters,
            "nll": {
                str(length): {"mean": _or_none(cell.mean), "std": _or_none(cell.spread), "seeds": cell.seeds}
                for length, cell in entry.cells.items()
            },
            "below_nope": entry.below_baseline,
            "failures": list(entry.failures),
            "cost": json.loads(entry.cost.to_json()) if entry.cost else None,
            "curves": (curves or {}).get(entry.encoding),
        }
        for entry in summary.entries
    ]
    return {"training_length": summary.training_length, "notes": list(summary.notes), "encodings": encodings}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def write(summary: Summary, folder: Path, curves: Mapping[str, Any] | None = None) -> tuple[Path, Path]:
    """Write `table.md` and `summary.json`.

    Args:
        summary: of all rows.
        folder: to write to.
        curves: see `to_dict`.

    Returns:
        their paths.
    """
    paths = folder / "table.md", folder / "summary.json"
    paths[0].write_text(markdown(summary), encoding="utf-8")
    paths[1].write_text(json.dumps(to_dict(summary, curves), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return paths
