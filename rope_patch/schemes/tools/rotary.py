"""Rotations: frequencies, tables, and the layouts in which checkpoints pair their dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def inverse_frequencies(dim: int, base: float | torch.Tensor) -> torch.Tensor:
    """The frequencies theta_i = b^(-2i/d), float32, `(d/2,)`; `(batch, d/2)` for a `base` of shape `(batch, 1)`.

    The order of operations matches Transformers, so the tables are identical bit for bit. Source: RoFormer, 2104.09864,
    section 3.2.2.
    """
    return 1.0 / periods(dim, base)


def periods(dim: int, base: float | torch.Tensor) -> torch.Tensor:
    """The periods 1 / theta_i = b^(2i/d) in tokens per radian, in the shape of `inverse_frequencies`."""
    device = base.device if isinstance(base, torch.Tensor) else None
    return base ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim)


def rotation_tables(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    attention_scaling: float | torch.Tensor,
    dtype: torch.dtype,
    by_pair: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables cos and sin of position times frequency, broadcastable over heads.

    Args:
        positions: `(batch, length)`, or `(batch, heads, length)` if heads differ, integer or fractional; with d/2 as an
            additional last axis if `by_pair` is true.
        inv_freq: `(d/2,)` or `(batch, d/2)`; `(1, heads, d/2)` if heads differ, `(batch, 1, length, d/2)` if tokens do.
        attention_scaling: factor on cos and sin, a number or `(batch, 1)`.
        dtype: dtype of the returned tables; angles are computed in float32, as Transformers does.
        by_pair: whether every pair of dimensions has its own positions, as a map with `pairs` returns them.

    Returns:
        cos and sin, each `(batch, heads or 1, length, d/2)`.
    """
    positions = positions if by_pair else positions[..., None]
    positions = positions if positions.ndim == 4 else positions[:, None]
    if inv_freq.ndim == 2:
        inv_freq = inv_freq[:, None]
    angles = positions.float() * (inv_freq if inv_freq.ndim == 4 else inv_freq[..., None, :]).float()
    if isinstance(attention_scaling, torch.Tensor):
        attention_scaling = attention_scaling[..., None, None]
    cos, sin = angles.cos(), angles.sin()
    if isinstance(attention_scaling, torch.Tensor) or attention_scaling != 1:
        cos, sin = cos * attention_scaling, sin * attention_scaling
    return cos.to(dtype), sin.to(dtype)


