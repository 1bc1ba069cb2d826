"""Squares that cover a band of pairs, for a kernel that knows causality but no windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rope_patch.attention.pieces import Tile


@dataclass(frozen=True)
class Square:
    """A run of equal rectangles of pairs of a tile.

    Attributes:
        q, k: first query and first key of the first one, counted from those of the tile.
        rows, columns: queries and keys of each; as many of both unless it is `full`.
        kind: `full`, `causal` (row i sees columns up to i), or `upper` (row i sees columns from i on).
        count: how many there are, each `step` queries and `step` keys after the last.
    """

    q: int
    k: int
    rows: int
    columns: int
    kind: Literal["full", "causal", "upper"]
    count: int = 1
    step: int = 1


def squares_of(tile: Tile) -> Iterator[Square]:
    """Cover a band whose last key belongs to its last query with disjoint squares. The squares on the diagonal come
    first: every query is in one of them.

    A block of as many queries as the band is wide sees a causal square of keys of its own, and a strict upper triangle
    of the keys before them.
    """
    rows, width, before = tile.q1 - tile.q0, tile.high - tile.low, tile.distance - tile.low
    blocks, rest = divmod(rows, width)
    last = blocks * width
    if blocks:
        yield Square(0, before, width, width, "causal", blocks, width)
    if rest:
        yield Square(last, before + last, rest, rest, "causal")
    yield from _beside(0, before, min(rows, width), width, before)
    if blocks > 1:
        yield from _beside(width, before + width, width, width, width, blocks - 1)
    if blocks and rest:
        yield from _beside(last, before + last, rest, width, width)


def _beside(q: int, k: int, rows: int, width: int, keys: int, count: int = 1) -> Iterator[Square]:
    """Cover the pairs of a block of `rows` queries from `q`, whose own keys begin at `k`, with the last `keys` of the
    keys before them, and do so for the blocks behind it. Row i sees the keys less than `width` - i before `k`.
    """
    all_see = min(rows, width - keys)  # the number of rows that see all of these keys
    others = rows - all_see
    if all_see and keys:
        yield Square(q, k - keys, all_see, keys, "full", count, width)
    if others and rows < width:
        yield Square(q + all_see, k - width + rows, others, width - rows, "full", count, width)
    if others > 1:
        yield Square(q + all_see, k - width + all_see + 1, others - 1, others - 1, "upper", count, width)
