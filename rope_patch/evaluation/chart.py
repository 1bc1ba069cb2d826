"""Perplexity against length as a picture: lines per scheme, and beside them, as their legend, the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.evaluation import figures
from rope_patch.evaluation.report import Grid, cell, in_training_lengths
from rope_patch.evaluation.results import Row
from rope_patch.evaluation.specs import CUT, PLAIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale for a line on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A4FA3", "#8C6D31")
MARKERS = "osD^vPX*"
REFERENCE_STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "#8A8A8A", "linestyle": (0, (5, 2)), "marker": "", "linewidth": 1.8, "zorder": 2},
    CUT: {"color": "#1A1A1A", "linestyle": (0, (5, 2)), "marker": "", "linewidth": 1.8, "zorder": 2},
}
"""Of the lines that a scheme has to beat."""
INK, FAINT = "#222222", "#777777"
"""Of what is to be read first, and of the rest."""

_WIDTH, _LEFT = 13.6, 0.055
_CLOSE_UP = 0.1
"""How many nats above attention cut at L the close-up shows at least."""


def save(rows: Sequence[Row], path: str | Path) -> Path:
    """Draw `figure(rows)` into a PNG.

    Raises:
        EvaluationError, MissingPackage: see `figure`.
        OSError: when it cannot be written.
    """
    return figures.save(figure(rows), path)


def figure(rows: Sequence[Row]) -> Figure:
    """The chart: x is the context length in multiples of L (log 2), y the perplexity (log).

    The rows of the table stand in the order of the lines at the right edge of the chart, each tied to its line.

    Args:
        rows: of one model, text and protocol.

    Raises:
        EvaluationError: see `Grid.of`.
        MissingPackage: there is no matplotlib.
    """
    grid = Grid.of(rows)
    close_up = CUT in grid.lines and len(grid.lines) > 1
    upper = max(3.4, 0.31 * (len(grid.lines) + 1))  # inches; the table needs a fixed height per row
    lower = 1.7 if close_up else 0.0
    height = 0.95 + upper + (lower + 0.45 if close_up else 0.0) + 0.95
    drawn = figures.blank(_WIDTH, height)
    floor = 1 - (0.95 + upper) / height
    chart = drawn.add_axes((_LEFT, floor, 0.455, upper / height))
    legend = drawn.add_axes((0.545, floor, 0.445, upper / height))
    styles = _styles(grid)
    _draw_lines(chart, grid, styles)
    _draw_table(legend, chart, grid, styles)
    lowest = chart
    if close_up:
        lowest = drawn.add_axes((_LEFT, 0.95 / height, 0.455, lower / height), sharex=chart)
        multiples = [length / grid.any.training_length for length in grid.lengths]
        lines = [([grid.nll(line, n) - grid.nll(CUT, n) for n in grid.lengths], styles[line]) for line in grid.lines]
        draw_close_up(lowest, multiples, lines)
        explain_close_up(drawn, (0.95 + lower) / height)
        chart.tick_params(labelbottom=False)
    lowest.set_xlabel("context length in training lengths, and in tokens", size=9.5, color=INK)
    drawn.text(_LEFT, 1 - 0.34 / height, "Perplexity against context length", size=15, weight="bold", color=INK)
    drawn.text(_LEFT, 1 - 0.60 / height, _subtitle(grid), size=9.5, color=FAINT)
    drawn.text(_LEFT, 0.14 / height, "   ".join(grid.notes()[1:]), size=8.5, color=FAINT)
    return drawn


def _subtitle(grid: Grid) -> str:
    return f"{grid.name_of_model}, trained at L = {grid.any.training_length}. {grid.notes()[0]}"


def _styles(grid: Grid) -> dict[str, dict[str, Any]]:
    styles = {}
    others = [line for line in grid.lines if line not in REFERENCE_STYLES]
    for i, line in enumerate(others):
        solid = i < len(COLOURS)
        styles[line] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": "-" if solid else (0, (1, 1)),
            "linewidth": 2.0,
            "markersize": 5.0,
            "zorder": 3,
        }
    return {line: REFERENCE_STYLES.get(line) or styles[line] for line in grid.lines}


def _draw_lines(chart: Any, grid: Grid, styles: dict[str, dict[str, Any]]) -> None:
    training_length = grid.any.training_length
    multiples = [length / training_length for length in grid.lengths]
    scale_axes(
        chart, multiples, [f"{in_training_lengths(length, training_length)}\n{length}" for length in grid.lengths]
    )
    for line in grid.lines:
        values = [perplexity_of(grid.nll(line, length)) for length in grid.lengths]
        chart.plot(multiples, values, **styles[line])
    chart.set_xlim(multiples[0] / 2**0.15, multiples[-1] * 2**0.08)
    chart.set_ylabel("perplexity", size=9.5, color=INK)
    tidy(chart)


def scale_axes(chart: Any, multiples: Sequence[float], labels: Sequence[str]) -> None:
    """Length in multiples of L (log 2) against perplexity (log), with the training length marked.

    Args:
        chart: the axes.
        multiples: where the ticks of x are.
        labels: what they say.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    chart.set_xscale("log", base=2)
    chart.set_yscale("log")
    chart.axvline(1, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    chart.annotate(
        "training length",
        (1, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        size=8.5,
        color=FAINT,
    )
    chart.xaxis.set_major_locator(FixedLocator(multiples))
    chart.xaxis.set_minor_locator(NullLocator())
    chart.set_xticklabels(labels)
    chart.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    chart.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    chart.yaxis.set_minor_formatter(NullFormatter())
    chart.yaxis.set_minor_locator(NullLocator())


def draw_close_up(
    chart: Any, multiples: Sequence[float], lines: Sequence[tuple[Sequence[float], Mapping[str, Any]]]
) -> None:
    """NLL minus that of attention cut at L: below zero, the context beyond L is worth something.

    Args:
        chart: the axes.
        multiples: lengths in multiples of L.
        lines: the differences of each line at these lengths, and its style.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for values, style in lines:
        chart.plot(multiples, values, **style)
    gain = max((-value for values, _ in lines for value in values if value < 0), default=0.0)
    chart.set_ylim(-max(1.25 * gain, 0.3 * _CLOSE_UP), max(1.5 * gain, _CLOSE_UP))
    chart.axvline(1, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    chart.yaxis.set_major_locator(MaxNLocator(5))
    chart.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.2f}" if round(value, 6) else "0"))
    chart.set_ylabel("nats above the cut", size=9.5, color=INK)
    tidy(chart)


def explain_close_up(drawn: Figure, y: float) -> None:
    """What the close-up shows, beside it; `y` is its upper edge in shares of the figure."""
    lines = (
        "Close up: NLL minus that of attention cut at L.",
        "Below zero, what lies beyond L helps to predict the same tokens;",
        "above, the scheme costs more than forgetting would.",
    )
    drawn.text(0.596, y, "\n".join(lines), size=9, color=FAINT, va="top", linespacing=1.5)


def tidy(chart: Any) -> None:
    """Faint lines across, and no box around."""
    chart.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    chart.set_axisbelow(True)
    chart.tick_params(length=0, labelsize=9, colors=INK)
    for side, spine in chart.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#BBBBBB")


def _draw_table(legend: Any, chart: Any, grid: Grid, styles: dict[str, dict[str, Any]]) -> None:
    """One row per line, worst on top as at the right edge of the chart, and a thread from each line to its row."""
    from matplotlib.patches import ConnectionPatch

    training_length = grid.any.training_length
    pitch = 1 / (len(grid.lines) + 0.5)
    header = 1 - pitch / 4
    columns = head_table(legend, 0.115, 0.48, header, [in_training_lengths(n, training_length) for n in grid.lengths])
    longest = grid.lengths[-1]
    for i, line in enumerate(sorted(grid.lines, key=lambda line: -_or_lowest(grid.nll(line, longest)))):
        y, style = header - pitch * (i + 1), styles[line]
        legend.plot([0.045, 0.10], [y, y], **{**style, "markersize": 0})
        legend.plot([0.0725], [y], **{**style, "linestyle": ""})
        legend.text(0.115, y, grid.name(line), size=_fitting(grid.name(line)), color=INK, va="center")
        for x, length in zip(columns, grid.lengths, strict=True):
            write_nll(legend, x, y, grid.nll(line, length), grid.is_best(line, length))
        if not math.isnan(nll := grid.nll(line, longest)):
            end = (longest / training_length, perplexity_of(nll))
            thread = ConnectionPatch(
                end,
                (0.04, y),
                "data",
                "data",
                axesA=chart,
                axesB=legend,
                color=style["color"],
                linewidth=0.7,
                alpha=0.6,
            )
            legend.figure.add_artist(thread)


def head_table(legend: Any, left: float, names_end: float, y: float, labels: Sequence[str]) -> list[float]:
    """Turn axes into an empty table of losses with its header, all places in shares of the axes.

    Args:
        legend: the axes.
        left: where the names begin.
        names_end: from where on the columns of numbers share what is left.
        y: of the header.
        labels: of the columns.

    Returns:
        where each column ends.
    """
    legend.set_xlim(0, 1)
    legend.set_ylim(0, 1)
    legend.axis("off")
    legend.text(left, y, "NLL, nats per token", size=8.5, color=FAINT, va="center")
    columns = [names_end + (1 - names_end) * (i + 1) / len(labels) for i in range(len(labels))]
    for x, label in zip(columns, labels, strict=True):
        legend.text(x, y, label, size=9, weight="bold", color=INK, ha="right", va="center")
    return columns


def write_nll(legend: Any, x: float, y: float, nll: float, best: bool) -> None:
    """Write one number of that table.

    Args:
        legend: the axes.
        x: where the column ends.
        y: of the row.
        nll: NaN where nothing was measured.
        best: whether it is the lowest of its column.
    """
    weight, colour = ("bold", INK) if best else ("normal", "#555555")
    style = {"size": 9, "weight": weight, "color": colour, "family": "DejaVu Sans Mono"}
    legend.text(x, y, cell(nll), ha="right", va="center", **style)


def perplexity_of(nll: float) -> float:
    """exp(nll), as far as a chart can show it."""
    return math.exp(min(nll, 100.0))  # beyond, a logarithmic axis overflows and nobody reads it


def _or_lowest(nll: float) -> float:
    return -math.inf if math.isnan(nll) else nll


def _fitting(name: str) -> float:
    """A size in points at which a long name stays out of the first column of numbers."""
    return min(9.0, 9.0 * 31 / len(name))
