"""Intervals of slots: the keys that every query sees in a region, as kernels of interval masks take them.

Within a run of slots of one group, at increasing positions, the keys of a query in a region are an interval. Positions
may skip, and chunks may begin anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from rope_patch.attention.spans import MOST_SPANS_PER_ROW, first_keys
from rope_patch.schemes.slots import Region

MOST = 8
"""The most runs in which a query may see keys: one in a packed row, but all for a pad behind several documents."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of slots, and the runs that each query sees, whatever the region. All tensors are int64.

    Attributes:
        places: `(rows, kv_len)`, goes up along the slots: the number of the run times `span`, plus the token's position
            after `lowest`.
        lowest, span: the lowest position of a token, and how many there are from it to the highest.
        number, start, stop: `(rows, q_len, runs)`: the runs that a query sees, the oldest first, with the slots of each
            that it sees; `start` and `stop` are 0 where there are fewer.
    """

    places: torch.Tensor
    lowest: int
    span: int
    number: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor


def runs_of(
    key_positions: torch.Tensor,
    q_length: int,
    query_start: int,
    mask: torch.Tensor | None,
    groups: torch.Tensor | None,
    causal: bool,
) -> Runs | None:
    """The runs of a call whose first query is in slot `query_start`; None if a query sees keys of more than `MOST`, or
    if a mask has other forms than an interval up to each query.

    Args:
        key_positions: integer, `(batch or 1, kv_len)`.
        mask, groups, causal: see `Visibility`.
    """
    length, device = key_positions.shape[-1], key_positions.device
    slots = torch.arange(length, device=device)
    own = slots[None, query_start : query_start + q_length]
    oldest, newest = torch.zeros_like(own), own + 1 if causal else torch.full_like(own, length)
    if mask is not None:
        first = first_keys(mask[:, 0], query_start) if causal and _is_shared(mask) else None
        if first is None:
            return None
        oldest, newest = first.to(device), torch.where(first.to(device) < 0, 0, newest)
    groups = torch.zeros_like(slots)[None] if groups is None else groups
    positions, groups = torch.broadcast_tensors(key_positions.long(), groups.long())
    tokens = groups >= 0
    follows = (groups.diff(dim=-1) == 0) & (positions.diff(dim=-1) > 0)
    begins = tokens & functional.pad(~follows, (1, 0), value=True)
    number = begins.cumsum(dim=-1) - 1
    highest = torch.iinfo(torch.int64).max
    limits = number.max(), positions.masked_fill(~tokens, highest).min(), positions.masked_fill(~tokens, -1).max()
    last, lowest, stop = torch.stack(limits).tolist()
    if not 0 <= last < MOST_SPANS_PER_ROW:
        return None
    # for all runs of a row, `(rows, runs)`: the first slot, the slot behind the last, and the group; pads are in no run
    rows, run = len(positions), number.masked_fill(~tokens, last + 1)
    starts = slots.new_full((rows, last + 2), length).scatter_reduce(1, run, slots.expand(rows, -1), "amin")
    stops = slots.new_zeros(rows, last + 2).scatter_reduce(1, run, slots.expand(rows, -1) + 1, "amax")
    of_runs = slots.new_full((rows, last + 2), -1).scatter(1, run, groups)
    places = (number * (stop - lowest + 1) + positions - lowest).masked_fill(~tokens, -1).cummax(dim=-1).values
    # the runs that each query sees, `(rows, q_len, runs)`
    of_queries = groups[:, query_start : query_start + q_length, None]
    sees = ((of_runs[:, None] == of_queries) | (of_queries < 0)) & (of_runs[:, None] >= 0)
    sees = sees & (starts[:, None] < newest[..., None]) & (stops[:, None] > oldest[..., None])
    most = max(1, int(sees.sum(dim=-1).max()))
    if most > MOST:
        return None
    in_order = sees * torch.arange(last + 2, 0, -1, device=device)
    rank, seen = in_order.topk(min(most, last + 2), dim=-1)
    chosen = [x[:, None].expand_as(in_order).gather(-1, seen) for x in (starts, stops)]
    bounds = (
        torch.maximum(chosen[0], oldest[..., None]),
        torch.minimum(chosen[1], newest[..., None]),
    )
    first_slot, behind = (x.masked_fill(rank == 0, 0) for x in bounds)
    return Runs(places, lowest, stop - lowest + 1, seen, first_slot, behind)


def _is_shared(mask: torch.Tensor) -> bool:
    """Whether a mask is boolean and the same for all heads."""
    return mask.dtype == torch.bool and mask.shape[1] == 1


def end_points(region: Region, runs: Runs, query_positions: torch.Tensor, batch: int, first: int = 0) -> torch.Tensor:
    """The slots that each query sees in a region, counted from slot `first`: `[0, F0) u [F1, F2) u ...`.

    Returns:
        int32 `(1, odd number, batch * q_len)`, going up along the second axis, with F0 = 0. The queries of a row of the
        batch stand together.
    """
    unit, m = region.chunk, query_positions.long()
    block = m.div(unit, rounding_mode="floor")
    low = torch.zeros_like(m) if region.stop == math.inf else (block - int(region.stop) + 1) * unit - runs.lowest
    high = torch.full_like(m, runs.span)
    if region.start > -math.inf:
        high = (block - int(region.start) + 1) * unit - runs.lowest
    if region.keys_below < math.inf:
        high = high.clamp(max=int(region.keys_below) - runs.lowest)
    ends = []
    for bound in (low, high):
        places = runs.number * runs.span + bound.clamp(0, runs.span)[..., None]
        rows = torch.broadcast_shapes(runs.places.shape[:1], places.shape[:1])
        found = torch.searchsorted(
            runs.places.expand(*rows, -1).contiguous(), places.expand(*rows, -1, -1).flatten(1).contiguous()
        )
        ends.append(found.view(*rows, *places.shape[1:]).clamp(runs.start, runs.stop))
    begin, end = ends
    points = torch.stack([begin, torch.maximum(begin, end)], dim=-1).flatten(2)
    points = functional.pad(points, (1, 0)).cummax(dim=-1).values  # runs that a query does not see are empty
    points = (points - first).clamp(min=0).int().expand(batch, -1, -1)
    return points.flatten(0, 1).T.contiguous()[None]
