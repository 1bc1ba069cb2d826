"""One rotation of the only query that meets all keys: what a region would rotate in the query besides, its keys take
over.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import cast

import torch

from rope_patch.attention.rotation import Tables
from rope_patch.attention.turner import Turner, remaining, rotations
from rope_patch.schemes.tools.positions import UNROTATED
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import Frequencies, PositionMap


@dataclass(frozen=True)
class Turned:
    """The rotations of the query and of the keys.

    Attributes:
        query: multiplies the query, `(batch or 1, head_dim, head_dim)`; None if it stays as it is.
        keys: of each run of slots: None if they stay as they are; a matrix like that of the query, if all turn by the
            same angle; a matrix for each pair of dimensions, `(batch or 1, 1, slots, 2, 2, d/2)`, in a layout that
            fills the halves of a head; in another layout cos `(batch or 1, 1, slots, head_dim)` and sin `(batch or 1,
            1, slots, d/2)`.
    """

    query: torch.Tensor | None
    keys: tuple[torch.Tensor | Tables | None, ...]


def factor_of(turner: Turner) -> float | None:
    """The factor on all scores that `turned` leaves to the caller; None where it does not apply. Keys take over
    rotations of the query, so a factor on both goes to the scores, and frequencies are those of a row.
    """
    if turner.layout is None:
        return 1.0
    frequencies = cast(Frequencies, turner.frequencies)
    factor = frequencies.attention_scaling
    if turner.exact or turner.by_head or turner.key_positions.ndim > 2 or frequencies.inv_freq.ndim > 2:
        return None
    if isinstance(factor, torch.Tensor) or (turner.anchor is not None and factor != 1):
        return None
    return float(factor) ** 2


def meets(turner: Turner, region: int, other: int) -> bool:
    """Whether a query that is rotated as in one region meets the keys of another as they are."""
    one, keys = turner.regions[region], turner.regions[other]
    return turner.layout is None or (one.query_map == keys.query_map and keys.key_map == anchor_of(turner))


def anchor_of(turner: Turner) -> PositionMap:
    """The position map by which states are rotated already."""
    return UNROTATED if turner.anchor is None else turner.anchor


def turned(turner: Turner, like: torch.Tensor, region: int, runs: tuple[tuple[int, int, int], ...]) -> Turned:
    """The rotations by which the only query, of the dtype and width of `like` `(batch, heads, 1, head_dim)` and rotated
    as in one `region`, meets the keys of all regions. Each of the `runs` is a region, with the first slot and the one
    after the last; regions are given by their places.
    """
    if turner.layout is None:
        return Turned(None, (None,) * len(runs))
    compute = turner.forward.shared(_compute) if turner.shares else _compute
    maps = tuple((turner.regions[at].query_map, turner.regions[at].key_map, start, stop) for at, start, stop in runs)
    inv_freq = cast(Frequencies, turner.frequencies).inv_freq
    positions, query_map = (turner.query_positions, turner.key_positions), turner.regions[region].query_map
    return compute(*positions, query_map, maps, anchor_of(turner), inv_freq, turner.layout, like.dtype, like.shape[-1])


def _compute(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    query_map: PositionMap,
    runs: tuple[tuple[PositionMap, PositionMap, int, int], ...],
    anchor: PositionMap,
    inv_freq: torch.Tensor,
    layout: RotaryLayout,
    dtype: torch.dtype,
    width: int,
) -> Turned:
    """Compute `Turned` for a query that `query_map` rotates. Each of the `runs` has the maps of its queries and keys,
    its first slot, and the one after its last. All tables come from one product, because each operator takes the host
    longer than the device.
    """
    at = functools.cache(lambda position_map: position_map(query_positions))
    alike: list[torch.Tensor] = []
    if query_map != anchor:
        alike.append(at(query_map) if anchor == UNROTATED else sum_of(at(query_map), at(anchor), -1))
    each, found = [], list[tuple[bool, int] | None]()
    for query_map_of_run, key_map, start, stop in runs:
        ahead = None  # by how much this query is turned farther than that of the run
        if query_map_of_run != query_map:
            ahead = sum_of(at(query_map), at(query_map_of_run), -1)
        if key_map != anchor:
            moved = remaining(key_positions[:, start:stop], key_map, anchor)
            each.append(moved if ahead is None else sum_of(moved, ahead))
            found.append((False, len(each) - 1))
        elif ahead is None:
            found.append(None)
        else:
            alike.append(ahead)
            found.append((True, len(alike) - 1))
    if not alike and not each:
        return Turned(None, (None,) * len(runs))
    every, by_pair = _beside_each_other([*alike, *each], len(layout.first))
    cos, sin = rotation_tables(every, inv_freq, 1.0, torch.float32, by_pair)
    tables: list[torch.Tensor | Tables]
    widths, number = [moved.shape[1] for moved in each], len(alike)
    if layout.fills(width):
        blocks = torch.stack([cos, -sin, sin, cos], dim=-2).to(dtype).unflatten(-2, (2, 2))
        tables = list(blocks[:, :, number:].split(widths, dim=2))
        # the rows of a matrix are dimensions before the rotation, its columns those after it
        matrices = blocks[:, 0, :number].transpose(-3, -2).diag_embed().transpose(-3, -2)
        matrices = matrices.reshape(len(blocks), number, width, width)
    else:
        cos, sin = cos.to(dtype), sin.to(dtype)
        parts = (layout.wide(cos[:, :, number:], width), sin[:, :, number:])
        tables = list(zip(*(table.split(widths, dim=2) for table in parts), strict=True))
        first = cos[:, :, :number], sin[:, :, :number]
        matrices = rotations(*first, layout, width, (False,) * number).transpose(1, 2)
    of_keys = tuple(None if one is None else matrices[:, one[1]] if one[0] else tables[one[1]] for one in found)
    return Turned(None if query_map == anchor else matrices[:, 0], of_keys)


def _beside_each_other(moved: list[torch.Tensor], pairs: int) -> tuple[torch.Tensor, bool]:
    """Positions `(batch or 1, length)` along one axis, and whether each pair has its own, with `pairs` as a last axis
    then.
    """
    by_pair, batch = any(x.ndim == 3 for x in moved), max(len(x) for x in moved)
    if by_pair:
        moved = [x if x.ndim == 3 else x[..., None].expand(-1, -1, pairs) for x in moved]
    return torch.cat([x if len(x) == batch else x.expand(batch, *x.shape[1:]) for x in moved], dim=1), by_pair


def sum_of(some: torch.Tensor, others: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """The sum of positions `(batch or 1, length or 1)`, either of which may have d/2 as a last axis; the difference
    with a `sign` of -1.
    """
    if some.ndim < others.ndim:
        some = some[..., None]
    return torch.add(some, others[..., None] if others.ndim < some.ndim else others, alpha=sign)
