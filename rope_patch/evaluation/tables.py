"""Rows as a table for the terminal, and values that charts share with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rope_patch.data.windows import FEW
from rope_patch.errors import EvaluationError, counted
from rope_patch.evaluation.effective_length import NEAR_NOTHING, SHARE, effective_length
from rope_patch.evaluation.row import Row, by_line
from rope_patch.evaluation.scheme_specs import COMPARED, NEAR, TRUNCATED, WINDOW, display_name, in_a_sentence
from rope_patch.evaluation.standard_errors import (
    FEW_TOKENS,
    is_below,
    loss_error,
    paired_difference,
    pairs_of,
    tells_nothing,
)
from rope_patch.evaluation.tasks.perplexity import PROTOCOLS
from rope_patch.evaluation.verdict import copies, with_text_cut

_REGIMES = {
    "fine-tune": ("†", "made to be fine-tuned; measured here without"),
    "from-scratch": ("‡", "made for training from scratch; measured here without"),
}

LOST_MARK = "§"  # marks the sliding window that lost its sinks
LOST = 0.1  # nats above truncated text from which on the sliding window counts as another model
WIDE = 120  # columns of a table without a terminal


def print_table(rows: Sequence[Row], console: Console | None = None, what: str = "the answers") -> None:
    """Print `table(rows)`."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDE)
    console.print(table(rows, console.width, what))


def table(rows: Sequence[Row], width: int = WIDE, what: str = "the answers") -> RenderableType:
    """Build the table of schemes by lengths, for `rich` to print: losses, or shares of correct answers if the task has
    them.

    Args:
        width: width of the terminal in columns.
        what: the noun whose share the task gives, `Task.what`.

    Raises:
        EvaluationError: there are no rows, or they do not belong together.
    """
    return losses(rows, width) if not rows or math.isnan(rows[0].share) else answers(rows, what)


# --- losses -----------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """A line of a table: a scheme, and the step of its training, if there is one."""

    line: str
    step: int | None


