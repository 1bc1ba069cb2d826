"""One tile of attention with its log-sum-exp, forward and backward, by the fastest kernel of the platform."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from rope_patch.attention.tiles import Tile


class Kernel(Protocol):
    """Attention of one tile. The log-sum-exp lets tiles be merged; given the merged output and log-sum-exp, each
    tile's backward yields its exact share of the gradients.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        scale: float,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`, float32.

        A full tile may bring an additive `mask`, broadcastable to the scores.
        """

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of queries, keys and values from those of the merged output."""


class FlashCPU:
    """The flash kernel behind `scaled_dot_product_attention` on CPU, which hands out its log-sum-exp."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        scale: float,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        mask = _additive(tile, q.dtype) if mask is None else mask
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale
        )

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, tile.kind == "causal", attn_mask=_additive(tile, q.dtype), scale=scale
        )


def _additive(tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
    if tile.kind != "band":
        return None
    return _band(tile.q1 - tile.q0, tile.k1 - tile.k0, tile.low, tile.high, tile.shift, dtype)


@functools.lru_cache(maxsize=8)
def _band(rows: int, columns: int, low: int, high: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """The same mask serves every tile inside a band: only the first and the last differ."""
    seen = Tile(0, rows, 0, columns, "band", low, high, shift).mask(torch.device("cpu"))
    return torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -torch.inf)


class Dense:
    """Plain products: on any device, in any dtype; the measure of the other kernels."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        scale: float,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        scores = self._scores(q, k, tile, scale)
        if mask is not None:
            scores = scores + mask[:, :, None]
        lse = scores.logsumexp(dim=-1)
        weights = (scores - lse[..., None]).exp().to(v.dtype)
        return (weights @ v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        group = (k.shape[1], -1)
        weights = (self._scores(q, k, tile, scale) - lse.unflatten(1, group)[..., None]).exp()
        delta = (grad.float() * out.float()).sum(dim=-1, keepdim=True).unflatten(1, group)
        grouped_grad = grad.unflatten(1, group)
        inner = weights * ((grouped_grad @ v[:, :, None].mT).float() - delta) * scale
        weights, inner = weights.to(q.dtype), inner.to(q.dtype)
        grad_q = (inner @ k[:, :, None]).flatten(1, 2)
        grad_k = (inner.mT @ q.unflatten(1, group)).sum(dim=2)
        grad_v = (weights.mT @ grouped_grad).sum(dim=2)
        return grad_q, grad_k, grad_v

    def _scores(self, q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
        """`(batch, kv_heads, group, q_len, kv_len)`, float32."""
        scores = (q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].mT).float() * scale
        if tile.kind == "band":
            scores = scores.masked_fill(~tile.mask(q.device), -torch.inf)
        elif tile.kind == "causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores


def kernel_for(q: torch.Tensor) -> Kernel:
    """The kernel that is right and fastest for these queries."""
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return FlashCPU()
    return Dense()
