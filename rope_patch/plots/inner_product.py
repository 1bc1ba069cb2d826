"""How the likeness of two positions falls with their distance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from matplotlib.figure import Figure

from rope_patch.evaluation.chart import COLOURS
from rope_patch.plots.checks import require_count, require_positive, require_some
from rope_patch.plots.over_distance import check_distances, draw_over_distance
from rope_patch.plots.style import number, sheet
from rope_patch.schemes.tools.rotary import inverse_frequencies


def mean_inner_products(distance: torch.Tensor, dim: int, base: float = 10000.0) -> torch.Tensor:
    """(2/d) sum_i cos(theta_i distance): the inner product of two sinusoidal vectors, divided by that at distance 0.

    It is as well what rotation makes of the inner product of a vector of ones with itself.

    Args:
        distance: m - n in tokens, of any shape.
        dim: d, even.
        base: b in theta_i = b^(-2i/d).

    Returns:
        float64, the shape of `distance`.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_count("dim", dim, minimum=2, multiple_of=2)
    require_positive("base", base)
    return (distance.double()[..., None] * inverse_frequencies(dim, base).double()).cos().mean(dim=-1)


def plot_inner_product(
    dims: Sequence[int] = (32, 128, 512),
    length: int = 16384,
    base: float = 10000.0,
    training_length: int | None = None,
) -> Figure:
    """`mean_inner_products` over distance, a line per number of dimensions and a band for its ripples.

    It falls with the logarithm of the distance, and is spent at about as many tokens as the base says. More dimensions
    do not make it fall faster; they take away the ripples, in which a far position looks nearer than it is.

    Args:
        dims: d, even, one per line.
        length: the longest distance in tokens.
        base: b.
        training_length: L in tokens, to be marked. Default: not marked.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_some("dims", dims, most=len(COLOURS))
    check_distances(length, training_length)
    figure = sheet(
        6.9,
        3.9,
        "Likeness of two positions",
        f"mean of cos(\N{GREEK SMALL LETTER THETA}\N{LATIN SUBSCRIPT SMALL LETTER I} (m \N{MINUS SIGN} n)) "
        f"over d/2 pairs of dimensions, base {number(base)}\nbands: range over neighbouring distances",
    )
    quantities = {f"d = {dim}": partial(mean_inner_products, dim=dim, base=base) for dim in dims}
    axes = draw_over_distance(figure, quantities, "normalised inner product", length, training_length, 5.2)
    axes.axhline(0, color="#BBBBBB", linewidth=0.8)
    return figure
