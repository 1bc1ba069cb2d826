"""The paths for rotated states: which of them is the fastest that is exact for a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rope_patch.attention import chunked, decode, dense, oracle, products, segmented
from rope_patch.attention.bias import has_terms
from rope_patch.attention.inputs import AttentionInputs, AttentionMode
from rope_patch.attention.spans import Span

Spans = Callable[[AttentionInputs], "tuple[Span, ...] | None"]


def attend(inputs: AttentionInputs, mode: AttentionMode, spans: Spans) -> torch.Tensor:
    """Output `(batch, heads, q_len, value_dim)`; `spans` finds the spans of a call, or None, and is called only when
    they help.
    """
    if mode == "oracle":
        return oracle.attend(inputs)[0]
    if mode == "auto" and inputs.q_length * inputs.kv_length <= decode.SMALL and dense.applies(inputs):
        return dense.attend(inputs)
    in_spans = segments(inputs, mode, spans)
    if in_spans is None:
        return chunked.attend(inputs.turned())
    if mode == "auto" and products.applies(inputs):
        return products.attend(inputs, in_spans)
    return segmented.attend(inputs, in_spans)


def segments(inputs: AttentionInputs, mode: AttentionMode, spans: Spans) -> tuple[Span, ...] | None:
    """The spans of a call if its regions are scored one by one; None if blocks of queries are."""
    in_order = not inputs.scattered and (inputs.causal or inputs.q_length == inputs.kv_length)
    geometric = in_order and inputs.fits_kernels and has_terms(inputs)
    if mode == "chunked" or not geometric or torch.compiler.is_compiling():
        return None
    in_spans = spans(inputs) if mode == "segmented" or not _is_small(inputs) else None
    return in_spans if in_spans is not None and segmented.applies(inputs, in_spans) else None


def _is_small(inputs: AttentionInputs) -> bool:
    """Whether one dense block is faster than finding tiles: a share of `decode.SMALL`, where tiles are many."""
    return inputs.q_length * inputs.kv_length <= decode.SMALL // 16
