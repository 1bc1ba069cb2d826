"""ReRoPE for a whole batch by two calls of flash attention over a paged cache, merged by log-sum-exp.

The cache holds unrotated keys, as the far region needs them: there every query is at w and every key at 0. One call
reads the cache directly, without the last w keys of each request. The causal mask of flash attention is aligned to the
last query and the last key, so a query at m sees keys up to m - w. For the near region the last w - 1 keys before a
request's queries are gathered and rotated: a decoded token rotates w keys, however long its text is.

It was tested with a dense float64 stand-in for flash attention (tests/serving/test_flash.py), not on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from rope_patch.attention.forward import Forward
from rope_patch.models.base import RotaryTables
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import LayerState
from rope_patch.mounting.scoring import query_factors
from rope_patch.schemes.tools.positions import UNROTATED

Flash = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""vLLM's `flash_attn_varlen_func`, with paged keys and `return_softmax_lse`."""


def applies(state: LayerState) -> bool:
    """Whether a layer has exactly two regions, a near one and a far one with all keys at position 0."""
    if len(state.regions) != 2:
        return False
    near, far = state.regions
    return (
        near.stop == far.start
        and far.stop == math.inf
        and near.translation_invariant
        and far.translation_invariant
        and far.key_map == UNROTATED
        and not state.scheme.slots & {"bias", "values", "frequencies"}
        and cast(RotaryTables, state.layer.rotary).attention_scaling == 1
    )


@dataclass(frozen=True)
class Batch:
    """A batch of one forward, as index tensors that its layers share.

    Attributes:
        position_ids: positions of the queries, `(1, tokens)`.
        near: positions of the gathered keys, `(1, keys)`, request by request.
        blocks, offsets: places of the gathered keys in the cache, `(keys,)`.
        near_start: start of each request's gathered keys, and their total number, `(requests + 1,)`.
        longest: the largest number of gathered keys of a request.
    """

    position_ids: torch.Tensor
    near: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    near_start: torch.Tensor
    longest: int
    forward: Forward

    @classmethod
    def of(cls, metadata: Any, window: int, block_size: int) -> Batch:
        """Derive the batch from the attention metadata of vLLM."""
        ends, starts = metadata.seq_lens.long(), metadata.query_start_loc.long()
        queries = starts.diff()
        kept = torch.minimum(ends, queries + window - 1)
        near_start = torch.cat([starts[:1], kept.cumsum(0)])
        row, near = _counted(ends - kept, kept)
        return cls(
            position_ids=_counted(ends - queries, queries)[1][None],
            near=near[None],
            blocks=metadata.block_table[row, near // block_size].long(),
            offsets=near % block_size,
            near_start=near_start.int(),
            longest=min(metadata.max_seq_len, metadata.max_query_len + window - 1),
            forward=Forward(),
        )


def _counted(first: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row index and position of each token, for `counts` tokens per row, starting at `first`, one row after another."""
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[row]
    return row, torch.arange(len(row), device=row.device) - before + first[row]


def attend(
    state: LayerState,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    batch: Batch,
    flash: Flash,
    scaling: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Compute the output of one layer, `(tokens, heads, head_dim)`.

    Shape:
        query `(tokens, heads, head_dim)`, kv_cache `(blocks, kv_heads, block_size, 2 head_dim)`.
    """
    near, far = state.regions
    window, head_dim = int(near.stop), query.shape[-1]
    keys, values = kv_cache[batch.blocks, :, batch.offsets].split(head_dim, dim=-1)
    queries = query.transpose(0, 1)[None]
    call = ForwardCall(state, batch.forward, queries, batch.position_ids, 0, past=batch.near, scattered=True)
    turner, factors = call.turner(len(batch.blocks), {}), query_factors(call, queries, {})
    queries = queries if factors is None else queries * factors

    def rows(states: torch.Tensor) -> torch.Tensor:
        return states[0].transpose(0, 1).contiguous()

    common = {
        "max_seqlen_q": metadata.max_query_len,
        "cu_seqlens_q": metadata.query_start_loc,
        "softmax_scale": scaling,
        "softcap": softcap,
        "causal": True,
        "return_softmax_lse": True,
    }
    parts = [
        flash(
            rows(turner.turn(queries, near, "query")),
            rows(turner.turn(keys.transpose(0, 1)[None], near, "key")),
            values.contiguous(),
            max_seqlen_k=batch.longest,
            cu_seqlens_k=batch.near_start,
            window_size=[window - 1, 0],
            **common,
        )
    ]
    if metadata.max_seq_len > window:
        key_cache, value_cache = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
        parts.append(
            flash(
                rows(turner.turn(queries, far, "query")),
                key_cache,
                value_cache,
                max_seqlen_k=metadata.max_seq_len - window,
                seqused_k=(metadata.seq_lens - window).clamp(min=0),
                block_table=metadata.block_table,
                **common,
            )
        )
    return _merged(*zip(*parts, strict=True))


def _merged(outputs: tuple[torch.Tensor, ...], lses: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Merge outputs `(tokens, heads, head_dim)` by their log-sum-exps `(heads, tokens)`."""
    lse = torch.stack(lses)
    lse = torch.where(lse == math.inf, -math.inf, lse)  # in flash attention 2, inf marks a query without keys
    weights = lse.softmax(dim=0).transpose(1, 2)[..., None]
    return (weights * torch.stack(outputs)).sum(dim=0).to(outputs[0].dtype)
