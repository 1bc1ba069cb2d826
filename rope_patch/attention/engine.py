"""Choosing how to score: the fastest way that is exact for what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from rope_patch.attention import chunked, oracle, segmented
from rope_patch.attention.inputs import AttentionInputs, DistanceBias
from rope_patch.attention.spans import Span

AttentionMode = Literal["auto", "oracle", "chunked", "segmented"]

SMALL = 2**18
"""Below this many pairs a row, one dense block is faster than many tiles."""

Spans = Callable[[], "tuple[Span, ...] | None"]


def attend(inputs: AttentionInputs, mode: AttentionMode, spans: Spans) -> torch.Tensor:
    """Output `(batch, heads, q_len, value_dim)`.

    Args:
        inputs: the call.
        mode: `auto` decides; the others insist, as far as the call allows it.
        spans: finds the spans of the call, or None; asked only where they help.
    """
    if mode == "oracle":
        return oracle.attend(inputs)[0]
    geometric = inputs.causal and inputs.fits_kernels and not torch.compiler.is_compiling()
    if mode != "chunked" and geometric and not _learned(inputs.bias):
        large = inputs.q_length * inputs.kv_length > SMALL
        found = spans() if large or mode == "segmented" else None
        if found is not None and segmented.applies(inputs, found):
            return segmented.attend(inputs, found)
    return chunked.attend(inputs)


def _learned(bias: DistanceBias | None) -> bool:
    """Whether a gradient must flow into the bias, which no mask passes on."""
    return bias is not None and bias.values(1).requires_grad
