"""Sinusoids of positions: each pair of dimensions is a clock hand."""

from __future__ import annotations

import torch

from rope_patch.errors import InvalidField


def sinusoidal_rows(
    positions: torch.Tensor, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> torch.Tensor:
    """The sinusoids PE of the given positions, in float64, because float32 loses the digits of large angles.

    Args:
        positions: `(..., length)`, also fractional or negative.
        dim: d.
        base: b.
        layout: `"interleaved"` alternates sine and cosine, as in the paper; `"split"` puts all sines before all
            cosines, as in most released code.

    Returns:
        `(..., length, dim)`.

    Raises:
        InvalidField: d is odd, so a sine would lack its cosine.

    Source:
        "Attention Is All You Need", 1706.03762, section 3.5.
    """
    if dim % 2:
        raise InvalidField(f"sinusoidal: {dim} dimensions cannot be paired; an even number is required")
    steps = torch.arange(0, dim, 2, device=positions.device).double() / dim
    angles = positions.double()[..., None] / base**steps
    if layout == "split":
        return torch.cat([angles.sin(), angles.cos()], dim=-1)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
