"""One tile of attention with its log-sum-exp, forward and backward, by the fastest kernel of the platform."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from rope_patch.attention.bias import TileBias
from rope_patch.attention.inputs import wide
from rope_patch.attention.spans import Span
from rope_patch.attention.tiles import Tile, clipped, in_rows, tiles_of
from rope_patch.schemes.slots import Region

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """The attention of one tile, as a kernel is given it.

    Attributes:
        q: queries of the tile, `(batch, heads, q_len, head_dim)`.
        k, v: keys and values of the tile, `(batch, kv_heads, kv_len, head_dim or value_dim)`.
        scale: multiplies the products of queries and keys.
        mask: float32, added to the scores, to whose shape it broadcasts. It takes the place of the tile's own where the
            tile is a band, and comes on top of it otherwise. None for none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tile: Tile
    scale: float
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Merged:
    """What all tiles together made of the queries of one: output and log-sum-exp, `(batch, heads, q_len, value_dim)`
    and `(batch, heads, q_len)`, and the gradient that the output got.
    """

    out: torch.Tensor
    lse: torch.Tensor
    grad: torch.Tensor


class Kernel(Protocol):
    """Attention of one tile. The log-sum-exp lets tiles be merged; given the merged output and log-sum-exp, each
    tile's backward yields its exact share of the gradients.
    """

    @property
    def rows(self) -> int | None:
        """The most queries of a tile; None for any number."""

    def band_rows(self, width: float) -> int:
        """The queries of a tile of a band that is `width` tokens wide."""

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`, float32."""

    def backward(self, work: Work, merged: Merged) -> Tensors:
        """Gradients of queries, keys and values, each of their shape, from that of the merged output."""


@dataclass(frozen=True)
class Biased:
    """A kernel in one span under a bias, which gives each tile its mask, or under none."""

    kernel: Kernel
    span: Span
    bias: TileBias | None

    def tiles(self, region: Region) -> Iterator[Tile]:
        """The tiles of a region of the span, as the kernel and the bias want them."""
        span = self.span
        region = region.within(span.window)
        rows = self.kernel.band_rows(region.stop - (max(0, region.start) if span.causal else region.start))
        tiles = tiles_of(region, span.q_length, span.offset, span.first_position, rows, span.causal)
        if span.hidden or span.before:
            stop = span.before + span.keys.stop - span.keys.start
            tiles = (part for tile in tiles for part in clipped(tile, span.before, stop))
        for tile in tiles:
            for part in (tile,) if self.bias is None else self.bias.pieces(tile):
                yield from (part,) if self.kernel.rows is None else in_rows(part, self.kernel.rows, as_bands=True)

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        if self.bias is None:
            return self.kernel.forward(work)
        out, lse = self.kernel.forward(self._masked(work, self.bias))
        return self._ordered(out), self._ordered(lse)

    def backward(self, work: Work, merged: Merged) -> Tensors:
        """See `Kernel.backward`."""
        if self.bias is None:
            return self.kernel.backward(work, merged)
        in_order = Merged(*map(self._ordered, (merged.out, merged.lse, merged.grad)))
        grad_q, grad_k, grad_v = self.kernel.backward(self._masked(work, self.bias), in_order)
        return self._ordered(grad_q), grad_k, grad_v

    def bias_gradient(self, work: Work, merged: Merged, into: torch.Tensor) -> None:
        """Add to `into` a tile's share of the gradient of the bias' `source`, of its shape, by blocks of queries."""
        tile, bias = work.tile, cast(TileBias, self.bias)
        into = bias.place(self.span, into)
        for block in in_rows(tile, Dense.rows, as_bands=True):
            rows, keys = slice(block.q0 - tile.q0, block.q1 - tile.q0), slice(block.k0 - tile.k0, block.k1 - tile.k0)
            mask = self._ordered(bias.mask(block))
            part = Work(work.q[:, :, rows], work.k[:, :, keys], work.v[:, :, keys], block, work.scale, mask)
            of_part = Merged(merged.out[:, :, rows], merged.lse[:, :, rows], merged.grad[:, :, rows])
            _, inner = Dense().of_scores(part, of_part)
            bias.gradient(block, inner.flatten(1, 2), into)

    def _masked(self, work: Work, bias: TileBias) -> Work:
        return Work(self._ordered(work.q), work.k, work.v, work.tile, work.scale, bias.mask(work.tile))

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to queries, in the order of the mask's rows, or back again."""
        return x.flip(2) if self.bias is not None and self.bias.reverses_queries else x


class FlashCPU:
    """The flash kernel behind `scaled_dot_product_attention` on CPU, which hands out its log-sum-exp."""

    rows = None

    def band_rows(self, width: float) -> int:
        """Fewer waste less at the edges; from 192 on, the kernel works in larger blocks."""
        return 192 if width < 1024 else 256

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        q, k, v = _of_one_width(work.q, work.k, work.v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, work.tile.kind == "causal", attn_mask=_additive(work), scale=work.scale
        )
        return out[..., : work.v.shape[-1]], lse

    def backward(self, work: Work, merged: Merged) -> Tensors:
        """See `Kernel`."""
        head_dim, value_dim = work.q.shape[-1], work.v.shape[-1]
        grad, q, k, v, out = _of_one_width(merged.grad, work.q, work.k, work.v, merged.out)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, q, k, v, out, merged.lse, 0.0, work.tile.kind == "causal"),
            attn_mask=_additive(work),
            scale=work.scale,
        )
        return grad_q[..., :head_dim], grad_k[..., :head_dim], grad_v[..., :value_dim]


def _of_one_width(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """States with zeros where heads of values are narrower or wider than those of keys, as MLA has them."""
    width = max(state.shape[-1] for state in states)
    if all(state.shape[-1] == width for state in states):
        return states
    return tuple(torch.nn.functional.pad(state, (0, width - state.shape[-1])) for state in states)


def _additive(work: Work) -> torch.Tensor | None:
    tile = work.tile
    if work.mask is not None or tile.kind != "band":
        return work.mask
    return _band(tile.q1 - tile.q0, tile.k1 - tile.k0, tile.low, tile.high, tile.distance, work.q.dtype)


@functools.lru_cache(maxsize=8)
def _band(rows: int, columns: int, low: int, high: int, distance: int, dtype: torch.dtype) -> torch.Tensor:
    """The same mask serves every tile inside a band: only the first and the last differ."""
    seen = Tile(0, rows, 0, columns, "band", low, high, distance).mask(torch.device("cpu"))
    return torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -torch.inf)


@dataclass(frozen=True)  # equal to any other, so that it is tried once and not at every call
class FlashCUDA:
    """The flash kernel behind `scaled_dot_product_attention` on CUDA, for half precision; a band is one call.

    Its windows are aligned with the last query and the last key (FlashAttention-2, from version 2.1). It takes no mask.
    """

    rows = None

    def band_rows(self, width: float) -> int:
        """All of them: the kernel itself knows windows."""
        return 2**62

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        q, k, v = (x.transpose(1, 2) for x in (work.q, work.k, work.v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, work.tile.kind == "causal", False),
            scale=work.scale,
            **_window(work.tile),
        )
        return out.transpose(1, 2), lse

    def backward(self, work: Work, merged: Merged) -> Tensors:
        """See `Kernel`."""
        grad, q, k, v, out = (x.transpose(1, 2) for x in (merged.grad, work.q, work.k, work.v, merged.out))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out.contiguous(), merged.lse.contiguous(), None, None, q.shape[1], k.shape[1]),
            *(0.0, work.tile.kind == "causal", no_dropout, no_dropout[0]),
            scale=work.scale,
            **_window(work.tile),
        )
        grad_q, grad_k, grad_v = (gradient.transpose(1, 2) for gradient in gradients)
        return grad_q, grad_k, grad_v


def _window(tile: Tile) -> dict[str, int]:
    """How far a band reaches to either side of the diagonal that ends at the last query and the last key."""
    if tile.kind != "band":
        return {}
    on_diagonal = tile.distance - ((tile.k1 - tile.k0) - (tile.q1 - tile.q0))
    return {"window_size_left": tile.high - 1 - on_diagonal, "window_size_right": on_diagonal - tile.low}


class Dense:
    """Plain products in float32 at least: on any device, in any dtype; the measure of the other kernels."""

    rows = 256

    def band_rows(self, width: float) -> int:
        """No more than any other tile has."""
        return self.rows

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        scores = self._scores(work)
        lse = scores.logsumexp(dim=-1)
        weights = (scores - lse[..., None]).exp().to(work.v.dtype)
        return (weights @ work.v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)

    def backward(self, work: Work, merged: Merged) -> Tensors:
        """See `Kernel`."""
        q, k, group = work.q, work.k, (work.k.shape[1], -1)
        weights, inner = self.of_scores(work, merged)
        weights, inner = weights.to(q.dtype), (inner * work.scale).to(q.dtype)
        grad_q = (inner @ k[:, :, None]).flatten(1, 2)
        grad_k = (inner.mT @ q.unflatten(1, group)).sum(dim=2)
        grad_v = (weights.mT @ merged.grad.unflatten(1, group)).sum(dim=2)
        return grad_q, grad_k, grad_v

    def of_scores(self, work: Work, merged: Merged) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights, and gradients of the scores: `(batch, kv_heads, group, q_len, kv_len)`, float32."""
        group, grad = (work.k.shape[1], -1), merged.grad
        weights = (self._scores(work) - merged.lse.unflatten(1, group)[..., None]).exp()
        delta = (wide(grad) * wide(merged.out)).sum(dim=-1, keepdim=True).unflatten(1, group)
        return weights, weights * ((wide(grad.unflatten(1, group)) @ wide(work.v)[:, :, None].mT) - delta)

    def _scores(self, work: Work) -> torch.Tensor:
        """`(batch, kv_heads, group, q_len, kv_len)`, float32."""
        group, tile = (work.k.shape[1], -1), work.tile
        scores = (wide(work.q).unflatten(1, group) @ wide(work.k)[:, :, None].mT).flatten(1, 2) * work.scale
        if tile.kind == "causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if work.mask is not None:
            scores = scores + work.mask
        elif tile.kind == "band":
            scores = scores.masked_fill(~tile.mask(scores.device), -torch.inf)
        return scores.unflatten(1, group)


def kernel_for(query: torch.Tensor, value: torch.Tensor, masked: bool) -> Kernel:
    """The kernel that is right and fastest for a `query` and a `value` of these shapes and dtypes; `masked` where tiles
    will bring masks.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "cpu" and (half or query.dtype == torch.float32):
        return FlashCPU()
    head_dim = query.shape[-1]
    fits = half and not masked and head_dim == value.shape[-1] and head_dim % 8 == 0 and head_dim <= 256
    if query.device.type == "cuda" and fits and agrees(FlashCUDA(), query.device, query.dtype, head_dim):
        return FlashCUDA()
    return Dense()


@functools.lru_cache(maxsize=64)
def agrees(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a kernel computes small tiles of every kind as `Dense` does, forward and backward.

    The kernels behind PyTorch's own attention are called below their public face, which may change: they are tried
    once before they are trusted, for each `head_dim`.
    """
    random = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, 1, 4, 24, head_dim, generator=random).to(device, dtype)
    k, v = torch.randn(2, 1, 2, 24, head_dim, generator=random).to(device, dtype)
    tiles = (Tile(0, 24, 0, 24), Tile(0, 24, 0, 24, "causal"), Tile(8, 24, 1, 24, "band", 0, 8, distance=7))
    for tile in tiles:
        queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        work = Work(q[:, :, queries], k[:, :, keys], v[:, :, keys], tile, scale=0.1)
        merged = Merged(*Dense().forward(work), grad[:, :, queries])
        expected = (merged.out, merged.lse, *Dense().backward(work, merged))
        try:
            found = (*kernel.forward(work), *kernel.backward(work, merged))
        except (RuntimeError, TypeError, NotImplementedError):
            return False
        for one, other in zip(found, expected, strict=True):
            if not torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.05):
                return False
    return True
