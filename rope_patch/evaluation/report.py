"""Rows as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols import PROTOCOLS
from rope_patch.evaluation.protocols.base import count
from rope_patch.evaluation.results import Row
from rope_patch.evaluation.specs import CUT, PLAIN

_NAMES = {PLAIN: "plain checkpoint", CUT: "attention cut at L"}


def check_shared(what: str, measured: Sequence[Any], fields: Mapping[str, str] | Sequence[str]) -> None:
    """Refuse to show together what was not measured alike.

    Args:
        what: is shown, as a plural.
        measured: rows, or whatever has the fields.
        fields: that have to be the same in all of them; of a mapping its values are what the fields are called.

    Raises:
        EvaluationError: there is nothing, or a field differs.
    """
    if not measured:
        raise EvaluationError(f"there are no {what} to show")
    names = fields if isinstance(fields, Mapping) else dict(zip(fields, fields, strict=True))
    for field, name in names.items():
        values = sorted({str(getattr(each, field)) for each in measured})
        if len(values) > 1:
            raise EvaluationError(f"{what} of different {name} cannot share a table or a picture: {', '.join(values)}")


@dataclass(frozen=True)
class Grid:
    """Rows by scheme and length, checked to belong together.

    Attributes:
        lines: schemes in the order of the rows.
        lengths: ascending, in tokens.
        rows: by line and length; a measurement that is not there yet has none.
    """

    lines: tuple[str, ...]
    lengths: tuple[int, ...]
    rows: dict[tuple[str, int], Row]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Grid:
        """Arrange rows.

        Raises:
            EvaluationError: see `check_shared`.
        """
        check_shared("rows", rows, ("protocol", "model", "weights", "texts", "dtype"))
        if name_of_targets := PROTOCOLS[rows[0].protocol].shared_targets:
            check_shared("rows", rows, {"targets": name_of_targets})
        return cls(
            lines=tuple(dict.fromkeys(row.line for row in rows)),
            lengths=tuple(sorted({row.length for row in rows})),
            rows={(row.line, row.length): row for row in rows},
        )

    @property
    def any(self) -> Row:
        """A row, for what is the same in all of them."""
        return next(iter(self.rows.values()))

    @property
    def name_of_model(self) -> str:
        """The model without the folders above it."""
        return Path(self.any.model).name

    def nll(self, line: str, length: int) -> float:
        """NLL of one cell, NaN where it is missing."""
        row = self.rows.get((line, length))
        return row.nll if row else math.nan

    def best(self, length: int) -> float:
        """The lowest NLL at one length, NaN where no cell has a number."""
        return min((n for line in self.lines if not math.isnan(n := self.nll(line, length))), default=math.nan)

    def is_best(self, line: str, length: int) -> bool:
        """Whether a cell shows the lowest NLL of its column; equal to three decimals counts."""
        nll = self.nll(line, length)
        return not math.isnan(nll) and cell(nll) == cell(self.best(length))

    def name(self, line: str) -> str:
        """The line for people: spaces for punctuation, a dagger where the scheme is made for fine-tuning."""
        regime = next(row.regime for (of, _), row in self.rows.items() if of == line)
        mark = {"training-free": "", "fine-tune": " †", "from-scratch": " ‡"}[regime]
        return display_name(line) + mark

    def notes(self) -> list[str]:
        """Everything that a reader needs to know beside the numbers, one sentence each."""
        row = self.any
        scored = PROTOCOLS[row.protocol].sentence(row)
        source = f"{scored} from {count(row.documents, 'document')}, {row.dtype}, protocol {row.protocol}"
        short = f"{count(row.short_documents, 'document')} too short for {self.lengths[-1]} tokens and left out"
        regimes = {row.regime for row in self.rows.values()}
        return [
            source,
            *([short] if row.short_documents else []),
            *(["† made to be fine-tuned; measured here without"] if "fine-tune" in regimes else []),
            *(["‡ made to be trained with from scratch; measured here without"] if "from-scratch" in regimes else []),
        ]


def display_name(line: str) -> str:
    """`self_extend:group_size=auto,window=128` as `self_extend group_size=auto window=128`."""
    return _NAMES.get(line) or line.replace(":", " ").replace(",", " ").replace("+", " + ")


def cell(nll: float) -> str:
    """One number of the table."""
    return "-" if math.isnan(nll) else f"{nll:.3f}"


def in_training_lengths(length: int, training_length: int) -> str:
    """A length in multiples of L, such as `4L`."""
    return f"{length / training_length:g}L"


class NumberTable:
    """Names on the left, columns of numbers beside them. Columns that have no room go on below, and none is cut.

    Args:
        names: headers of the columns of words, whose cells fold, with the least width of each.
        numbers: headers of the columns of numbers.
        show_lines: whether rows are ruled apart.
    """

    def __init__(self, names: Mapping[str, int], numbers: Sequence[str], *, show_lines: bool = False) -> None:
        self.names, self.numbers, self.show_lines = dict(names), list(numbers), show_lines
        self.rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: Text | str, style: str = "") -> None:
        """A cell for every column, words first."""
        self.rows.append(([Text(cell) if isinstance(cell, str) else cell for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self._parts(console, options):
            yield self._table(part)

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """The columns of numbers that stand side by side."""
        frame, edge = 3, 1  # a rule and two spaces for every column
        room = options.max_width - edge - sum(width + frame for width in self.names.values())
        parts: list[list[int]] = []
        left = 0
        for number, header in enumerate(self.numbers):
            cells = [Text(header), *(cells[len(self.names) + number] for cells, _ in self.rows)]
            width = frame + max(Measurement.get(console, options, cell).maximum for cell in cells)
            if not parts or width > left:
                parts.append([])
                left = room
            parts[-1].append(number)
            left -= width
        return parts

    def _table(self, part: Sequence[int]) -> Table:
        table = Table(show_lines=self.show_lines)
        for header, width in self.names.items():
            table.add_column(header, overflow="fold", min_width=width)
        for number in part:
            table.add_column(self.numbers[number], justify="right", overflow="fold")
        count = len(self.names)
        for cells, style in self.rows:
            table.add_row(*cells[:count], *(cells[count + number] for number in part), style=style)
        return table


def length_header(length: int, training_length: int) -> str:
    """A length in tokens and in multiples of L, one below the other."""
    return f"{length}\n{in_training_lengths(length, training_length)}"


def table(rows: Sequence[Row]) -> Group:
    """Schemes by lengths: NLL in nats per token, the best of each column bold and starred.

    Args:
        rows: of one model, text and protocol.

    Returns:
        something that `rich` prints, in the width and the colours that the terminal has.

    Raises:
        EvaluationError: see `Grid.of`.
    """
    grid = Grid.of(rows)
    training_length = grid.any.training_length
    shown = NumberTable({"scheme": 12}, [length_header(length, training_length) for length in grid.lengths])
    for line in grid.lines:
        cells = [_styled(grid, line, length) for length in grid.lengths]
        shown.add_row(Text(grid.name(line), style="dim" if line in _NAMES else ""), *cells)
    title = Text(f"{grid.name_of_model}: NLL in nats per token by context length, L = {training_length}", style="bold")
    notes = [Text(note, style="dim") for note in ("* best of its column", *grid.notes())]
    return Group(title, shown, *notes)


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print `table(rows)`."""
    (console or Console()).print(table(rows))


def _styled(grid: Grid, line: str, length: int) -> Text:
    best = grid.is_best(line, length)
    return Text(cell(grid.nll(line, length)) + ("*" if best else " "), style="bold green" if best else "")
