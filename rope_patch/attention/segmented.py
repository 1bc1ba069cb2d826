"""Flash attention per region, merged by log-sum-exp: every visible pair is scored once, and no mask is materialised.

The regions of a scheme are disjoint, so softmax over their union is a weighted mean of the softmax of each, with the
weights that their log-sum-exps give. In the backward pass each region's kernel is called with the merged output and
the merged log-sum-exp and then yields its exact share of the gradients (the identity behind ring attention, Liu et
al., 2310.01889): no gradient flows through the merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from rope_patch.attention.bias import TileBias, tile_bias
from rope_patch.attention.inputs import AttentionInputs, Branch
from rope_patch.attention.kernels import Biased, kernel_for
from rope_patch.attention.spans import Span
from rope_patch.attention.tiles import Tile
from rope_patch.schemes.base import ALL_PAIRS, Region


def attend(inputs: AttentionInputs, spans: tuple[Span, ...]) -> torch.Tensor:
    """Output of `oracle.attend` for a causal call made of spans, `(batch, heads, q_len, value_dim)`.

    The caller has made sure that there is no softcap, sink or dropout, and that no bias wants a gradient. Queries
    outside every span (pads) give zeros.
    """
    regions = tuple(branch.region for branch in inputs.branches)
    states = [state for branch in inputs.branches for state in (branch.query, branch.key)]
    return _Segmented.apply(spans, regions, tile_bias(inputs), inputs.scaling, inputs.value, *states)


def applies(inputs: AttentionInputs, spans: tuple[Span, ...]) -> bool:
    """Whether every region keeps its shape inside the windows of the spans."""
    regions = [branch.region for branch in inputs.branches if branch.region is not None]
    return all(region.translation_invariant for region in regions) or all(span.window == math.inf for span in spans)


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spans: tuple[Span, ...],
        regions: tuple[Region | None, ...],
        bias: TileBias | None,
        scale: float,
        value: torch.Tensor,
        *states: torch.Tensor,
    ) -> torch.Tensor:
        branches = _as_branches(regions, states)
        kernel = Biased(kernel_for(states[0], value, bias is not None), bias)
        query = states[0]
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=dtype, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
        for span in spans:
            touched = [False] * span.q_length
            for branch, tile, queries, keys in _work(span, branches, kernel):
                part, part_lse = kernel.forward(branch.query[queries], branch.key[keys], value[keys], tile, scale)
                rows = slice(tile.q0, tile.q1)
                if any(touched[rows]):
                    merge(out[queries], lse[queries], part, part_lse)
                else:
                    out[queries], lse[queries] = part, part_lse
                touched[rows] = [True] * (tile.q1 - tile.q0)
        out = out.to(value.dtype)
        ctx.save_for_backward(value, out, lse, *states)
        ctx.spans, ctx.regions, ctx.bias, ctx.scale = spans, regions, bias, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, out, lse, *states = ctx.saved_tensors
        branches = _as_branches(ctx.regions, states)
        kernel = Biased(kernel_for(states[0], value, ctx.bias is not None), ctx.bias)
        # half precision would lose what many tiles add up
        dtype = torch.promote_types(value.dtype, torch.float32)
        gradients = [torch.zeros_like(state, dtype=dtype) for state in states]
        grad_value = torch.zeros_like(value, dtype=dtype)
        order = {id(branch): i for i, branch in enumerate(branches)}
        for span in ctx.spans:
            for branch, tile, queries, keys in _work(span, branches, kernel):
                grad_q, grad_k, grad_v = kernel.backward(
                    grad[queries],
                    branch.query[queries],
                    branch.key[keys],
                    value[keys],
                    out[queries],
                    lse[queries],
                    tile,
                    ctx.scale,
                )
                index = 2 * order[id(branch)]
                gradients[index][queries] += grad_q
                gradients[index + 1][keys] += grad_k
                grad_value[keys] += grad_v
        shares = [gradient.to(state.dtype) for gradient, state in zip(gradients, states, strict=True)]
        return (None, None, None, None, grad_value.to(value.dtype), *shares)


Index = tuple[slice, slice, slice]


def _work(span: Span, branches: list[Branch], kernel: Biased) -> Iterator[tuple[Branch, Tile, Index, Index]]:
    """Every tile of a span with the places of its queries and keys in the batch."""
    every = slice(None)
    # the far region first: its one large tile is then the ground to which small ones are added while they are in cache
    for branch in sorted(branches, key=lambda branch: -branch.region.start if branch.region else 0):
        for tile in kernel.tiles(branch.region or ALL_PAIRS, span):
            queries = slice(span.queries.start + tile.q0, span.queries.start + tile.q1)
            keys = slice(span.keys.start + tile.k0, span.keys.start + tile.k1)
            yield branch, tile, (span.rows, every, queries), (span.rows, every, keys)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold another part of the keys into output and log-sum-exp, in place."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp_()[..., None]).addcmul_(part, (part_lse - merged).exp_()[..., None].to(part.dtype))
    lse.copy_(merged)


def _as_branches(regions: tuple[Region | None, ...], states: Any) -> list[Branch]:
    return [Branch(region, states[2 * i], states[2 * i + 1]) for i, region in enumerate(regions)]
