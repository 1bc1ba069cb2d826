"""Attention over rows that several processes share.

The keys of all processes meet the queries of this one, and each run of queries is scored like a chunk of a text whose
earlier keys are cached. Keys are exchanged once and rotated in each process, whatever the number of regions.

Source: keys gathered as for Llama 3, 2407.21783, section 3.3.2; heads exchanged as in DeepSpeed Ulysses, 2309.14509.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from rope_patch.attention import engine
from rope_patch.attention.forward import Forward
from rope_patch.attention.masks import read_mask
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Turner
from rope_patch.context_parallel.row import RowMask
from rope_patch.errors import UnsupportedPositions
from rope_patch.models.base import is_causal
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.scoring import late_attention
from rope_patch.schemes.slots import ALL_PAIRS


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rope_patch: ForwardCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a row that processes share, for layers under a scheme (with the call object of their
    hook) and for all other layers. Shapes are as in `late_attention`, for the tokens of this process: queries `(batch,
    heads, tokens, head_dim)`.

    Raises:
        UnsupportedPositions: the mask is not a `RowMask`.
    """
    if not isinstance(attention_mask, RowMask):
        raise UnsupportedPositions(
            f"{type(module).__name__} receives a mask of its own, so its keys cannot be shared; context parallelism "
            "needs models that pass a mask with four axes through unchanged"
        )
    row, call, added = attention_mask.row, rope_patch, None
    sharding, causal = row.sharding, is_causal(module, kwargs.get("is_causal"))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):  # so that half as many bytes are exchanged
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if call is not None and call.added is not None:
        added = sharding.all_gather(call.added, dim=1)
    heads = None
    if row.backend == "ulysses":
        share = query.shape[1] // sharding.number
        heads = slice(sharding.rank * share, (sharding.rank + 1) * share)
        copies = max(1, sharding.number // key.shape[1])
        key, value = (sharding.by_heads(x.repeat_interleave(copies, dim=1)) for x in (key, value))
        query = sharding.by_heads(query)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"][heads]
    else:
        joined = sharding.all_gather(torch.cat([key, value], dim=-1), dim=2)
        key, value = joined.split([key.shape[-1], value.shape[-1]], dim=-1)
    window = kwargs.get("sliding_window") if call is None else call.state.layer.sliding_window
    outputs = []
    for run in row.runs(row.forward if call is None else call.forward):
        keys = run.keys(causal, window)
        states = query[:, :, run.queries], key[:, :, keys], value[:, :, keys], run.mask(keys, causal, window)
        if call is None:
            first = run.slots.start - keys.start
            kwargs |= {"forward": run.forward, "query_start": first, "causal": causal}
            outputs.append(_plain_attention(module, *states, scaling, dropout, **kwargs))
        else:
            part = run.of_call(call, keys, heads, added)
            outputs.append(late_attention(module, *states, scaling, dropout, part, **kwargs)[0])
    output = torch.cat(outputs, dim=1)
    if row.backend == "ulysses":
        output = sharding.by_tokens(output.transpose(1, 2)).transpose(1, 2).contiguous()
    return output, None


def _plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float,
    *,
    query_start: int,
    causal: bool,
    forward: Forward,
    **kwargs: Any,
) -> torch.Tensor:
    """Score a layer without a scheme as `late_attention` does: its queries and keys are rotated already."""
    q_length, kv_length = query.shape[2], key.shape[2]
    slots = forward.shared(_slots)(kv_length, query.device)
    implementation = cast(Any, module).config._attn_implementation
    mask, groups = forward.shared(read_mask)(attention_mask, slots, q_length, kv_length, query_start, implementation)
    positions = slots[:, query_start : query_start + q_length]
    problem = Problem(
        branches=(),
        value=value,
        query_positions=positions,
        key_positions=slots,
        mask=mask,
        groups=groups,
        causal=causal and q_length > 1,
        query_start=query_start,
        scaling=scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
        query=query,
        key=key,
        turner=Turner(forward, positions, slots, (ALL_PAIRS,)),
    )
    return engine.score(problem)[0].transpose(1, 2)


def _slots(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device)[None]
