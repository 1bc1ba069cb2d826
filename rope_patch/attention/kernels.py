"""One tile of attention with its log-sum-exp, forward and backward, by the fastest kernel of the platform."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from rope_patch.attention.bias import DiagonalTerm, TileBias
from rope_patch.attention.inputs import wide
from rope_patch.attention.spans import Span
from rope_patch.attention.tiles import Tile, clipped, in_rows, tiles_of
from rope_patch.schemes.slots import Region

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """Attention of one tile. The log-sum-exp lets tiles be merged; given the merged output and log-sum-exp, each
    tile's backward yields its exact share of the gradients.

    An additive `mask`, float32 and broadcastable to the scores, takes the place of the tile's own where the tile is a
    band, and comes on top of it otherwise.

    Attributes:
        rows: the most queries of a tile; None for any number.
    """

    @property
    def rows(self) -> int | None:
        """See the class."""

    def band_rows(self, width: float) -> int:
        """The queries of a tile of a band that is `width` tokens wide."""

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

        Args:
            q: queries of the tile, `(batch, heads, q_len, head_dim)`.
            k, v: keys and values of the tile, `(batch, kv_heads, kv_len, head_dim or value_dim)`.
            tile: which pairs are seen.
            scale: multiplies the products of queries and keys.
            mask: see the class; default none.
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
        mask: torch.Tensor | None = None,
    ) -> Tensors:
        """Gradients of queries, keys and values from those of the merged output.

        Args:
            grad: of the merged output, `(batch, heads, q_len, value_dim)`.
            q, k, v, tile, scale, mask: as they were given to `forward`.
            out, lse: the merged output, of the shape of `grad`, and its log-sum-exp, `(batch, heads, q_len)`.
        """


@dataclass(frozen=True)
class Biased:
    """A kernel under a bias by distance, or under none.

    Attributes:
        kernel: computes the tiles.
        bias: gives each tile its mask.
    """

    kernel: Kernel
    bias: TileBias | None

    def tiles(self, region: Region, span: Span) -> Iterator[Tile]:
        """The tiles of a region of a span, as the kernel and the bias want them."""
        region = region.within(span.window)
        rows = self.kernel.band_rows(region.stop - (max(0, region.start) if span.causal else region.start))
        tiles = tiles_of(region, span.q_length, span.offset, span.first_position, rows, span.causal)
        if span.hidden or span.before:
            stop = span.before + span.keys.stop - span.keys.start
            tiles = (part for tile in tiles for part in clipped(tile, span.before, stop))
        for tile in tiles:
            for part in (tile,) if self.bias is None else self.bias.pieces(tile):
                yield from (part,) if self.kernel.rows is None else in_rows(part, self.kernel.rows, as_bands=True)

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

    def bias_gradient(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
        scale: float,
        into: torch.Tensor,
    ) -> None:
        """Add what a tile contributes to the gradient of the bias' values, a block of queries at a time.

        Args:
            grad, q, k, v, out, lse, tile, scale: see `Kernel.backward`.
            into: gradients of the bias' values, `(heads, distances)`, in place.
        """
        bias = cast(DiagonalTerm, self.bias)
        for block in in_rows(tile, Dense.rows, as_bands=True):
            rows, keys = slice(block.q0 - tile.q0, block.q1 - tile.q0), slice(block.k0 - tile.k0, block.k1 - tile.k0)
            mask = bias.mask(block).flip(2)
            states = (grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows])
            _, inner = Dense().of_scores(*states, block, scale, mask)
            bias.gradient(block, inner.flatten(1, 2).sum(dim=0), into)

    def _ordered(self, *of_queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What belongs to queries, in the order of the mask's rows, or back again."""
        if self.bias is None or not self.bias.reverses_queries:
            return of_queries
        return tuple(x.flip(2) for x in of_queries)


class FlashCPU:
    """The flash kernel behind `scaled_dot_product_attention` on CPU, which hands out its log-sum-exp."""

    rows = None

    def band_rows(self, width: float) -> int:
        """Fewer waste less at the edges; from 192 on, the kernel works in larger blocks."""
        return 192 if width < 1024 else 256

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
        mask, value_dim = _additive(tile, q.dtype) if mask is None else mask, v.shape[-1]
        q, k, v = _of_one_width(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale
        )
        return out[..., :value_dim], lse

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
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        grad, q, k, v, out = _of_one_width(grad, q, k, v, out)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale
        )
        return grad_q[..., :head_dim], grad_k[..., :head_dim], grad_v[..., :value_dim]


