"""Bias matrices: what a scheme adds to the score of every pair of positions, head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from rope_patch.errors import InvalidField
from rope_patch.evaluation.chart import FAINT, INK
from rope_patch.plots.checks import require_count, require_slot, require_some
from rope_patch.plots.style import (
    HIDDEN,
    name_axes,
    panel,
    sheet,
    short_name,
    tokens_axis,
)
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint, ModelShape
from rope_patch.typing import Weights

_MOST_HEADS, _MOST_SCHEMES = 8, 6


def bias_matrices(
    scheme: Scheme,
    num_heads: int,
    length: int,
    weights: Weights | None = None,
    bidirectional: bool = False,
) -> torch.Tensor:
    """b(m, n) of a scheme whose bias depends on the distance.

    Args:
        scheme: fills `bias` by distance, such as `ALiBi()`.
        num_heads: of the model.
        length: positions, from 0.
        weights: its learned parameters by name; default as they start in an untrained model.
        bidirectional: whether keys after the query are seen; their pairs are NaN otherwise.

    Returns:
        float64, `(heads, length, length)`, rows are queries.

    Raises:
        InvalidField: when the scheme has no such bias or needs weights, or naming the wrong argument.
    """
    require_slot(scheme, "bias", ("alibi", "t5", "sandwich"))
    require_count("num_heads", num_heads)
    require_count("length", length)
    resolved = scheme.resolve(Checkpoint(length, num_heads, length, bidirectional))
    if weights is None:
        shape = ModelShape(num_heads, 64, 64 * num_heads, 1, 1, length, 64)
        weights = resolved.parameters(shape, torch.Generator().manual_seed(0))
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    try:
        bias = resolved.bias(distance, num_heads, weights).detach().double()
    except KeyError as missing:
        raise InvalidField(
            f"{scheme}: its bias is read off the learned parameter {missing}; give it in `weights`"
        ) from None
    if len(bias) != num_heads:
        raise InvalidField(f"num_heads={num_heads} is not allowed; the weights of {scheme} are for {len(bias)} heads")
    return bias if bidirectional else bias.masked_fill(distance < 0, torch.nan)


def plot_biases(
    schemes: Sequence[Scheme],
    num_heads: int = 4,
    length: int = 64,
    weights: Mapping[str, Weights] | None = None,
    bidirectional: Sequence[str] = (),
) -> Figure:
    """`bias_matrices` as images: a row per scheme, a column per head; white is no bias, blue less, red more attention.

    Colours mean the same in all heads of a row. Only differences along one row of a matrix matter to the softmax.

    Args:
        schemes: with a bias by distance.
        num_heads: of the model.
        length: positions, from 0.
        weights: learned parameters by the name of the scheme; default as they start in an untrained model.
        bidirectional: names of the schemes that are drawn for keys on both sides.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_some("schemes", schemes, most=_MOST_SCHEMES)
    require_count("num_heads", num_heads)
    require_some("num_heads", range(num_heads), most=_MOST_HEADS)
    given = weights or {}
    size, pitch = 1.45, 2.2
    figure = sheet(
        1.75 + 1.6 * num_heads,
        0.95 + pitch * len(schemes),
        "Biases by position",
        "what is added to the score of query m and key n; rows of one colour scale, grey is not seen",
    )
    for row, scheme in enumerate(schemes):
        both = scheme.name in bidirectional
        matrices = bias_matrices(scheme, num_heads, length, given.get(scheme.name), both)
        bottom = 0.5 + pitch * (len(schemes) - 1 - row)
        most = float(matrices.nan_to_num().abs().max()) or 1.0
        colours = colormaps["RdBu_r"].with_extremes(bad=HIDDEN)
        for head, matrix in enumerate(matrices):
            axes = panel(figure, 0.75 + 1.6 * head, bottom, size, size)
            image = axes.imshow(matrix.numpy(), cmap=colours, vmin=-most, vmax=most, interpolation="nearest")
            last = row == len(schemes) - 1
            name_axes(axes, "key n (tokens)" if last else "", "" if head else "query m (tokens)")
            seen = matrix[~matrix.isnan()]
            low, high = (_signed(float(extreme)) for extreme in (seen.min(), seen.max()))
            axes.set_title(f"head {head + 1}: {low} to {high}", size=8, color=FAINT, loc="left", pad=4)
            _frame(axes, length, labelled=head == 0)
            if head == 0:
                axes.annotate(
                    short_name(scheme),
                    (0, 1),
                    xytext=(0, 17),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    size=9.5,
                    weight="bold",
                    color=INK,
                )
        left = 0.75 + 1.6 * num_heads
        bar = figure.colorbar(image, cax=panel(figure, left, bottom, 0.1, size))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, length=0)
        bar.set_label("bias (nats)", size=8, color=INK)
        seen = matrices[~matrices.isnan()]
        if seen.any():
            bar.ax.set_ylim(min(0.0, float(seen.min())), max(0.0, float(seen.max())))
    return figure


def _signed(value: float) -> str:
    return f"{value + 0.0:.3g}".replace("-", "\N{MINUS SIGN}")  # the sum makes a negative zero positive


def _frame(axes: Any, length: int, labelled: bool) -> None:
    ticks = [0, length // 2, length - 1] if length > 2 else range(length)
    tokens_axis(axes.xaxis, ticks)
    tokens_axis(axes.yaxis, ticks)
    axes.tick_params(length=2, labelsize=8, colors=INK, labelleft=labelled)
    for spine in axes.spines.values():
        spine.set_visible(False)
