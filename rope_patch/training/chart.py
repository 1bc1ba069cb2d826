"""A comparison as a picture: one panel per slot, perplexity against length, the same references grey in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.evaluation import figures
from rope_patch.evaluation.chart import COLOURS, FAINT, INK, MARKERS, perplexity_of, scale_axes, tidy
from rope_patch.evaluation.labels import spread_apart
from rope_patch.evaluation.report import display_name
from rope_patch.training.report import PANELS, Entry, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = ("rope", "nope", "alibi")
"""Lines that every panel shows: in colour under their own slot, grey elsewhere."""

CAP = 8.0
"""The perplexity axis ends at this multiple of the lowest perplexity; lines beyond end in an arrow."""

_GREY = "#A8A8A8"
_WIDTH, _PANEL = 14.0, 4.3
_LETTER = 8.5
_DOTTED = (0, (2, 1))
_THREAD = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}


def save(summary: Summary, path: str | Path) -> Path:
    """Draw `figure(summary)` into a PNG.

    Raises:
        MissingPackage: there is no matplotlib.
        OSError: when it cannot be written.
    """
    return figures.save(figure(summary), path, dpi=140)


def figure(summary: Summary) -> Figure:
    """The chart: x is the context length in multiples of L (log 2), y the perplexity per byte (log).

    The band around a line is a standard deviation over the seeds to either side. Every line is named at its right end.

    Raises:
        MissingPackage: there is no matplotlib.
    """
    slots = [slot for slot in PANELS if any(entry.slot == slot for entry in summary.entries)]
    columns = min(2, len(slots))
    count = math.ceil(len(slots) / columns)
    height = 1.5 + _PANEL * count
    drawn = figures.blank(_WIDTH * (0.6 if columns == 1 else 1), height)
    grid = drawn.subplots(count, columns, squeeze=False, sharex=True, sharey=True)
    drawn.subplots_adjust(left=0.06, right=0.845, top=1 - 0.95 / height, bottom=0.95 / height, hspace=0.16, wspace=0.48)
    low, high = _limits(summary)
    panels = list(grid.flat)
    for panel, slot in zip(panels, slots, strict=False):
        _draw_panel(panel, summary, slot, low, high)
    for spare in panels[len(slots) :]:
        spare.set_axis_off()
    for panel in grid[:, 0]:
        panel.set_ylabel("perplexity per byte", size=9.5, color=INK)
    for column in range(columns):
        lowest = [panel for panel in grid[:, column] if panel.axison][-1]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("context length in training lengths, and in bytes", size=9.5, color=INK)
    title = "Position encodings trained from scratch: perplexity against context length"
    drawn.text(0.06, 1 - 0.32 / height, title, size=14, weight="bold", color=INK)
    drawn.text(0.06, 1 - 0.56 / height, summary.notes[0], size=9.5, color=FAINT)
    drawn.text(0.06, 0.14 / height, summary.notes[1], size=8.5, color=FAINT)
    return drawn


def _limits(summary: Summary) -> tuple[float, float]:
    """Of the perplexity axis."""
    found = [
        perplexity_of(cell.mean) for entry in summary.entries for cell in entry.cells.values() if cell.mean == cell.mean
    ]
    if not found:
        return 1.0, CAP
    low, high = min(found), max(found)
    return low / 1.06, min(high * 1.06, low * CAP)


def _draw_panel(panel: Any, summary: Summary, slot: str, low: float, high: float) -> None:
    multiples = [length / summary.training_length for length in summary.lengths]
    labels = [f"{m:g}L\n{length}" for m, length in zip(multiples, summary.lengths, strict=True)]
    scale_axes(panel, multiples, labels)
    panel.set_xlim(multiples[0] / 2**0.15, multiples[-1] * 2**0.08)
    panel.set_ylim(low, high)
    panel.set_title(f"slot: {slot}", size=10.5, color=INK, loc="left", weight="bold")
    own = [entry for entry in summary.entries if entry.slot == slot]
    grey = [entry for entry in summary.entries if entry.encoding in REFERENCES and entry.slot != slot]
    ends = []
    for entry in grey:
        style = {"color": _GREY, "linestyle": "-", "linewidth": 1.4, "marker": "", "markersize": 0.0}
        ends += _draw_line(panel, summary, entry, style, high)
    for i, entry in enumerate(own):
        dots = i >= len(COLOURS)  # with the markers in another order, so that no two lines look alike
        style = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": _DOTTED if dots else "-",
            "linewidth": 1.8,
            "marker": MARKERS[(i + (i // len(COLOURS))) % len(MARKERS)],
            "markersize": 4.5,
        }
        ends += _draw_line(panel, summary, entry, style, high)
    _label(panel, ends, multiples[-1], low, high)
    tidy(panel)


def _draw_line(
    panel: Any, summary: Summary, entry: Entry, style: dict[str, Any], high: float
) -> list[tuple[float, float, str, str]]:
    """Draw one encoding.

    Returns:
        where its label belongs, in multiples of L and perplexity, its words and its colour; nothing where it has no
        numbers.
    """
    points = [
        (length / summary.training_length, cell)
        for length in summary.lengths
        if not math.isnan((cell := entry.cells[length]).mean)
    ]
    if not points:
        return []
    x = [multiple for multiple, _ in points]
    y = [perplexity_of(cell.mean) for _, cell in points]
    # cut at the axis only by the axis itself, so that the slope towards the arrow is the true one
    panel.plot(x, y, zorder=2 if style["color"] == _GREY else 3, **style)
    spreads = [0.0 if math.isnan(cell.spread) else cell.spread for _, cell in points]
    if any(spreads):
        lower = [perplexity_of(cell.mean - spread) for (_, cell), spread in zip(points, spreads, strict=True)]
        upper = [perplexity_of(cell.mean + spread) for (_, cell), spread in zip(points, spreads, strict=True)]
        panel.fill_between(x, lower, upper, color=style["color"], alpha=0.18, linewidth=0, zorder=1)
    words = display_name(entry.encoding)
    if y[-1] > high:
        words += f" ↑ {y[-1]:.3g}"
        _draw_arrow(panel, x, y, high, style["color"])
    elif len(points) < len(summary.lengths):
        words += f" (to {x[-1]:g}L)"
    return [(x[-1], y[-1], words, style["color"])]


def _draw_arrow(panel: Any, x: Sequence[float], y: Sequence[float], high: float, colour: str) -> None:
    """An arrow where the line leaves the axis for the last time."""
    inside = max((i for i, value in enumerate(y) if value <= high), default=None)
    if inside is None:
        where = x[0]
    else:
        steps = [math.log(value) for value in (y[inside], y[inside + 1], high)]
        share = (steps[2] - steps[0]) / (steps[1] - steps[0])
        where = x[inside] * (x[inside + 1] / x[inside]) ** share
    panel.plot([where], [high], marker="^", color=colour, markersize=7, clip_on=False, zorder=4, linestyle="")


def _label(panel: Any, ends: Sequence[tuple[float, float, str, str]], right: float, low: float, high: float) -> None:
    """Name every line beside its right end, in the order of the ends, spread apart where they would overlap."""
    if not ends:
        return
    ordered = sorted(ends, key=lambda end: end[1])
    heights = [math.log(min(y, high) / low) / math.log(high / low) for _, y, _, _ in ordered]
    pitch = (_LETTER + 2.2) / 72 / (_PANEL * 0.84)  # of one label, as a share of the panel's height
    for (x, y, words, colour), height in zip(ordered, spread_apart(heights, pitch, 0.0, 1.0), strict=True):
        panel.annotate(
            words,
            xy=(x, y),
            xycoords="data",
            xytext=(1.045, height),
            textcoords="axes fraction",
            size=min(_LETTER, _LETTER * 26 / len(words)),
            color=FAINT if colour == _GREY else colour,
            va="center",
            annotation_clip=False,
            arrowprops=None if "↑" in words else {**_THREAD, "color": colour},  # its line ended at an arrow before
        )
