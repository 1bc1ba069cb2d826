"""Attention alone, on states that are rotated already: regions, the platform's attention, two dense matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.comparison import Shape, Side
from benchmarks.dense import two_matrices
from rope_patch.attention import paths
from rope_patch.attention.executors import fused
from rope_patch.attention.problem import Problem
from rope_patch.attention.spans import Span
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.turner import Branch, Fused
from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.registry import as_scheme
from rope_patch.schemes.slots import ALL_PAIRS, Checkpoint
from rope_patch.schemes.t5 import T5Bias

_DCA_CHUNK = 2048

SEGMENTS = ("rerope", "leaky_rerope", "self_extend", "dca")
"""Schemes with regions that are compared with plain attention."""


def spec(scheme: str, length: int) -> str:
    """The scheme for `patch`, with a window of an eighth of the length; what has no window as it is."""
    window = max(1, length // 8)
    chunk = min(_DCA_CHUNK, length // 2)
    return {
        "rerope": f"rerope:window={window}",
        "leaky_rerope": f"leaky_rerope:window={window},factor=4",
        "self_extend": f"self_extend:group_size=4,window={window}",
        "dca": f"dca:chunk_size={chunk},local_window={chunk // 4}",
        "nope+rerope": f"layers:[0::2=nope;rest=rerope:window={window}]",
        "nope+yarn": "layers:[0::2=nope;rest=yarn:factor=4]",
    }.get(scheme, scheme)


def regions(shape: Shape, scheme: str, backward: bool = False) -> Side:
    """A segment scheme through the engine, every region with queries and keys of its own."""
    inputs = in_regions(shape, scheme, backward)
    spans = (Span(slice(0, 1), slice(0, shape.length), slice(0, shape.length), 0),)
    return side(shape, lambda: paths.score(inputs.replaced(find_spans=lambda _: spans))[0], leaves(inputs), backward)


def in_regions(shape: Shape, scheme: str, backward: bool) -> Problem:
    """A causal call under a segment scheme."""
    length = shape.length
    value = _keys(shape, backward)
    branches = tuple(
        Branch(region, _queries(shape, backward), _keys(shape, backward))
        for region in as_scheme((spec(scheme, length),), {}).segments()
        if region.stop > 0
    )
    positions = torch.arange(length, device=shape.device)[None]
    return Problem(
        branches=branches,
        value=value,
        query_positions=positions,
        key_positions=positions,
        mask=None,
        causal=True,
        query_start=0,
        scaling=shape.head_dim**-0.5,
    )


def leaves(inputs: Problem) -> list[torch.Tensor]:
    """What gets gradients."""
    return [inputs.value, *(state for branch in inputs.branches for state in (branch.query, branch.key))]


def alibi(shape: Shape, backward: bool = False) -> Side:
    """Causal attention under the published slopes."""
    inputs = dataclasses.replace(_both_directions(shape, backward), causal=True)
    scheme = ALiBi()
    bias = DistanceBias(lambda distance: scheme.bias(distance.to(shape.device), shape.heads), scheme.linear)
    inputs = dataclasses.replace(inputs, bias=bias)
    spans = (Span(slice(0, 1), slice(0, shape.length), slice(0, shape.length), 0),)
    return side(shape, lambda: _biased(inputs, spans), _states(inputs), backward)


def t5_encoder(shape: Shape, backward: bool = False) -> Side:
    """Attention in both directions under T5's biases, looked up in their table at every call; backward to the table."""
    inputs, table = _both_directions(shape, backward), _table(shape, backward)
    scheme = T5Bias().resolve(Checkpoint(512, shape.heads, 512, bidirectional=True, buckets=(32, 128)))
    weights = {"relative_attention_bias": table}
    bias = DistanceBias(lambda distance: scheme.bias(distance.to(shape.device), shape.heads, weights))
    inputs = dataclasses.replace(inputs, bias=bias)
    spans = (Span(slice(0, 1), slice(0, shape.length), slice(0, shape.length), 0, causal=False),)
    return side(shape, lambda: _biased(inputs, spans), [table, *_states(inputs)], backward)


