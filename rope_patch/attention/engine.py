"""Choosing how to score: the fastest way that is exact for what was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rope_patch.attention import chunked, decay, decode, dense, oracle, segmented
from rope_patch.attention.inputs import AttentionInputs, AttentionMode, Branch
from rope_patch.attention.spans import Span
from rope_patch.schemes.slots import ALL_PAIRS, Region

SMALL = 2**18
"""Below this many pairs a row, one dense block is faster than many tiles."""

Spans = Callable[[AttentionInputs], "tuple[Span, ...] | None"]


def score(
    inputs: AttentionInputs,
    query: torch.Tensor,
    regions: Sequence[Region],
    query_of: decode.QueryOf,
    key_of: decode.KeyOf,
    spans: Spans,
    mode: AttentionMode = "auto",
    literal: bool = False,
    fades: decay.Decay | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a whole call, decoding steps included.

    Args:
        inputs: the call; its branches are filled in here.
        query: as it arrived, `(batch, heads, q_len, head_dim)`.
        regions: disjoint; `ALL_PAIRS` alone where there is no other.
        query_of: the queries as they are rotated for a region.
        key_of: the keys of some slots, or of all for None, as they are rotated for a region.
        spans: finds the spans of a call, or None; asked only where they help.
        mode: see `AttentionMode`.
        literal: score by definition and give the attention weights, as eager attention does.
        fades: how pairs decay with distance, or None.

    Returns:
        output `(batch, heads, q_len, value_dim)`, and the weights `(batch, heads, q_len, kv_len)` where `literal`, or
        under the mode `oracle`.
    """
    if fades is None and not literal and decode.applies(inputs, query, regions, mode):
        step = decode.attend_in_graph if torch.compiler.is_compiling() else decode.attend
        return step(regions, query_of, key_of, inputs), None
    whole = None if len(regions) == 1 and regions[0] == ALL_PAIRS else regions
    inputs = inputs.with_branches(
        tuple(Branch(region if whole else None, query_of(region), key_of(region, None)) for region in regions)
    )

    def attend_block(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        if literal or mode == "oracle":
            return oracle.attend(inputs)
        return attend(inputs, mode, spans), None

    return attend_block(inputs) if fades is None else decay.attend(inputs, fades, attend_block)


def attend(inputs: AttentionInputs, mode: AttentionMode, spans: Spans) -> torch.Tensor:
    """Output `(batch, heads, q_len, value_dim)` of rotated branches.

    Args:
        inputs: the call.
        mode: see `AttentionMode`.
        spans: finds the spans of a call, or None; asked only where they help.
    """
    if mode == "oracle":
        return oracle.attend(inputs)[0]
    small = inputs.q_length * inputs.kv_length <= SMALL
    if mode == "auto" and small and dense.applies(inputs):
        return dense.attend(inputs)
    in_order = not inputs.scattered and (inputs.causal or inputs.q_length == inputs.kv_length)
    geometric = in_order and inputs.fits_kernels
    if mode != "chunked" and geometric and not torch.compiler.is_compiling():
        found = spans(inputs) if not small or mode == "segmented" else None
        if found is not None and segmented.applies(inputs, found):
            return segmented.attend(inputs, found)
    return chunked.attend(inputs)
