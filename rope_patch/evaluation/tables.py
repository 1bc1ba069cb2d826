"""Rows as a table for the terminal, and what a chart has to show of them, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.lines import CUT, PLAIN
from rope_patch.evaluation.protocols import PROTOCOLS
from rope_patch.evaluation.rows import Row

_NAMES = {PLAIN: "plain checkpoint", CUT: "attention cut at L"}
_REGIMES = {
    "fine-tune": ("†", "made to be fine-tuned; measured here without"),
    "from-scratch": ("‡", "made to be trained with from scratch; measured here without"),
}


@dataclass(frozen=True)
class Grid:
    """Rows by scheme and length, checked to belong together."""

    lines: tuple[str, ...]  # schemes in the order of the rows
    lengths: tuple[int, ...]  # ascending, in tokens
    rows: dict[tuple[str, int], Row]  # a measurement that is not there yet has none

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Grid:
        """Arrange rows.

        Raises:
            EvaluationError: there are none, or they were not measured alike.
        """
        if not rows:
            raise EvaluationError("there are no rows to show")
        shared = {name: name for name in ("protocol", "model", "weights", "texts", "dtype")}
        if targets := PROTOCOLS[rows[0].protocol].shared_targets:
            shared["targets"] = targets
        for field, name in shared.items():
            if len(values := sorted({str(getattr(row, field)) for row in rows})) > 1:
                raise EvaluationError(
                    f"rows of different {name} cannot share a table or a picture: {', '.join(values)}"
                )
        by_cell = {(row.line, row.length): row for row in rows}
        return cls(tuple(dict.fromkeys(row.line for row in rows)), tuple(sorted({n for _, n in by_cell})), by_cell)

    @property
    def any(self) -> Row:
        """A row, for what is the same in all of them."""
        return next(iter(self.rows.values()))

    def nll(self, line: str, length: int) -> float:
        """NLL of one cell, NaN where it is missing."""
        row = self.rows.get((line, length))
        return row.nll if row else math.nan

    def cell(self, line: str, length: int) -> str:
        """NLL of one cell with three decimals, starred where it is the best of its column."""
        known = [nll for each in self.lines if not math.isnan(nll := self.nll(each, length))]
        shown = f"{self.nll(line, length):.3f}".replace("nan", "-")
        return f"{shown}*" if known and shown == f"{min(known):.3f}" else f"{shown} "

    def name(self, line: str) -> str:
        """The line for people, with a dagger where the scheme is made to be fine-tuned."""
        regime = next(row.regime for (of, _), row in self.rows.items() if of == line)
        return " ".join([display_name(line), *_REGIMES.get(regime, ())[:1]])

    def notes(self) -> list[str]:
        """What a reader needs to know beside the numbers, one sentence each."""
        row = self.any
        scored = PROTOCOLS[row.protocol].sentence.format(targets=row.targets, windows=_count(row.windows, "window"))
        short = f"{_count(row.short_documents, 'document')} too short for {self.lengths[-1]} tokens and left out"
        regimes = {row.regime for row in self.rows.values()}
        return [
            f"{scored} from {_count(row.documents, 'document')}, {row.dtype}, protocol {row.protocol}",
            *([short] if row.short_documents else []),
            *(" ".join(note) for regime, note in _REGIMES.items() if regime in regimes),
        ]


def display_name(line: str) -> str:
    """`self_extend:target=auto,window=128` as `self_extend target=auto window=128`; what is in brackets stays."""
    if "[" in line:
        return line
    return _NAMES.get(line) or line.replace(":", " ").replace(",", " ").replace("+", " + ")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def table(rows: Sequence[Row]) -> Group:
    """Schemes by lengths, for `rich` to print: NLL in nats per token, the best of each column starred.

    Raises:
        EvaluationError: the rows are not of one model, text and protocol.
    """
    grid = Grid.of(rows)
    trained = grid.any.training_length
    shown = Table()
    shown.add_column("scheme", overflow="fold")
    for length in grid.lengths:
        shown.add_column(f"{length}\n{length / trained:g}L", justify="right", overflow="fold")
    for line in grid.lines:
        cells = [grid.cell(line, length) for length in grid.lengths]
        styled = [Text(cell, style="bold green" if cell.endswith("*") else "") for cell in cells]
        shown.add_row(Text(grid.name(line), style="dim" if line in _NAMES else ""), *styled)
    title = f"{Path(grid.any.model).name}: NLL in nats per token by context length, L = {trained}"
    notes = [Text(note, style="dim") for note in ("* best of its column", *grid.notes())]
    return Group(Text(title, style="bold"), shown, *notes)


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print `table(rows)`."""
    (console or Console()).print(table(rows))
