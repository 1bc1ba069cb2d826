"""Positions of keys in a cache, and maps from positions to positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.typing import PositionMap


def key_positions(
    query_positions: torch.Tensor, kv_length: int, query_start: int | torch.Tensor | None
) -> torch.Tensor:
    """Positions of all keys that the attention function receives.

    Without a past they are the positions of the queries, packed rows included. With a past, the slots of new tokens
    have the positions of the queries; older slots count down from the first query, and later ones (the empty tail of a
    static cache) count up from the last. Counting up from the first column would be wrong, because left pads share a
    position.

    Args:
        query_positions: `(batch, q_len)`, integer.
        kv_length: number of key slots.
        query_start: slot of the first query among the keys; None without a cache.

    Returns:
        `(batch, kv_length)`, integer.
    """
    q_length = query_positions.shape[-1]
    if query_start is None and kv_length == q_length:
        return query_positions
    start = 0 if query_start is None else query_start
    steps = torch.arange(kv_length, device=query_positions.device) - start
    inside = steps.clamp(0, q_length - 1)
    return query_positions[:, inside] + (steps - inside)


def follow_on(past: torch.Tensor, query_positions: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Whether the distance of every visible cached key to the first query equals the number of slots between them.

    Args:
        past: positions of the keys before the first query, `(batch or 1, start)` or `(batch, kv_heads, start)`.
        query_positions: `(batch or 1, q_len)`.
        seen: False on pads, `(batch or 1, start or more)`; None without pads.

    Returns:
        boolean, a scalar.
    """
    length = past.shape[-1]
    expected = query_positions[:, :1] + torch.arange(-length, 0, device=query_positions.device)
    differs = past.to(expected.device) != (expected if past.ndim == 2 else expected[:, None])
    if seen is not None:
        differs = differs & (seen[:, :length] if past.ndim == 2 else seen[:, None, :length])
    return ~differs.any()


def joined(past: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Concatenate positions of cached keys and of the keys after them, in the shape of `past`.

    Args:
        past: `(batch or 1, start)` or `(batch, kv_heads, start)`.
        positions: `(batch or 1, length)`.
    """
    positions = positions if past.ndim == 2 else positions[:, None].expand(-1, past.shape[1], -1)
    parts, rows = [past.to(positions.device), positions], max(len(past), len(positions))
    if len(past) != len(positions):
        parts = [part.expand(rows, *part.shape[1:]) for part in parts]
    return torch.cat(parts, dim=-1)


def query_start(cache: Any, layer_index: int, q_length: int) -> int | torch.Tensor:
    """The slot of the first query among the keys that a Transformers cache will return, a scalar. Call this before the
    cache is updated.
    """
    offset = cache.get_query_offset(layer_index)
    # a static layer returns its live counter; the difference is a new tensor
    return offset - cache.get_mask_sizes(q_length, layer_index)[1]


@dataclass(frozen=True)
class Identity:
    """The map phi(m) = m."""

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return positions


@dataclass(frozen=True)
class Constant:
    """The map phi(m) = `value`, the same for every token."""

    value: float

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.full_like(positions, self.value, dtype=torch.float32)


UNROTATED = Constant(0)
"""The position of states without rotation."""


@dataclass(frozen=True)
class Interpolated:
    """The map phi(m) = m / `factor` + `shift`."""

    factor: float
    shift: float = 0.0

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return positions / self.factor + self.shift


@dataclass(frozen=True)
class Grouped:
    """The map phi(m) = floor(`steps` m / `group_size`) + `shift`: `group_size` tokens share `steps` positions."""

    group_size: int
    shift: float = 0.0
    steps: int = 1

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        steps = positions if self.steps == 1 else positions * self.steps
        return steps.div(self.group_size, rounding_mode="floor") + self.shift


@dataclass(frozen=True)
class PerPair:
    """A map phi_g for each group g of pairs of dimensions: phi_p(m) = phi_g(m) for every pair p in the group.

    Attributes:
        maps: one map for each group, from the fastest pairs to the slowest; none of them has a pair axis.
        sizes: number of pairs in each group, d/2 together.
    """

    maps: tuple[PositionMap, ...]
    sizes: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """The length d/2 of the last axis of the positions that the map returns."""
        return sum(self.sizes)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        groups = zip(self.maps, self.sizes, strict=True)
        return torch.cat([phi(positions)[..., None].expand(*positions.shape, size) for phi, size in groups], dim=-1)


def pairs_of(position_map: PositionMap) -> int | None:
    """The length d/2 of the pair axis, if a map returns positions `(*shape, d/2)`; None if they keep the shape of its
    input.
    """
    return getattr(position_map, "pairs", None)


@dataclass(frozen=True)
class Periodic:
    """The map phi(m) = min(m mod `period` + `shift`, `most`)."""

    period: int
    shift: int = 0
    most: float = math.inf

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions % self.period + self.shift).clamp(max=self.most)