def _biased(inputs: Problem, spans: tuple[Span, ...]) -> torch.Tensor:
    """Attention under a bias as the engine computes it: on a GPU by the fused kernel."""
    (branch,) = inputs.branches
    call = Fused(branch.query, branch.key, (ALL_PAIRS,), (None,), (None,))
    if inputs.value.is_cuda and not fused.unsupported(inputs, call):
        return fused.launched(inputs, call)
    return paths.score(inputs.replaced(find_spans=lambda _: spans))[0]


def unbiased_encoder(shape: Shape, backward: bool = False) -> Side:
    """The same without biases, as fast as the platform can."""
    query, key, value = states = _states(_both_directions(shape, backward))
    return side(shape, lambda: functional.scaled_dot_product_attention(query, key, value), states, backward)


def materialised_encoder(shape: Shape, backward: bool = False) -> Side:
    """The same as Transformers has it: a bias for every pair, made at every call."""
    query, key, value = states = _states(_both_directions(shape, backward))
    table = _table(shape, backward)
    places = torch.arange(shape.length, device=shape.device)

    def attend() -> torch.Tensor:
        buckets = T5Attention._relative_position_bucket(places[None] - places[:, None])
        bias = functional.embedding(buckets, table).permute(2, 0, 1)[None].contiguous()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    return side(shape, attend, [table, *states], backward)


def _both_directions(shape: Shape, backward: bool) -> Problem:
    positions = torch.arange(shape.length, device=shape.device)[None]
    return Problem(
        branches=(Branch(None, _queries(shape, backward), _keys(shape, backward)),),
        value=_keys(shape, backward),
        query_positions=positions,
        key_positions=positions,
        mask=None,
        causal=False,
        query_start=0,
        scaling=shape.head_dim**-0.5,
    )


def _states(inputs: Problem) -> list[torch.Tensor]:
    (branch,) = inputs.branches
    return [branch.query, branch.key, inputs.value]


def _table(shape: Shape, backward: bool) -> torch.Tensor:
    return shape.random(32, shape.heads).requires_grad_(backward)


def sdpa(shape: Shape, backward: bool = False, backend: SDPBackend | None = None) -> Side:
    """Plain causal attention by this backend; without one, by the one that PyTorch takes."""
    query, key, value = _queries(shape, backward), _keys(shape, backward), _keys(shape, backward)

    def attend() -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=shape.kv_heads != shape.heads
            )

    return side(shape, attend, [query, key, value], backward)


def dense(shape: Shape, backward: bool = False) -> Side:
    """ReRoPE as the authors compute it."""
    near = (_queries(shape, backward), _keys(shape, backward))
    far = (_queries(shape, backward), _keys(shape, backward))
    value, window = _keys(shape, backward), max(1, shape.length // 8)
    return side(shape, lambda: two_matrices(near, far, value, window), [value, *near, *far], backward)


def flops(shape: Shape) -> float:
    """Of causal attention forward: two products over half of all pairs, two operations per number."""
    return 2.0 * shape.heads * shape.head_dim * shape.length**2


def training_flops(shape: Shape) -> float:
    """Forward and backward: the backward pass has five products where the forward has two."""
    return 3.5 * flops(shape)


def _queries(shape: Shape, backward: bool) -> torch.Tensor:
    return shape.random(1, shape.heads, shape.length, shape.head_dim).requires_grad_(backward)


def _keys(shape: Shape, backward: bool) -> torch.Tensor:
    return shape.random(1, shape.kv_heads, shape.length, shape.head_dim).requires_grad_(backward)


def side(shape: Shape, attend: Callable[[], torch.Tensor], of: Sequence[torch.Tensor], backward: bool) -> Side:
    """What is timed: attention without gradients, or with those of the leaves."""
    if not backward:
        return Side(torch.no_grad()(attend))
    grad = shape.random(1, shape.heads, shape.length, shape.head_dim)
    return Side(lambda: torch.autograd.grad(attend(), of, grad))
