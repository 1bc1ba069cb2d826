"""The bound on how a rotated inner product decays with distance."""

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


def decay_bounds(distance: torch.Tensor, dim: int, base: float = 10000.0) -> torch.Tensor:
    """(2/d) sum_(i=1)^(d/2) |S_i| with S_i = sum_(j<i) exp(i distance theta_j) (RoFormer, section 3.4.3).

    Summation by parts bounds a rotated inner product by the sum of |S_i| times the largest difference between
    neighbouring pairs of dimensions. At distance 0 it is (d/2 + 1) / 2.

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
    angles = distance.double()[..., None] * inverse_frequencies(dim, base).double()
    return torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1).abs().mean(dim=-1)


def plot_decay_bound(
    bases: Sequence[float] = (100, 10000, 500000, 10000000),
    length: int = 16384,
    dim: int = 128,
    training_length: int | None = None,
) -> Figure:
    """`decay_bounds` over distance, a line per base and a band for its ripples.

    A larger base keeps the bound up at far distances, which is what a long context needs, and lowers the slope by
    which near and far are told apart.

    Args:
        bases: b, one per line.
        length: the longest distance in tokens.
        dim: d, even.
        training_length: L in tokens, to be marked. Default: not marked.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_some("bases", bases, most=len(COLOURS))
    check_distances(length, training_length)
    figure = sheet(
        6.9,
        3.9,
        "The decay bound of rotary positions",
        f"mean |S\N{LATIN SUBSCRIPT SMALL LETTER I}| with S\N{LATIN SUBSCRIPT SMALL LETTER I} the sum of the first i "
        f"unit vectors at angles (m \N{MINUS SIGN} n) \N{GREEK SMALL LETTER THETA}\N{LATIN SUBSCRIPT SMALL LETTER J}; "
        f"d = {dim}\nbands: range over neighbouring distances",
    )
    quantities = {f"base {number(base)}": partial(decay_bounds, dim=dim, base=base) for base in bases}
    name = "mean |S\N{LATIN SUBSCRIPT SMALL LETTER I}|"
    draw_over_distance(figure, quantities, name, length, training_length, 4.9, limits=(0, (dim / 2 + 1) / 2))
    return figure
