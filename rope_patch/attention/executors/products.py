"""Attention by the processor's products of bfloat16 matrices: a block of queries against all keys that it sees.

Scores are rounded to bfloat16 before their softmax, which is float32: the error of the output is about twice that of
flash, a quarter of the step between two bfloat16 numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from rope_patch.attention.executors import merged
from rope_patch.attention.executors.merged import Block, HeadGroup, blocks_of, head_groups
from rope_patch.attention.pieces import Piece, Tile
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Needs
from rope_patch.attention.terms import upcast
from rope_patch.attention.tile_kernels import Dense


def _objection(problem: Problem) -> str:
    """The reason why a call is left to flash, or an empty string if `merged` supports it and this processor's products
    score it faster.
    """
    states = problem.rotated.states()
    if any(not state.is_cpu for state in states):
        return "it is for CPUs"
    if any(state.dtype != torch.bfloat16 for state in states):
        return "it needs bfloat16 states"
    if not multiplies_bfloat16():
        return "this processor has no instructions for products of bfloat16 matrices"
    return merged.supports(problem)


supports = Needs(compiling=False, biased=False, differentiable=False, further=_objection)
"""Without gradients, and without a bias, which products in half precision would round with the scores."""


@functools.cache
def _instructions() -> dict[str, Any]:
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return known


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16 matrices."""
    return any(_instructions().get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def with_tiles(problem: Problem) -> str:
    """The reason why flash is preferred, or an empty string: on a processor with AMX, PyTorch's flash also multiplies
    in bfloat16.
    """
    return "flash is faster on this processor, which has AMX" if _instructions().get("amx_bf16", False) else ""


def attend(problem: Problem) -> Output:
    """Output of `reference.attend` for a call made of spans, `(batch, heads, q_len, value_dim)`."""
    spans, branches = problem.spans or (), problem.rotated.branches
    query, value = branches[0].query, problem.value
    batch, heads, length = query.shape[:3]
    out = value.new_zeros(batch, length, heads, value.shape[-1]).transpose(1, 2)
    blocks = blocks_of(spans, branches, Dense(Dense.rows), None)
    groups = list(head_groups(query, value, value.shape[2]))
    # one buffer for all blocks: a large temporary is mapped and faulted in again at every call
    room = value.new_empty(max((math.prod(_shape(block, groups[0], batch)) for block in blocks), default=0))
    for group in groups:
        # the products need contiguous matrices
        values = value[:, group.kv_heads].contiguous()
        keys = [branch.key[:, group.kv_heads].contiguous() for branch in branches]
        for block in blocks:
            shape = _shape(block, group, batch)
            scores = room[: math.prod(shape)].view(shape)
            _fill(scores, block, group, problem.rotated, keys)
            torch.softmax(scores, dim=-1, out=scores)
            out[block.rows, group.heads, block.queries] = _mean(scores, block, values)
    return out, None


def _shape(block: Block, group: HeadGroup, batch: int) -> tuple[int, ...]:
    """Shape of the scores of a block: rows, heads, queries, and the keys of all tiles side by side."""
    width = sum(piece.width for piece in block.pieces)
    return len(range(batch)[block.rows]), group.heads.stop - group.heads.start, block.q_length, width


def _fill(scores: torch.Tensor, block: Block, group: HeadGroup, problem: Problem, keys: list[torch.Tensor]) -> None:
    """Write the scores of a block, in its `_shape`."""
    for piece, columns in _columns(block):
        branch, tile, here = problem.branches[piece.region], piece.tile, scores[..., columns]
        slots = slice(piece.keys.start - branch.first, piece.keys.stop - branch.first)
        k = keys[piece.region][block.rows, :, slots].flatten(0, 1)
        q = branch.queries(block.rows, group.heads, piece.queries).reshape(len(k), -1, k.shape[-1])
        if piece.queries == block.queries:
            place = _per_kv_head(scores, len(k))[..., columns]
            torch.baddbmm(place, q, k.mT, beta=0, alpha=problem.scaling, out=place)
        else:
            here.fill_(-torch.inf)
            here = here[:, :, piece.queries.start - block.queries.start : piece.queries.stop - block.queries.start]
            here.copy_((q @ k.mT).view(here.shape)).mul_(problem.scaling)
        if tile.kind == "band":
            _hide(here, tile)


def _mean(weights: torch.Tensor, block: Block, values: torch.Tensor) -> torch.Tensor:
    """Sum the values that a block sees, weighted by attention, `(rows, heads, queries, value_dim)`."""
    values = values[block.rows]
    weights_of = _per_kv_head(weights, values.shape[0] * values.shape[1])
    out = None
    for piece, columns in _columns(block):
        part = torch.bmm(weights_of[..., columns], values[:, :, piece.keys].flatten(0, 1))
        out = part if out is None else upcast(out).add_(part)
    assert out is not None  # for the type checker: a block has a tile
    return out.view(*weights.shape[:3], -1)


def _columns(block: Block) -> Iterator[tuple[Piece, slice]]:
    """Pair each tile of a block with its columns of the scores."""
    start = 0
    for piece in block.pieces:
        stop = start + piece.width
        yield piece, slice(start, stop)
        start = stop


def _per_kv_head(x: torch.Tensor, number: int) -> torch.Tensor:
    """View `(rows, heads, queries, columns)` as one matrix per key head, `(number, ..., columns)`."""
    return x.view(number, -1, x.shape[-1])


def _hide(scores: torch.Tensor, tile: Tile) -> None:
    """Write -inf where a band hides keys, left and right of the keys that all queries see."""
    rows, width = tile.q1 - tile.q0, tile.k1 - tile.k0
    left = min(max(0, tile.distance + rows - tile.high), width)
    right = min(max(left, tile.distance - tile.low + 1), width)
    for start, stop in ((0, left), (right, width)):
        if start < stop:
            edge = dataclasses.replace(tile, k0=start, k1=stop, distance=tile.distance - start)
            scores[..., start:stop].masked_fill_(~edge.mask(scores.device), -torch.inf)


EXECUTOR = Executor(
    "products",
    "the processor's products of bfloat16 matrices, a block of queries against all keys that it sees",
    supports,
    attend,
    merged.pieces,
)
