"""Sinusoidal positions: no table to learn, a formula for every position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source


@dataclass(frozen=True)
class Sinusoidal(Scheme):
    """Each pair of dimensions is a clock hand: PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(same angle).

    Wavelengths run from 2 pi to 2 pi base tokens, and PE(pos + k) is a rotation of PE(pos), the same one wherever pos
    is. The amplitude is 1, as in the paper, which multiplies its word embeddings by the root of d. The rows stand in
    the place of the learned ones; they stay fixed where their parameter is frozen.

    Args:
        base: b, which sets the longest wavelength; 10000 by default.
        num_positions: rows of the table, by default 32 times as many as the checkpoint has.
        layout: `"interleaved"`, sine and cosine by turns, as the paper writes them; or `"split"`, all sines before
            all cosines, as Marian's and Transformers' code does.
    """

    name = "sinusoidal"
    equation = "sin(pos / base^(2i/d)) at 2i, cos(pos / base^(2i/d)) at 2i+1"
    source = Source(
        "Attention Is All You Need",
        2017,
        "https://arxiv.org/abs/1706.03762",
        "https://github.com/tensorflow/tensor2tensor",
    )
    regime = "from-scratch"
    absolute = True

    base: float = 10000.0
    num_positions: int | None = None
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        self._above_zero("base")
        self._at_least("num_positions", 1, int, optional=True)
        self._one_of("layout", ("interleaved", "split"))

    def embedding(self, native: torch.Tensor) -> torch.Tensor:
        n, dim = native.shape
        rows = 32 * n if self.num_positions is None else self.num_positions
        return sinusoidal_rows(torch.arange(rows), dim, self.base, self.layout)


def sinusoidal_rows(
    positions: torch.Tensor, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> torch.Tensor:
    """PE of the given positions (paper, section 3.5), in float64: large angles leave float32 no digits.

    Args:
        positions: `(length,)`, also fractional.
        dim: d.
        base: b.
        layout: as in `Sinusoidal`.

    Returns:
        `(length, dim)`.

    Raises:
        InvalidField: when d is odd, so that a sine would lack its cosine.
    """
    if dim % 2:
        raise InvalidField(f"sinusoidal: {dim} dimensions cannot be paired; an even number is expected")
    angles = positions.double()[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)
    if layout == "split":
        return torch.cat([angles.sin(), angles.cos()], dim=-1)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def sinusoidal_grid(
    height: int, width: int, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> torch.Tensor:
    """The 2-D form, for patches of an image: the first half of the dimensions says the row, the second the column.

    Returns:
        `(height * width, dim)` in float64, row by row.

    Raises:
        InvalidField: when half of the dimensions cannot be paired.
    """
    if dim % 4:
        raise InvalidField(f"sinusoidal: {dim} dimensions do not make pairs on two axes; a multiple of 4 is expected")
    rows = sinusoidal_rows(torch.arange(height), dim // 2, base, layout)
    columns = sinusoidal_rows(torch.arange(width), dim // 2, base, layout)
    return torch.cat([rows.repeat_interleave(width, dim=0), columns.repeat(height, 1)], dim=-1)
