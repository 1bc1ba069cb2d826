"""Attention of one query behind a static cache in a compiled model. The graph does not know the length, so shapes are
those of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import torch

from rope_patch.attention.behind_cache import NEEDS, planned_pieces
from rope_patch.attention.pieces import Tile
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import EVERY
from rope_patch.attention.table import Executor
from rope_patch.attention.terms import HALF, product, upcast
from rope_patch.attention.tile_kernels import Dense, FlashCPU, Work
from rope_patch.attention.turner import Turner
from rope_patch.schemes.slots import Region

supports = dataclasses.replace(NEEDS, compiling=True, one_query=True, decays=False)
"""One query of a compiled model."""


def attend(problem: Problem) -> Output:
    """Attention of one query, `(batch, heads, 1, value_dim)`, without gradients: a narrow region is gathered from the
    cache, any other region is the whole cache, masked. Keys and values keep their dtype.
    """
    turner, value = cast(Turner, problem.turner), problem.value
    parts = [_part(problem, turner, region) for region in turner.regions]
    out, largest = _by_kernel(parts) if _suits_kernel(value) else _by_one_softmax(parts, problem.kv_length)
    out = out.masked_fill(largest <= torch.finfo(out.dtype).min / 2, 0)  # a bias may hide all keys
    return out.to(value.dtype).flatten(1, 2)[:, :, None], None


def _suits_kernel(value: torch.Tensor) -> bool:
    return value.is_cpu and value.dtype in HALF


def _kernel(problem: Problem) -> str:
    value = problem.value
    if _suits_kernel(value):
        return FlashCPU.name
    return "sums that the compiler fuses" if _compiles_sums(value) else Dense.name


EXECUTOR = Executor("traced", "one query of a compiled model, one softmax", supports, attend, planned_pieces, _kernel)


def _part(problem: Problem, turner: Turner, region: Region) -> Work:
    """The work of a region: its slots of the cache, and the term added to their scores. Query heads that share a key
    head are the queries of one tile.
    """
    query, key = cast(tuple[torch.Tensor, torch.Tensor], (problem.query, problem.key))
    value, m = problem.value, problem.query_positions
    visible = problem.mask if problem.groups is None else problem.visible()
    slots: slice | torch.Tensor = EVERY
    number = torch.arange(problem.kv_length, device=value.device)
    exists = number <= problem.query_start
    first, width = int(max(0, region.start)), region.stop - max(0, region.start)
    if region.translation_invariant and width < problem.kv_length:
        number = problem.query_start - first - torch.arange(int(width), device=value.device)
        exists, slots = number >= 0, number.clamp(min=0)
    distance = problem.query_start - number
    seen = (exists & region.contains(m, m - distance))[:, None, None]
    if visible is not None:
        seen = seen & of_one_group(visible[..., slots], value)
    added = added_to_one(problem, seen, distance, slots)
    queries = of_one_group(turner.turn(query, region, "query"), value)
    keys = turner.turn(key[:, :, slots], region, "key", slots)
    tile = Tile(0, queries.shape[2], 0, keys.shape[2])
    return Work(queries, keys, value[:, :, slots], tile, problem.scaling, added)


def of_one_group(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Reshape what belongs to the only query, `(batch or 1, heads or 1, 1, n)`, to `(batch or 1, kv_heads or 1, group
    or 1, n)`.
    """
    return x if x.shape[1] == 1 else x[:, :, 0].unflatten(1, (value.shape[1], -1))


def added_to_one(
    problem: Problem, seen: torch.Tensor, distance: torch.Tensor, slots: slice | torch.Tensor = EVERY
) -> torch.Tensor:
    """The term added to the scores of the only query in some slots, in the dtype of scores: biases, and the lowest
    number for keys that it does not see.

    Shape:
        seen `(batch or 1, kv_heads or 1, group or 1, slots)`, as the result; distance `(slots,)`.
    """
    value = problem.value
    added = torch.zeros((), dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
    if problem.bias is not None:
        added = added + of_one_group(problem.bias.function(distance)[None, :, None], value).to(added.dtype)
    if (running := problem.running_bias_of_pairs) is not None:
        added = added + of_one_group(running[..., slots], value).to(added.dtype)
    lowest = torch.finfo(added.dtype).min  # a kernel may compute NaN from infinite numbers
    return torch.where(seen, added.clamp(min=lowest), lowest)


def _by_kernel(parts: list[Work]) -> tuple[torch.Tensor, torch.Tensor]:
    """Score each part by the CPU's kernel and merge them by LSE: output in the dtype of scores, `(batch, kv_heads,
    group, value_dim)`, and log-sum-exp, `(batch, kv_heads, group, 1)`.
    """
    outputs, sums = [], []
    for part in parts:
        out, lse = FlashCPU().scored(part)
        outputs.append(upcast(out))
        sums.append(lse[..., None])
    total = torch.stack(sums).logsumexp(dim=0)
    return sum((out * (lse - total).exp() for out, lse in zip(outputs, sums, strict=True)), start=0 * total), total


def _by_one_softmax(parts: list[Work], kv_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Score all parts by products with one softmax: the output, `(batch, kv_heads, group, value_dim)`, and the largest
    score, `(batch, kv_heads, group, 1)`.
    """
    scores, values = _without_repeats([_scores(part) for part in parts], parts, kv_length)
    joined = torch.cat(scores, dim=-1)
    weights = joined.softmax(dim=-1).split([x.shape[-1] for x in scores], dim=-1)
    outputs = (_mean(w, v) for w, v in zip(weights, values, strict=True))
    return sum(outputs, start=joined.new_zeros(())), joined.amax(dim=-1, keepdim=True)


def _without_repeats(
    scores: list[torch.Tensor], parts: list[Work], kv_length: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Join the scores of all parts that are the whole cache: a query sees a slot in one region, and the scores of all
    others have the lowest number there. So values are read once.

    Returns:
        the scores, and for each the values that they weigh.
    """
    narrow = [(x, part.v) for x, part in zip(scores, parts, strict=True) if part.v.shape[2] < kv_length]
    of_cache = [(x, part.v) for x, part in zip(scores, parts, strict=True) if part.v.shape[2] == kv_length]
    if of_cache:
        every = functools.reduce(torch.maximum, (x for x, _ in of_cache))
        narrow.append((every, of_cache[0][1]))
    return [x for x, _ in narrow], [v for _, v in narrow]


def _scores(part: Work) -> torch.Tensor:
    """The scores of a part, `(batch, kv_heads, group, slots)`, in their dtype."""
    if _compiles_sums(part.k):
        products = (upcast(part.q)[:, :, :, None] * upcast(part.k)[:, :, None]).sum(dim=-1)
    else:
        products = product(part.q, part.k.mT)
    return products * part.scale + cast(torch.Tensor, part.mask)


def _mean(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum values `(batch, kv_heads, slots, value_dim)` by their weights `(batch, kv_heads, group, slots)`."""
    if not _compiles_sums(values):
        return product(weights.to(values.dtype), values)
    return (weights[..., None] * upcast(values)[:, :, None]).sum(dim=-2)


def _compiles_sums(x: torch.Tensor) -> bool:
    """Whether products are written as sums, of which Inductor makes one kernel with what surrounds them. The few rows
    of a token suit no kernel of cuBLAS with float32 results: on an H200, after 8,192 tokens, it took 249 microseconds
    for the values of a layer and 24 for its scores, and all of the plain model's layer took 130.
    """
    return x.is_cuda
