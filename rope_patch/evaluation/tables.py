"""Rows as a table for the terminal, and the values that charts share with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rope_patch.errors import EvaluationError, counted
from rope_patch.evaluation.lines import CUT, PLAIN, REFERENCES, display_name
from rope_patch.evaluation.protocols import PROTOCOLS
from rope_patch.evaluation.rows import Row
from rope_patch.evaluation.standard_errors import FEW, paired_difference, pairs_of, standard_error

_REGIMES = {
    "fine-tune": ("†", "made to be fine-tuned; measured here without"),
    "from-scratch": ("‡", "made to be trained with from scratch; measured here without"),
}

WIDE = 120  # columns of a table without a terminal

SERVED = "served by: config is any server that reads Transformers' rope_parameters, see rope-patch export"


@dataclass(frozen=True)
class Grid:
    """Rows by scheme and length, checked to belong together."""

    lines: tuple[str, ...]  # schemes in the order of the rows
    lengths: tuple[int, ...]  # ascending, in tokens
    rows: dict[tuple[str, int], Row]  # without missing measurements

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Grid:
        """Arrange rows.

        Raises:
            EvaluationError: there are none, or they do not belong together.
        """
        if not rows:
            raise EvaluationError("there are no rows to show")
        shared = {name: name for name in ("protocol", "model", "weights", "texts", "dtype")}
        if targets := PROTOCOLS[rows[0].protocol].shared_targets:
            shared["targets"] = targets
        for field, name in shared.items():
            if len(values := sorted({str(getattr(row, field)) for row in rows})) > 1:
                raise EvaluationError(
                    f"rows with different {name} cannot share a table or a picture: {', '.join(values)}"
                )
        by_cell = {(row.line, row.length): row for row in rows}
        return cls(tuple(dict.fromkeys(row.line for row in rows)), tuple(sorted({n for _, n in by_cell})), by_cell)

    @property
    def any(self) -> Row:
        """Any row, for the fields that all rows share."""
        return next(iter(self.rows.values()))

    def nll(self, line: str, length: int) -> float:
        """NLL of one cell, NaN if it is missing."""
        row = self.rows.get((line, length))
        return row.nll if row else math.nan

    def cell(self, line: str, length: int) -> str:
        """NLL of one cell with three decimals, starred if it is the best of its column and not all are equal."""
        known = [nll for each in self.lines if not math.isnan(nll := self.nll(each, length))]
        shown, best = f"{self.nll(line, length):.3f}".replace("nan", "-"), f"{min(known, default=0):.3f}"
        return f"{shown}*" if shown == best != f"{max(known):.3f}" else f"{shown} "

    def apart(self, line: str, length: int) -> tuple[float, float | None]:
        """NLL minus that of attention cut at L, and the standard error of the difference; NaN if one is missing."""
        row, cut = self.rows.get((line, length)), self.rows.get((CUT, length))
        return paired_difference(row, cut) if row and cut else (math.nan, None)

    def below(self, line: str, length: int, between: str = " ") -> str:
        """The text below a cell: the difference from the cut with its error; for the cut, the error of its loss."""
        row, (difference, error) = self.rows.get((line, length)), self.apart(line, length)
        if row is None:
            return ""
        if line == CUT or math.isnan(difference):
            return plus_minus(standard_error(row.nll_by_document))
        return f"{signed(difference)}{between}{plus_minus(error)}"

    def served(self, line: str) -> str:
        """Other programs that can compute the scheme of a line."""
        served = next(row.served for (of, _), row in self.rows.items() if of == line)
        return "-" if served is None else ", ".join(served) or "this library"

    def name(self, line: str) -> str:
        """The display name of a line, with a dagger if the scheme needs training."""
        regime = next(row.regime for (of, _), row in self.rows.items() if of == line)
        return " ".join([display_name(line), *_REGIMES.get(regime, ())[:1]])

    def _lost_first_tokens(self) -> list[str]:
        """A sentence if attention cut at L is not a valid reference for this checkpoint."""
        cut, trained = self.rows.get((CUT, self.lengths[-1])), self.rows.get((PLAIN, self.any.training_length))
        if not cut or not trained or (cut.texts, cut.protocol) != (trained.texts, trained.protocol):
            return []
        difference, error = paired_difference(cut, trained)
        if error is None or difference < 0.1 or difference < 4 * error:
            return []
        return [
            f"attention cut at L is {signed(difference)} {plus_minus(error)} from the plain checkpoint at L: it has "
            "lost the first tokens, which this checkpoint needs; compare with plain at L, the text cut to L"
        ]

    def notes(self) -> list[str]:
        """The notes below a table, one sentence each."""
        row = max(self.rows.values(), key=lambda row: row.length)
        scored = PROTOCOLS[row.protocol].sentence.format(targets=row.targets, windows=counted(row.windows, "window"))
        regimes = {row.regime for row in self.rows.values()}
        return [
            f"{f'text: {row.text}; ' if row.text else ''}{scored} from {counted(row.documents, 'document')}, "
            f"{row.dtype}, protocol {row.protocol}",
            *([f"standard errors over {pairs_of(row)}"] if row.nll_by_document[1:] else []),
            *shortfalls(row),
            *self._lost_first_tokens(),
            *(" ".join(note) for regime, note in _REGIMES.items() if regime in regimes),
        ]


def shortfalls(row: Row) -> list[str]:
    """The reasons for an uncertain answer, one sentence each: missing or too short documents, or too few windows."""
    asked, short = row.asked or 0, counted(row.short_documents, "document")
    sentences = {
        f"asked for {counted(asked, 'document')}, found {row.documents}": row.documents < asked,
        f"{short} too short for {row.length} tokens and left out": row.short_documents > 0,
        f"only {counted(row.windows, 'window')}: below {FEW} a standard error means little; a longer text, more"
        " documents or fewer targets give more windows": row.windows < FEW,
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def signed(difference: float) -> str:
    """Three decimals, and no minus before a zero."""
    return f"{round(difference, 3) + 0.0:+.3f}"


def plus_minus(error: float | None) -> str:
    """A standard error, or a question mark without one."""
    return "±?" if error is None else f"±{error:.3f}"


def table(rows: Sequence[Row], width: int = WIDE) -> Group:
    """Schemes by lengths, for `rich` to print: NLL in nats per token, with the best of each column starred, and below
    it the difference from attention cut at L with its standard error, on two lines if `width` columns are too few.

    Raises:
        EvaluationError: the rows differ in model, text or protocol.
    """
    grid = Grid.of(rows)
    trained = grid.any.training_length
    known = any(row.served is not None for row in rows)
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("scheme\nserved by" if known else "scheme", overflow="fold")
    between = " " if 30 + 16 * len(grid.lengths) <= width else "\n"
    for length in grid.lengths:
        shown.add_column(f"{length}\n{length / trained:g}L", justify="right", overflow="fold")
    starred = False
    for line in grid.lines:
        cells = []
        for length in grid.lengths:
            cell = grid.cell(line, length)
            best = cell.endswith("*")
            starred |= best
            cells.append(
                Text.assemble((cell, "bold green" if best else ""), "\n", (grid.below(line, length, between), "dim"))
            )
        served = f"\n{grid.served(line)}" if known else ""
        name = Text.assemble((grid.name(line), "dim" if line in REFERENCES else ""), (served, "dim"))
        shown.add_row(name, *cells)
    title = f"{Path(grid.any.model).name}: NLL in nats per token by context length, L = {trained}"
    errors = "the standard error of each loss"
    if CUT in grid.lines:
        errors = "loss minus that of attention cut at L, ± the standard error of this difference"
    notes = [*(["* best of its column"] if starred else []), f"below each loss: {errors}", *grid.notes()]
    if known:
        notes.append(SERVED)
    return Group(Text(title, style="bold"), shown, *(Text(note, style="dim") for note in notes))


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print `table(rows)`."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDE)
    console.print(table(rows, console.width))
