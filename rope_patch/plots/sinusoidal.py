"""Sinusoidal positions as a heat map."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from rope_patch.errors import InvalidField, did_you_mean
from rope_patch.evaluation.chart import INK
from rope_patch.plots.checks import require_count, require_positive
from rope_patch.plots.style import name_axes, number, panel, sheet, tokens_axis
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows

_LAYOUTS = {"split": "all sines, then all cosines", "interleaved": "sines and cosines by turns"}


def plot_sinusoidal(length: int = 128, dim: int = 128, base: float = 10000.0, layout: str = "split") -> Figure:
    """PE(pos) of "Attention Is All You Need", one row per position: fast dimensions flicker, slow ones drift.

    The numbers are those of `sinusoidal_rows`.

    Args:
        length: positions, from 0.
        dim: d, even.
        base: b, which sets the longest wavelength, 2 pi b.
        layout: as in `Sinusoidal`; `"split"` is the easier to read.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_count("length", length)
    require_count("dim", dim, minimum=2, multiple_of=2)
    require_positive("base", base)
    if layout not in _LAYOUTS:
        raise InvalidField(f"layout={layout!r}: {did_you_mean(str(layout), _LAYOUTS)}")
    rows = sinusoidal_rows(torch.arange(length), dim, base, layout)
    figure = sheet(6.6, 4.6, "Sinusoidal positions", f"d = {dim}, base {number(base)}; {_LAYOUTS[layout]}")
    axes = panel(figure, 0.75, 0.6, 4.9, 3.2)
    image = axes.imshow(rows.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    name_axes(axes, "dimension", "position (tokens)")
    axes.tick_params(length=2.5, colors=INK)
    axes.spines[:].set_visible(False)
    tokens_axis(axes.xaxis, range(0, dim, max(1, dim // 8)))
    bar = figure.colorbar(image, cax=panel(figure, 5.8, 0.6, 0.13, 3.2), ticks=[-1, -0.5, 0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.set_label("value", size=9, color=INK)
    bar.ax.tick_params(labelsize=8.5, length=0)
    return figure