@dataclass(frozen=True)
class Grid:
    """A table of losses by series and length, after a check that the rows belong together."""

    series: tuple[Series, ...]  # lines in the order of the rows, the steps of each ascending
    lengths: tuple[int, ...]  # ascending, in tokens
    rows: dict[tuple[Series, int], Row]  # without missing measurements

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Grid:
        """Arrange rows by series and length.

        Raises:
            EvaluationError: there are no rows, or they do not belong together.
        """
        if not rows:
            raise EvaluationError("there are no rows to show")
        rows = with_text_cut(rows)
        shared = {name: name for name in ("protocol", "model", "weights", "texts", "dtype")}
        if rows[0].step is not None:
            del shared["weights"]  # a training changes them
        protocol = PROTOCOLS.get(rows[0].protocol or "")
        if protocol and protocol.shared_targets:
            shared["targets"] = protocol.shared_targets
        for field, name in shared.items():
            if len(values := sorted({str(getattr(row, field)) for row in rows})) > 1:
                raise EvaluationError(
                    f"rows with different {name} cannot share a table or a picture: {', '.join(values)}"
                )
        cells = {(Series(row.line, row.step), row.length): row for row in rows}
        lines = list(by_line(rows))
        series = sorted({one for one, _ in cells}, key=lambda one: (lines.index(one.line), one.step or 0))
        return cls(tuple(series), tuple(sorted({length for _, length in cells})), cells)

    @property
    def any(self) -> Row:
        """An arbitrary row, for the fields that all rows share."""
        return next(iter(self.rows.values()))

    @property
    def baseline(self) -> str:
        """The line that losses are compared with."""
        protocol = PROTOCOLS.get(self.any.protocol or "")
        chosen = protocol.baseline if protocol else WINDOW
        return TRUNCATED if chosen == WINDOW and self.lost_its_sinks else chosen

    def row(self, series: Series | str, length: int) -> Row | None:
        """The row of one cell; None if it was not measured. Without a step it is the row before any training."""
        if isinstance(series, str):
            series = next((one for one in self.series if one.line == series), Series(series, None))
        return self.rows.get((series, length))

    def cell(self, series: Series, length: int) -> str:
        """Format the NLL of one cell with three decimals, with a star if it is below every other cell of its column by
        more than noise.
        """
        row = self.row(series, length)
        rivals = [self.row(one, length) for one in self.series if one != series and one.line != NEAR]
        others = [rival for rival in rivals if rival and not math.isnan(rival.loss)]
        best = row and series.line != NEAR and others and all(is_below(row, other, len(others)) for other in others)
        shown = f"{row.loss:.3f}".replace("nan", "-") if row else "-"
        return f"{shown}*" if best else f"{shown} "

    def apart(self, series: Series, length: int) -> tuple[float, float | None]:
        """The NLL minus the baseline's NLL, and the standard error of the difference; NaN if either NLL is missing."""
        row, cut = self.row(series, length), self.row(self.baseline, length)
        return paired_difference(row, cut) if row and cut else (math.nan, None)

    def below(self, series: Series, length: int, between: str = " ") -> str:
        """The text below a cell: its difference from the baseline with the standard error; for the baseline, the error
        of its loss.
        """
        row, (difference, error) = self.row(series, length), self.apart(series, length)
        if row is None:
            return ""
        if series.line == self.baseline or math.isnan(difference):
            return plus_minus(loss_error(row))
        return f"{signed(difference)}{between}{plus_minus(error)}"

    def steps(self, line: str) -> list[int]:
        """The training steps after which a line was measured, ascending."""
        return [one.step for one in self.series if one.line == line and one.step is not None]

    def name(self, series: Series) -> str:
        """The name of a series, with its step, and with a dagger if the scheme needs training and has had none."""
        if series.step:
            return f"{display_name(series.line)}, {counted(series.step, 'step')}"
        regime = next(row.regime for (one, _), row in self.rows.items() if one == series)
        lost = series.line == WINDOW and self.lost_its_sinks
        name = " ".join([display_name(series.line), *_REGIMES.get(regime, ())[:1], *([LOST_MARK] if lost else [])])
        return f"{name}, before" if len(self.steps(series.line)) > 1 else name

    @cached_property
    def lost_its_sinks(self) -> bool:
        """Whether the sliding window is a poor reference, because the model needs the first tokens of a text.

        Source: Xiao et al., 2309.17453 (attention sinks).
        """
        cut, text_cut = (self.row(line, self.lengths[-1]) for line in (WINDOW, TRUNCATED))
        if not cut or not text_cut:
            return False
        difference, error = paired_difference(cut, text_cut)
        return error is not None and difference >= max(LOST, 4 * error)

    def _doubts(self, row: Row) -> Iterator[str]:
        """Doubts about the table, one sentence each: few tokens, and references that are missing or mean nothing; `row`
        is its longest.
        """
        if row.chosen_share is not None:
            count = counted(row.scored_tokens or 0, "token")
            few = f"; below {FEW_TOKENS} nothing is claimed" if tells_nothing(row) else ""
            share = f"{row.chosen_share:.1%} of the last {row.targets} of the windows"
            yield f"{count}, {share}{few}; others: the rest of these"
        protocol, trained = PROTOCOLS.get(row.protocol or "last"), row.training_length
        cut, text_cut, near = (self.row(line, row.length) for line in (WINDOW, TRUNCATED, NEAR))
        if protocol and TRUNCATED in protocol.references and not text_cut and (row.targets or 0) > trained:
            yield f"no line for truncated text: {trained} tokens have no room for {row.targets} targets"
        if cut and text_cut and self.lost_its_sinks:
            yield (
                f"{LOST_MARK} the sliding window is {_apart(cut, text_cut)} from truncated text: it has lost the "
                "first tokens, which this checkpoint needs"
            )
        schemes = [other for other in self.rows.values() if other.line not in COMPARED]
        if near and text_cut and not copies(near, text_cut, schemes):
            yield (
                f"this means nothing: with the passage inside L the plain checkpoint predicts its copy "
                f"{_apart(near, text_cut)} from truncated text, so it cannot copy"
            )

    def notes(self) -> list[str]:
        """The notes below a table, one sentence each."""
        row = max(self.rows.values(), key=lambda row: row.length)
        protocol = PROTOCOLS.get(row.protocol or "")
        sentence = protocol.sentence if protocol else "NLL of the same {tokens} tokens"
        windows = counted(row.windows or 0, "window")
        scored = sentence.format(targets=row.targets, windows=windows, tokens=row.scored_tokens)
        settings = [row.dtype, *([f"protocol {row.protocol}"] if protocol else [])]
        regimes = {row.regime for row in self.rows.values() if not row.step}
        return [
            f"{f'text: {row.text}; ' if row.text else ''}{scored} from "
            + ", ".join(filter(None, [counted(row.documents or 0, "document"), *settings])),
            *([f"standard errors over {pairs_of(row)}"] if row.nll_by_document[1:] else []),
            *shortfalls(row),
            *self._doubts(row),
            *(" ".join(note) for regime, note in _REGIMES.items() if regime in regimes),
        ]


