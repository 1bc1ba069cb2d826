"""How many tokens each pair of dimensions needs for a full turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from rope_patch.evaluation.chart import COLOURS, tidy
from rope_patch.plots.checks import require_count, require_positive, require_some
from rope_patch.plots.frequencies import frequencies_of
from rope_patch.plots.style import (
    LINE,
    End,
    mark_training_length,
    name_axes,
    name_ends,
    number,
    panel,
    sheet,
    short_name,
    tokens_axis,
)
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.rope import RoPE
from rope_patch.typing import RotarySpec


def wavelengths_of(scheme: Scheme, rotary: RotarySpec, length: int | None = None) -> torch.Tensor:
    """2 pi / theta_i in tokens, under a scheme that fills `frequencies`; infinite where a pair does not turn.

    Args:
        scheme: such as `YaRN(factor=8)`.
        rotary: of the checkpoint.
        length: of the text in tokens, for a scheme that follows it; default the training length.

    Returns:
        float64, `(d/2,)`.

    Raises:
        InvalidField: when the scheme has no frequencies, or naming the wrong argument.
    """
    return 2 * math.pi / frequencies_of(scheme, rotary, length).inv_freq


def plot_wavelengths(
    rotary: RotarySpec,
    bases: Sequence[float] = (10000, 500000, 10000000),
    schemes: Sequence[Scheme] = (),
    length: int | None = None,
) -> Figure:
    """`wavelengths_of` by pair of dimensions: of RoPE with several bases, and of schemes for the base of `rotary`.

    Pairs above the line of the training length have never made a full turn in training: beyond L they meet angles
    that they do not know. A scheme that stretches a text k times moves them up by k, and differs from the others in
    what it does to the pairs below the line.

    Args:
        rotary: d, b and L of the checkpoint.
        bases: a line each in the first panel; none for no such panel.
        schemes: a line each in the second panel, beside RoPE itself; none for no such panel.
        length: of the text in tokens, for schemes that follow it; default the training length.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_count("dim", rotary.dim, minimum=2, multiple_of=2)
    require_positive("base", rotary.base)
    require_count("training_length", rotary.training_length)
    for base in bases:
        require_positive("base", base)
    of_bases = {
        f"base {number(base)}": wavelengths_of(RoPE(), RotarySpec(rotary.dim, base, rotary.training_length))
        for base in bases
    }
    of_schemes = {short_name(scheme): wavelengths_of(scheme, rotary, length) for scheme in (RoPE(), *schemes)}
    panels = {
        "RoPE with several bases": of_bases,
        f"schemes, base {number(rotary.base)}": of_schemes if schemes else {},
    }
    panels = {title: lines for title, lines in panels.items() if lines}
    require_some("bases and schemes", panels, most=2)
    for title, lines in panels.items():
        require_some(title, lines, most=len(COLOURS))
    pitches = [3.7 + 0.067 * max(map(len, lines)) for lines in panels.values()]  # inches; names stand at the right
    figure = sheet(
        0.1 + sum(pitches),
        4.3,
        "Wavelengths of rotary positions",
        f"d = {rotary.dim}, training length {rotary.training_length:,} tokens\npairs above the dotted line never made "
        "a full turn in training",
    )
    values = torch.cat([line for lines in panels.values() for line in lines.values()])
    top = 2 * float(values[values.isfinite()].max())
    for i, (title, lines) in enumerate(panels.items()):
        axes = panel(figure, 0.85 + sum(pitches[:i]), 0.6, 2.5, 2.6)
        _draw(axes, lines, rotary, top)
        name_axes(axes, "pair of dimensions i", "" if i else "wavelength (tokens)", title)
    return figure


def _draw(axes: Any, lines: Mapping[str, torch.Tensor], rotary: RotarySpec, top: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(4, top)
    axes.set_xlim(0, max(1, rotary.dim // 2 - 1))
    ends = []
    for colour, (name, values) in zip(COLOURS, lines.items(), strict=False):
        axes.plot(values, color=colour, zorder=3, **LINE)
        last = int(values.isfinite().nonzero().max()) if values.isfinite().any() else 0
        ends.append(End(last, min(float(values[last]), top), name, colour))
    mark_training_length(axes, rotary.training_length, along="y")
    tokens_axis(axes.yaxis, [10**k for k in range(1, 1 + int(math.log10(top)))])
    tidy(axes)
    name_ends(axes, ends, gap=0.075)
