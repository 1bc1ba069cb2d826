"""Retrieval as heat maps, one per scheme: depth down, length across, the same colours in all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rope_patch.evaluation import figures
from rope_patch.evaluation.chart import FAINT, INK
from rope_patch.evaluation.report import display_name, in_training_lengths
from rope_patch.evaluation.retrieval.report import Grid, percent
from rope_patch.evaluation.retrieval.rows import RetrievalRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = "Blues"
"""One hue, pale to dark: its order is that of the lightness, which every reader sees."""

_STEPS = "#D55E00"  # Okabe and Ito's vermilion, far from every blue for colour-blind readers too
_STEPS_MEAN = "Vermilion: above it, what is hidden is farther than L from the question, out of sight for the cut."

_MISSING = "#EDEDED"
_CELL, _ROW = 0.62, 0.34  # inches
_APART = 0.3  # rows between the depths and the control
_ACROSS = 3  # heat maps side by side
_LEFT, _TOP, _BOTTOM, _GAP, _BETWEEN = 0.8, 1.1, 1.05, 0.35, 0.8


def save(rows: Sequence[RetrievalRow], path: str | Path) -> Path:
    """Draw `figure(rows)` into a PNG.

    Raises:
        EvaluationError, MissingPackage: see `figure`.
        OSError: when it cannot be written.
    """
    return figures.save(figure(rows), path)


def figure(rows: Sequence[RetrievalRow]) -> Figure:
    """The heat maps.

    A dashed line stands where the training length ends; steps in vermilion part what lies farther than L from the
    question, above them, from what attention cut at L still sees. Where the task has a control, it is the row below.

    Args:
        rows: of one task, model and set of prompts.

    Raises:
        EvaluationError: see `Grid.of`.
        MissingPackage: there is no matplotlib.
    """
    grid = Grid.of(rows)
    control = grid.has_control
    across = min(_ACROSS, len(grid.lines))
    down = math.ceil(len(grid.lines) / across)
    wide = _CELL * len(grid.lengths)
    high = _ROW * (len(grid.depths) + (1 + _APART if control else 0))
    width = max(8.6, _LEFT + across * (wide + _GAP) + 0.9)
    height = _TOP + down * (high + _BETWEEN) - _BETWEEN + _BOTTOM
    drawn = figures.blank(width, height)
    drawn.text(0.2 / width, 1 - 0.16 / height, grid.title(), size=13, weight="bold", color=INK, va="top")
    drawn.text(0.2 / width, 1 - 0.47 / height, _subtitle(grid, width), size=9, color=FAINT, va="top", linespacing=1.4)
    for i, line in enumerate(grid.lines):
        left = _LEFT + (i % across) * (wide + _GAP)
        top = _TOP + (i // across) * (high + _BETWEEN)
        cells = drawn.add_axes(
            (left / width, 1 - (top + _ROW * len(grid.depths)) / height, wide / width, _ROW * len(grid.depths) / height)
        )
        _draw_cells(cells, grid, line, first=i % across == 0)
        lowest = cells
        if control:
            lowest = drawn.add_axes((left / width, 1 - (top + high) / height, wide / width, _ROW / height))
            _draw_control(lowest, grid, line, first=i % across == 0)
            cells.set_xticks([])
        _name_lengths(lowest, grid)
    _draw_scale(drawn, _LEFT + across * (wide + _GAP) - _GAP + 0.2, _TOP, high)
    drawn.text(0.2 / width, 0.14 / height, _legend(grid, width), size=8.5, color=FAINT, va="bottom", linespacing=1.4)
    return drawn


def _subtitle(grid: Grid, width: float) -> str:
    return "\n".join(textwrap.wrap(f"{grid.unit()}, in percent.", int(width * 14)))


def _legend(grid: Grid, width: float) -> str:
    words = [
        "Dashed: the training length.",
        *([_STEPS_MEAN] if _has_both_sides(grid) else []),
        *(["Nothing hidden: what is known without retrieval."] if grid.has_control else []),
        *grid.doubts(),
    ]
    return "\n".join(textwrap.wrap(" ".join(words), int(width * 14.5)))


def _has_both_sides(grid: Grid) -> bool:
    return {row.far for row in grid.rows.values()} == {True, False}


def _draw_cells(axes: Any, grid: Grid, line: str, first: bool) -> None:
    shares = np.full((len(grid.depths), len(grid.lengths)), np.nan)
    for down, depth in enumerate(grid.depths):
        for across, length in enumerate(grid.lengths):
            if row := grid.rows.get((line, length, depth)):
                shares[down, across] = row.accuracy
    _paint(axes, shares)
    axes.set_title(display_name(line), size=9.5, color=INK, loc="left", pad=4)
    axes.set_yticks(range(len(grid.depths)), [f"{depth:.0%}" for depth in grid.depths] if first else [])
    if first:
        axes.set_ylabel("depth", size=9, color=INK)
    _mark_far(axes, grid, line)
    _mark_training_length(axes, grid)


def _draw_control(axes: Any, grid: Grid, line: str, first: bool) -> None:
    _paint(axes, np.array([[grid.control(line, length) for length in grid.lengths]]))
    axes.set_yticks([0], ["nothing\nhidden"] if first else [""], linespacing=0.9)
    _mark_training_length(axes, grid)


def _paint(axes: Any, shares: np.ndarray) -> None:
    axes.set_facecolor(_MISSING)
    axes.imshow(shares, cmap=COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for down, across in np.ndindex(*shares.shape):
        share = shares[down, across]
        ink = "white" if share > 0.55 else INK  # dark cells; NaN is not among them
        axes.text(across, down, percent(share), ha="center", va="center", size=8.5, color=ink)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _name_lengths(axes: Any, grid: Grid) -> None:
    labels = [f"{in_training_lengths(length, grid.any.training_length)}\n{length}" for length in grid.lengths]
    axes.set_xticks(range(len(grid.lengths)), labels)


def _mark_training_length(axes: Any, grid: Grid) -> None:
    """Dashed, right of the last length that the checkpoint was trained at."""
    known = sum(length <= grid.any.training_length for length in grid.lengths)
    if 0 < known < len(grid.lengths):
        axes.axvline(known - 0.5, color=FAINT, linewidth=1.2, linestyle=(0, (3, 2)))


def _mark_far(axes: Any, grid: Grid, line: str) -> None:
    """Steps below the cells that lie farther than L from the question."""
    for across, length in enumerate(grid.lengths):
        far = sum(row.far for row in grid.column(line, length))
        before = sum(row.far for row in grid.column(line, grid.lengths[across - 1])) if across else 0
        axes.plot([across - 0.5, across - 0.5], [before - 0.5, far - 0.5], color=_STEPS, linewidth=2.0)
        if far:
            axes.plot([across - 0.5, across + 0.5], [far - 0.5, far - 0.5], color=_STEPS, linewidth=2.0)


def _draw_scale(drawn: Figure, left: float, top: float, high: float) -> None:
    width, height = drawn.get_size_inches()
    axes = drawn.add_axes((left / width, 1 - (top + high) / height, 0.12 / width, high / height))
    axes.imshow(np.linspace(1, 0, 256)[:, None], cmap=COLOURS, aspect="auto", extent=(0, 1, 0, 100))
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_yticks([0, 50, 100], ["0", "50", "100%"])
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
