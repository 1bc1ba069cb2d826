"""Sinusoidal positions: a formula for every position instead of a learned table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import Tokens, rows_for
from rope_patch.schemes.tools.sinusoids import sinusoidal_rows
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Sinusoidal(Scheme):
    """Turn each pair of dimensions like a clock hand: PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(same
    angle).

    Wavelengths range from 2 pi to 2 pi base tokens. PE(pos + k) is a rotation of PE(pos) that depends on k alone. Every
    position has a vector. In a model with a learned position table, sinusoidal rows replace the learned ones; freeze
    their parameter to keep them fixed.

    Args:
        base: b, which sets the longest wavelength; 10000 by default.
        num_positions: rows that replace a model's own table, by default 32 times as many as it has; with a `target` of
            l tokens l, but at least L.
        layout: `"interleaved"`, alternating sine and cosine, as in the paper; or `"split"`, all sines before all
            cosines, as in Marian's and Transformers' code.
        amplitude: multiplies the sinusoids. The paper uses 1 and multiplies its word vectors by sqrt(d). The word
            vectors of a pretrained model have no such factor and are often so small (0.02) that sinusoids of amplitude
            1 drown them.
        grid_width: number of patches per image row, if the tokens are image patches in row order: the first half of
            the dimensions encodes the row, the second the column. Default: the tokens are text.
    """

    name = "sinusoidal"
    summary = "adds sines and cosines of the position to the input"
    equation = "x_m + PE(m), PE(m) = sin(m / base^(2i/d)) at 2i, cos(m / base^(2i/d)) at 2i+1"
    source = Source(
        "Attention Is All You Need",
        2017,
        "https://arxiv.org/abs/1706.03762",
        "https://github.com/tensorflow/tensor2tensor",
    )
    regime = "from-scratch"
    absolute = True

    base: Annotated[float, Above(0)] = 10000.0
    num_positions: Annotated[int, AtLeast(1)] | None = None
    layout: Literal["interleaved", "split"] = "interleaved"
    amplitude: Annotated[float, Above(0)] = 1.0
    grid_width: Annotated[int, AtLeast(1)] | None = None

    fields_for = rows_for

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x = tokens.states
        encoded = self._encode(tokens.positions, x.shape[-1])
        return (x + encoded.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)

    def rows(self, native: torch.Tensor) -> torch.Tensor:
        n, dim = native.shape
        return self._encode(torch.arange(32 * n if self.num_positions is None else self.num_positions), dim)

    def _encode(self, positions: torch.Tensor, dim: int) -> torch.Tensor:
        if self.grid_width is None:
            return self.amplitude * sinusoidal_rows(positions, dim, self.base, self.layout)
        if dim % 4:
            raise InvalidField(
                f"sinusoidal: {dim} dimensions cannot be paired on two axes; a multiple of 4 is required"
            )
        axes = (positions.div(self.grid_width, rounding_mode="floor"), positions % self.grid_width)
        halves = [sinusoidal_rows(axis, dim // 2, self.base, self.layout) for axis in axes]
        return self.amplitude * torch.cat(halves, dim=-1)
