"""A few queries against a long cache, without rotating the cache: each region is a run of slots.

Keys are rotated only where the region differs from the rotation in the cache: the near window, a few of many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from rope_patch.attention.call import Call
from rope_patch.attention.decay import Decay
from rope_patch.attention.inputs import AttentionInputs, wide
from rope_patch.attention.problem import NOT_PRODUCTS, Problem
from rope_patch.attention.slot_plan import EVERY, SlotPlan, SlotRows, SlotRun
from rope_patch.schemes.slots import Region

QUERIES = 32  # up to this many are scored like one, at any cache length; tiles are for more
SMALL = 2**18  # or up to this many pairs per row: one dense block is then faster than many tiles
BLOCK = 2**21  # bytes of keys that are rotated and scored at once, while they are in the processor's cache


def supports(problem: Problem) -> str:
    """Why `attend` cannot compute a call; empty if it can: for a few queries behind the keys of a cache."""
    inputs, call, decay = problem.inputs, problem.call, problem.decay
    if call is None:
        return "its states are rotated already"
    if inputs.scattered:
        return "keys of the cache have gaps between their positions"
    if not inputs.fits_kernels:
        return NOT_PRODUCTS
    if inputs.mask is not None and inputs.mask.dtype != torch.bool:
        return "the mask is added to the scores"
    if call.differentiable:
        return "gradients are wanted"
    if inputs.q_length > 1 and (decay is not None or problem.compiling):
        return "there are several queries" + (", and scores decay" if decay is not None else " in a compiled model")
    if inputs.q_length > 1 and not _is_block(inputs, call):
        return "there are many queries, or they do not follow keys of a cache one by one"
    if decay is not None and (problem.compiling or inputs.by_head):
        return "scores decay" + (" in a compiled model" if problem.compiling else ", and heads keep different keys")
    if not problem.compiling and _may_see_nothing(inputs, call):
        return "the bias hides a token from itself, so that a query may see no key"
    return ""


def _may_see_nothing(inputs: AttentionInputs, call: Call) -> bool:
    """Whether a bias hides a token from itself, so that a query may see no key."""
    bias = inputs.bias
    if bias is None or bias.linear:
        return False
    values = bias.values(0, int(inputs.query_start) + inputs.q_length)  # those that `_added` reads
    return bool(call.forward_cache.derived("hides itself", lambda: bool(values[:, 0].isneginf().any()), bias))


def _is_block(inputs: AttentionInputs, call: Call) -> bool:
    """Whether several queries at consecutive positions follow keys of a cache."""
    if not inputs.causal:
        return False
    few = inputs.q_length <= QUERIES or inputs.q_length * inputs.kv_length <= SMALL
    if not few or inputs.q_length >= inputs.kv_length:
        return False
    return call.forward_cache.once("consecutive", lambda: bool((inputs.query_positions.diff(dim=-1) == 1).all()))


def attend(inputs: AttentionInputs, call: Call, decay: Decay | None = None) -> torch.Tensor:
    """Attention of a few queries, `(batch, heads, q_len, value_dim)`, without gradients. The call keeps its plan."""
    call.plan = plan(inputs, call, decay)
    return call.plan.attend(call.queries, call.keys, inputs.value, inputs.scaling)


def plan(inputs: AttentionInputs, call: Call, decay: Decay | None) -> SlotPlan:
    """How to score a few queries. It reads no states, only their shapes and dtypes.

    Distance is a difference of slots: the positions of keys are counted from the queries.
    """
    by_rows = tuple(
        SlotRows(rows, tuple(_runs(inputs, call, decay, rows, position)))
        for rows, position in _rows_alike(inputs, call)
    )
    return SlotPlan(call.query_rotation(), by_rows)


def _rows_alike(inputs: AttentionInputs, call: Call) -> Iterator[tuple[slice, int]]:
    """Runs of rows whose regions begin at the same slots, and the position of their first query."""
    if all(region.translation_invariant for region in call.regions):
        yield EVERY, int(inputs.query_start)  # any position will do
        return
    positions = call.forward_cache.once("first positions", lambda: inputs.query_positions[:, 0].tolist())
    start = 0
    for position, run in itertools.groupby(positions):
        stop = start + len(list(run))
        yield EVERY if len(positions) == 1 else slice(start, stop), position
        start = stop


def _runs(inputs: AttentionInputs, call: Call, decay: Decay | None, rows: slice, position: int) -> Iterator[SlotRun]:
    """Oldest slots first, as far as regions allow."""
    slot, last = int(inputs.query_start), inputs.q_length - 1
    for index, region in sorted(enumerate(call.regions), key=lambda indexed: -indexed[1].start):
        seen = region.slots(slot, position)
        oldest, newest = seen.start, region.slots(slot + last, position + last).stop if last else seen.stop
        step = max(1, newest - oldest)
        if call.keys.is_cpu and (decay is not None or call.rotates_keys(region)):
            # rotated keys are computed a few at a time
            step = min(step, max(1, BLOCK // call.keys[rows, :, 0].nbytes))
        rotation = call.key_rotation(region, slice(oldest, newest), rows) if oldest < newest else None
        for start in range(oldest, newest, step):
            slots = slice(start, min(start + step, newest))
            yield SlotRun(
                region=index,
                slots=slots,
                rotate=None if rotation is None else rotation(slots),
                decay=None if decay is None else _decayed(inputs, call, decay, region, slots, rows),
                added=_added(inputs, call, region, slots, rows, position),
            )


def _decayed(
    inputs: AttentionInputs, call: Call, decay: Decay, region: Region, slots: slice, rows: slice
) -> torch.Tensor:
    """Decay of each pair of dimensions of the keys for the only query, `(batch or 1, 1, slots, head_dim)`."""

    def factors() -> torch.Tensor:
        m, n = inputs.query_positions.float(), inputs.key_positions[:, slots].float()
        distance = region.rotated_distance(m, n)
        return decay.factor(-(distance if len(distance) == 1 else distance[rows]), call.keys)

    # layers with a sliding cache have other slots than layers with all keys
    place = slots.start, slots.stop, int(inputs.query_start), rows.start
    return call.forward_cache.once(("decayed", decay, region, *place), factors)


def _added(
    inputs: AttentionInputs, call: Call, region: Region, slots: slice, rows: slice, position: int
) -> torch.Tensor | None:
    """The term added to scaled products, in the shape of `SlotRun.added`: biases, and the lowest number for keys that a
    query does not see in this region.
    """
    if inputs.q_length == 1 and inputs.mask is None and inputs.bias is None and inputs.running_bias is None:
        return None
    shared, seen_by_all = (inputs.mask, inputs.groups, inputs.bias), inputs.mask is None and inputs.groups is None

    def compute() -> torch.Tensor:
        value, slot = inputs.value[rows], int(inputs.query_start)
        if inputs.q_length == 1 and seen_by_all and inputs.bias is not None and inputs.running_bias is None:
            values = inputs.bias.falling(slot - slots.start, slot - slots.stop + 1, value.device)[None, :, None]
            return _by_kv_head(wide(values.to(value.dtype)), len(value), value.shape[1], call.queries.shape[1])
        i = torch.arange(inputs.q_length, device=value.device)[:, None]
        distance = (slot + i) - torch.arange(slots.start, slots.stop, device=value.device)
        seen = inputs.visible() if inputs.mask is None else inputs.mask
        if seen is not None:
            seen = (seen if len(seen) == 1 else seen[rows])[..., slots]
        if inputs.q_length > 1:
            inside = region.contains(position + i, position + i - distance)
            seen = inside if seen is None else seen & inside
        added = torch.zeros((), dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
        if inputs.bias is not None:
            values = inputs.bias.values(0, slot + inputs.q_length)
            added = values[:, distance.clamp(min=0)][None].to(added.dtype)
        if inputs.running_bias is not None:
            running = inputs.running_bias_of_pairs
            assert running is not None  # for the type checker: there is one
            added = added + (running if len(running) == 1 else running[rows])[..., slots].to(added.dtype)
        if seen is not None:
            added = torch.where(seen, added, torch.finfo(added.dtype).min)
        return _by_kv_head(added, len(value), value.shape[1], call.queries.shape[1])

    if inputs.running_bias is not None:
        return compute()
    return call.forward_cache.derived(
        ("added", region, slots.start, slots.stop, rows.start, inputs.query_start), compute, *shared
    )


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


def attend_in_graph(inputs: AttentionInputs, call: Call) -> torch.Tensor:
    """A traceable form of `attend`, with the same shapes: a narrow region is gathered from the cache, any other region
    is the whole cache, masked.
    """
    value, m = inputs.value, inputs.query_positions[..., None]
    every = torch.arange(inputs.kv_length, device=value.device)
    scores, values = [], []
    for region in call.regions:
        first, width = int(max(0, region.start)), region.stop - max(0, region.start)
        slots, exists = every, every <= inputs.query_start
        if region.translation_invariant and width < inputs.kv_length:
            slots = inputs.query_start - first - torch.arange(int(width), device=value.device)
            exists, slots = slots >= 0, slots.clamp(min=0)
        n = m - (inputs.query_start - slots)
        seen = (exists & region.contains(m, n))[:, :, None]
        if inputs.mask is not None:
            seen = seen & inputs.mask[..., slots]
        rows = wide(call.query(region)).unflatten(1, (value.shape[1], -1))[:, :, :, 0]  # of each kv head
        products = rows @ wide(call.key(region, slots, EVERY)).mT * inputs.scaling
        if inputs.bias is not None:
            term = inputs.bias.function((m - n)[:, 0]).transpose(0, 1)
            products = products + term.unflatten(1, (value.shape[1], -1))
        if (running := inputs.running_bias_of_pairs) is not None:
            products = products + running[:, :, 0, slots].to(products.dtype).unflatten(1, (value.shape[1], -1))
        scores.append(products.masked_fill(~seen, -torch.inf))
        values.append(value[:, :, slots])
    joined = torch.cat(scores, dim=-1)
    # a bias may hide all keys
    weights = joined.softmax(dim=-1).masked_fill(joined.isneginf().all(dim=-1, keepdim=True), 0)
    weights = weights.split([x.shape[-1] for x in scores], dim=-1)
    out = sum(weight @ wide(part) for weight, part in zip(weights, values, strict=True))
    return out.to(value.dtype).flatten(1, 2)[:, :, None]
