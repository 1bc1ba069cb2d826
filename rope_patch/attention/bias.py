"""Biases by distance as additive masks that need only one number per distance and head, for the pieces of `merged`.

A difference of sums, such as a multiple of the distance, needs only a term per key, because softmax cancels what is
constant in a row. Any other bias is constant along every diagonal of a tile: a strided view of one vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from rope_patch.attention.pieces import Tile, in_rows
from rope_patch.attention.problem import Problem
from rope_patch.attention.spans import Span
from rope_patch.attention.terms import DistanceBias

NEGLIGIBLE = 2.0**-32  # a share of the weights that is far below the rounding of float32


@dataclass(frozen=True)
class KeyTerm:
    """The bias c_m - c_n of running sums, reduced to -c_n per key: c_m is constant in a row, and softmax cancels it.

    c is counted from the middle of a block of rows, so that the terms of near keys stay small and exact. It is the
    `running_bias`, float64, `(batch or 1, heads, keys)`.
    """

    running_bias: torch.Tensor
    reverses_queries = False
    rows = 1024

    @property
    def source(self) -> torch.Tensor:
        """The tensor to which a gradient flows."""
        return self.running_bias

    def as_inputs(self) -> tuple[DistanceBias | None, torch.Tensor | None]:
        """The fields `bias` and `running_bias` of a `Problem`, as functions of `source`, so that gradients reach it."""
        return None, self.running_bias

    def within(self, span: Span) -> KeyTerm:
        """Restrict the term to the rows and keys of a span."""
        return KeyTerm(self.place(span, slice(None), self.running_bias))

    def for_heads(self, heads: slice) -> KeyTerm:
        """Restrict the term to some heads."""
        return KeyTerm(self.running_bias[:, heads])

    def place(self, span: Span, heads: slice, source: torch.Tensor) -> torch.Tensor:
        """A view of the entries of `source`, or of a tensor of its shape, for some heads and the keys of a span."""
        return source[span.rows if len(source) > 1 else slice(None), heads, span.keys]

    def reaches(self, largest: torch.Tensor) -> list[int]:
        """The distance for each head from which keys weigh nothing: all of them together less than `NEGLIGIBLE` times
        the query's own, if no scaled product of a query and a key exceeds `largest` `(heads,)` on either side of zero
        (as in Adaptive Computation Pruning, Lin et al., 2504.06949, equation 4). It is the number of keys if the sums
        do not fall so far, or if they also rise.
        """
        sums, slots = self.running_bias.detach(), self.running_bias.shape[-1]
        enough = 2 * largest.double() + math.log(slots / NEGLIGIBLE)
        # the first slot at which the sums have fallen by this much from each slot
        first = torch.searchsorted(-sums, enough[:, None] - sums)
        reach = (first - torch.arange(slots)).amax(dim=(0, 2))
        falls = (sums.diff(dim=-1) <= 0).all(dim=-1).all(dim=0)
        return cast(list[int], torch.where(falls & enough.isfinite(), reach, slots).tolist())

    def pieces(self, tile: Tile) -> Iterator[Tile]:
        """Split a tile at the borders of blocks of rows."""
        return in_rows(tile, self.rows)

    def mask(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask of a tile, `(batch or 1, heads, 1 or rows, keys)`, in this dtype."""
        middle = tile.q0 // self.rows * self.rows + self.rows // 2
        slot = tile.k0 + tile.distance + middle - tile.q0
        at_middle = self.running_bias[..., min(max(slot, 0), self.running_bias.shape[-1] - 1), None]
        term = (at_middle - self.running_bias[..., tile.k0 : tile.k1]).to(dtype)[:, :, None]
        return term.masked_fill(~tile.mask(term.device), -torch.inf) if tile.kind == "band" else term

    def gradient(self, tile: Tile, inner: torch.Tensor, into: torch.Tensor) -> None:
        """Add the gradients of the scores of a tile, per key and query, to those of the sums, `into`. `inner` is
        `(batch, heads, rows, keys + rows)`, zero for hidden pairs and behind the keys. A whole row would add up to
        zero, except for rounding that all later sums would inherit.
        """
        of_keys, of_queries = inner.sum(dim=-2)[..., : tile.k1 - tile.k0], inner.sum(dim=-1)
        if len(into) == 1:
            of_keys, of_queries = of_keys.sum(dim=0, keepdim=True), of_queries.sum(dim=0, keepdim=True)
        into[..., tile.k0 : tile.k1] -= of_keys
        first = tile.k0 + tile.distance
        of_tokens = into[..., first : first + tile.q1 - tile.q0]  # without the pads behind them
        of_tokens += of_queries[..., : of_tokens.shape[-1]]


