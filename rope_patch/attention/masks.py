"""Masks in all the forms in which Transformers hands them to an attention function, as one form."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.errors import UnsupportedPositions


def as_mask(
    mask: Any,
    position_ids: torch.Tensor,
    q_length: int,
    kv_length: int,
    query_start: int | torch.Tensor,
    config: Any,
) -> torch.Tensor | None:
    """The mask as `(batch or 1, heads or 1, q_len, kv_len)`, boolean or additive; None for none.

    `sdpa` and `eager` masks have that form already. A flash mask is `(batch, kv_len)`, true on tokens that are no pads,
    or None where rows are packed documents whose positions start again; causality is understood in both.

    Args:
        mask: what the attention function received.
        position_ids: `(batch or 1, q_len)`.
        query_start: slot of the first query among the keys.
        config: of the model, for the name of its attention implementation.

    Raises:
        UnsupportedPositions: for a mask of any other form, such as a FlexAttention block mask.
    """
    implementation = config._attn_implementation
    if mask is None:
        if "flash" in implementation and kv_length == q_length > 1:
            return _packed(position_ids)
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        raise UnsupportedPositions(
            f"a mask of type {type(mask).__name__} from attn_implementation={implementation!r}; "
            "call model.set_attn_implementation('sdpa') first"
        )
    if mask.ndim == 2:
        queries = torch.arange(q_length, device=mask.device)[:, None] + query_start
        causal = torch.arange(kv_length, device=mask.device) <= queries
        return causal & mask[:, None, None, :kv_length].bool()
    return mask[..., :kv_length]


def _packed(position_ids: torch.Tensor) -> torch.Tensor:
    """Causal within documents: a new one starts where positions do not go up by one."""
    jumps = position_ids.diff(dim=-1) != 1
    document = torch.nn.functional.pad(jumps.cumsum(dim=-1), (1, 0))
    length = position_ids.shape[-1]
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
