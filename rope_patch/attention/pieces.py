"""The one geometry: the queries and keys that meet in a region, row by row, and the shape of each piece.

In every scheme the keys of a query in a region are an interval of slots. A `Tile` is a rectangle of pairs in which
these intervals have a shape; a `Piece` is a tile at its place in a call. Executors other than the definition read them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rope_patch.schemes.slots import Region


@dataclass(frozen=True)
class Tile:
    """Queries `q0:q1` against keys `k0:k1` of a span, or a run of such tiles, of which these are the first one's.

    Attributes:
        kind: `full` (all pairs), `causal` (row i sees keys up to i of the tile), `upper` (row i sees keys from i on),
            or `band`; `stairs` is a run of full tiles, each of which sees all keys of the last and `step` more.
        distance: from the first query to the first key, in tokens.
        low, high: for a band, the pairs at low <= distance < high.
        count: how many tiles a run has, each `step` queries behind the last, and `step` keys unless they are stairs.
        short: queries by which the last tile of a run is shorter; and keys if it is causal.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "upper", "band", "stairs"] = "full"
    low: int = 0
    high: int = 0
    distance: int = 0
    count: int = 1
    step: int = 0
    short: int = 0

    @property
    def queries(self) -> slice:
        """The queries of all tiles of a run; of squares that cover stairs, not all of these."""
        return slice(self.q0, self.q1 + (self.count - 1) * self.step - self.short)

    @property
    def keys(self) -> slice:
        """The keys of all tiles of a run."""
        short = self.short if self.kind == "causal" else 0
        return slice(self.k0, self.k1 + (self.count - 1) * self.step - short)

    @property
    def has_gaps(self) -> bool:
        """Whether queries between the tiles of a run belong to none of them."""
        return self.count > 1 and self.step > self.q1 - self.q0

    def mask(self, device: torch.device) -> torch.Tensor:
        """A boolean mask `(q1 - q0, k1 - k0)`, true for the pairs of a band."""
        rows = torch.arange(self.q1 - self.q0, device=device)[:, None]
        distance = self.distance + rows - torch.arange(self.k1 - self.k0, device=device)
        return (distance >= self.low) & (distance < self.high)


@dataclass(frozen=True)
class Piece:
    """Some queries of some rows against a run of keys in one region.

    Attributes:
        rows: of the batch.
        region: its place among the regions of the call.
        queries: range of the queries.
        keys: range of their slots.
        tile: shape of the pairs. One query sees all of the keys; of several after a cache, see `few_queries`.
    """

    rows: slice
    region: int
    queries: slice
    keys: slice
    tile: Tile

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.keys.stop - self.keys.start


def narrowed(states: torch.Tensor, slots: slice) -> torch.Tensor:
    """Select some slots, `(..., slots, dim)`, of states `(..., kv_len, dim)`."""
    width = slots.stop - slots.start
    return states if width == states.shape[-2] else states.narrow(-2, slots.start, width)


def few_queries(
    regions: Sequence[Region],
    rows: slice,
    queries: int,
    slot: int,
    position: int,
    most: Sequence[float] | None = None,
) -> Iterator[Piece]:
    """One piece for each region, oldest slots first: all of a few consecutive `queries` against every key that one of
    them sees there.

    Args:
        regions: of the call.
        rows: of the batch, whose regions begin at the same slots.
        queries: how many; the first is in this `slot`, at this `position`.
        most: the largest number of keys in a piece of each region; None for any number.
    """
    last = queries - 1
    for number, region in sorted(enumerate(regions), key=lambda numbered: -numbered[1].start):
        seen = region.slots(slot, position)
        newest = region.slots(slot + last, position + last).stop if last else seen.stop
        width = max(1, newest - seen.start)
        step = width if most is None else int(min(width, most[number]))
        for start in range(seen.start, newest, step):
            stop = min(start + step, newest)
            tile = Tile(0, queries, 0, stop - start, distance=slot - start)
            yield Piece(rows, number, slice(0, queries), slice(start, stop), tile)


