"""The attention function of patched modules: rotates, scales, and scores by region."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention import engine
from rope_patch.attention.inputs import AttentionInputs, Content, DistanceBias
from rope_patch.attention.masks import keys_seen, read_mask
from rope_patch.errors import UnsupportedModel, UnsupportedPositions
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.mounting.late import LateCall
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import Identity
from rope_patch.typing import Weights


def late_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rope_patch: LateCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What Transformers calls in place of `sdpa_attention_forward` and its like.

    Where the scheme has one region only and no bias, the attention that was there before does the work.

    Args:
        module: the attention module, for its config.
        query, key, value: see Shape.
        attention_mask: as Transformers makes it, or groups.
        scaling: multiplies the products; default head_dim^-0.5.
        dropout: a probability, 0 by default.
        rope_patch: what the hook of this layer left for this call.
        **kwargs: of the function that it stands in place of.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key and value `(batch, kv_heads, kv_len, head_dim)`, in the rotation
        that the hook asked for; returns `(batch, q_len, heads, head_dim)`, and the weights under eager attention.

    Raises:
        UnsupportedModel: when the model calls it with something that the scheme's attention cannot honour.
        UnsupportedPositions: when other keys arrive than the cache announced, or masks of an unknown form.
    """
    if rope_patch is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass its keyword arguments on to its attention")
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} passes {name!r}, which patched attention cannot honour")
    call, state = rope_patch, rope_patch.state
    expected = query.shape[2] if call.kv_length is None else call.kv_length
    if key.shape[2] != expected:
        raise UnsupportedPositions(
            f"{state.layer.name}: {key.shape[2]} keys arrive where its cache announced {expected}; "
            f"{type(module).__name__} keeps them in a way that is not understood here"
        )
    call.remember()
    if isinstance(key, CachedKeys):  # of a static cache
        key = key.plain()
    scheme, implementation = state.scheme, state.config._attn_implementation
    projected = query
    if "query_scale" in scheme.slots:
        query = query * scheme.query_scale(call.position_ids.clamp(min=0))[:, None, :, None].to(query.dtype)
    start = call.start
    if scheme.length_dependent and (attention_mask is None or isinstance(attention_mask, torch.Tensor)):
        mask, groups = read_mask(attention_mask, call.position_ids, query.shape[2], key.shape[2], start, state.config)
        call = dataclasses.replace(call, tokens=keys_seen(mask, groups))
    scores = state.regions or scheme.slots & {"bias", "values"} or scheme.decays or state.attention != "auto"
    if (scores or scheme.length_dependent) and not torch.compiler.is_compiling():
        _refuse_part_of_a_row(scheme, implementation)
    if not scores:
        if state.rotate:
            query, key = call.rotated_query(query, Identity()), call.rotated_key(key, Identity())
        previous = _previous_attention(module, implementation)
        return previous(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)

    if torch.is_autocast_enabled(query.device.type):  # as it does for `scaled_dot_product_attention`
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, projected = (x.to(dtype) for x in (query, key, value, projected))
    causal = kwargs.get("is_causal")
    mask, groups = read_mask(attention_mask, call.position_ids, query.shape[2], key.shape[2], start, state.config)
    learned = state.weights()
    inputs = AttentionInputs(
        branches=(),
        value=value,
        query_positions=call.position_ids,
        key_positions=call.key_positions(key.shape[2]),
        mask=mask,
        groups=groups,
        # one query beside no mask is a decoding step: it sees every key there is
        causal=(getattr(module, "is_causal", True) if causal is None else causal) and query.shape[2] > 1,
        query_start=start,
        scattered=call.scattered,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        bias=_bias(call, query, learned),
        content=_content(call, projected, key, learned),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
    )
    output, weights = engine.score(
        inputs,
        query,
        state.regions or (ALL_PAIRS,),
        lambda region: call.rotated_query(query, region.query_map) if state.rotate else query,
        lambda region, slots: _keys(call, key, region, slots),
        call.spans,
        mode=state.attention,
        literal=implementation == "eager",
        fades=call.decay(),
    )
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _refuse_part_of_a_row(scheme: Scheme, implementation: str) -> None:
    """Where a row is divided over processes, others' keys are fetched by what stands in for these two functions.

    Raises:
        UnsupportedPositions: one of them belongs to context parallelism of torch or sequence parallelism of DeepSpeed.
    """
    for function in (nn.functional.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS.get(implementation)):
        if str(getattr(function, "__module__", "")).startswith(("torch.distributed.", "deepspeed.")):
            raise UnsupportedPositions(
                f"context parallelism: the attention of {scheme} sees only the part of the row that this process has; "
                "schemes of static frequencies (pi, yarn) can share rows"
            )


def _keys(call: LateCall, key: torch.Tensor, region: Region, slots: slice | torch.Tensor | None) -> torch.Tensor:
    """The keys of some slots, or of all, as a region wants them."""
    if call.state.rotate:
        return call.rotated_key(key, region.key_map, slots)
    return key if slots is None else key[:, :, slots]


def _content(call: LateCall, query: torch.Tensor, key: torch.Tensor, weights: Weights) -> Content | None:
    if call.state.scheme.methods.isdisjoint(("content_bias", "weight_factor", "relative_values")):
        return None
    return Content(call.state.scheme, weights, query, key)


def _bias(call: LateCall, query: torch.Tensor, weights: Weights) -> DistanceBias | None:
    state, heads = call.state, query.shape[1]
    if "bias" not in state.scheme.methods:
        return None

    def bias(distance: torch.Tensor) -> torch.Tensor:
        return state.scheme.bias(distance, heads, weights)

    def values(low: int, high: int) -> torch.Tensor:
        distances = torch.arange(low, high, device=query.device)
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights.values()):
            return bias(distances)  # of a graph of its own, which may be walked before another layer's
        key = ("bias", *map(id, weights.values()), heads, low, high)
        # the weights are kept beside what was found for them, so that their identities stay their own
        return call.state.shared.once(call.position_ids, key, lambda: (weights, bias(distances)))[1]

    return DistanceBias(bias, state.scheme.linear, values)


def _previous_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that the module would have called unpatched."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if implementation == "eager" and eager is None:
        raise UnsupportedModel(f"{type(module).__module__} has no eager_attention_forward")
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
