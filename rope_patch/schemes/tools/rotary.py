"""Rotations: frequencies, tables and the layouts in which checkpoints pair their dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def inverse_frequencies(dim: int, base: float | torch.Tensor) -> torch.Tensor:
    """theta_i = b^(-2i/d), float32, `(d/2,)`; `(batch, d/2)` for a `base` of shape `(batch, 1)`.

    The order of operations is that of Transformers, so the tables are the same to the last bit.
    Source: RoFormer, 2104.09864, section 3.2.2.
    """
    return 1.0 / periods(dim, base)


def periods(dim: int, base: float | torch.Tensor) -> torch.Tensor:
    """1 / theta_i = b^(2i/d): tokens per radian, in the shape of `inverse_frequencies`."""
    device = base.device if isinstance(base, torch.Tensor) else None
    return base ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim)


def rotation_tables(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    attention_scaling: float | torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position times frequency, broadcastable over heads.

    Args:
        positions: `(batch, length)`, or `(batch, heads, length)` where they differ, integer or fractional.
        inv_freq: `(d/2,)` or `(batch, d/2)`.
        attention_scaling: number, or `(batch, 1)`.
        dtype: of the returned tables; angles are computed in float32, as Transformers does.

    Returns:
        cos and sin, each `(batch, heads or 1, length, d/2)`.
    """
    positions = positions if positions.ndim == 3 else positions[:, None]
    if inv_freq.ndim == 2:
        inv_freq = inv_freq[:, None]
    angles = positions[..., None].float() * inv_freq.float()[..., None, :]
    if isinstance(attention_scaling, torch.Tensor):
        attention_scaling = attention_scaling[..., None, None]
    cos, sin = angles.cos() * attention_scaling, angles.sin() * attention_scaling
    return cos.to(dtype), sin.to(dtype)


@dataclass(frozen=True)
class RotaryLayout:
    """Which dimensions of a head turn together, and how fast: pair p turns (x[first_p], x[second_p]) by angle p.

    Attributes:
        first, second: indices of the two dimensions of each pair, ordered by frequency index.
        half_split_offset: start of the rotated dimensions when they are [first half, second half], as in Llama; None
            otherwise.
        interleaved_offset: start of them when pairs are neighbours, as in GPT-J and Cohere; None otherwise.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    half_split_offset: int | None = field(init=False, compare=False)
    interleaved_offset: int | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        pairs, start = len(self.first), self.first[0]
        stop, end = start + pairs, start + 2 * pairs
        halves = (tuple(range(start, stop)), tuple(range(stop, end)))
        neighbours = (tuple(range(start, end, 2)), tuple(range(start + 1, end, 2)))
        found = (self.first, self.second)
        # known from here on: a compiler does not trace the lock of a `cached_property`
        object.__setattr__(self, "half_split_offset", start if found == halves else None)
        object.__setattr__(self, "interleaved_offset", start if found == neighbours else None)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """R x: every pair (a, b) becomes (a cos - b sin, b cos + a sin); other dimensions pass.

        Args:
            x: `(batch, heads, length, head_dim)`.
            cos, sin: `(batch, 1, length, d/2)`, broadcastable.

        Returns:
            the shape and dtype of `x`.
        """
        pairs = len(self.first)
        if (start := self.half_split_offset) is not None:
            a, b = x[..., start : start + pairs], x[..., start + pairs : start + 2 * pairs]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            return _between(x, turned, start)
        if (start := self.interleaved_offset) is not None:
            a, b = x[..., start : start + 2 * pairs : 2], x[..., start + 1 : start + 2 * pairs : 2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
            return _between(x, turned, start)
        a, b = x[..., list(self.first)], x[..., list(self.second)]
        rotated = x.clone()
        rotated[..., list(self.first)] = a * cos - b * sin
        rotated[..., list(self.second)] = b * cos + a * sin
        return rotated

    def rotate_into(self, out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`rotate` without temporaries, into memory `out` of the shape of `x`; for use without gradients."""
        pairs = len(self.first)
        if (start := self.half_split_offset) is not None:
            first, second = slice(start, start + pairs), slice(start + pairs, start + 2 * pairs)
        elif (start := self.interleaved_offset) is not None:
            first, second = slice(start, start + 2 * pairs, 2), slice(start + 1, start + 2 * pairs, 2)
        else:
            return out.copy_(self.rotate(x, cos, sin))
        if 2 * pairs < x.shape[-1]:
            out.copy_(x)
        a, b = x[..., first], x[..., second]
        torch.mul(a, cos, out=out[..., first]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., second]).addcmul_(a, sin)
        return out


def half_split(dim: int) -> RotaryLayout:
    """The layout of Llama on all of a head: dimension i turns with i + d/2."""
    return RotaryLayout(tuple(range(dim // 2)), tuple(range(dim // 2, dim)))


def _between(x: torch.Tensor, turned: torch.Tensor, start: int) -> torch.Tensor:
    stop = start + turned.shape[-1]
    if start == 0 and stop == x.shape[-1]:
        return turned
    return torch.cat([x[..., :start], turned, x[..., stop:]], dim=-1)
