"""Charts of loss against length and heat maps of answers, and the shared look of all pictures."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.errors import require
from rope_patch.evaluation.row import Row, by_line
from rope_patch.evaluation.scheme_specs import COMPARED, CONTROLS, WINDOW, display_name
from rope_patch.evaluation.standard_errors import loss_error
from rope_patch.evaluation.tables import Grid, Series, failed_within, headline, is_far, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale for a line on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A4FA3", "#8C6D31")
MARKERS = "osD^vPX*"
INK, FAINT = "#222222", "#777777"  # colours of the text to read first, and of the rest
WIDTH = 5.2  # inches of every picture: its words are as large as the text beside it, and legible on a phone
SIZE = 9  # points of every word; titles have 2 more
NAMED = 8  # the number of lines of the close-up with room for their names
CLOSEST = 3  # the number of lines, besides the references, that the close-up shows from end to end


def blank(width: float, height: float, **settings: Any) -> Figure:
    """Make an empty white figure of a size in inches, without pyplot.

    Raises:
        MissingPackage: there is no matplotlib.
    """
    require("matplotlib", "the picture", "plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", **settings)


def sheet(title: str, caption: str, height: float, rows: int = 1, columns: int = 1, **panels: Any) -> Any:
    """Make an empty figure and return it with its axes in a row; `height` is the height of the panels in inches.

    Args:
        title: the subject, in a few words.
        caption: the text below the figure, wrapped.
    """
    lines = [line for part in caption.split("\n") for line in textwrap.wrap(part, int(14.6 * WIDTH))]
    figure = blank(WIDTH, height + 0.35 + 0.16 * len(lines), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **panels)
    figure.suptitle(title, x=0.01, ha="left", size=SIZE + 2, weight="bold", color=INK)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", size=SIZE, color=FAINT)
    for chart in axes.flat:
        tidy(chart)
        chart.set_prop_cycle(color=COLOURS)
    return figure, *axes.flat


def write(figure: Figure, path: str | Path) -> Path:
    """Write a PNG of 256 colours at 200 dots per inch; the same picture gives the same bytes."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=200)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, format="png", optimize=True)
    return Path(path)


def save(rows: Sequence[Row], path: str | Path, **settings: Any) -> Path:
    """Draw `figure(rows)` into a PNG."""
    return write(figure(rows, **settings), path)


def figure(rows: Sequence[Row], **settings: Any) -> Figure:
    """Draw `loss_lines` of rows, or `heat_maps` if the task has answers.

    Raises:
        EvaluationError: the rows are not of one model, text and protocol.
        MissingPackage: there is no matplotlib.
    """
    draw: Any = loss_lines if not rows or math.isnan(rows[0].share) else heat_maps
    return draw(rows, **settings)


