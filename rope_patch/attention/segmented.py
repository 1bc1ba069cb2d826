"""Flash attention per region, merged by log-sum-exp: every visible pair is scored once, and no mask is materialised.

The regions of a scheme are disjoint, so softmax over their union is a weighted mean of the softmax of each, with the
weights that their log-sum-exps give. In the backward pass each region's kernel is called with the merged output and
the merged log-sum-exp and then yields its exact share of the gradients (the identity behind ring attention, Liu et
al., 2310.01889): no gradient flows through the merge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from rope_patch.attention.bias import TileBias, tile_bias
from rope_patch.attention.inputs import AttentionInputs, Branch
from rope_patch.attention.kernels import Biased, Merged, Work, kernel_for
from rope_patch.attention.spans import Span
from rope_patch.attention.tiles import Tile
from rope_patch.schemes.slots import ALL_PAIRS, Region


def attend(inputs: AttentionInputs, spans: tuple[Span, ...]) -> torch.Tensor:
    """Output of `oracle.attend` for a call made of spans, `(batch, heads, q_len, value_dim)`.

    The caller has made sure that there is no softcap, sink or dropout. Queries outside every span (pads) give zeros.
    """
    regions = tuple(branch.region for branch in inputs.branches)
    states = [state for branch in inputs.branches for state in (branch.query, branch.key)]
    bias = tile_bias(inputs)
    source = None if bias is None else bias.source
    return _Segmented.apply(spans, regions, bias, inputs.scaling, source, inputs.value, *states)


LARGE = 2**25
"""Bytes. A larger temporary is mapped and faulted in anew at every call: the C library does not keep it."""


def applies(inputs: AttentionInputs, spans: tuple[Span, ...]) -> bool:
    """Whether every region keeps its shape inside the windows of the spans."""
    regions = [branch.region for branch in inputs.branches if branch.region is not None]
    plain = all(span.window == math.inf for span in spans) and inputs.causal
    return plain or all(region.translation_invariant for region in regions)


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spans: tuple[Span, ...],
        regions: tuple[Region | None, ...],
        bias: TileBias | None,
        scale: float,
        source: torch.Tensor | None,
        value: torch.Tensor,
        *states: torch.Tensor,
    ) -> torch.Tensor:
        branches = _as_branches(regions, states)
        query = states[0]
        dtype = torch.promote_types(query.dtype, torch.float32)
        batch, heads, length = query.shape[:3]
        # laid out as the kernels lay theirs out, and as the model wants it next
        out = torch.empty(batch, length, heads, value.shape[-1], dtype=dtype, device=query.device).transpose(1, 2)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
        touched = torch.zeros(batch, heads, length, dtype=torch.bool)
        for kernel, branch, tile, queries, keys in _work(spans, branches, value, bias):
            part, part_lse = kernel.forward(Work(branch.query[queries], branch.key[keys], value[keys], tile, scale))
            seen = touched[queries]
            if not seen.any():
                out[queries], lse[queries] = part, part_lse
            else:
                if not seen.all():
                    out[queries].masked_fill_(~seen[..., None].to(out.device), 0)
                merge(out[queries], lse[queries], part, part_lse)
            seen.fill_(True)
        if not touched.all():
            out.masked_fill_(~touched[..., None].to(out.device), 0)
        out = out.to(value.dtype)
        ctx.save_for_backward(value, out, lse, *states)
        ctx.spans, ctx.regions, ctx.bias, ctx.scale = spans, regions, bias, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, out, lse, *states = ctx.saved_tensors
        branches = _as_branches(ctx.regions, states)
        work = list(_work(ctx.spans, branches, value, ctx.bias))
        of_value = _Sum(value, [(tile, keys) for *_, tile, _, keys in work])
        of_query = {id(b): _Sum(b.query, [(t, queries) for _, x, t, queries, _ in work if x is b]) for b in branches}
        of_key = {id(b): _Sum(b.key, [(t, keys) for _, x, t, _, keys in work if x is b]) for b in branches}
        of_bias = torch.zeros_like(ctx.bias.source) if ctx.needs_input_grad[4] else None
        for kernel, branch, tile, queries, keys in work:
            here = Work(branch.query[queries], branch.key[keys], value[keys], tile, ctx.scale)
            merged = Merged(out[queries], lse[queries], grad[queries])
            grad_q, grad_k, grad_v = kernel.backward(here, merged)
            if of_bias is not None:
                kernel.bias_gradient(here, merged, into=of_bias)
            of_query[id(branch)].add(queries, grad_q)
            of_key[id(branch)].add(keys, grad_k)
            of_value.add(keys, grad_v)
        shares = [sums[id(branch)].total() for branch in branches for sums in (of_query, of_key)]
        return (None, None, None, None, of_bias, of_value.total(), *shares)


Index = tuple[slice, slice, slice]


class _Sum:
    """What tiles contribute to one gradient: written to its place where each place has one tile, else added up in
    float32, because half precision would lose what many tiles add up.
    """

    def __init__(self, like: torch.Tensor, work: list[tuple[Tile, Index]]) -> None:
        # the groups of heads of one tile do not meet
        runs = {(id(tile), rows.start): (rows.start, run.start, run.stop) for tile, (rows, _, run) in work}
        in_order = itertools.pairwise(sorted(runs.values()))
        self._disjoint = all(a[0] != b[0] or a[2] <= b[1] for a, b in in_order)
        self._dtype = like.dtype
        dtype = like.dtype if self._disjoint else torch.promote_types(like.dtype, torch.float32)
        self._sum = torch.zeros_like(like, dtype=dtype)

    def add(self, place: Index, share: torch.Tensor) -> None:
        """The contribution of one tile."""
        if self._disjoint:
            self._sum[place] = share
        else:
            self._sum[place] += share.to(self._sum.dtype)

    def total(self) -> torch.Tensor:
        """The gradient in the dtype of its tensor."""
        return self._sum.to(self._dtype)


def _work(
    spans: tuple[Span, ...], branches: list[Branch], value: torch.Tensor, bias: TileBias | None
) -> Iterator[tuple[Biased, Branch, Tile, Index, Index]]:
    """Every tile, its kernel, and the places of its queries and keys in the batch; a large one by groups of heads."""
    plain = kernel_for(branches[0].query, value, bias is not None)
    # the far region first: its one large tile is then the ground to which small ones are added while they are in cache
    in_order = sorted(branches, key=lambda branch: -branch.region.start if branch.region else 0)
    for span, branch in itertools.product(spans, in_order):
        kernel = Biased(plain, span, None if bias is None else bias.of(span))
        for tile in kernel.tiles(branch.region or ALL_PAIRS):
            queries = slice(span.queries.start + tile.q0, span.queries.start + tile.q1)
            keys = slice(span.keys.start + tile.k0, span.keys.start + tile.k1)
            rows = span.rows.stop - span.rows.start
            whole = kernel.bias is not None or not branch.query.is_cpu  # a bias has a mask for all heads
            groups = 1 if whole else _number_of_head_groups(rows, tile, branch.query)
            for of_queries, of_keys in _head_groups(groups, branch.query.shape[1], value.shape[1]):
                yield kernel, branch, tile, (span.rows, of_queries, queries), (span.rows, of_keys, keys)


def _number_of_head_groups(rows: int, tile: Tile, query: torch.Tensor) -> int:
    """As many as keep the output of each below `LARGE` bytes, and every thread at work."""
    _, heads, _, head_dim = query.shape
    size = rows * heads * (tile.q1 - tile.q0) * head_dim * query.element_size()
    return max(1, min(math.ceil(size / LARGE), rows * heads // torch.get_num_threads()))


def _head_groups(number: int, heads: int, kv_heads: int) -> Iterator[tuple[slice, slice]]:
    """Query heads and the key heads that they share, in `number` groups at most."""
    size, shared = math.ceil(kv_heads / number), heads // kv_heads
    for start in range(0, kv_heads, size):
        stop = min(start + size, kv_heads)
        yield slice(start * shared, stop * shared), slice(start, stop)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold another part of the keys into output and log-sum-exp, `(batch, heads, q_len, value_dim)` and
    `(batch, heads, q_len)`, in place.
    """
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp_()[..., None]).addcmul_(part, (part_lse - merged).exp_()[..., None].to(part.dtype))
    lse.copy_(merged)


def _as_branches(regions: tuple[Region | None, ...], states: Any) -> list[Branch]:
    return [Branch(region, states[2 * i], states[2 * i + 1]) for i, region in enumerate(regions)]
