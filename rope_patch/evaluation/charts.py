"""Loss against length as a picture: lines per scheme, and beside them, as their legend, the table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.errors import require
from rope_patch.evaluation.lines import CUT, REFERENCES
from rope_patch.evaluation.rows import Row
from rope_patch.evaluation.standard_errors import standard_error
from rope_patch.evaluation.tables import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale for a line on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A4FA3", "#8C6D31")
MARKERS = "osD^vPX*"
INK, FAINT = "#222222", "#777777"  # of what is to be read first, and of the rest
CLOSEST = 3  # how many lines beside the references the close-up shows from end to end


def blank(width: float, height: float, **settings: Any) -> Figure:
    """An empty white figure in inches, of which pyplot knows nothing.

    Raises:
        MissingPackage: there is no matplotlib.
    """
    require("matplotlib", "the picture", "plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", **settings)


def save(rows: Sequence[Row], path: str | Path) -> Path:
    """Draw `figure(rows)` into a PNG; the same rows are the same bytes."""
    figure(rows).savefig(path, dpi=160, format="png")
    return Path(path)


def figure(rows: Sequence[Row]) -> Figure:
    """The chart: x is the context length in multiples of L (log 2), y the loss, and bands are its standard errors.

    Below it, where attention cut at L is among the lines, NLL minus that of the cut with the errors of this difference:
    beneath zero, what lies beyond L helps to predict the same tokens.

    Raises:
        EvaluationError: the rows are not of one model, text and protocol.
        MissingPackage: there is no matplotlib.
    """
    grid = Grid.of(rows)
    trained, close_up = grid.any.training_length, CUT in grid.lines and len(grid.lines) > 1
    upper = max(3.4, 0.22 * (len(grid.lines) + 4))
    drawn = blank(13.6, upper + 1.3 + 2.2 * close_up, layout="constrained")
    heights = [upper, 2.0] if close_up else [upper]
    axes = drawn.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    chart, lowest = axes[0, 0], axes[-1, 0]
    multiples = [length / trained for length in grid.lengths]
    scale_lengths(chart, multiples, [f"{m:g}L\n{n}" for m, n in zip(multiples, grid.lengths, strict=True)])
    width = max(len(grid.name(line)) for line in grid.lines)
    apart: dict[str, list[tuple[float, float]]] = {}  # from the cut, by line
    for line in sorted(grid.lines, key=lambda line: _end(grid, line)):  # as they end at the right edge
        cells = [grid.cell(line, n) for n in grid.lengths]
        found = [grid.rows.get((line, n)) for n in grid.lengths]
        losses = [(row.nll, standard_error(row.nll_by_document) or 0) if row else (math.nan, 0) for row in found]
        label = f"{grid.name(line):<{width}}" + "".join(f"{cell:>9}" for cell in cells)
        _draw(chart, multiples, losses, label=label, **_style(line, grid.lines))
        if close_up:
            differences = [grid.apart(line, n) for n in grid.lengths]
            apart[line] = [(difference, error or 0) for difference, error in differences]
            _draw(lowest, multiples, apart[line], **_style(line, grid.lines))
    if close_up:
        lowest.set_ylim(close_range(apart))
        lowest.set_ylabel("nats above the cut", size=9.5, color=INK)
        lowest.axvline(1, color=FAINT, linewidth=1, linestyle=":", zorder=1)
        tidy(lowest)
    header = f"{'NLL, nats per token':<{width}}" + "".join(f"{f'{m:g}L':>9}" for m in multiples)
    font = {"family": "DejaVu Sans Mono", "size": 8.5}
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "alignment": "right", "frameon": False}
    chart.legend(title=header, prop=font, title_fontproperties=font, **place)
    chart.set_ylabel("NLL, nats per token", size=9.5, color=INK)
    tidy(chart)
    lowest.set_xlabel("context length in training lengths, and in tokens", size=9.5, color=INK)
    drawn.suptitle("Loss against context length", x=0.01, ha="left", size=15, weight="bold", color=INK)
    first, *notes = grid.notes()
    subtitle = f"{Path(grid.any.model).name}, trained at L = {trained}. {first}"
    chart.set_title(subtitle, loc="left", size=9.5, color=FAINT)
    starred = any(grid.cell(line, n).endswith("*") for line in grid.lines for n in grid.lengths)
    bands = "bands: ± one standard error" + ", in the lower panel of the difference" * close_up
    keys = {"* best of its column": starred, bands: bool(grid.any.nll_by_document[1:])}
    lines = textwrap.wrap("   ".join([*(key for key, shown in keys.items() if shown), *notes]), 220)
    drawn.supxlabel("\n".join(lines), x=0.01, ha="left", size=8.5, color=FAINT)
    return drawn


def close_range(apart: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """From where to where the close-up shows differences from the cut: zero, every gain, and the closest lines whole.

    Args:
        apart: the differences and their errors by line.
    """
    known = {line: [pair for pair in pairs if math.isfinite(pair[0])] for line, pairs in apart.items() if line != CUT}
    others = [line for line in known if known[line] and line not in REFERENCES] or [
        line for line in known if known[line]
    ]
    closest = sorted(others, key=lambda line: max(abs(difference) for difference, _ in known[line]))[:CLOSEST]
    whole = [difference + side * error for line in closest for difference, error in known[line] for side in (-1, 1)]
    low = min([0.0, *whole, *(difference - error for pairs in known.values() for difference, error in pairs)])
    high = max([-low / 2, *whole])
    margin = max(0.08 * (high - low), 0.005)
    return low - margin, high + margin


def scale_lengths(chart: Any, multiples: Sequence[float], labels: Sequence[str]) -> None:
    """Length in multiples of L (log 2), with ticks at these, the training length marked."""
    from matplotlib.ticker import NullLocator

    chart.set_xscale("log", base=2)
    chart.axvline(1, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -4), "textcoords": "offset points", "va": "top"}
    chart.annotate("training length", (1, 1), size=8.5, color=FAINT, **place)
    chart.set_xticks(multiples, labels)
    chart.xaxis.set_minor_locator(NullLocator())


def scale_axes(chart: Any, multiples: Sequence[float], labels: Sequence[str]) -> None:
    """`scale_lengths` against perplexity (log)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    scale_lengths(chart, multiples, labels)
    chart.set_yscale("log")
    chart.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    chart.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    chart.yaxis.set_minor_locator(NullLocator())


