"""One tile of attention with its log-sum-exp, forward and backward, by the fastest kernel of the platform."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from rope_patch.attention.bias import TileBias
from rope_patch.attention.tiles import Tile

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """Attention of one tile. The log-sum-exp lets tiles be merged; given the merged output and log-sum-exp, each
    tile's backward yields its exact share of the gradients.

    An additive `mask`, float32 and broadcastable to the scores, takes the place of the tile's own where the tile is a
    band, and comes on top of it otherwise.
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
        """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`, float32."""

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
        mask: torch.Tensor | None = None,
    ) -> Tensors:
        """Gradients of queries, keys and values from those of the merged output."""


@dataclass(frozen=True)
class Biased:
    """A kernel under a bias by distance, or under none.

    Attributes:
        kernel: computes the tiles.
        bias: gives each tile its mask.
    """

    kernel: Kernel
    bias: TileBias | None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        if self.bias is None:
            return self.kernel.forward(q, k, v, tile, scale)
        (q,) = self._ordered(q)
        out, lse = self.kernel.forward(q, k, v, tile, scale, self.bias.mask(tile))
        out, lse = self._ordered(out, lse)
        return out, lse

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
    ) -> Tensors:
        """See `Kernel.backward`."""
        if self.bias is None:
            return self.kernel.backward(grad, q, k, v, out, lse, tile, scale)
        grad, q, out, lse = self._ordered(grad, q, out, lse)
        grad_q, grad_k, grad_v = self.kernel.backward(grad, q, k, v, out, lse, tile, scale, self.bias.mask(tile))
        (grad_q,) = self._ordered(grad_q)
        return grad_q, grad_k, grad_v

    def _ordered(self, *of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What belongs to queries, in the order of the mask's rows, or back again."""
        if self.bias is None or not self.bias.reverses_queries:
            return of_queries
        return tuple(x.flip(2) for x in of_queries)


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
        mask: torch.Tensor | None = None,
    ) -> Tensors:
        """See `Kernel`."""
        mask = _additive(tile, q.dtype) if mask is None else mask
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale
        )


def _additive(tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
    if tile.kind != "band":
        return None
    return _band(tile.q1 - tile.q0, tile.k1 - tile.k0, tile.low, tile.high, tile.distance, dtype)


@functools.lru_cache(maxsize=8)
def _band(rows: int, columns: int, low: int, high: int, distance: int, dtype: torch.dtype) -> torch.Tensor:
    """The same mask serves every tile inside a band: only the first and the last differ."""
    seen = Tile(0, rows, 0, columns, "band", low, high, distance).mask(torch.device("cpu"))
    return torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -torch.inf)


class Dense:
    """Plain products in float32: on any device, in any dtype; the measure of the other kernels."""

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
        scores = self._scores(q, k, tile, scale, mask)
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
        mask: torch.Tensor | None = None,
    ) -> Tensors:
        """See `Kernel`."""
        group = (k.shape[1], -1)
        weights = (self._scores(q, k, tile, scale, mask) - lse.unflatten(1, group)[..., None]).exp()
        delta = (grad.float() * out.float()).sum(dim=-1, keepdim=True).unflatten(1, group)
        grouped_grad = grad.unflatten(1, group)
        inner = weights * ((grouped_grad.float() @ v.float()[:, :, None].mT) - delta) * scale
        weights, inner = weights.to(q.dtype), inner.to(q.dtype)
        grad_q = (inner @ k[:, :, None]).flatten(1, 2)
        grad_k = (inner.mT @ q.unflatten(1, group)).sum(dim=2)
        grad_v = (weights.mT @ grouped_grad).sum(dim=2)
        return grad_q, grad_k, grad_v

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`(batch, kv_heads, group, q_len, kv_len)`, float32."""
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        scores = (grouped @ k.float()[:, :, None].mT).flatten(1, 2) * scale
        if tile.kind == "causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if mask is not None:
            scores = scores + mask
        elif tile.kind == "band":
            scores = scores.masked_fill(~tile.mask(q.device), -torch.inf)
        return scores.unflatten(1, (k.shape[1], -1))


def kernel_for(q: torch.Tensor) -> Kernel:
    """The kernel that is right and fastest for these queries."""
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return FlashCPU()
    return Dense()