def _of_one_width(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """States with zeros where heads of values are narrower or wider than those of keys, as MLA has them."""
    width = max(state.shape[-1] for state in states)
    if all(state.shape[-1] == width for state in states):
        return states
    return tuple(torch.nn.functional.pad(state, (0, width - state.shape[-1])) for state in states)


def _additive(tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
    if tile.kind != "band":
        return None
    return _band(tile.q1 - tile.q0, tile.k1 - tile.k0, tile.low, tile.high, tile.distance, dtype)


@functools.lru_cache(maxsize=8)
def _band(rows: int, columns: int, low: int, high: int, distance: int, dtype: torch.dtype) -> torch.Tensor:
    """The same mask serves every tile inside a band: only the first and the last differ."""
    seen = Tile(0, rows, 0, columns, "band", low, high, distance).mask(torch.device("cpu"))
    return torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -torch.inf)


@dataclass(frozen=True)  # equal to any other, so that it is tried once and not at every call
class FlashCUDA:
    """The flash kernel behind `scaled_dot_product_attention` on CUDA, for half precision; a band is one call.

    Its windows are aligned with the last query and the last key (FlashAttention-2, from version 2.1).
    """

    rows = None

    def band_rows(self, width: float) -> int:
        """All of them: the kernel itself knows windows."""
        return 2**62

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tile: Tile,
        scale: float,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`; a mask is not possible."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, tile.kind == "causal", False, scale=scale, **_window(tile)
        )
        return out.transpose(1, 2), lse

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
        """See `Kernel`; a mask is not possible."""
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out.contiguous(),
            lse.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            tile.kind == "causal",
            no_dropout,
            no_dropout[0],
            scale=scale,
            **_window(tile),
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
        weights, inner = self.of_scores(grad, q, k, v, out, lse, tile, scale, mask)
        weights, inner = weights.to(q.dtype), (inner * scale).to(q.dtype)
        grad_q = (inner @ k[:, :, None]).flatten(1, 2)
        grad_k = (inner.mT @ q.unflatten(1, group)).sum(dim=2)
        grad_v = (weights.mT @ grad.unflatten(1, group)).sum(dim=2)
        return grad_q, grad_k, grad_v

    def of_scores(
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights, and gradients of the scores: `(batch, kv_heads, group, q_len, kv_len)`, float32.

        Args:
            grad, q, k, v, out, lse, tile, scale, mask: see `Kernel.backward`.
        """
        group = (k.shape[1], -1)
        weights = (self._scores(q, k, tile, scale, mask) - lse.unflatten(1, group)[..., None]).exp()
        delta = (wide(grad) * wide(out)).sum(dim=-1, keepdim=True).unflatten(1, group)
        return weights, weights * ((wide(grad.unflatten(1, group)) @ wide(v)[:, :, None].mT) - delta)

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`(batch, kv_heads, group, q_len, kv_len)`, float32."""
        grouped = wide(q).unflatten(1, (k.shape[1], -1))
        scores = (grouped @ wide(k)[:, :, None].mT).flatten(1, 2) * scale
        if tile.kind == "causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if mask is not None:
            scores = scores + mask
        elif tile.kind == "band":
            scores = scores.masked_fill(~tile.mask(q.device), -torch.inf)
        return scores.unflatten(1, (k.shape[1], -1))


def kernel_for(query: torch.Tensor, value: torch.Tensor, masked: bool) -> Kernel:
    """The kernel that is right and fastest.

    Args:
        query: `(batch, heads, q_len, head_dim)`.
        value: `(batch, kv_heads, kv_len, value_dim)`.
        masked: whether tiles will bring masks.
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
    once before they are trusted.

    Args:
        kernel: the one in question.
        device, dtype, head_dim: what it would be used on.
    """
    random = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, 1, 4, 24, head_dim, generator=random).to(device, dtype)
    k, v = torch.randn(2, 1, 2, 24, head_dim, generator=random).to(device, dtype)
    tiles = (Tile(0, 24, 0, 24), Tile(0, 24, 0, 24, "causal"), Tile(8, 24, 1, 24, "band", 0, 8, distance=7))
    for tile in tiles:
        queries, keys = (
            (slice(None), slice(None), slice(tile.q0, tile.q1)),
            (slice(None), slice(None), slice(tile.k0, tile.k1)),
        )
        out, lse = Dense().forward(q[queries], k[keys], v[keys], tile, 0.1)
        expected = (out, lse, *Dense().backward(grad[queries], q[queries], k[keys], v[keys], out, lse, tile, 0.1))
        try:
            found = (
                *kernel.forward(q[queries], k[keys], v[keys], tile, 0.1),
                *kernel.backward(grad[queries], q[queries], k[keys], v[keys], out, lse, tile, 0.1),
            )
        except (RuntimeError, TypeError, NotImplementedError):
            return False
        for one, other in zip(found, expected, strict=True):
            if not torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.05):
                return False
    return True
