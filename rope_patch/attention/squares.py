"""Squares that cover a band of pairs, for a kernel that knows causality but no windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rope_patch.attention.pieces import Tile


def squares_of(tile: Tile) -> Iterator[Tile]:
    """Cover a band whose last key belongs to its last query with disjoint runs of squares, whose queries and keys count
    from those of the tile. The squares on the diagonal come first: every query is in one of them.

    A block of as many queries as the band is wide sees a causal square of keys of its own, and a strict upper triangle
    of the keys before them.
    """
    rows, width, before = tile.q1 - tile.q0, tile.high - tile.low, tile.distance - tile.low
    blocks, rest = divmod(rows, width)
    last = blocks * width
    if blocks:
        yield _run(0, before, width, width, "causal", blocks, width)
    if rest:
        yield _run(last, before + last, rest, rest, "causal")
    yield from _beside(0, before, min(rows, width), width, before)
    if blocks > 1:
        yield from _beside(width, before + width, width, width, width, blocks - 1)
    if blocks and rest:
        yield from _beside(last, before + last, rest, width, width)


def _beside(q: int, k: int, rows: int, width: int, keys: int, count: int = 1) -> Iterator[Tile]:
    """Cover the pairs of a block of `rows` queries from `q`, whose own keys begin at `k`, with the last `keys` of the
    keys before them, and do so for the blocks behind it. Row i sees the keys less than `width` - i before `k`.
    """
    all_see = min(rows, width - keys)  # the number of rows that see all of these keys
    others = rows - all_see
    if all_see and keys:
        yield _run(q, k - keys, all_see, keys, "full", count, width)
    if others and rows < width:
        yield _run(q + all_see, k - width + rows, others, width - rows, "full", count, width)
    if others > 1:
        yield _run(q + all_see, k - width + all_see + 1, others - 1, others - 1, "upper", count, width)


def _run(
    q: int, k: int, rows: int, columns: int, kind: Literal["full", "causal", "upper"], count: int = 1, step: int = 0
) -> Tile:
    """A run of `count` squares, each `step` queries and keys behind the last."""
    return Tile(q, q + rows, k, k + columns, kind, count=count, step=step)
