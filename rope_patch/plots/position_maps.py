"""The position map of a scheme: the distance by which each pair of query and key is rotated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from rope_patch.evaluation.chart import COLOURS, FAINT, INK
from rope_patch.plots.checks import require_count, require_some
from rope_patch.plots.style import name_axes, panel, sheet, short_name, tokens_axis
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.dca import DualChunkAttention
from rope_patch.schemes.lm_infinite import LMInfinite
from rope_patch.schemes.rerope import LeakyReRoPE, ReRoPE
from rope_patch.schemes.rope import RoPE
from rope_patch.schemes.self_extend import SelfExtend
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.window import SlidingWindow

_MOST, _COLUMNS = 12, 4


def rotated_distances(scheme: Scheme, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """phi_q(m) - phi_k(n) of the region that holds each pair; NaN where no region does, so that it is not attended.

    Args:
        scheme: with its defaults filled in, see `Scheme.resolve`. One without segments leaves m - n as it is.
        m, n: integer positions of queries and keys, broadcastable.

    Returns:
        float64, the broadcast shape of `m` and `n`.
    """
    if "segments" not in scheme.slots:
        return (m - n).double()
    distances = torch.full(torch.broadcast_shapes(m.shape, n.shape), math.nan, dtype=torch.float64)
    for region in scheme.segments():
        there = region.query_map(m).double() - region.key_map(n).double()
        distances = torch.where(region.contains(m, n), there, distances)
    return distances


def segment_schemes(training_length: int, length: int) -> tuple[Scheme, ...]:
    """RoPE, and the segment schemes with settings that keep every distance of a text within the training length.

    Args:
        training_length: L in tokens.
        length: of the text in tokens.
    """
    w = max(1, training_length // 2)
    stretch = max(1, math.ceil((length - w) / max(1, training_length - w)))
    return (
        RoPE(),
        SlidingWindow(window=training_length),
        LMInfinite(local_window=training_length, n_global=max(1, training_length // 8)),
        ReRoPE(window=w),
        LeakyReRoPE(window=w, factor=stretch),
        SelfExtend(group_size=stretch, window=w),
        DualChunkAttention(),
        DualChunkAttention(constants="paper"),
    )


def plot_position_maps(schemes: Sequence[Scheme] = (), training_length: int = 64, length: int | None = None) -> Figure:
    """`rotated_distances` of a causal model as images, a panel per scheme, pairs that are not attended left blank.

    Distances up to the training length run from light to dark; farther ones, which the model never met, are orange.

    Args:
        schemes: default `segment_schemes`.
        training_length: L in tokens.
        length: of the text in tokens; default 4L.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_count("training_length", training_length, minimum=2)
    length = 4 * training_length if length is None else length
    require_count("length", length)
    schemes = schemes or segment_schemes(training_length, length)
    require_some("schemes", schemes, most=_MOST)
    columns = min(_COLUMNS, len(schemes))
    rows = math.ceil(len(schemes) / columns)
    size, across, down = 1.65, 1.95, 2.35
    width, height = 0.75 + across * columns + (0.95 if columns > 1 else 1.75), 1.0 + down * rows
    figure = sheet(
        width,
        height,
        "Position maps",
        f"the distance by which query m and key n are rotated, training length {training_length:,} tokens; "
        "blank pairs are not attended",
    )
    positions = torch.arange(length)
    m, n = positions[:, None], positions
    checkpoint = Checkpoint(training_length, num_heads=1, max_length=length)
    colours = colormaps["YlGnBu"].with_extremes(over=COLOURS[1], bad="white")
    for i, scheme in enumerate(schemes):
        row, column = divmod(i, columns)
        axes = panel(figure, 0.7 + across * column, 0.5 + down * (rows - 1 - row), size, size)
        resolved = scheme.resolve(checkpoint)
        distances = rotated_distances(resolved, m, n).masked_fill(m < n, math.nan)
        image = axes.imshow(distances.numpy(), cmap=colours, vmin=0, vmax=training_length, interpolation="nearest")
        lowest = i + columns >= len(schemes)
        name_axes(axes, "key n (tokens)" if lowest else "", "" if column else "query m (tokens)")
        _entitle(axes, scheme, resolved)
        _frame(axes, training_length, length)
    _draw_bar(figure, image, panel(figure, width - 1.0, 0.5, 0.12, size), training_length)
    return figure


def _entitle(axes: Any, scheme: Scheme, resolved: Scheme) -> None:
    """The name of a scheme, and its settings below in smaller letters: those of the checkpoint where none are given."""
    name, _, fields = short_name(scheme).partition(" ")
    fields = fields or short_name(resolved).partition(" ")[2]
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(name, (0, 1), xytext=(0, 15), size=9.5, weight="bold", color=INK, **place)
    axes.annotate(fields, (0, 1), xytext=(0, 4), size=7.5, color=FAINT, **place)


def _draw_bar(figure: Figure, image: Any, axes: Any, training_length: int) -> None:
    bar = figure.colorbar(image, cax=axes, extend="max", extendfrac=0.12)
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=8, length=0)
    half = training_length / 2
    bar.set_ticks([0, half, training_length], labels=["0 tokens", f"{half:g}", f"L = {training_length}"])
    axes.annotate("farther", (1, 1.06), xytext=(4, 0), xycoords="axes fraction", textcoords="offset points", size=8)


def _frame(axes: Any, training_length: int, length: int) -> None:
    ticks = [*range(0, length + 1, training_length * max(1, math.ceil(length / training_length / 4)))]
    tokens_axis(axes.xaxis, ticks)
    tokens_axis(axes.yaxis, ticks)
    axes.tick_params(length=2, labelsize=8, colors=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#BBBBBB")
