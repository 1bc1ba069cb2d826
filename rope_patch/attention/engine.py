"""Choosing how to score: the fastest way that is exact for what was given."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rope_patch.attention import chunked, decay, decode, dense, oracle, segmented
from rope_patch.attention.bias import has_terms
from rope_patch.attention.call import Call
from rope_patch.attention.inputs import AttentionInputs, AttentionMode, Branch
from rope_patch.attention.spans import Span
from rope_patch.schemes.slots import ALL_PAIRS

SMALL = 2**18
"""Below this many pairs a row, one dense block is faster than many tiles."""

Spans = Callable[[AttentionInputs], "tuple[Span, ...] | None"]


def score(
    inputs: AttentionInputs, call: Call, mode: AttentionMode = "auto"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a whole call, decoding steps included. The branches of `inputs` are filled in here.

    Returns:
        output `(batch, heads, q_len, value_dim)`, and under the mode `oracle` the weights
        `(batch, heads, q_len, kv_len)`.
    """
    fades = call.decay()
    if fades is None and decode.applies(inputs, call, mode):
        step = decode.attend_in_graph if torch.compiler.is_compiling() else decode.attend
        return step(inputs, call), None
    only = call.regions == (ALL_PAIRS,)
    inputs = inputs.with_branches(
        tuple(Branch(None if only else region, call.query(region), call.key(region)) for region in call.regions)
    )

    def attend_block(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        return oracle.attend(inputs) if mode == "oracle" else (attend(inputs, mode, call.spans), None)

    return attend_block(inputs) if fades is None else decay.attend(inputs, fades, attend_block)


def attend(inputs: AttentionInputs, mode: AttentionMode, spans: Spans) -> torch.Tensor:
    """Output `(batch, heads, q_len, value_dim)` of rotated branches; `spans` finds the spans of a call, or None, and is
    asked only where they help.
    """
    if mode == "oracle":
        return oracle.attend(inputs)[0]
    small = inputs.q_length * inputs.kv_length <= SMALL
    if mode == "auto" and small and dense.applies(inputs):
        return dense.attend(inputs)
    in_order = not inputs.scattered and (inputs.causal or inputs.q_length == inputs.kv_length)
    geometric = in_order and inputs.fits_kernels and has_terms(inputs)
    if mode != "chunked" and geometric and not torch.compiler.is_compiling():
        found = spans(inputs) if not small or mode == "segmented" else None
        if found is not None and segmented.applies(inputs, found):
            return segmented.attend(inputs, found)
    return chunked.attend(inputs)
