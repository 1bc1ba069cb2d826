"""A few queries behind the keys of a cache: whether a call is one, which of its rows are alike, and the terms that are
added to their scores. The executors of such calls share them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch

from rope_patch.attention.forward import Forward
from rope_patch.attention.pieces import Piece
from rope_patch.attention.problem import Problem, TokenPlan
from rope_patch.attention.rotation import EVERY
from rope_patch.attention.table import Needs
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.turner import Turner
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.slots import Region

QUERIES = 32  # up to this many are scored like one, at any cache length; tiles are for more
SMALL = 2**18  # or up to this many pairs per row: one dense block is then faster than many tiles

NEEDS = Needs(
    behind_cache=True, is_rotated=False, fits_kernels=True, scattered=False, mask_is_added=False, differentiable=False
)
"""The calls that are scored behind the keys of a cache, without rotating all states first."""


def is_block(problem: Problem, forward: Forward) -> bool:
    """Whether several queries are few and at consecutive positions."""
    few = problem.q_length <= QUERIES or problem.pairs <= SMALL
    return few and forward.shared(_are_consecutive)(problem.query_positions)


def _are_consecutive(positions: torch.Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())


def blind_queries(problem: Problem, forward: Forward, added: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """The queries that see no key because a bias hides all, `(rows * kv_heads or 1, group * q_len or 1, 1)`, from the
    terms added to the scores of all pieces; None if there can be none.
    """
    if problem.bias is None or problem.bias.linear:
        return None
    return forward.shared(_blind)(*cast("tuple[torch.Tensor, ...]", added))


def _blind(*added: torch.Tensor) -> torch.Tensor:
    """Compute `blind_queries` from the terms added to scores. It stays a tensor, because reading it would synchronise
    with the device; the softmax of a blind query may be over nothing but -inf.
    """
    largest = functools.reduce(torch.maximum, (x.amax(dim=-1, keepdim=True) for x in added))
    return largest <= torch.finfo(largest.dtype).min / 2


def rows_alike(problem: Problem, turner: Turner) -> Iterator[tuple[slice, int]]:
    """Group neighbouring rows whose regions begin at the same slots; yield each group with the position of its first
    query.
    """
    if all(region.translation_invariant for region in turner.regions):
        yield EVERY, int(problem.query_start)  # any position will do
        return
    forward, positions = turner.forward, [int(problem.query_start)]
    if not forward.counted:
        positions = forward.shared(_first_positions)(problem.query_positions)
    start = 0
    for position, run in itertools.groupby(positions):
        stop = start + len(list(run))
        yield EVERY if len(positions) == 1 else slice(start, stop), position
        start = stop


def _first_positions(positions: torch.Tensor) -> list[int]:
    return cast(list[int], positions[:, 0].tolist())


Place = tuple[int, int, Any, Any]
"""Start and stop of a run of slots, then start and stop of rows of the batch."""


def place_of(piece: Piece) -> Place:
    """The place of a piece in a call."""
    return piece.keys.start, piece.keys.stop, piece.rows.start, piece.rows.stop


def adds(problem: Problem) -> bool:
    """Whether something is added to the scores of one query: a bias, or what hides keys from it."""
    return problem.biased or problem.mask is not None or problem.groups is not None


def added_to(
    problem: Problem, forward: Forward, region: Region, heads: int, place: Place, position: int
) -> torch.Tensor | None:
    """The term added to scaled products of `heads` query heads, `(rows * kv_heads or 1, group * q_len or 1, slots)`:
    biases, and the lowest number for keys that a query does not see in this region; None if there is none.
    """
    if problem.q_length == 1 and not adds(problem):
        return None
    running, value = problem.running_bias_of_pairs, problem.value
    dtype = torch.promote_types(value.dtype, torch.float32)
    compute = (
        _sum_of_terms if running is not None else forward.shared(_sum_of_terms)
    )  # a layer has its own running sums
    states = heads, value.shape[1], len(value), dtype, value.device
    return compute(problem.visibility, problem.bias, running, region, place, position, *states)


def _sum_of_terms(
    visibility: Visibility,
    bias: DistanceBias | None,
    running: torch.Tensor | None,
    region: Region,
    place: Place,
    position: int,
    heads: int,
    kv_heads: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    slot, length = int(visibility.query_start), visibility.q_length
    first, stop, *bounds = place
    rows, slots = slice(*bounds), slice(first, stop)
    i = torch.arange(length, device=device)[:, None]
    distance = (slot + i) - torch.arange(first, stop, device=device)
    seen = visibility.pairs(device)
    if seen is not None:
        seen = (seen if len(seen) == 1 else seen[rows])[..., slots]
    if length > 1:
        inside = region.contains(position + i, position + i - distance)
        seen = inside if seen is None else seen & inside
    added = torch.zeros((), dtype=dtype, device=device)
    if bias is not None:
        added = bias.values(0, slot + length)[:, distance.clamp(min=0)][None].to(dtype)
    if running is not None:
        added = added + (running if len(running) == 1 else running[rows])[..., slots].to(dtype)
    if seen is not None:
        added = torch.where(seen, added, torch.finfo(dtype).min)
    return _by_kv_head(added, len(range(batch)[rows]), kv_heads, heads)


def _by_kv_head(added: torch.Tensor, batch: int, kv_heads: int, heads: int) -> torch.Tensor:
    """Reshape `(batch or 1, heads or 1, q_len, slots)` to the shape of `added_to`."""
    if added.ndim == 2:
        added = added[None, None]
    if added.shape[:3] == (1, 1, 1):
        return added[0]
    group = heads // kv_heads
    if added.shape[1] == 1:  # one term for all heads
        added = added[:, :, None].expand(-1, kv_heads if len(added) > 1 else 1, group, -1, -1)
    else:
        added = added.unflatten(1, (kv_heads, group)).expand(batch if kv_heads > 1 else len(added), -1, -1, -1, -1)
    return added.flatten(2, 3).flatten(0, 1)


def by_plan(problem: Problem, plan: TokenPlan) -> torch.Tensor:
    """The output of a call by a plan, `(batch, heads, q_len, value_dim)`, without gradients. The problem keeps it."""
    problem.plan = plan
    with torch.no_grad():  # results are written into memory, which has no gradient, and none is wanted
        return plan.attend(cast(torch.Tensor, problem.query), cast(torch.Tensor, problem.key), problem.value)


def planned_pieces(problem: Problem) -> int:
    """The number of pieces in the plan of a call, or in what would be planned."""
    if problem.plan is None:
        return len(cast(Turner, problem.turner).regions)
    return problem.plan.pieces
