"""Biases by distance as additive masks that take no more memory than one number per distance and head.

Both forms serve the tiles of `segmented`. A bias that is a multiple of the distance needs a term per key alone:
softmax does not see what is the same for a whole row. Any other bias is the same along every diagonal of a tile, so
with the queries in reverse order the mask is a strided view of one vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rope_patch.attention.inputs import AttentionInputs
from rope_patch.attention.tiles import Tile, in_rows


@dataclass(frozen=True)
class LinearTerm:
    """-slope_h (m - n), of which slope_h n is left when the rest, constant in a row, is dropped.

    Keys are counted from the middle of a block of rows, so that the terms of near keys stay small and exact. `slopes`
    are float32, `(heads,)`.
    """

    slopes: torch.Tensor
    reverses_queries = False
    rows = 1024

    def pieces(self, tile: Tile) -> Iterator[Tile]:
        """The tile in parts that each lie within one block of rows."""
        return in_rows(tile, self.rows)

    def mask(self, tile: Tile) -> torch.Tensor:
        """`(1, heads, 1 or rows, keys)`."""
        middle = tile.q0 // self.rows * self.rows + self.rows // 2
        columns = torch.arange(tile.k1 - tile.k0, device=self.slopes.device)
        term = self.slopes[:, None] * (columns - tile.distance - (middle - tile.q0))
        if tile.kind == "band":
            hidden = ~tile.mask(term.device)
            return term[None, :, None].masked_fill(hidden, -torch.inf)
        return term[None, :, None]


@dataclass(frozen=True)
class DiagonalTerm:
    """Any b(m - n).

    Attributes:
        values: b(first), b(first + 1), ... `(heads, distances)`, float32.
        first: the smallest distance of the call.
    """

    values: torch.Tensor
    first: int = 0
    reverses_queries = True
    rows = 1024

    def pieces(self, tile: Tile) -> Iterator[Tile]:
        """The tile in bands of rows: the hidden pairs of each are few, and its mask hides them."""
        return iter((tile,)) if tile.kind == "full" else in_rows(tile, self.rows, as_bands=True)

    def mask(self, tile: Tile) -> torch.Tensor:
        """`(1, heads, rows, keys)`, a view; its row r belongs to the query `q1 - 1 - r`."""
        rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
        nearest, farthest = tile.distance - keys + 1, tile.distance + rows - 1
        distances = torch.arange(farthest, nearest - 1, -1, device=self.values.device)
        inside = distances >= self.first
        if tile.kind == "band":
            inside &= (distances >= tile.low) & (distances < tile.high)
        places = (distances - self.first).clamp(min=0)
        diagonals = self.values[:, places].masked_fill(~inside, -torch.inf)
        heads, length = diagonals.shape
        return diagonals.as_strided((1, heads, rows, keys), (heads * length, length, 1, 1))

    def gradient(self, tile: Tile, inner: torch.Tensor, into: torch.Tensor) -> None:
        """Add up the gradients of the scores along the diagonals of a tile: `inner`, `(heads, rows, keys)`, zero where
        pairs are hidden, `into` those of `values`.
        """
        _, rows, keys = inner.shape
        # with every row one longer than the one before it is read, diagonals become columns
        skewed = torch.nn.functional.pad(inner.flip(-1), (0, rows)).flatten(1)[:, :-rows]
        sums = skewed.unflatten(1, (rows, keys + rows - 1)).sum(dim=1)
        nearest = tile.distance - keys + 1 - self.first
        into[:, max(nearest, 0) : nearest + keys + rows - 1] += sums[:, max(-nearest, 0) :]


TileBias = LinearTerm | DiagonalTerm


def tile_bias(inputs: AttentionInputs) -> TileBias | None:
    """The bias of a call in the form that tiles take; None where there is none."""
    bias = inputs.bias
    if bias is None:
        return None
    if not inputs.causal:
        first = 1 - inputs.kv_length
        return DiagonalTerm(bias.values(first, inputs.q_length), first)
    if bias.linear and not bias.learned:
        none, one = bias.values(0, 2).unbind(dim=-1)
        return LinearTerm(none - one)
    return DiagonalTerm(bias.values(0, inputs.kv_length))
