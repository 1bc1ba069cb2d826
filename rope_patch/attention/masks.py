"""Masks of Transformers in one of two forms: a number per pair of tokens, or a segment id per key, its *group*."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.errors import UnsupportedPositions

PAD = -1  # the group of pads, which no token sees

NO_WEIGHT = -1000
"""A key with this added to its score has no weight beside the query's own: masks that are added hide it by this, by
-10000 or by the lowest number.
"""


def groups_of_pads(mask: torch.Tensor) -> torch.Tensor:
    """Segment ids for a mask `(batch, length)` that is true on tokens: one group per row."""
    return torch.where(mask.bool(), 0, PAD).int()


def groups_of_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Segment ids of packed rows, `(batch, length)`: a document starts where positions do not go up by one."""
    jumps = position_ids.diff(dim=-1) != 1
    return torch.nn.functional.pad(jumps.cumsum(dim=-1), (1, 0)).int()


def groups_as_mask(groups: torch.Tensor) -> torch.Tensor:
    """Segment ids `(batch, length)` as an `attention_mask`, `(batch, length, 1, 1)`: Transformers passes four axes
    through unchanged, and no mask has integers for one query and one key in as many heads.
    """
    return groups.int()[..., None, None]


def holds_groups(mask: Any) -> bool:
    """Whether an `attention_mask` was made by `groups_as_mask`."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.dtype != torch.int32:
        return False
    return mask.shape[1] > 1 and mask.shape[2] == mask.shape[3] == 1


def attended(mask: torch.Tensor) -> torch.Tensor:
    """Convert a boolean or additive mask of any shape to a boolean one, true where a key is attended."""
    return mask if mask.dtype == torch.bool else mask > NO_WEIGHT


def keys_seen(mask: torch.Tensor | None, groups: torch.Tensor | None) -> torch.Tensor | None:
    """A boolean `(batch or 1, kv_len)`, true for keys that some query of the row can see, so false for pads. It follows
    from the two results of `read_mask`, and is None if there are no pads.
    """
    if groups is not None:
        return groups != PAD
    if mask is None:
        return None
    return attended(mask[:, 0]).any(dim=-2)  # the last query does not see earlier documents


def documents_of(mask: torch.Tensor | None, groups: torch.Tensor | None, position_ids: torch.Tensor) -> torch.Tensor:
    """The document number of each token of a forward without earlier keys, `(batch or 1, length)`, from the two results
    of `read_mask`. A document begins where a token does not see the one before it.
    """
    if groups is not None:
        begins = groups.diff(dim=-1) != 0
    elif mask is not None:
        begins = ~attended(mask[:, 0]).diagonal(-1, dim1=-2, dim2=-1)
    else:
        begins = torch.zeros_like(position_ids[:, 1:], dtype=torch.bool)
    return torch.nn.functional.pad(begins.cumsum(dim=-1), (1, 0))


def shows_later_keys(mask: torch.Tensor, query_start: int | torch.Tensor) -> torch.Tensor:
    """Whether a materialised mask shows a key in a later slot than its query, a scalar."""
    own = torch.arange(mask.shape[-2], device=mask.device)[:, None] + query_start
    later = torch.arange(mask.shape[-1], device=mask.device) > own
    return (attended(mask) & later).any()


def read_mask(
    mask: Any,
    position_ids: torch.Tensor,
    q_length: int,
    kv_length: int,
    query_start: int | torch.Tensor,
    implementation: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read a mask of Transformers: return a materialised mask `(batch or 1, heads or 1, q_len, kv_len)`, boolean or
    additive, and segment ids `(batch or 1, kv_len)`; one of the two, or both, is None.

    `sdpa` and `eager` masks are materialised. A flash mask is `(batch, kv_len)`, true on tokens, or None for packed
    documents whose positions restart; causality is implied in both. The attention `implementation` says which it is.

    Raises:
        UnsupportedPositions: the mask has another form, such as a FlexAttention block mask, or one of integers.
    """
    if mask is None:
        packed = "flash" in implementation and kv_length == q_length > 1
        return None, groups_of_documents(position_ids) if packed else None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        raise UnsupportedPositions(
            f"a mask of type {type(mask).__name__} from attn_implementation={implementation!r} is not supported; "
            "call model.set_attn_implementation('sdpa') first"
        )
    if holds_groups(mask):
        groups = mask[:, :kv_length, 0, 0]
    elif mask.ndim == 2:
        groups = groups_of_pads(mask)[:, :kv_length]
    elif mask.dtype == torch.bool or mask.is_floating_point():
        return mask[..., :kv_length], None
    else:
        raise UnsupportedPositions(
            f"attention_mask of dtype {mask.dtype} and shape {tuple(mask.shape)}: with four axes, a mask is boolean "
            "(True is attended) or of floating-point numbers that are added to the scores"
        )
    # the empty tail of a static cache
    groups = torch.nn.functional.pad(groups, (0, kv_length - groups.shape[-1]), value=PAD)
    if q_length > 1:
        return None, groups
    slots = torch.arange(kv_length, device=groups.device)
    return (groups != PAD)[:, None, None] & (slots <= query_start), None
