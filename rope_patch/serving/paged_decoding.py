"""One new token of each request against a paged cache, for all requests of a batch at once.

The cache holds keys as the farthest region wants them (`anchor_of`), so only keys of a near window are turned, a few of
many. Their scores and those of the other keys are columns of one matrix, and one softmax weighs all values. Keys and
values are read a few blocks at a time, while they stay in the processor's cache. Requests are sorted by length: a piece
of the columns is read for those alone that reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.models.base import RotaryTables
from rope_patch.mounting.layer_state import UNROTATED, LayerState
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import PositionMap

PIECE = 2**21
"""Bytes of keys that are read at once."""


def regions_of(state: LayerState) -> tuple[Region, ...]:
    """The regions of a layer, nearest first."""
    return tuple(sorted(state.regions or (ALL_PAIRS,), key=lambda region: region.start))


def anchor_of(state: LayerState) -> PositionMap | None:
    """The position map by which the keys in the cache are rotated; None where requests are scored one by one."""
    regions, scheme = regions_of(state), state.scheme
    anchor = regions[-1].key_map if state.rotates else UNROTATED
    near = [region for region in regions if region.key_map != anchor]
    if (
        scheme.slots - {"segments", "frequencies", "query_scale", "bias"}
        or scheme.length_dependent
        or scheme.decays
        or scheme.learns
        or "running_bias" in state.methods
        or any(region.pairs is not None for region in regions)
        or any(min(region.stop, region.keys_below) == math.inf for region in near)
        or (anchor != UNROTATED and factor_of(state) != 1)
    ):
        return None
    return anchor


def factor_of(state: LayerState) -> float:
    """What multiplies rotated queries and keys."""
    if not state.rotates:
        return 1.0
    if state.frequencies == "late":
        return float(state.own_frequencies(None, {}, torch.device("cpu")).attention_scaling)
    return float(cast(RotaryTables, state.layer.rotary).attention_scaling)


@dataclass(frozen=True)
class Piece:
    """Some columns, read for the first requests.

    Attributes:
        keys: their halves of blocks in the cache, `(requests * kv_heads * blocks,)`; those of values follow each.
        regions: those that some of the requests see there.
    """

    columns: slice
    requests: int
    keys: torch.Tensor
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Window:
    """Keys of a near region, which are turned, of some requests: as many for each, and masked where there are fewer.

    Attributes:
        requests: which ones.
        columns: `(requests, keys)`; one after the last for what lies before the text.
        rows: their places in the cache, `(requests * kv_heads * keys,)`.
        tables: cos and sin of the turn relative to the query, `(requests or 1, 1, keys, head_dim or d/2)`.
    """

    requests: slice
    columns: torch.Tensor
    rows: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]


class Step:
    """What the layers of a group share in a step.

    Args:
        state: of one of the layers.
        lengths: of the requests with their new token, `(requests,)`.
        blocks: of each request, `(requests, longest in blocks)`.
        sizes: kv_heads, block_size and head_dim of the cache, and its bytes of a number.
    """

    def __init__(
        self, state: LayerState, lengths: torch.Tensor, blocks: torch.Tensor, sizes: tuple[int, int, int, int]
    ) -> None:
        self.forward_cache = ForwardCache()
        kv_heads, size, head_dim, itemsize = self.sizes = sizes
        self.order = lengths.argsort(descending=True, stable=True)
        lengths, blocks = lengths[self.order].long(), blocks[self.order].long()
        self.positions = m = lengths - 1
        count = -(-int(lengths[0]) // size)
        self.columns = torch.arange(count * size)
        self._heads, self._blocks = torch.arange(kv_heads), blocks
        distance = m[:, None] - self.columns
        self.regions = regions_of(state)
        self.inside = {region: region.contains(m[:, None], self.columns) & (distance >= 0) for region in self.regions}
        visible = torch.stack(list(self.inside.values())).any(0)
        # with one column more, for what lies before the text
        self.hidden = nn.functional.pad(~visible, (0, 1), value=True)[:, None]
        self.distance = nn.functional.pad(distance.clamp(min=0), (0, 1))
        anchor = cast(PositionMap, anchor_of(state))
        near = [region for region in self.regions if region.key_map != anchor]
        frequencies = state.frequencies_of(None, {}, torch.device("cpu"), anchored=False) if state.rotates else None
        self._inv_freq = None if frequencies is None else frequencies.inv_freq
        self._layout, self._anchor = cast(RotaryLayout, state.layer.layout), anchor
        self.turns = {region: self._query_turn(region) for region in self.regions if region not in near}
        self.windows = {region: self._windows(region) for region in near}
        self._read = torch.empty(0)
        each = max(1, PIECE // (len(lengths) * kv_heads * size * head_dim * itemsize))
        self.pieces = [self._piece(lengths, first, min(first + each, count)) for first in range(0, count, each)]

    def _piece(self, lengths: torch.Tensor, first: int, last: int) -> Piece:
        kv_heads, size = self.sizes[:2]
        columns, requests = slice(first * size, last * size), int((lengths > first * size).sum())
        halves = (self._blocks[:requests, None, first:last] * kv_heads + self._heads[:, None]) * 2
        far = [region for region in self.regions if region not in self.windows]
        seen = tuple(region for region in far if bool(self.inside[region][:requests, columns].any()))
        return Piece(columns, requests, halves.flatten(), seen)

    def _windows(self, region: Region) -> list[Window]:
        kv_heads, size, head_dim, itemsize = self.sizes
        m = self.positions[:, None]
        if region.stop == math.inf:
            columns = torch.arange(int(region.keys_below)).expand(len(m), -1)
        else:
            nearest, width = int(max(region.start, 0)), int(region.stop - max(region.start, 0)) * region.chunk
            newest = (m // region.chunk - nearest + 1) * region.chunk - 1  # the last of its chunk
            columns = newest - torch.arange(min(width, len(self.columns) + region.chunk))
        n = columns.clamp(min=0).minimum(m)
        inside = (columns >= 0) & (columns <= m) & region.contains(m, n)
        block = self._blocks.gather(1, n // size)
        rows = ((block[:, None] * kv_heads + self._heads[:, None]) * 2) * size + (n % size)[:, None]
        columns = torch.where(inside, columns, len(self.columns))
        # relative to the query, whose own turn is saved; for most schemes the same for all requests
        moved = (region.key_map(n) - self._anchor(n)) - (region.query_map(m) - self._anchor(m))
        moved = torch.where(inside, moved, moved[:1])
        if bool((moved == moved[:1]).all()):
            moved = moved[:1]
        each = max(1, PIECE // (kv_heads * columns.shape[1] * head_dim * itemsize))
        windows = []
        for first in range(0, len(m), each):
            some = slice(first, first + each)
            tables = self._tables(moved if len(moved) == 1 else moved[some])
            windows.append(Window(some, columns[some], rows[some].flatten(), tables))
        return windows

    def _query_turn(self, region: Region) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin, `(requests, 1, 1, head_dim or d/2)`; None for no turn."""
        m = self.positions[:, None]
        if self._inv_freq is None or region.query_map == self._anchor:
            return None
        return self._tables(region.query_map(m) - self._anchor(m))

    def _tables(self, moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._inv_freq is not None  # for the type checker: something is turned
        cos, sin = rotation_tables(moved, self._inv_freq, 1.0, torch.float32)
        return self._layout.wide(cos, self.sizes[2]), sin

    def read(self, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """These rows of the cache, `(rows, numbers)`, valid until the next are read: fresh memory would cost more."""
        numbers = len(rows) * cache.shape[1]
        if self._read.numel() < numbers or self._read.dtype != cache.dtype:
            self._read = cache.new_empty(numbers)
        return torch.index_select(cache, 0, rows, out=self._read[:numbers].view(len(rows), -1))

    def turned(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """States `(requests, heads, length, head_dim)`, turned."""
        return x if tables is None else self._layout.rotate_wide(x, *tables)


def attend(
    state: LayerState,
    query: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    scaling: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of one layer, `(requests, heads, head_dim)`.

    Shape:
        query `(requests, heads, head_dim)`, in the rotation of `anchor_of`; cache `(blocks, kv_heads, 2, block_size,
        head_dim)`, keys before values, contiguous; sinks `(heads,)`.
    """
    kv_heads, size, head_dim, _ = step.sizes
    requests, heads = query.shape[:2]
    group = heads // kv_heads
    scaled = query[step.order].float() * scaling * factor_of(state) ** 2
    if state.scales:
        scale = step.forward_cache.once(
            ("scale", heads), lambda: state.scheme.query_scale(step.positions[None], heads)[:, 0].T[..., None]
        )
        scaled = scaled * scale
    whole = scaled.view(requests, kv_heads, group, head_dim)
    by_region = {
        region: step.turned(scaled[:, :, None], turn).view(requests * kv_heads, group, head_dim)
        for region, turn in step.turns.items()
    }
    halves, rows = cache.view(-1, size * head_dim), cache.view(-1, head_dim)
    scores = scaled.new_empty(requests, kv_heads, group, len(step.columns) + 1)
    for piece in step.pieces:
        n, columns = piece.requests, piece.columns
        if not piece.regions:
            continue
        keys = step.read(halves, piece.keys).view(n * kv_heads, -1, head_dim).float()
        for region in piece.regions:
            products = torch.bmm(by_region[region][: n * kv_heads], keys.mT).unflatten(0, (-1, kv_heads))
            if region is not piece.regions[0]:
                inside = step.inside[region][:n, None, None, columns]
                products = torch.where(inside, products, scores[:n, ..., columns])
            scores[:n, ..., columns] = products
    for window in (window for windows in step.windows.values() for window in windows):
        keys = step.read(rows, window.rows).view(len(window.columns), kv_heads, -1, head_dim).float()
        keys = step.turned(keys, window.tables).flatten(0, 1)
        products = torch.bmm(whole[window.requests].flatten(0, 1), keys.mT).unflatten(0, (-1, kv_heads))
        scores[window.requests].scatter_(3, window.columns[:, None, None].expand_as(products), products)
    weights = _weights(state, scores.flatten(1, 2), step, softcap, sinks)
    weights = weights.view(requests * kv_heads, group, -1)
    output = torch.zeros_like(whole).flatten(0, 1)
    for piece in step.pieces:
        n = piece.requests * kv_heads
        values = step.read(halves, piece.keys + 1).view(n, -1, head_dim).float()
        output[:n].baddbmm_(weights[:n, :, piece.columns], values)
    result = torch.empty_like(query)
    result[step.order] = output.view(requests, heads, head_dim).to(query.dtype)
    return result


def _weights(
    state: LayerState, scores: torch.Tensor, step: Step, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The softmax of scores, both `(requests, heads, columns)`."""
    heads = scores.shape[1]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if "bias" in state.methods:
        bias = step.forward_cache.once(("bias", heads), lambda: _bias(state, heads, step.distance))
        scores = scores + bias
    scores = scores.masked_fill_(step.hidden, -math.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float()[None, :, None].expand(len(scores), -1, 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _bias(state: LayerState, heads: int, distance: torch.Tensor) -> torch.Tensor:
    """By distance, `(requests, heads or 1, columns)`."""
    values = state.scheme.bias(torch.arange(int(distance.max()) + 1), heads, {})
    return values[:, distance].transpose(0, 1).float()


def written(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new keys and values, `(tokens, kv_heads, head_dim)`, to slots `(tokens,)` of a cache as of `attend`."""
    size, new = cache.shape[3], len(slots)
    block, offset = slots // size, slots % size
    cache[block, :, 0, offset] = key[:new].to(cache.dtype)
    cache[block, :, 1, offset] = value[:new].to(cache.dtype)


def held(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of a request, each `(1, kv_heads, length, head_dim)`, from a cache as of `attend`."""
    states: Sequence[torch.Tensor] = cache[blocks].unbind(2)
    return tuple(state.transpose(0, 1).flatten(1, 2)[None, :, :length] for state in states)