def shortfalls(row: Row) -> list[str]:
    """The reasons for an uncertain answer, one sentence each: missing or too short documents, or too few windows."""
    asked, documents, windows = row.asked or 0, row.documents or 0, row.windows or FEW
    short = counted(row.short_documents or 0, "document")
    sentences = {
        f"asked for {counted(asked, 'document')}, found {documents}": documents < asked,
        f"{short} too short for {row.length} tokens and left out": bool(row.short_documents),
        f"only {counted(windows, 'window')}: below {FEW} a standard error means little; a longer text, more"
        " documents or fewer targets give more windows": windows < FEW,
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def signed(difference: float) -> str:
    """Format a number with its sign and three decimals; zero has no minus."""
    return f"{round(difference, 3) + 0.0:+.3f}"


def plus_minus(error: float | None) -> str:
    """Format a standard error, or a question mark without one."""
    return "±?" if error is None else f"±{error:.3f}"


def _apart(row: Row, reference: Row) -> str:
    difference, error = paired_difference(row, reference)
    return f"{signed(difference)} {plus_minus(error)}"


def losses(rows: Sequence[Row], width: int = WIDE) -> Group:
    """Build the table of losses in nats per token. The best of each column is starred; below each loss stands its
    difference from the sliding window with the standard error, on two lines if `width` columns are too few.
    """
    grid = Grid.from_rows(rows)
    trained = grid.any.training_length
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("scheme", overflow="fold")
    between = " " if 30 + 16 * len(grid.lengths) <= width else "\n"
    others = grid.any.others_nll is not None  # a second column where a protocol scores only some tokens
    for length in grid.lengths:
        shown.add_column(f"{length}\n{length / trained:g}L", justify="right", overflow="fold")
        if others:
            shown.add_column("others", justify="right", overflow="fold", style="dim")
    starred = False
    for series in grid.series:
        cells = []
        for length in grid.lengths:
            cell = grid.cell(series, length)
            best = cell.endswith("*")
            starred |= best
            cells.append(
                Text.assemble((cell, "bold green" if best else ""), "\n", (grid.below(series, length, between), "dim"))
            )
            if others:
                row = grid.row(series, length)
                cells.append(Text(f"{row.others_nll:.3f}" if row and row.others_nll is not None else "-"))
        shown.add_row(Text(grid.name(series), "dim" if series.line in COMPARED else ""), *cells)
    title = f"{Path(grid.any.model).name}: NLL in nats per token by context length, L = {trained}"
    errors = "the error of each loss"
    if grid.row(grid.baseline, grid.lengths[0]):
        errors = f"loss minus that of {in_a_sentence(grid.baseline)}, ± the error of this difference"
    notes = [
        *(["* best of its column, by more than noise"] if starred else []),
        f"below each loss: {errors}",
        *grid.notes(),
    ]
    return Group(Text(title, style="bold"), shown, *(Text(note, style="dim") for note in notes))


# --- answers ----------------------------------------------------------------------------------------------------------


def headline(rows: Sequence[Row], what: str) -> str:
    """The title of a table or heat map of answers."""
    return f"{Path(rows[0].model).name}, L = {rows[0].training_length}: percent of {what}"


def failed_within(rows: Sequence[Row]) -> dict[str, float]:
    """The tasks that no scheme can do at the longest length within the training length, with their best score."""
    best: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row.length <= row.training_length:
            best[row.task] = max(best.get(row.task, (0, 0.0)), (row.length, row.share))
    return {task: score for task, (_, score) in best.items() if score < NEAR_NOTHING}


def label(task: str, failed: dict[str, float]) -> str:
    """The name of a task, with a remark if its rows mean nothing."""
    return f"{task}\n(means nothing)" if task in failed else task


def is_far(row: Row) -> bool:
    """Whether the hidden passage lies beyond the reach of the sliding window."""
    return row.distance is not None and row.distance >= row.training_length


def answers(rows: Sequence[Row], what: str = "the answers") -> Group:
    """Build the table of correct answers in percent. For a passage hidden at several depths the table has means over
    all depths, over the depths that the sliding window does not see, and of the control with nothing hidden. For other
    tasks it has a line for each task, ± the standard error.
    """
    sections: dict[str, Callable[[Row], float | None]]
    failed, by_depth = failed_within(rows), rows[0].depth is not None
    if by_depth:
        sections = {
            "all": lambda row: row.share,
            "farther than L": lambda row: row.share if is_far(row) else None,
            "nothing hidden": lambda row: row.control_accuracy,
        }
        sections = {title: share for title, share in sections.items() if any(share(row) is not None for row in rows)}
    else:
        sections = {
            label(task, failed): lambda row, task=task: row.share if row.task == task else None  # type: ignore[misc]
            for task in dict.fromkeys(row.task for row in rows)
        }
    lengths, lines = sorted({row.length for row in rows}), by_line(rows)
    shown = Table("depths" if by_depth else "task", "scheme", *map(str, lengths))
    for title, share_of in sections.items():
        for line, of_line in lines.items():
            cells = []
            for length in lengths:
                cell = [row for row in of_line if row.length == length and share_of(row) is not None]
                error = f" ± {100 * cell[0].error:.0f}" if cell and cell[0].error is not None and not by_depth else ""
                cells.append(f"{100 * fmean(share_of(row) or 0 for row in cell):.0f}{error}" if cell else "-")
            shown.add_row(title, display_name(line), *cells)
        shown.add_section()
    reach = [f"effective length, the longest with {SHARE:.0%} of the best score within L (NoLiMa, 2502.05167):"]
    for line, of_line in lines.items():
        found = effective_length(of_line)
        told = f"{found}, of {found.base:.0%} within L" if found else "none: the task fails even within L"
        reach.append(f"  {display_name(line)}: {told}")
    return Group(Text(headline(rows, what), style="bold"), shown, *map(Text, reach))
