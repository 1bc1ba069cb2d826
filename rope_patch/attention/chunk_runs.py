"""Runs of equal tiles: the chunks of a region as the batch of one call, for kernels whose calls cost more than batches.

The tiles of a region by chunk are alike: a causal square for each chunk, the square before it, or stairs, in which each
chunk sees one chunk of keys more than the last. A `Tile` with a `count` above 1 is a run of them; the functions here
join tiles to runs and give the views by which a kernel reads a run, and by which its results are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch.nn import functional

from rope_patch.attention.pieces import Tile

COPIED = 2**14
"""Queries of a run up to which a copy that pads its last chunk takes less time than a call of its own: on an H200 0.07
of 1 ms for 32 heads of 128 at half of them, where a call costs the host 0.2 ms.
"""

WASTED = 6
"""The padding of a run is at most one in so many of its queries, because the kernel scores it too."""


Runs = Literal["none", "squares", "stairs"]
"""Whether the tiles of a region by chunk are joined, and whether stairs are one of the runs or are cut into squares."""


def in_runs(tiles: Iterable[Tile], stairs: bool) -> Iterator[Tile]:
    """Join the tiles of a region by chunk, in the order of their queries, into runs, of which `stairs` may be one."""
    tiles = list(tiles)
    yield from (tile for tile in tiles if tile.kind == "band")
    for kind in ("causal", "full"):
        run: Tile | None = None
        for tile in tiles:
            if tile.kind != kind:
                continue
            longer = None if run is None else _joined(run, tile)
            if run is not None and longer is None:
                yield from _cut(run, stairs)
            run = longer or tile
        if run is not None:
            yield from _cut(run, stairs)


def _joined(run: Tile, tile: Tile) -> Tile | None:
    """The run with one more tile; None if the tile does not continue it. The last tile of a run may have fewer queries,
    and as many keys less if it is causal.
    """
    size, columns = run.q1 - run.q0, run.k1 - run.k0
    short = size - (tile.q1 - tile.q0)
    if run.short or short < 0 or tile.q0 != run.q0 + run.count * size:
        return None
    if short and not _is_worth_padding(run, short):
        return None
    keys = columns - short if run.kind == "causal" else columns
    moved = tile.k0 - run.k0 == run.count * size and tile.k1 - tile.k0 == keys
    grown = run.kind != "causal" and tile.k0 == run.k0 and tile.k1 == run.k1 + run.count * size
    run = dataclasses.replace(run, count=run.count + 1, step=size, short=short)
    if moved and run.kind != "stairs":
        return run
    return dataclasses.replace(run, kind="stairs") if grown and (run.count == 2 or run.kind == "stairs") else None


def _is_worth_padding(run: Tile, missing: int) -> bool:
    """Whether one more tile, with some queries missing, is padded. Causal squares are even if that costs more than a
    call: others are merged into their result, which would have to be copied to get one more chunk.
    """
    queries = (run.q1 - run.q0) * (run.count + 1)
    return missing * WASTED <= queries and (run.kind == "causal" or queries <= COPIED)


def _cut(run: Tile, stairs: bool) -> Iterator[Tile]:
    if run.kind == "stairs" and not stairs:
        yield from in_squares(run)
    else:
        yield run


def in_squares(stairs: Tile) -> Iterator[Tile]:
    """Cover stairs with runs of full tiles, as many as the logarithm of their steps: half of the steps see a square of
    keys that belongs to the other half, and so on within each half.

    For 20 steps these are 6 calls, whose keys are 55 chunks, where a rectangle for each step reads 210 chunks; each
    chunk of keys also costs its gradients, in each query head that shares it.
    """
    size, keys = stairs.step, stairs.k1 - stairs.k0
    steps, first, k0 = stairs.count, 0, stairs.k0
    if keys == size:
        steps, first = steps + 1, 1  # as if a step without keys came first
    else:
        yield _part(stairs, stairs.q0, stairs.queries.stop, k0, stairs.k1)
        k0 = stairs.k1
    start = stairs.q0 - first * size  # of the step that sees none of these keys
    width = 1 << (steps - 1).bit_length() - 1
    while width:
        lower = list(range(width, steps, 2 * width))  # the first step of each square
        whole = [step for step in lower if start + (step + width) * size <= stairs.queries.stop]
        if whole:
            q0, step = start + width * size, 2 * width * size
            run = _part(stairs, q0, q0 + width * size, k0, k0 + width * size)
            yield run if len(whole) == 1 else dataclasses.replace(run, count=len(whole), step=step)
        for last in lower[len(whole) :]:
            q0, k = start + last * size, k0 + (last - width) * size
            yield _part(stairs, q0, stairs.queries.stop, k, k + width * size)
        width //= 2


def _part(stairs: Tile, q0: int, q1: int, k0: int, k1: int) -> Tile:
    distance = stairs.distance + (q0 - stairs.q0) - (k0 - stairs.k0)
    return Tile(q0, q1, k0, k1, "full", distance=distance)


# --- views ---


def of_blocks(x: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """A view of the blocks of `size` tokens, each `step` tokens behind the last, of `(rows, heads, length, ...)`:
    `(rows, count, heads, size, ...)`. The last one ends with `x`.
    """
    blocks = x.unfold(2, size, step).transpose(1, 2)
    return blocks if x.ndim == 3 else blocks.transpose(3, 4)


def as_batch(x: torch.Tensor, tile: Tile, size: int, short: int) -> torch.Tensor:
    """The states of a run, `(rows, heads, length, ...)`, as a batch, `(rows * count, heads, size, ...)`, padded by
    `short` tokens: a view of one row without padding.
    """
    if tile.count == 1:
        return x
    return of_blocks(longer(x, short), size, tile.step).flatten(0, 1)


def queries_of(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The queries of a tile, or what belongs to them, `(rows, heads, length, ...)`, as the batch that a kernel scores,
    `(rows * count, heads, size, ...)`.
    """
    return as_batch(x, tile, tile.q1 - tile.q0, tile.short)