@dataclass(frozen=True)
class DiagonalTerm:
    """A bias b(m - n) of any form, which is constant along every diagonal of a tile.

    Attributes:
        values: b(first), b(first + 1), ... `(heads, distances)`, float32.
        first: the smallest distance of the call.
    """

    values: torch.Tensor
    first: int = 0
    reverses_queries = True
    rows = 256

    @property
    def source(self) -> torch.Tensor:
        """The tensor to which a gradient flows."""
        return self.values

    def as_inputs(self) -> tuple[DistanceBias | None, torch.Tensor | None]:
        """The fields `bias` and `running_bias` of a `Problem`, as functions of `source`, so that gradients reach it."""
        last = self.values.shape[-1] - 1
        return DistanceBias(lambda distance: self.values[:, (distance - self.first).clamp(0, last)]), None

    def within(self, span: Span) -> DiagonalTerm:
        """Return the term itself, because it is the same for every span."""
        return self

    def for_heads(self, heads: slice) -> DiagonalTerm:
        """Restrict the biases to some heads."""
        return DiagonalTerm(self.values[heads], self.first)

    def place(self, span: Span, heads: slice, source: torch.Tensor) -> torch.Tensor:
        """A view of the entries of `source`, or of a tensor of its shape, for some heads; every span has the same."""
        return source[heads]

    def pieces(self, tile: Tile) -> Iterator[Tile]:
        """Split a tile into bands of rows: each band has few hidden pairs, and its mask hides them."""
        return iter((tile,)) if tile.kind == "full" else in_rows(tile, self.rows, as_bands=True)

    def mask(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask of a tile, `(1, heads, rows, keys)`, in this dtype: a strided view whose row r belongs to
        the query `q1 - 1 - r`.
        """
        rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
        nearest, farthest = tile.distance - keys + 1, tile.distance + rows - 1
        distances = torch.arange(farthest, nearest - 1, -1, device=self.values.device)
        inside = distances >= self.first
        if tile.kind == "band":
            inside &= (distances >= tile.low) & (distances < tile.high)
        places = (distances - self.first).clamp(min=0)
        diagonals = self.values[:, places].to(dtype).masked_fill(~inside, -torch.inf)
        heads, length = diagonals.shape
        return diagonals.as_strided((1, heads, rows, keys), (heads * length, length, 1, 1))

    def gradient(self, tile: Tile, inner: torch.Tensor, into: torch.Tensor) -> None:
        """Add the gradients of the scores along the diagonals of a tile to those of `values`, `into`. `inner` is
        `(batch, heads, rows, keys + rows)`, contiguous, with rows in the order of `mask`, zero for hidden pairs and
        behind the keys.
        """
        rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
        # reading every row one number short turns diagonals into columns
        skewed = inner.flatten(2)[..., :-rows].unflatten(2, (rows, keys + rows - 1))
        sums = skewed.sum(dim=(0, 2)).flip(-1)
        nearest = tile.distance - keys + 1 - self.first
        into[:, max(nearest, 0) : nearest + keys + rows - 1] += sums[:, max(-nearest, 0) :]


TileBias = KeyTerm | DiagonalTerm


def has_terms(problem: Problem) -> bool:
    """Whether a `KeyTerm` or a `DiagonalTerm` can express the biases of a call."""
    return problem.running_bias is None or (problem.causal and (problem.bias is None or problem.bias.linear))


def tile_bias(problem: Problem) -> TileBias | None:
    """The bias of a call as a `KeyTerm` or a `DiagonalTerm`; None without a bias. The call must satisfy `has_terms`."""
    bias, running = problem.bias, problem.running_bias
    if bias is None:
        return None if running is None else KeyTerm(running)
    if not problem.causal:
        first = 1 - problem.kv_length
        return DiagonalTerm(bias.values(first, problem.kv_length), first)
    if not bias.linear:
        return DiagonalTerm(bias.values(0, problem.kv_length))
    none, one = bias.values(0, 2).double().unbind(dim=-1)
    linear = (one - none)[:, None] * torch.arange(problem.kv_length, device=none.device)
    return KeyTerm(linear[None] if running is None else running + linear)
