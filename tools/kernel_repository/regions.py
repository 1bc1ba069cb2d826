"""Causal attention whose pairs are scored by regions of distance, each with rotated queries and keys of its own.

One Triton kernel, forward only, that of rope_patch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rope_patch.attention import triton_kernels as kernels

FAR = 2**30
ROWS, KEYS = 64, 32


def attention(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
    bounds: Sequence[tuple[int, int | None]],
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`; the last query and key meet.

    Args:
        queries: for each region, `(batch, heads, q_len, head_dim)`.
        keys: for each region, `(batch, kv_heads, kv_len, head_dim)`.
        value: `(batch, kv_heads, kv_len, value_dim)`.
        bounds: for each region the first distance and the end, None without an end; regions are disjoint.
        scale: of the scores, by default head_dim^-0.5.

    Raises:
        ValueError: If the regions do not have one of each.
    """
    if not len(queries) == len(keys) == len(bounds):
        raise ValueError(f"{len(bounds)} bounds need as many queries and keys, not {len(queries)} and {len(keys)}")
    (batch, heads, length, dim), (kv_heads, kv_length, value_dim) = queries[0].shape, value.shape[1:]
    out = value.new_empty(batch, heads, length, value_dim)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=value.device)
    positions = torch.arange(kv_length, dtype=torch.int32, device=value.device)
    start = kv_length - length
    given = kernels.Given(
        q=tuple(map(_states, queries)),
        k=tuple(map(_states, keys)),
        v=_states(value),
        m=kernels.States.from_tensor(positions[None, start:]),
        n=kernels.States.from_tensor(positions[None]),
        groups=None,
        start=start,
        q_length=length,
        kv_length=kv_length,
        scale=dim**-0.5 if scale is None else scale,
        bias=None,
        first=0,
        sums=None,
        sinks=None,
    )
    how = kernels.How(
        areas=tuple(kernels.Area(first, FAR if end is None else end, 1, None) for first, end in bounds),
        group=heads // kv_heads,
        head_dim=dim,
        value_dim=value_dim,
        rows=ROWS,
        keys=KEYS,
        causal=True,
        in_order=True,
        window=None,
        softcap=None,
        bias=None,
        products="ieee" if torch.version.hip else "tf32x3",
    )
    grid = -(-length * how.group // ROWS), kv_heads, batch
    places = kernels.States.from_tensor(out), kernels.States.from_tensor(lse)
    kernels.forward[grid](given, *places, 1, FAR, how, num_warps=4, num_stages=2)
    return out, lse


def _states(x: torch.Tensor) -> kernels.States:
    return kernels.States.from_tensor(x if x.stride(-1) == 1 else x.contiguous())
