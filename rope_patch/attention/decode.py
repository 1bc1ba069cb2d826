"""A few queries against a long cache, without rotating the cache: each region is a run of slots.

Keys are rotated only where the region differs from the rotation in the cache: the near window, a few of many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch

from rope_patch.attention.decay import Decay
from rope_patch.attention.forward import Forward
from rope_patch.attention.inputs import AttentionInputs, DistanceBias
from rope_patch.attention.problem import NOT_PRODUCTS, Problem
from rope_patch.attention.slot_plan import EVERY, SlotPlan, SlotRows, SlotRun
from rope_patch.attention.turner import Turner
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.slots import Region

QUERIES = 32  # up to this many are scored like one, at any cache length; tiles are for more
SMALL = 2**18  # or up to this many pairs per row: one dense block is then faster than many tiles
BLOCK = 2**21  # bytes of keys that are rotated and scored at once, while they are in the processor's cache


def supports(problem: Problem) -> str:
    """Why `attend` cannot compute a call; empty if it can: for a few queries behind the keys of a cache."""
    inputs, decay = problem.inputs, problem.decay
    if problem.turner is None:
        return "its states are rotated already"
    if inputs.scattered:
        return "keys of the cache have gaps between their positions"
    if not inputs.fits_kernels:
        return NOT_PRODUCTS
    if inputs.mask is not None and inputs.mask.dtype != torch.bool:
        return "the mask is added to the scores"
    if problem.differentiable:
        return "gradients are wanted"
    if inputs.q_length > 1 and (decay is not None or problem.compiling):
        return "there are several queries" + (", and scores decay" if decay is not None else " in a compiled model")
    if inputs.q_length > 1 and not _is_block(inputs, problem.turner.forward):
        return "there are many queries, or they do not follow keys of a cache one by one"
    if decay is not None and (problem.compiling or inputs.by_head):
        return "scores decay" + (" in a compiled model" if problem.compiling else ", and heads keep different keys")
    if not problem.compiling and _may_see_nothing(inputs, problem.turner.forward):
        return "the bias hides a token from itself, so that a query may see no key"
    return ""


def _may_see_nothing(inputs: AttentionInputs, forward: Forward) -> bool:
    """Whether a bias hides a token from itself, so that a query may see no key."""
    if inputs.bias is None or inputs.bias.linear:
        return False
    return forward.shared(_hides_itself)(inputs.bias, int(inputs.query_start) + inputs.q_length)


def _hides_itself(bias: DistanceBias, length: int) -> bool:
    return bool(bias.values(0, length)[:, 0].isneginf().any())  # values that `_added` reads too


def _is_block(inputs: AttentionInputs, forward: Forward) -> bool:
    """Whether several queries at consecutive positions follow keys of a cache."""
    if not inputs.causal:
        return False
    few = inputs.q_length <= QUERIES or inputs.q_length * inputs.kv_length <= SMALL
    if not few or inputs.q_length >= inputs.kv_length:
        return False
    return forward.shared(_are_consecutive)(inputs.query_positions)


def _are_consecutive(positions: torch.Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())


def attend(problem: Problem) -> torch.Tensor:
    """Attention of a few queries, `(batch, heads, q_len, value_dim)`, without gradients. The problem keeps its plan."""
    inputs, query, key = problem.inputs, *_states(problem)
    problem.plan = _plan(problem)
    return problem.plan.attend(query, key, inputs.value, inputs.scaling)


def _states(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return cast(tuple[torch.Tensor, torch.Tensor], (problem.query, problem.key))


def _plan(problem: Problem) -> SlotPlan:
    """How to score a few queries. It keeps no states.

    Distance is a difference of slots: the positions of keys are counted from the queries.
    """
    turner, (query, _) = cast(Turner, problem.turner), _states(problem)
    by_rows = tuple(
        SlotRows(rows, tuple(_runs(problem, turner, rows, position)))
        for rows, position in _rows_alike(problem.inputs, turner)
    )
    return SlotPlan(turner.of_queries(query), by_rows)


def _rows_alike(inputs: AttentionInputs, turner: Turner) -> Iterator[tuple[slice, int]]:
    """Runs of rows whose regions begin at the same slots, and the position of their first query."""
    if all(region.translation_invariant for region in turner.regions):
        yield EVERY, int(inputs.query_start)  # any position will do
        return
    forward, positions = turner.forward, [int(inputs.query_start)]
    if not forward.counted:
        positions = forward.shared(_first_positions)(inputs.query_positions)
    start = 0
    for position, run in itertools.groupby(positions):
        stop = start + len(list(run))
        yield EVERY if len(positions) == 1 else slice(start, stop), position
        start = stop


def _first_positions(positions: torch.Tensor) -> list[int]:
    return cast(list[int], positions[:, 0].tolist())


def _runs(problem: Problem, turner: Turner, rows: slice, position: int) -> Iterator[SlotRun]:
    """Oldest slots first, as far as regions allow."""
    inputs, decay, (query, key) = problem.inputs, problem.decay, _states(problem)
    slot, last = int(inputs.query_start), inputs.q_length - 1
    for index, region in sorted(enumerate(turner.regions), key=lambda indexed: -indexed[1].start):
        seen = region.slots(slot, position)
        oldest, newest = seen.start, region.slots(slot + last, position + last).stop if last else seen.stop
        step = max(1, newest - oldest)
        if key.is_cpu and (decay is not None or turner.rotates(region.key_map)):
            # rotated keys are computed a few at a time
            step = min(step, max(1, BLOCK // key[rows, :, 0].nbytes))
        turn = turner.of_keys(region, key, slice(oldest, newest), rows) if oldest < newest else None
        for start in range(oldest, newest, step):
            slots = slice(start, min(start + step, newest))
            place = slots.start, slots.stop, rows.start, rows.stop
            decayed = None
            if decay is not None:
                positions = inputs.query_positions, inputs.key_positions
                decayed = turner.forward.shared(_decayed)(*positions, region, decay, *place, key.dtype, key.shape[-1])
            yield SlotRun(
                region=index,
                slots=slots,
                rotate=None if turn is None else turn(slots),
                decay=decayed,
                added=_added(inputs, turner.forward, region, query.shape[1], place, position),
            )


def _decayed(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    region: Region,
    decay: Decay,
    first: int,
    stop: int,
    first_row: int | None,
    last_row: int | None,
    dtype: torch.dtype,
    head_dim: int,
) -> torch.Tensor:
    """Decay of each pair of dimensions of the keys in the slots from `first` to below `stop` for the only query,
    `(batch or 1, 1, slots, head_dim)`.
    """
    m, n = query_positions.float(), key_positions[:, first:stop].float()
    distance = region.rotated_distance(m, n)
    like = torch.empty((), dtype=dtype, device=m.device).expand(1, 1, 1, head_dim)
    return decay.factor(-(distance if len(distance) == 1 else distance[first_row:last_row]), like)


Place = tuple[int, int, Any, Any]
"""First slot, the slot after the last, and likewise the rows of the batch."""


def _added(
    inputs: AttentionInputs, forward: Forward, region: Region, heads: int, place: Place, position: int
) -> torch.Tensor | None:
    """The term added to scaled products of `heads` query heads, in the shape of `SlotRun.added`: biases, and the lowest
    number for keys that a query does not see in this region.
    """
    if inputs.q_length == 1 and inputs.mask is None and inputs.bias is None and inputs.running_bias is None:
        return None
    running, value = inputs.running_bias_of_pairs, inputs.value
    dtype = torch.promote_types(value.dtype, torch.float32)
    compute = _terms if running is not None else forward.shared(_terms)  # a layer has its own running sums
    states = heads, value.shape[1], len(value), dtype, value.device
    return compute(inputs.visibility, inputs.bias, running, region, place, position, *states)


def _terms(
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
    """`(batch or 1, heads or 1, q_len, slots)` in the shape of `SlotRun.added`."""
    if added.ndim == 2:
        added = added[None, None]
    if added.shape[:3] == (1, 1, 1):
        return added[0]
    group = heads // kv_heads
    if added.shape[1] == 1:  # the same for all heads
        added = added[:, :, None].expand(-1, kv_heads if len(added) > 1 else 1, group, -1, -1)
    else:
        added = added.unflatten(1, (kv_heads, group)).expand(batch if kv_heads > 1 else len(added), -1, -1, -1, -1)
    return added.flatten(2, 3).flatten(0, 1)
