"""A panel of quantities over distance: a line and the band of its ripples for each, named at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from matplotlib.figure import Figure

from rope_patch.evaluation.chart import COLOURS, tidy
from rope_patch.plots.checks import require_count
from rope_patch.plots.style import (
    End,
    band_of,
    draw_band,
    mark_training_length,
    name_axes,
    name_ends,
    panel,
    powers_of_two,
    tokens_axis,
)

Quantity = Callable[[torch.Tensor], torch.Tensor]
"""From distances in tokens, of any shape, to values of that shape."""


def check_distances(length: int, training_length: int | None) -> None:
    """Check what every such picture is given.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_count("length", length, minimum=2)
    if training_length is not None:
        require_count("training_length", training_length)


def draw_over_distance(
    figure: Figure,
    quantities: Mapping[str, Quantity],
    name: str,
    length: int,
    training_length: int | None,
    width: float,
    limits: tuple[float, float] | None = None,
) -> Any:
    """Distances from 1 to `length` on a logarithmic axis.

    Args:
        figure: a sheet.
        quantities: by the name that stands at the end of the line, one colour each.
        name: of what they are, at the vertical axis.
        length: the longest distance in tokens.
        training_length: L in tokens, to be marked; None for no mark.
        width: of the panel in inches.
        limits: of the vertical axis; default those of the values.

    Returns:
        the axes.
    """
    distance = torch.arange(1, length + 1)
    bands = {label: band_of(distance, quantity(distance)) for label, quantity in quantities.items()}
    axes = panel(figure, 0.75, 0.6, width, 2.45)
    axes.set_xscale("log", base=2)
    for colour, band in zip(COLOURS, bands.values(), strict=False):
        draw_band(axes, band, colour)
    axes.set_xlim(1, length)
    if limits is not None:
        axes.set_ylim(*limits)
    if training_length is not None:
        mark_training_length(axes, training_length)
    name_axes(axes, "distance m \N{MINUS SIGN} n (tokens)", name)
    tokens_axis(axes.xaxis, powers_of_two(1, length))
    tidy(axes)
    ends = [
        End(length, float(band.mean[-1]), label, colour)
        for colour, (label, band) in zip(COLOURS, bands.items(), strict=False)
    ]
    name_ends(axes, ends, gap=0.08)
    return axes