@dataclass(frozen=True)
class RotaryLayout:
    """The pairs of dimensions of a head that turn together, and their order: pair p turns (x[first_p], x[second_p]) by
    angle p.

    Attributes:
        first, second: indices of the two dimensions of each pair, ordered by frequency index.
        halves: both index lists, as slices where possible: halves in Llama, neighbours in GPT-J and Cohere.
        in_halves: whether the first dimensions are followed by the second ones, from dimension 0 on, as in Llama.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    halves: tuple[slice | list[int], slice | list[int]] = field(init=False, compare=False)
    in_halves: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # not a `cached_property`: a compiler does not trace its lock
        object.__setattr__(self, "halves", (_as_slice(self.first), _as_slice(self.second)))
        length = len(self.first)
        object.__setattr__(self, "in_halves", (*self.first, *self.second) == tuple(range(2 * length)))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x: every pair (a, b) becomes (a cos - b sin, b cos + a sin); other dimensions pass. Each product is
        rounded separately, as in Transformers, so that the same tables give the same bits.

        Args:
            x: `(batch, heads, length, head_dim)`.
            cos, sin: `(batch, 1, length, d/2)`, broadcastable.

        Returns:
            the shape and dtype of `x`.
        """
        first, second = self.halves
        a, b = x[..., first], x[..., second]
        rotated = x.clone()
        rotated[..., first] = a * cos - b * sin
        rotated[..., second] = b * cos + a * sin
        return rotated

    def wide(self, cos: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Expand cos from pairs, `(..., d/2)`, to dimensions, `(..., head_dim)`, with 1 for dimensions that do not
        rotate.
        """
        if self.fills(head_dim):  # in one operator
            return torch.cat([cos, cos], dim=-1)
        cosines = cos.new_ones(*cos.shape[:-1], head_dim)
        for half in self.halves:
            cosines[..., half] = cos
        return cosines

    def signed(self, sin: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Expand sin from pairs, `(..., d/2)`, to dimensions, `(..., head_dim)`, with signs such that R x = x cos +
        x[`partners`] sin.
        """
        if self.fills(head_dim):  # in one operator
            return torch.cat([-sin, sin], dim=-1)
        sines = sin.new_zeros(*sin.shape[:-1], head_dim)
        first, second = self.halves
        sines[..., first], sines[..., second] = -sin, sin
        return sines

    def fills(self, head_dim: int) -> bool:
        """Whether every dimension of a head rotates, each with its partner in the other half."""
        return self.in_halves and head_dim == 2 * len(self.first)

    def partners(self, head_dim: int) -> list[int]:
        """The index of each dimension's partner, or its own index without a pair."""
        partner_of = dict(zip(self.first + self.second, self.second + self.first, strict=True))
        return [partner_of.get(i, i) for i in range(head_dim)]

    def rotate_wide(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Like `rotate` up to rounding, with a cos that is `wide`: three kernels, and no temporary of the size of `x`,
        which is `(batch, heads, length, head_dim)`.
        """
        rotated = x * cos
        first, second = self.halves
        for half, partner, sign in ((first, second, -1), (second, first, 1)):
            part = _dimensions(rotated, half).addcmul_(_dimensions(x, partner), sin, value=sign)
            if isinstance(half, list):  # a copy
                rotated[..., half] = part
        return rotated

    def rotate_in_graph(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Like `rotate_wide`, for a compiler: it rotates x `(batch, heads, length, head_dim)`. Where one half of a head
        follows the other, it writes no part of a tensor, so that the compiler makes one kernel of the whole rotation.
        """
        dims = x.shape[-1]
        if not self.fills(dims):
            return self.rotate_wide(x, cos, sin)
        return torch.addcmul(x * cos, x.roll(dims // 2, dims=-1), self.signed(sin, dims))

    def basis(self, like: torch.Tensor, scaling: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices I and P, each `(head_dim, head_dim)`, times `scaling`, such that x (I cos + P sin) = R x, with
        `wide` cos and sin. They have the dtype and the device of `like`, `(..., head_dim)`.
        """
        eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device) * scaling
        one, none = like.new_ones(len(self.first)), like.new_zeros(len(self.first))
        return eye, self.rotate_wide(eye, self.wide(none, like.shape[-1]), one) - eye * self._fixed(like)

    def _fixed(self, like: torch.Tensor) -> torch.Tensor:
        """A vector `(head_dim,)` that is 1 for the dimensions without a rotation, and 0 for the others."""
        fixed = like.new_ones(like.shape[-1])
        fixed[[*self.first, *self.second]] = 0
        return fixed


def _dimensions(x: torch.Tensor, some: slice | list[int]) -> torch.Tensor:
    """Select some dimensions of states, `(..., dims)`. A contiguous run is a view, which takes half the time of
    indexing.
    """
    if isinstance(some, slice) and some.step == 1:
        return x.narrow(-1, some.start, some.stop - some.start)
    return x[..., some]


def _as_slice(indices: tuple[int, ...]) -> slice | list[int]:
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    steps = range(indices[0], indices[0] + step * len(indices), step or 1)
    return slice(steps.start, steps.stop, steps.step) if step > 0 and tuple(steps) == indices else list(indices)


def half_split(dim: int) -> RotaryLayout:
    """The layout of Llama on a whole head: dimension i pairs with i + d/2."""
    return RotaryLayout(tuple(range(dim // 2)), tuple(range(dim // 2, dim)))
