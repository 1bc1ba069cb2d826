"""Attention of the ALiBi kind: relative, in float32, without a bias tensor for all pairs of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import nn

from rope_patch.attention import engine
from rope_patch.attention.forward import Forward
from rope_patch.attention.masks import keys_seen, read_mask
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Turner
from rope_patch.errors import UnsupportedPositions
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.models.paged import is_paged, split_by_request
from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.schemes.tools.positions import follow_on, joined, key_positions


def alibi_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    position_ids: torch.Tensor | None = None,
    start: int | torch.Tensor = 0,
    positions: torch.Tensor | None = None,
    shared: Forward | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with ALiBi: softmax(q k^T scaling - slope_h (m - n)) v.

    Args:
        attention_mask: a mask as Transformers builds it for `eager`, `sdpa` or flash attention.
        position_ids: positions of the queries; default by slot.
        start: slot of the first query among the keys.
        positions: positions of cached keys and queries, from `known_positions`; default counted back from the queries.

    Shape:
        query, key and value `(batch, heads, q_len or kv_len, head_dim)`; returns `(batch, q_len, heads, head_dim)`, and
        the weights `(batch, heads, q_len, kv_len)` under eager attention, else None.

    Raises:
        UnsupportedPositions: the masks of the attention implementation are not supported.
    """
    forward = Forward() if shared is None else shared
    if is_paged(kwargs):
        arguments = {**kwargs, "position_ids": position_ids, "forward": forward}
        row = split_by_request(module, query, key, value, **arguments)
        for request, q, k, v in row.parts:
            own = request.position_ids, request.start, None, request.forward
            output = alibi_attention_forward(module, q, k, v, None, scaling, *own, **row.others)[0]
            row.output[:, request.queries] = output
        return row.output, None
    implementation = cast(Any, module.config)._attn_implementation.removeprefix("paged|")
    flash = "flash" in implementation
    if implementation not in ("eager", "sdpa") and not flash:
        raise UnsupportedPositions(
            f"attn_implementation={implementation!r} does not support ALiBi; allowed: eager, sdpa, and the flash "
            "implementations"
        )
    q_length, kv_length = query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = (torch.arange(q_length, device=query.device) + start)[None]
    sizes = q_length, kv_length, start, cast(Any, module.config)._attn_implementation
    mask, groups = forward.shared(read_mask)(attention_mask, position_ids, *sizes)
    of_keys, scattered = forward.shared(key_positions)(position_ids, kv_length, start), False
    if positions is not None and (length := positions.shape[-1] - q_length):
        seen, past = keys_seen(mask, groups), positions[..., :length]
        scattered = not bool(follow_on(past, position_ids, seen))
        of_keys = joined(past, of_keys[:, length:]) if scattered else of_keys
    bias = forward.bias(ALiBi(), query)
    key = key.plain() if isinstance(key, CachedKeys) else key  # keys of a static cache are plain already
    problem = Problem(
        branches=(),
        value=value,
        query_positions=position_ids,
        key_positions=of_keys,
        scattered=scattered,
        mask=mask,
        groups=groups,
        causal=q_length > 1,  # one query without a mask is a decoding step and sees every key
        query_start=start,
        scaling=scaling,
        # the linear form is a tenth faster, with an error from rounding slope * 512: too large for float32, negligible
        # in half precision
        bias=dataclasses.replace(bias, linear=bias.linear and torch.finfo(query.dtype).bits < 32),
        mode="oracle" if implementation == "eager" else "auto",
        query=query,
        key=key,
        turner=Turner(forward, position_ids, of_keys, (ALL_PAIRS,)),
    )
    output, weights = engine.score(problem)
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)