def tidy(chart: Any) -> None:
    """Faint lines across, and no box around."""
    chart.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    chart.set_axisbelow(True)
    chart.tick_params(length=0, labelsize=9, colors=INK)
    chart.spines[["top", "left", "right"]].set_visible(False)
    chart.spines["bottom"].set_color("#BBBBBB")


def _draw(chart: Any, multiples: Sequence[float], values: Sequence[tuple[float, float]], **style: Any) -> None:
    """A line with a light band of its errors."""
    middle, errors = zip(*values, strict=True)
    chart.plot(multiples, middle, **style)
    low, high = ([value + side * error for value, error in values] for side in (-1, 1))
    if any(errors):
        chart.fill_between(multiples, low, high, color=style["color"], alpha=0.08, linewidth=0)


def _end(grid: Grid, line: str) -> float:
    """Where a line stands in the legend: the worst first."""
    nll = grid.nll(line, grid.lengths[-1])
    return math.inf if math.isnan(nll) else -nll


def _style(line: str, lines: Sequence[str]) -> dict[str, Any]:
    """The references are dashed without markers, and no two of the others alike."""
    if line in REFERENCES:
        return {"color": INK if line == CUT else "#8A8A8A", "linestyle": "--", "linewidth": 1.8, "zorder": 2}
    turn, look = divmod([each for each in lines if each not in REFERENCES].index(line), len(COLOURS))
    dashes = (0, (turn, 1)) if turn else "-"
    return {"color": COLOURS[look], "marker": MARKERS[look], "linestyle": dashes, "linewidth": 2.0, "markersize": 5.0}
