"""The look that all pictures share. The palette and the bare axes are those of the chart of perplexity."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rope_patch.evaluation import figures
from rope_patch.evaluation.chart import FAINT, INK
from rope_patch.evaluation.labels import spread_apart
from rope_patch.schemes.base import Scheme

HIDDEN = "#EDEDED"
"""Where there is nothing to see: keys after the query, and pairs that are not attended."""

LINE: dict[str, Any] = {"linewidth": 1.6, "solid_capstyle": "round"}

_DPI = 130


@dataclass(frozen=True)
class End:
    """The right end of a line, which bears the line's name.

    Attributes:
        x, y: in data coordinates.
        name: what to write.
        colour: of the line.
    """

    x: float
    y: float
    name: str
    colour: str


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as a small PNG, the same bytes whenever the picture is the same.

    Args:
        figure: one of the pictures.
        path: of the file.

    Raises:
        OSError: when it cannot be written.
    """
    return figures.save(figure, path, dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})


def sheet(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    """An empty figure, in inches, with its title in the upper left corner; a subtitle may take two lines of it.

    Args:
        width, height: in inches.
        title: one line.
        subtitle: wrapped to the width; default none.
    """
    figure = figures.blank(width, height)
    figure.text(0.15 / width, 1 - 0.13 / height, title, size=12.5, weight="bold", color=INK, va="top")
    lines = [wrapped for line in subtitle.split("\n") for wrapped in textwrap.wrap(line, int((width - 0.3) * 14.5))]
    figure.text(0.15 / width, 1 - 0.42 / height, "\n".join(lines), size=8.5, color=FAINT, va="top", linespacing=1.35)
    return figure


def panel(figure: Figure, left: float, bottom: float, width: float, height: float, **settings: Any) -> Any:
    """Axes at a place in inches.

    Args:
        figure: to draw on.
        left, bottom, width, height: in inches.
        **settings: for `Figure.add_axes`.
    """
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up), **settings)


def name_axes(axes: Any, x: str = "", y: str = "", title: str = "") -> None:
    """Write what the axes show, with units.

    Args:
        axes: the axes.
        x, y, title: what to write; default nothing.
    """
    axes.set_xlabel(x, size=9, color=INK)
    axes.set_ylabel(y, size=9, color=INK)
    axes.set_title(title, size=9.5, color=INK, loc="left")
    axes.tick_params(labelsize=8.5)


def tokens_axis(axis: Any, ticks: Sequence[float]) -> None:
    """Ticks at these numbers of tokens and nowhere else."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def number(value: float) -> str:
    """A number to read: 10,000 and not 1e+04, 1M and not 1,000,000."""
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if value >= size and value % (size // 10) == 0:
            return f"{value / size:g}{letter}"
    return f"{value:,.0f}" if value >= 10**4 or value == round(value) else f"{value:.4g}"


def mark_training_length(axes: Any, training_length: int, along: str = "x") -> None:
    """A dotted line at L: upright in axes whose x counts tokens, or level in axes whose y does.

    The words stand at its top, or at its left end, where the caller leaves room. Nothing is drawn where L lies beyond
    the limits of the axes, which are final.

    Args:
        axes: with their final limits.
        training_length: L in tokens.
        along: `x` or `y`, the axis that counts tokens.
    """
    low, high = sorted(axes.get_xlim() if along == "x" else axes.get_ylim())
    if not low <= training_length <= high:
        return
    style = {"color": FAINT, "linewidth": 1, "linestyle": ":", "zorder": 1}
    words = {"xycoords": "data", "textcoords": "offset points", "size": 8, "color": FAINT}
    if along == "x":
        axes.axvline(training_length, **style)
        where = {**words, "xycoords": ("data", "axes fraction")}
        axes.annotate("training length", (training_length, 1), xytext=(4, -2), va="top", **where)
    else:
        axes.axhline(training_length, **style)
        where = {**words, "xycoords": ("axes fraction", "data")}
        axes.annotate("training length", (0, training_length), xytext=(4, 3), **where)


def name_ends(axes: Any, ends: Sequence[End], gap: float) -> None:
    """Write the name of each line right of the axes, tied to the line's end by a thread, names never overlapping.

    Args:
        axes: with their final limits.
        ends: of the lines.
        gap: the least distance of two names, as a share of the height of the axes.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    order = sorted(range(len(ends)), key=lambda i: -wanted[i])
    places = spread_apart([wanted[i] for i in reversed(order)], gap)
    for i, place in zip(order, reversed(places), strict=True):
        axes.annotate(
            ends[i].name,
            (ends[i].x, ends[i].y),
            xytext=(1.05, place),
            textcoords="axes fraction",
            size=8.5,
            color=INK,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": ends[i].colour,
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


@dataclass(frozen=True)
class Band:
    """Values over distance in bins of a quarter of an octave: their mean, least and greatest, float64, `(bins,)` each.

    Attributes:
        distance: geometric mean of the distances in the bin.
        mean, least, greatest: of the values in the bin.
    """

    distance: torch.Tensor
    mean: torch.Tensor
    least: torch.Tensor
    greatest: torch.Tensor


def band_of(distance: torch.Tensor, values: torch.Tensor) -> Band:
    """What an axis of logarithms can show of values at all distances, whose ripples lie closer than the ink.

    Args:
        distance: whole, from 1 on, ascending, `(distances,)`.
        values: at them.
    """
    _, size = (4 * distance.double().log2()).round().unique_consecutive(return_counts=True)
    bins = [part.split(size.tolist()) for part in (distance.double().log2(), values.double())]
    return Band(
        torch.stack([part.mean() for part in bins[0]]).exp2(),
        torch.stack([part.mean() for part in bins[1]]),
        torch.stack([part.min() for part in bins[1]]),
        torch.stack([part.max() for part in bins[1]]),
    )


def draw_band(axes: Any, band: Band, colour: str) -> None:
    """The mean as a line, the range as a pale band around it.

    Args:
        axes: the axes.
        band: what to draw.
        colour: of both.
    """
    axes.fill_between(band.distance, band.least, band.greatest, color=colour, alpha=0.2, linewidth=0, zorder=2)
    axes.plot(band.distance, band.mean, color=colour, zorder=3, **LINE)


def short_name(scheme: Scheme) -> str:
    """The name of a scheme with those of its fields that are not at their defaults."""
    words = []
    for part in scheme.parts():
        defaults = {field.name: field.default for field in dataclasses.fields(part)}  # type: ignore[arg-type]
        fields = {key: getattr(part, key) for key, default in defaults.items() if getattr(part, key) != default}
        words.append(" ".join([part.name, *(f"{key}={_plain(value)}" for key, value in fields.items())]))
    return " + ".join(words)


def _plain(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 4:  # a factor for every pair of dimensions
        return f"({_plain(value[0])}, ..., {_plain(value[-1])})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def powers_of_two(first: int, last: float, step: int = 2) -> list[int]:
    """1, 4, 16, ... within bounds: `step` doublings from tick to tick.

    Args:
        first, last: the bounds, both included.
        step: doublings from tick to tick, 2 by default.
    """
    return [2**i for i in range(0, 64, step) if first <= 2**i <= last]
