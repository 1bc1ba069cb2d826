"""ReRoPE as the authors' repositories compute it: two full score matrices, of which each pair uses one."""

from __future__ import annotations

import torch


def two_matrices(
    near: tuple[torch.Tensor, torch.Tensor],
    far: tuple[torch.Tensor, torch.Tensor],
    value: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Causal attention that scores pairs closer than the window by `near` and all others by `far`.

    Args:
        near, far: rotated queries `(batch, heads, length, head_dim)` and keys `(batch, kv_heads, length, head_dim)`.
        value: `(batch, kv_heads, length, head_dim)`.
        window: w in tokens.

    Returns:
        `(batch, heads, length, head_dim)`.
    """
    positions = torch.arange(value.shape[2], device=value.device)
    distance = positions[:, None] - positions
    scores = torch.where(distance < window, _scores(*near), _scores(*far))
    scores = scores.masked_fill(distance < 0, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights @ _repeated(value, weights.shape[1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query @ _repeated(key, query.shape[1]).mT * query.shape[-1] ** -0.5


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)