def keys_of(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The keys of a tile, or their values, `(rows, kv_heads, length, dim)`, as the batch that a kernel scores, `(rows *
    count, kv_heads, size, dim)`; those of stairs are shared by all.
    """
    if tile.kind == "stairs":
        return x
    return as_batch(x, tile, tile.k1 - tile.k0, tile.short if tile.kind == "causal" else 0)


def slots_of(slots: slice, tile: Tile) -> list[slice]:
    """The queries of a tile, or its keys, without the gaps of a run; `slots` are from the first to the last."""
    if not tile.has_gaps:
        return [slots]
    starts = range(slots.start, slots.start + tile.count * tile.step, tile.step)
    size = slots.stop - starts[-1]
    return [slice(start, start + size) for start in starts]


def in_place(share: torch.Tensor, into: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a tile for its queries or keys, as a kernel returns it, and a view of `into`, `(rows, heads,
    length, ...)`, both in one shape: `(rows, count, heads, size, ...)` for a run, unless padding has to go.
    """
    if tile.count == 1:
        return share, into
    share, size = share.unflatten(0, (len(into), tile.count)), share.shape[2]
    if (tile.count - 1) * tile.step + size == into.shape[2]:
        return share, of_blocks(into, size, tile.step)
    return share.transpose(1, 2).flatten(2, 3)[:, :, : into.shape[2]], into


def in_one(share: torch.Tensor, tile: Tile, rows: int, length: int, hidden: float) -> torch.Tensor:
    """The result of a run for its queries, `(rows * count, heads, size, ...)`, as one tensor, `(rows, heads, length,
    ...)`, a view if it can be; `hidden` is put where no tile has queries.
    """
    share = share.unflatten(0, (rows, tile.count)).transpose(1, 2)
    if not tile.has_gaps:
        return share.flatten(2, 3)[:, :, :length]
    into = share.new_full((*share.shape[:2], length, *share.shape[4:]), hidden)
    of_blocks(into, share.shape[3], tile.step).copy_(share.transpose(1, 2))
    return into


def longer(x: torch.Tensor, more: int) -> torch.Tensor:
    """Pad states `(batch, heads, length, dim)`, or numbers `(batch, heads, length)`, with zeros at the end; states in
    the layout that models project to, in which the strides of heads and tokens do not depend on the length.
    """
    if not more:
        return x
    if x.ndim == 3:
        return functional.pad(x, (0, more))
    return functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, more)).transpose(1, 2)
