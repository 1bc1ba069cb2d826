"""Rows of retrieval as tables for the terminal: schemes by lengths, means over depths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.report import NumberTable, check_shared, display_name, length_header
from rope_patch.evaluation.retrieval.rows import RetrievalRow
from rope_patch.evaluation.specs import PLAIN


@dataclass(frozen=True)
class Grid:
    """Rows by scheme, length and depth, checked to belong together.

    Attributes:
        lines: schemes in the order of the rows.
        lengths: ascending, in tokens.
        depths: ascending.
        rows: by line, length and depth; a measurement that is not there yet has none.
    """

    lines: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    rows: dict[tuple[str, int, float], RetrievalRow]

    @classmethod
    def of(cls, rows: Sequence[RetrievalRow]) -> Grid:
        """Arrange rows.

        Raises:
            EvaluationError: see `check_shared`; also where other prompts were asked at the same place.
        """
        check_shared("rows", rows, ("task", "model", "weights", "trials", "span", "seed", "dtype"))
        asked: dict[tuple[int, float], str] = {}
        for row in rows:
            if asked.setdefault((row.length, row.depth), row.prompts) != row.prompts:
                raise EvaluationError(
                    f"rows of different prompts at {row.length} tokens and depth {row.depth:g} cannot share a table or "
                    "a picture"
                )
        return cls(
            lines=tuple(dict.fromkeys(row.line for row in rows)),
            lengths=tuple(sorted({row.length for row in rows})),
            depths=tuple(sorted({row.depth for row in rows})),
            rows={(row.line, row.length, row.depth): row for row in rows},
        )

    @property
    def any(self) -> RetrievalRow:
        """A row, for what is the same in all of them."""
        return next(iter(self.rows.values()))

    def column(self, line: str, length: int) -> list[RetrievalRow]:
        """The rows of one scheme at one length, by depth."""
        return [row for depth in self.depths if (row := self.rows.get((line, length, depth)))]

    def mean(self, line: str, length: int, which: Callable[[RetrievalRow], bool] = lambda _: True) -> float:
        """Mean accuracy over the depths that are meant, NaN where there is none.

        Args:
            line: the scheme.
            length: in tokens.
            which: whether a row is meant; default all.
        """
        return _mean([row.accuracy for row in self.column(line, length) if which(row)])

    def control(self, line: str, length: int) -> float:
        """Accuracy with nothing hidden, NaN where the task has no such thing."""
        return _mean([row.control_accuracy for row in self.column(line, length) if row.control_accuracy is not None])

    @property
    def has_control(self) -> bool:
        """Whether the questions were asked with nothing hidden as well."""
        return any(row.control_accuracy is not None for row in self.rows.values())

    def title(self) -> str:
        """The task and the model, and that a synthetic task is one."""
        row = self.any
        task = {"passkey": "Passkey retrieval", "spans": "Retrieval of repeated spans, a synthetic task"}[row.task]
        return f"{task}: {Path(row.model).name}, trained at L = {row.training_length}"

    def unit(self) -> str:
        """What the accuracy is a share of."""
        row = self.any
        if row.task == "passkey":
            return f"Share of five-digit keys that greedy decoding says, {row.trials} prompts a cell, {row.dtype}"
        return (
            f"Share of the last three quarters of spans of {row.span} tokens that is the likeliest token, "
            f"{row.trials} prompts a cell, {row.dtype}"
        )

    def doubts(self) -> list[str]:
        """What keeps the numbers from saying what they seem to say, a sentence each."""
        row = self.any
        short = [length for length in self.lengths if length <= row.training_length]
        if row.task != "passkey" or PLAIN not in self.lines or not short:
            return []
        if max(self.mean(PLAIN, length) for length in short) > 0:
            return []
        return [
            "The plain checkpoint finds no key even within its training length: it cannot do the task, and the numbers "
            "say nothing of the schemes. Task 'spans' is for small checkpoints."
        ]


def tables(rows: Sequence[RetrievalRow]) -> Group:
    """Schemes by lengths: over all depths, over those that attention cut at L does not see, and the control.

    Args:
        rows: of one task, model and set of prompts.

    Returns:
        something that `rich` prints, in the width and the colours that the terminal has.

    Raises:
        EvaluationError: see `Grid.of`.
    """
    grid = Grid.of(rows)
    parts: list[RenderableType] = [
        Text(grid.title(), style="bold"),
        Text(grid.unit(), style="dim"),
        _table(grid, "all depths", grid.mean),
    ]
    if any(row.far for row in rows):
        parts.append(_table(grid, "farther than L", lambda line, length: grid.mean(line, length, _is_far)))
    if grid.has_control:
        parts.append(_table(grid, "control", grid.control))
    notes = [
        "all depths: mean over all of them. farther than L: over the depths that attention cut at L sees nothing of.",
        *(
            ["control: the same questions with nothing hidden; retrieval is what lies above."]
            if grid.has_control
            else []
        ),
        *grid.doubts(),
    ]
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def print_tables(rows: Sequence[RetrievalRow], console: Console | None = None) -> None:
    """Print `tables(rows)`."""
    (console or Console()).print(tables(rows))


def percent(share: float) -> str:
    """One number of the tables and of the heat maps, in percent."""
    return "-" if math.isnan(share) else f"{100 * share:.0f}"


def _is_far(row: RetrievalRow) -> bool:
    return row.far


def _table(grid: Grid, name: str, value: Callable[[str, int], float]) -> NumberTable:
    shown = NumberTable({name: 14}, [length_header(length, grid.any.training_length) for length in grid.lengths])
    for line in grid.lines:
        shown.add_row(display_name(line), *(percent(value(line, length)) for length in grid.lengths))
    return shown


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
