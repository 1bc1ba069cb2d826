"""Attention of one query behind a static cache in a compiled model, by one call of PyTorch's attention, as in the plain
model.

A product of a query and a key depends on the difference of their angles. So a key takes over what its region rotates in
the query beyond the first region: one rotation of the query then serves all regions, each key is rotated once, and
there is nothing to merge.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch

from rope_patch.attention.executors import traced
from rope_patch.attention.executors.traced import added_to_one, of_one_group
from rope_patch.attention.one_query import anchor_of, factor_of, sum_of
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import rotate
from rope_patch.attention.table import Executor
from rope_patch.attention.turner import Turner, remaining
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.schemes.tools.rotary import rotation_tables
from rope_patch.typing import Frequencies


def _objection(problem: Problem) -> str:
    """The reason why a call that `traced` takes is not one call of SDPA, or an empty string if each row has one set of
    frequencies and a mask holds the bias.
    """
    if problem.biased and problem.half:
        return f"{problem.value.dtype} would round the bias"
    if cast(torch.Tensor, problem.query).dtype != problem.value.dtype:
        return "queries and values differ in dtype"
    if factor_of(cast(Turner, problem.turner)) is None:
        return "heads, pairs or rows have frequencies of their own, or rotations are exact"
    return ""


supports = dataclasses.replace(traced.supports, further=_objection)


def attend(problem: Problem) -> Output:
    """Attention of one query, `(batch, heads, 1, value_dim)`, without gradients. Keys and values keep their dtype."""
    turner, value = cast(Turner, problem.turner), problem.value
    query, key = cast(tuple[torch.Tensor, torch.Tensor], (problem.query, problem.key))
    distance = problem.query_start - torch.arange(problem.kv_length, device=value.device)
    seen, keys = _seen(problem, turner, distance), _turned(problem, turner, key, distance)
    queries = of_one_group(turner.turn(query, turner.regions[0], "query"), value)
    if problem.biased:
        mask = added_to_one(problem, seen, distance)
        blind = mask.amax(dim=-1, keepdim=True) <= torch.finfo(mask.dtype).min / 2
    else:
        mask, blind = seen, ~seen.any(dim=-1, keepdim=True)
    mask = mask.expand(len(value), value.shape[1], queries.shape[2], -1)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, value, mask, scale=problem.scaling)
    return out.masked_fill(blind, 0).flatten(1, 2)[:, :, None], None


EXECUTOR = Executor(
    "one_rotation", "one query of a compiled model, all regions by one call of SDPA", supports, attend, lambda _: 1
)


def _seen(problem: Problem, turner: Turner, distance: torch.Tensor) -> torch.Tensor:
    """The slots that the query sees in some region, boolean `(batch or 1, kv_heads or 1, group or 1, kv_len)`."""
    m, exists = problem.query_positions, distance >= 0
    inside = exists[None]
    if turner.regions != (ALL_PAIRS,):
        inside = torch.stack([exists & region.contains(m, m - distance) for region in turner.regions]).any(dim=0)
    seen = inside[:, None, None]
    visible = problem.mask if problem.groups is None else problem.visible()
    return seen if visible is None else seen & of_one_group(visible, problem.value)


def _turned(problem: Problem, turner: Turner, key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Keys `(batch, kv_heads, kv_len, head_dim)`, rotated such that the query of the first region meets them all."""
    first, anchor, m = turner.regions[0], anchor_of(turner), problem.query_positions
    as_they_are = all(
        region.query_map == first.query_map and not turner.rotates(region.key_map) for region in turner.regions
    )
    if turner.layout is None or as_they_are:
        return key
    moved: torch.Tensor | None = None
    for region in turner.regions:
        ahead = sum_of(first.query_map(m), region.query_map(m), -1)
        own = sum_of(remaining(m - distance, region.key_map, anchor), ahead)
        if moved is not None:
            if own.ndim != moved.ndim:
                own, moved = (x if x.ndim == 3 else x[..., None] for x in (own, moved))
            inside = region.contains(m, m - distance)
            own = torch.where(inside if own.ndim == 2 else inside[..., None], own, moved)
        moved = own
    layout, frequencies = turner.layout, cast(Frequencies, turner.frequencies)
    angles = cast(torch.Tensor, moved)
    cos, sin = rotation_tables(
        angles, frequencies.inv_freq, frequencies.attention_scaling, key.dtype, by_pair=angles.ndim == 3
    )
    return rotate(layout, key, layout.wide(cos, key.shape[-1]), sin)