def loss_lines(rows: Sequence[Row], title: str = "Loss against context length") -> Figure:
    """Draw loss (y) against context length in multiples of L (x, log 2), with bands of standard errors.

    If the sliding window or truncated text is among the lines, a panel below shows NLL minus the NLL of this reference,
    with the errors of the difference: below zero, text beyond L helps to predict the same tokens. The sliding window is
    left out if it lost its sinks. With several measurements from one training, the first is dotted, and of the others
    only the last is shown.
    """
    grid = Grid.from_rows(rows)
    trained = grid.any.training_length
    close_up = len(grid.series) > 1 and any(one.line == grid.baseline for one in grid.series)
    shown = [one for one in grid.series if one.step is None or one.step in {0, *grid.steps(one.line)[-1:]}]
    shown = [one for one in shown if not (one.line == WINDOW and grid.lost_its_sinks)]
    bands = "bands: ± one standard error" + ", in the lower panel of the difference" * close_up
    model = f"model: {Path(grid.any.model).name}, " if grid.any.model else ""
    notes = [f"{model}trained at L = {trained}", *grid.notes()]
    notes += [bands] if grid.any.nll_by_document[1:] else []
    notes += ["dotted: before the training"] if any(one.step for one in shown) else []
    caption = ". ".join(note[:1].upper() + note[1:] for note in notes) + "."
    heights = [max(2.6, 0.17 * len(shown) + 0.6), *([1.7] if close_up else [])]
    panels: dict[str, Any] = {"sharex": True, "height_ratios": heights}
    drawn, *axes = sheet(title, caption, sum(heights), len(heights), **panels)
    multiples = [length / trained for length in grid.lengths]
    names, closest, apart = {}, {}, {}
    for one in shown:
        cells = [grid.row(one, length) for length in grid.lengths]
        losses = [(row.loss, loss_error(row) or 0) if row else (math.nan, 0) for row in cells]
        names[grid.name(one)] = plot_band(axes[0], multiples, losses, **_style(one, grid))
        if close_up:
            apart[one] = [(difference, error or 0) for difference, error in (grid.apart(one, n) for n in grid.lengths)]
            closest[grid.name(one)] = plot_band(axes[1], multiples, apart[one], **_style(one, grid))
    if close_up:
        low, high = close_range({one: pairs for one, pairs in apart.items() if one.line != grid.baseline})
        axes[1].set_ylim(low, high)
        axes[1].set_ylabel(f"nats above {display_name(grid.baseline)}")
        axes[1].axvline(1, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    scale_lengths(axes[0], multiples, [f"{m:g}L\n{n}" for m, n in zip(multiples, grid.lengths, strict=True)])
    axes[0].set_ylabel("NLL, nats per token")
    axes[-1].set_xlabel("context length (L, tokens)")
    name_lines(axes[0], names)
    within = {name: line for name, line in closest.items() if low <= line.get_ydata()[-1] <= high} if close_up else {}
    if 0 < len(within) <= NAMED:
        name_lines(axes[1], within)
    return drawn


def heat_maps(rows: Sequence[Row], what: str = "the answers") -> Figure:
    """Draw a heat map for each scheme: percent of correct answers, depth or task down, length across.

    The control with nothing hidden is below the depths, and steps show where the hidden text is farther back than L.
    """
    import numpy as np

    failed, trained = failed_within(rows), rows[0].training_length
    lines, lengths = list(by_line(rows)), sorted({row.length for row in rows})
    cells = {(row.line, row.length, row.task, row.depth): row for row in rows}
    down = list(dict.fromkeys((task, depth) for _, _, task, depth in cells))
    labels = [label(task, failed) if depth is None else f"{depth:.0%}" for task, depth in down]
    hidden, control = (any(getattr(row, name) is not None for row in rows) for name in ("distance", "control_accuracy"))
    labels += ["nothing hidden"] * control
    notes = ["Dashed: the training length L."]
    notes += ["Above the steps, what is hidden is farther than L from the question."] * hidden
    if any("means nothing" in name for name in labels):
        notes.append("A task that the checkpoint cannot do within L means nothing.")
    wide = min(2, len(lines))
    high = -(-len(lines) // wide)
    caption = " ".join([f"{headline(rows, what)}.", *notes])
    picture, *axes = sheet(
        "Answers by context length", caption, (0.8 + 0.24 * len(labels)) * high, high, wide, sharey=True
    )
    for panel, line in zip(axes, lines, strict=False):
        grid = [[cells.get((line, length, *place)) for length in lengths] for place in down]
        shares: Any = [[row.share if row else math.nan for row in across] for across in grid]
        shares += [[row.control_accuracy if row else math.nan for row in grid[0]]] * control
        percents = 100 * np.array(shares, dtype=float)
        panel.set_title(display_name(line), loc="left", size=SIZE)
        panel.grid(False)
        panel.imshow(percents, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (row, column), percent in np.ndenumerate(percents):
            ink = "white" if percent > 55 else "black"
            text = f"{percent:.0f}".replace("nan", "-")
            panel.text(column, row, text, ha="center", va="center", color=ink, size=SIZE)
        if hidden:
            columns = zip(*grid, strict=True)
            far = [sum(row is not None and is_far(row) for row in column) for column in columns]
            edges = np.arange(len(lengths) + 1) - 0.5
            panel.stairs(np.array(far) - 0.5, edges, baseline=None, color=COLOURS[1], linewidth=2)
        panel.set_xticks(range(len(lengths)), [f"{length / trained:g}L\n{length}" for length in lengths])
        panel.set_yticks(range(len(labels)), labels)
        panel.axvline(sum(length <= trained for length in lengths) - 0.5, color="grey", linestyle="--")
    for spare in axes[len(lines) :]:
        picture.delaxes(spare)
    return picture


def name_lines(chart: Any, lines: Mapping[str, Any]) -> None:
    """Write the name of each line at its end, in its colour, so that no two names overlap; the limits must be set
    before.
    """
    chart.figure.draw_without_rendering()
    height = chart.get_window_extent().height * 72 / chart.figure.dpi
    ends = {}
    for name, line in lines.items():
        points = [(x, y) for x, y in zip(*line.get_data(), strict=True) if math.isfinite(y)]
        if points:
            level = chart.transAxes.inverted().transform(chart.transData.transform(points[-1]))[1]
            ends[name] = (points[-1], min(max(level, 0.0), 1.0))
    gap, above = 1.3 * SIZE / height, -math.inf
    places = {}
    for name in sorted(ends, key=lambda name: ends[name][1]):
        above = places[name] = max(ends[name][1], above + gap)
    below = 1 + gap / 2
    for name in sorted(places, key=places.__getitem__, reverse=True):
        below = places[name] = min(places[name], below)
        below -= gap
    low, high = chart.get_ylim()
    for name, ((x, y), _) in ends.items():
        colour = lines[name].get_color()
        place = {
            "xytext": (1.04, places[name]),
            "textcoords": "axes fraction",
            "va": "center",
            "annotation_clip": False,
        }
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
        chart.annotate(name, (x, min(max(y, low), high)), size=SIZE, color=colour, arrowprops=leader, **place)


def close_range(apart: Mapping[Series, Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """The limits of the close-up of differences from the baseline: they include zero, every gain, and the closest lines
    whole.

    Args:
        apart: the differences and their errors by series, without truncated text.
    """
    finite = {one: [pair for pair in pairs if math.isfinite(pair[0])] for one, pairs in apart.items()}
    measured = [one for one in finite if finite[one]]
    others = [one for one in measured if one.line not in COMPARED] or measured
    closest = sorted(others, key=lambda one: max(abs(difference) for difference, _ in finite[one]))[:CLOSEST]
    whole = [difference + side * error for one in closest for difference, error in finite[one] for side in (-1, 1)]
    low = min([0.0, *whole, *(difference - error for pairs in finite.values() for difference, error in pairs)])
    high = max([-low / 2, *whole])
    margin = max(0.08 * (high - low), 0.005)
    return low - margin, high + margin


def scale_lengths(chart: Any, multiples: Sequence[float], labels: Sequence[str]) -> None:
    """Scale the length axis in multiples of L (log 2), with ticks at the lengths, and mark the training length."""
    from matplotlib.ticker import NullLocator

    chart.set_xscale("log", base=2)
    chart.axvline(1, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -4), "textcoords": "offset points", "va": "top"}
    chart.annotate("training length", (1, 1), size=SIZE, color=FAINT, **place)
    chart.set_xticks(multiples, labels)
    chart.xaxis.set_minor_locator(NullLocator())


def tidy(chart: Any) -> None:
    """Draw faint lines across and no box around, with words of one size."""
    chart.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    chart.set_axisbelow(True)
    chart.tick_params(length=0, labelsize=SIZE, colors=INK)
    chart.spines[["top", "left", "right"]].set_visible(False)
    chart.spines["bottom"].set_color("#BBBBBB")
    for text in (chart.xaxis.label, chart.yaxis.label, chart.title, chart._left_title):
        text.set(size=SIZE, color=INK)


def plot_band(chart: Any, at: Sequence[float], values: Sequence[tuple[float, float]], **style: Any) -> Any:
    """Plot a line with a light band of its errors."""
    middle, errors = zip(*values, strict=True)
    (line,) = chart.plot(at, middle, **style)
    low, high = ([value + side * error for value, error in values] for side in (-1, 1))
    if any(errors):
        chart.fill_between(at, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    return line


def _style(series: Series, grid: Grid) -> dict[str, Any]:
    """The style of a line: references are dashed without markers, all other lines look different from each other, and
    the line before a training is dotted.
    """
    if series.line in COMPARED:
        colour, style = INK if series.line == grid.baseline else "#8A8A8A", "-." if series.line in CONTROLS else "--"
        return {"color": colour, "linestyle": style, "linewidth": 1.6, "zorder": 2}
    others = list(dict.fromkeys(one.line for one in grid.series if one.line not in COMPARED))
    turn, look = divmod(others.index(series.line), len(COLOURS))
    dashes: Any = (0, (turn, 1)) if turn else "-"
    if series.step == 0 and any(grid.steps(series.line)):
        dashes = ":"
    return {"color": COLOURS[look], "marker": MARKERS[look], "linestyle": dashes, "linewidth": 1.8, "markersize": 4.5}
