"""Sinusoids of positions: each pair of dimensions is a clock hand."""

from __future__ import annotations

import torch

from rope_patch.errors import InvalidField


def sinusoidal_rows(
    positions: torch.Tensor, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> torch.Tensor:
    """PE of the given positions, in float64: large angles leave float32 no digits.

    Args:
        positions: `(..., length)`, also fractional or negative.
        dim: d.
        base: b.
        layout: `"interleaved"`, sine and cosine by turns, as the paper writes them; or `"split"`, all sines before
            all cosines, as most released code has them.

    Returns:
        `(..., length, dim)`.

    Raises:
        InvalidField: when d is odd, so that a sine would lack its cosine.

    Source:
        "Attention Is All You Need", 1706.03762, section 3.5.
    """
    if dim % 2:
        raise InvalidField(f"sinusoidal: {dim} dimensions cannot be paired; an even number is expected")
    steps = torch.arange(0, dim, 2, device=positions.device).double() / dim
    angles = positions.double()[..., None] / base**steps
    if layout == "split":
        return torch.cat([angles.sin(), angles.cos()], dim=-1)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