def in_rows(tile: Tile, rows: int, as_bands: bool = False) -> Iterator[Tile]:
    """Split a tile at multiples of `rows` of the span's queries. With `as_bands` each part of a causal tile is one band
    instead of a full and a causal tile.
    """
    for start in range(tile.q0 // rows * rows, tile.q1, rows):
        q0, q1 = max(start, tile.q0), min(start + rows, tile.q1)
        below = q0 - tile.q0
        part = dataclasses.replace(tile, q0=q0, q1=q1, distance=tile.distance + below)
        if tile.kind != "causal":
            yield part
        elif as_bands:
            k1 = tile.k0 + q1 - tile.q0
            yield dataclasses.replace(part, k1=k1, kind="band", low=tile.distance, high=part.distance + q1 - q0)
        else:
            edge = tile.k0 + below
            if below:
                yield dataclasses.replace(part, k1=edge, kind="full")
            yield dataclasses.replace(part, k0=edge, k1=edge + q1 - q0, distance=tile.distance)


def clipped(tile: Tile, start: int, stop: int) -> Iterator[Tile]:
    """Clip a tile to the visible keys `start` to `stop`, and count keys from the first of them; the other keys are
    pads. A causal tile must begin at or after `start`.
    """
    k0, k1 = max(tile.k0, start), min(tile.k1, stop)
    if k1 <= k0:
        return
    part = dataclasses.replace(tile, k0=k0 - start, k1=k1 - start, distance=tile.distance - (k0 - tile.k0))
    if tile.kind == "causal" and k1 < tile.k1:
        edge = min(tile.q0 + k1 - k0, tile.q1)  # later queries would see more keys than there are
        yield dataclasses.replace(part, q1=edge, k1=part.k0 + edge - tile.q0)
        if edge < tile.q1:
            yield dataclasses.replace(part, q0=edge, kind="full", distance=part.distance + edge - tile.q0)
    elif tile.kind == "band":
        # the first query whose band reaches a key, and the one after the last
        first = max(0, tile.low - part.distance)
        last = min(tile.q1 - tile.q0, tile.high - part.distance + (k1 - k0) - 1)
        if first < last:
            yield dataclasses.replace(part, q0=tile.q0 + first, q1=tile.q0 + last, distance=part.distance + first)
    else:
        yield part


def tiles_of(
    region: Region,
    q_length: int,
    offset: int,
    first_position: int = 0,
    band_rows: int = 256,
    causal: bool = True,
    whole: bool = False,
) -> Iterator[Tile]:
    """Cover the pairs of a region with disjoint tiles; with keys only up to the query if `causal`.

    Args:
        q_length: number of queries of the span; query i is `offset + i` tokens after the first key.
        offset: distance from the first query to the first key.
        first_position: position of the first key.
        band_rows: queries per tile of a band.
        causal: if False, there are as many keys as queries, and the region depends on distance alone.
        whole: if True, the pairs of a causal region that depends on distance alone are one tile: full, causal, or a
            band that may begin before the first key.
    """
    tiles = _tiles_of(region, q_length, offset, first_position, band_rows, whole)
    for tile in tiles if causal else _tiles_both_ways(region, q_length, band_rows):
        yield dataclasses.replace(tile, distance=offset + tile.q0 - tile.k0)


def _tiles_of(
    region: Region, q_length: int, offset: int, first_position: int, band_rows: int, whole: bool
) -> Iterator[Tile]:
    if region.stop <= 0:
        return
    if region.chunk > 1:
        yield from _chunk_tiles(region, q_length, offset, first_position)
        return
    low = int(max(0, region.start))
    first = max(0, low - offset)  # the first query that sees anything
    if first >= q_length or region.stop <= low:
        return
    if region.keys_below < math.inf:
        yield from _limited_tiles(first, q_length, offset + first - low, int(region.keys_below) - first_position)
        return
    # up to here a query sees every key at distance `low` or more; later queries no longer see the first key
    open_until = q_length if region.stop == math.inf else min(max(int(region.stop) - offset, first), q_length)
    square = open_until == q_length and offset + first == low
    if whole and not square and first + 1 < q_length:
        # an open region gets one more than any distance, so that flash sees that its window hides nothing
        high = int(min(region.stop, offset + q_length + 1))
        yield Tile(first, q_length, max(0, offset + first - high + 1), offset + q_length - low, "band", low, high)
        return
    if open_until > first:
        yield from _wedge(first, open_until, 0, offset + first - low)
    # cut at multiples, like other regions
    cuts = range((open_until // band_rows + 1) * band_rows, q_length, band_rows)
    for q0, q1 in itertools.pairwise([open_until, *cuts, q_length] if open_until < q_length else []):
        k0, k1 = max(0, offset + q0 - int(region.stop) + 1), offset + q1 - low
        yield Tile(q0, q1, k0, k1, "band", low, int(region.stop))


def _tiles_both_ways(region: Region, length: int, rows: int) -> Iterator[Tile]:
    """Cover each block of queries with a tile of keys that all of them see, and a band on either side that some see."""
    if region.start == -math.inf and region.stop == math.inf:
        yield Tile(0, length, 0, length)
        return
    # no pair lies beyond these bounds
    low, high = int(max(region.start, 1 - length)), int(min(region.stop, length))
    # queries outside these see nothing
    first, last = max(0, low), min(length, length - 1 + high) if low < high else 0
    for q0 in range(first, last, rows):
        q1 = min(q0 + rows, last)
        oldest, newest = max(0, q0 - high + 1), min(length, q1 - low)
        k0, k1 = max(0, q1 - high), min(length, q0 - low + 1)  # the keys that all of these queries see
        if k1 <= k0:
            yield Tile(q0, q1, oldest, newest, "band", low, high)
            continue
        if oldest < k0:
            yield Tile(q0, q1 - 1, oldest, k0, "band", low, high)
        yield Tile(q0, q1, k0, k1)
        if k1 < newest:
            yield Tile(q0 + 1, q1, k1, newest, "band", low, high)


def _wedge(q0: int, q1: int, k0: int, seen_by_first: int) -> Iterator[Tile]:
    """Cover a wedge: the first query sees `seen_by_first` + 1 keys from `k0`, and each further query one more."""
    edge = k0 + seen_by_first
    if q1 - q0 == 1:
        yield Tile(q0, q1, k0, edge + 1)
        return
    if seen_by_first:
        yield Tile(q0, q1, k0, edge)
    yield Tile(q0, q1, edge, edge + q1 - q0, "causal")


def _limited_tiles(q0: int, q1: int, seen_by_first: int, keys: int) -> Iterator[Tile]:
    """Cover a wedge that is cut off after the first `keys` keys."""
    if keys <= 0:
        return
    full_from = min(max(q0 + keys - seen_by_first - 1, q0), q1)
    if full_from > q0:
        yield from _wedge(q0, full_from, 0, seen_by_first)
    if full_from < q1:
        yield Tile(full_from, q1, 0, keys)


def _chunk_tiles(region: Region, q_length: int, offset: int, first_position: int) -> Iterator[Tile]:
    """Yield the tiles of a region whose distance counts chunks, one row of tiles for each chunk of queries."""
    size = region.chunk
    start = first_position + offset  # position of the first query
    for chunk in range(start // size, (start + q_length - 1) // size + 1):
        q0, q1 = max(0, chunk * size - start), min(q_length, (chunk + 1) * size - start)
        oldest = 0 if region.stop == math.inf else chunk - int(region.stop) + 1
        k0 = max(0, oldest * size - first_position)
        if region.start <= 0:
            yield from _wedge(q0, q1, k0, offset + q0 - k0)
            continue
        k1 = (chunk - int(region.start) + 1) * size - first_position
        if k1 > k0:
            yield Tile(q0, q1, k0, k1)
