"""Attention of one tile with its log-sum-exp, forward and backward: flash on a CPU and on CUDA, and plain products."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch

from rope_patch.attention.bias import TileBias
from rope_patch.attention.chunk_runs import Runs, in_one, in_runs, keys_of, queries_of
from rope_patch.attention.pieces import Tile, clipped, in_rows, tiles_of
from rope_patch.attention.spans import Span
from rope_patch.attention.terms import product, upcast
from rope_patch.attention.trials import Comparisons, Trial
from rope_patch.schemes.slots import Region

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """The attention of one tile, as a kernel receives it.

    Attributes:
        q: queries of the tile, `(batch, heads, q_len, head_dim)`.
        k, v: keys and values of the tile, `(batch, kv_heads, kv_len, head_dim or value_dim)`; of stairs, whose batch is
            their steps, those of all steps, with a batch of 1.
        scale: multiplies the products of queries and keys.
        mask: at least float32, added to the scores, broadcasts to their shape. It replaces the mask of a band and is
            added to that of any other tile.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tile: Tile
    scale: float
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Merged:
    """The merged result of all tiles for the queries of one: output and log-sum-exp, `(batch, heads, q_len,
    value_dim)` and `(batch, heads, q_len)`, and the gradient of the output.
    """

    out: torch.Tensor
    lse: torch.Tensor
    grad: torch.Tensor


class Kernel(Protocol):
    """Attention of one tile. Tiles are merged by their log-sum-exp; with the merged output and log-sum-exp, each tile's
    backward returns its exact share of the gradients.

    Attributes:
        name: the kernel in a few words.
        whole: whether a region whose bounds move along with the query is one tile, instead of one for each shape.
    """

    name: ClassVar[str]
    whole: bool = False

    def batches(self, query: torch.Tensor) -> bool:
        """Whether the equal tiles of a region by chunk are one call, whose batch they are, for queries of this device,
        dtype and width.
        """
        return False

    def climbs(self, query: torch.Tensor, key: torch.Tensor, chunk: int) -> bool:
        """Whether stairs of a call with these states, `(1, heads or kv_heads, length, head_dim)`, are one call."""
        return False

    def band_rows(self, width: float) -> int:
        """The number of queries in a tile of a band that is `width` tokens wide."""

    def cut(self, tile: Tile, masked: bool) -> Iterator[Tile]:
        """Cut a tile into parts of shapes that suit the kernel; `masked` if it will have a mask."""

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`, float32: zeros and the
        lowest number for a query from which the mask hides all keys.
        """

    def backward(self, work: Work, merged: Merged) -> Tensors:
        """Gradients of queries, keys and values, in their shapes, from the gradient of the merged output."""


@dataclass(frozen=True)
class Biased:
    """A kernel in one span for some of the heads, with a bias that provides each tile's mask, or without one."""

    kernel: Kernel
    span: Span
    bias: TileBias | None
    heads: slice = field(default_factory=lambda: slice(None))

    def for_heads(self, heads: slice) -> Biased:
        """Restrict the kernel to some of the heads."""
        return self if self.bias is None else Biased(self.kernel, self.span, self.bias.for_heads(heads), heads)

    def tiles(self, region: Region, runs: Runs = "none") -> Iterator[Tile]:
        """The tiles of a region of the span, cut for the kernel and the bias, or joined into runs."""
        tiles = self._tiles(region)
        return tiles if runs == "none" else in_runs(tiles, stairs=runs == "stairs")

    def _tiles(self, region: Region) -> Iterator[Tile]:
        span = self.span
        region = region.within(span.window)
        rows = self.kernel.band_rows(region.stop - (max(0, region.start) if span.causal else region.start))
        whole = self.kernel.whole
        tiles = tiles_of(region, span.q_length, span.offset, span.first_position, rows, span.causal, whole)
        if span.hidden or span.before:
            stop = span.before + span.keys.stop - span.keys.start
            tiles = (part for tile in tiles for part in clipped(tile, span.before, stop))
        for tile in tiles:
            for part in (tile,) if self.bias is None else self.bias.pieces(tile):
                yield from self.kernel.cut(part, masked=self.bias is not None)

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`, as in `Kernel.forward`."""
        if self.bias is None:
            return self.kernel.forward(work)
        out, lse = self.kernel.forward(self._masked(work, self.bias))
        return self._ordered(out), self._ordered(lse)

    def backward(self, work: Work, merged: Merged, of_bias: torch.Tensor | None) -> Tensors:
        """Gradients of a tile, as in `Kernel.backward`; `of_bias`, if given, has the shape of the bias's `source` and
        accumulates the tile's share of its gradient.
        """
        if self.bias is None:
            return self.kernel.backward(work, merged)
        if of_bias is not None:
            return self._backward_of_all(work, merged, self.bias, self.bias.place(self.span, self.heads, of_bias))
        in_order = Merged(*map(self._ordered, (merged.out, merged.lse, merged.grad)))
        grad_q, grad_k, grad_v = self.kernel.backward(self._masked(work, self.bias), in_order)
        return self._ordered(grad_q), grad_k, grad_v

    def _backward_of_all(self, work: Work, merged: Merged, bias: TileBias, into: torch.Tensor) -> Tensors:
        """Compute all gradients here, in blocks of queries that stay in cache: the gradient of the bias is a sum of
        gradients of scores, which kernels do not return.
        """
        tile, (batch, heads) = work.tile, work.q.shape[:2]
        keys, values = _by_kv_head(upcast(work.k)), _by_kv_head(upcast(work.v))
        grad_q = torch.empty_like(work.q)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        most = max(LEAST_ROWS, SCORES_IN_CACHE // (batch * heads * keys.shape[1]))
        room = keys.new_empty(2, batch * heads * min(most, tile.q1 - tile.q0) * (keys.shape[1] + most))
        for block in in_rows(tile, most, as_bands=True):
            rows, seen = slice(block.q0 - tile.q0, block.q1 - tile.q0), slice(block.k0 - tile.k0, block.k1 - tile.k0)
            q, grad, out, lse = (
                self._ordered(upcast(x[:, :, rows])) for x in (work.q, merged.grad, merged.out, merged.lse)
            )
            delta = (grad * out).sum(dim=-1, keepdim=True)
            q, grad = (x.reshape(len(keys), -1, x.shape[-1]) for x in (q * work.scale, grad))
            k, v = keys[:, seen], values[:, seen]
            # each row is followed by as many zeros as there are rows
            shape = batch, heads, block.q1 - block.q0, k.shape[1]
            padded = room[0, : math.prod(shape[:3]) * sum(shape[2:])].view(*shape[:3], -1)
            padded[..., shape[3] :] = 0
            weights, inner = room[1, : math.prod(shape)].view(shape), padded[..., : shape[3]]
            torch.sub(bias.mask(block, weights.dtype), lse[..., None], out=weights)
            weights = weights.view(len(keys), -1, shape[3])
            weights.baddbmm_(q, k.mT).exp_()
            inner.copy_(delta.neg_())
            inner = padded.view(len(keys), -1, sum(shape[2:]))[..., : shape[3]]
            inner.baddbmm_(grad, v.mT).mul_(weights)
            bias.gradient(block, padded, into)
            grad_k[:, seen].baddbmm_(inner.mT, q)
            grad_v[:, seen].baddbmm_(weights.mT, grad)
            of_rows = torch.bmm(inner, k).mul_(work.scale).view(*shape[:3], -1)
            grad_q[:, :, rows] = self._ordered(of_rows)
        return grad_q, grad_k.unflatten(0, (batch, -1)), grad_v.unflatten(0, (batch, -1))

    def _masked(self, work: Work, bias: TileBias) -> Work:
        mask = bias.mask(work.tile, torch.promote_types(work.q.dtype, torch.float32))
        return Work(self._ordered(work.q), work.k, work.v, work.tile, work.scale, mask)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder query states to the order of the mask's rows; a second call undoes it."""
        return x.flip(2) if self.bias is not None and self.bias.reverses_queries else x


SCORES_IN_CACHE = 2**19  # maximum number of scores of all heads in a block of `Biased`
LEAST_ROWS = 64  # minimum number of queries of such a block: fewer make its products slow


def _by_kv_head(x: torch.Tensor) -> torch.Tensor:
    """Flatten `(batch, kv_heads, length, dim)` to the matrices of one batched product."""
    return x.flatten(0, 1).contiguous()


@dataclass(frozen=True)  # instances are equal, so that the tiles of a call are found once
class FlashCPU(Kernel):
    """The flash kernel behind `scaled_dot_product_attention` on CPU, which returns its log-sum-exp.

    Attributes:
        heads: of all rows of the batch.
        threads: that share the work.
    """

    name = "flash on the CPU"
    heads: int = 1
    threads: int = 1
    rows = 768
    """Queries of a tile: from this many on, the kernel uses its largest blocks, which the threads share."""

    @property
    def scale(self) -> int:
        """Multiplies the number of queries of a tile, where fewer would leave threads idle."""
        return math.ceil(self.threads / (3 * self.heads))

    def band_rows(self, width: float) -> int:
        """The number of queries in a tile of a band: fewer waste less at the edges, and from 192 on the kernel uses
        larger blocks.
        """
        return 192 * self.scale

    def cut(self, tile: Tile, masked: bool) -> Iterator[Tile]:
        """Cut a tile into blocks of queries. Under a causal mask the kernel wastes up to 512 keys per query, so the end
        of each block becomes a band.
        """
        if masked:
            yield tile
            return
        for part in in_rows(tile, self.rows * self.scale):
            yield from in_rows(part, self.band_rows(math.inf), as_bands=True) if part.kind == "causal" else (part,)

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.scored(work)
        if work.mask is not None and not lse.all():  # 0 if a query sees nothing
            lse = lse.masked_fill(work.mask.amax(dim=-1) == -torch.inf, torch.finfo(lse.dtype).min)
        return out, lse

    def scored(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `(batch, heads, q_len, value_dim)` and log-sum-exp of a tile, computed without reading values: its
        mask must leave a finite number to each query.
        """
        q, k, v = _of_one_width(work.q, work.k, work.v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, work.tile.kind == "causal", attn_mask=_additive(work), scale=work.scale
        )
        return out[..., : work.v.shape[-1]], lse

    def backward(self, work: Work, merged: Merged) -> Tensors:
        head_dim, value_dim = work.q.shape[-1], work.v.shape[-1]
        grad, q, k, v, out = _of_one_width(merged.grad, work.q, work.k, work.v, merged.out)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, q, k, v, out, merged.lse, 0.0, work.tile.kind == "causal"),
            attn_mask=_additive(work),
            scale=work.scale,
        )
        return grad_q[..., :head_dim], grad_k[..., :head_dim], grad_v[..., :value_dim]


def _of_one_width(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad states with zeros to one head width, because in MLA the widths of keys and values differ."""
    width = max(state.shape[-1] for state in states)
    if all(state.shape[-1] == width for state in states):
        return states
    return tuple(torch.nn.functional.pad(state, (0, width - state.shape[-1])) for state in states)


def _additive(work: Work) -> torch.Tensor | None:
    tile = work.tile
    if work.mask is not None or tile.kind != "band":
        return work.mask
    low, high = tile.low - tile.distance, tile.high - tile.distance
    return _band(tile.q1 - tile.q0, tile.k1 - tile.k0, low, high, work.q.dtype)


@functools.lru_cache(maxsize=16)
def _band(rows: int, columns: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of a band, cached: every tile inside a band shares one, and the last tiles of all blocks share
    another.
    """
    seen = Tile(0, rows, 0, columns, "band", low, high).mask(torch.device("cpu"))
    return torch.zeros(rows, columns, dtype=dtype).masked_fill(~seen, -torch.inf)


@dataclass(frozen=True)  # instances are equal, so that `objection` tries it once and not at every call
class FlashCUDA(Kernel):
    """The flash kernel behind `scaled_dot_product_attention` on CUDA, for half precision; a band is one call.

    Its windows are aligned with the last query and the last key (FlashAttention-2, from version 2.1). It supports no
    mask.

    Attributes:
        implementation: the one that `torch.nn.attention.activate_flash_attention_impl` has put in its place, such as
            `FA4`; None for torch's own. Each has a trial of its own.
    """

    name = "flash"
    implementation: str | None = None

    def batches(self, query: torch.Tensor) -> bool:
        """Whether its results for blocks of a text equalled those of plain products when they were tried."""
        return not objection_to_runs(self.eager, query.device, query.dtype, query.shape[-1])

    @property
    def eager(self) -> FlashCUDA:
        """The kernel as its trial needs it, for the smallest tiles: itself, which takes all."""
        return self

    def band_rows(self, width: float) -> int:
        """Put all queries into one tile: the kernel itself supports windows."""
        return 2**62

    def cut(self, tile: Tile, masked: bool) -> Iterator[Tile]:
        """Leave the tile whole, for the fewest launches."""
        yield tile

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (work.q, work.k, work.v))
        out, lse = flash(q, k, v, work.scale, work.tile.kind == "causal", **_window(work.tile))
        return out.transpose(1, 2), lse

    def backward(self, work: Work, merged: Merged) -> Tensors:
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


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False, **window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(batch, q_len, heads, value_dim)` and log-sum-exp `(batch, heads, q_len)`, of states in the layout of
    flash, `(batch, length, heads or kv_heads, dim)`.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False), scale=scale, **window
    )
    return out, lse


def _window(tile: Tile) -> dict[str, int]:
    """The window of a band on either side of the diagonal that ends at the last query and the last key."""
    if tile.kind != "band":
        return {}
    on_diagonal = tile.distance - ((tile.k1 - tile.k0) - (tile.q1 - tile.q0))
    return {"window_size_left": tile.high - 1 - on_diagonal, "window_size_right": on_diagonal - tile.low}


@dataclass(frozen=True)
class Dense(Kernel):
    """Plain products in float32 or wider, on any device, in any dtype; the reference for the other kernels.

    The query heads that share a key head are rows of one product; a broadcast batch of products would copy the keys for
    each of them.

    Attributes:
        rows: queries of a tile.
    """

    name = "plain products"
    rows: int = 256

    def band_rows(self, width: float) -> int:
        """Take as many queries for a band as for any other tile."""
        return self.rows

    def cut(self, tile: Tile, masked: bool) -> Iterator[Tile]:
        """Cut a tile into blocks of queries whose scores fit into memory."""
        return in_rows(tile, self.rows, as_bands=True)

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        scores, kv_heads = self._scores(work), work.k.shape[1]
        lse = scores.logsumexp(dim=-1).clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - lse[..., None]).exp().to(work.v.dtype)
        return (_folded(weights, kv_heads) @ work.v).reshape(*lse.shape, -1), lse

    def backward(self, work: Work, merged: Merged) -> Tensors:
        q, k, kv_heads = work.q, work.k, work.k.shape[1]
        weights, inner = self.of_scores(work, merged)
        weights = _folded(weights.to(q.dtype), kv_heads)
        inner = _folded((inner * work.scale).to(q.dtype), kv_heads)
        grad_k = inner.mT @ _folded(q, kv_heads)
        return (inner @ k).reshape(q.shape), grad_k, weights.mT @ _folded(merged.grad, kv_heads)

    def of_scores(self, work: Work, merged: Merged) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights, and gradients of the scores: `(batch, heads, q_len, kv_len)`, float32."""
        grad = upcast(merged.grad)
        weights = (self._scores(work) - merged.lse[..., None]).exp()
        delta = (grad * upcast(merged.out)).sum(dim=-1, keepdim=True)
        products = product(_folded(merged.grad, work.v.shape[1]), work.v.mT).reshape(weights.shape)
        return weights, weights * (products - delta)

    def _scores(self, work: Work) -> torch.Tensor:
        """Scaled scores with the mask applied, `(batch, heads, q_len, kv_len)`, float32."""
        tile = work.tile
        products = product(_folded(work.q, work.k.shape[1]), work.k.mT)
        scores = products.reshape(*work.q.shape[:3], -1) * work.scale
        if tile.kind == "causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if work.mask is not None:
            scores = scores + work.mask
        elif tile.kind == "band":
            scores = scores.masked_fill(~tile.mask(scores.device), -torch.inf)
        return scores


def _folded(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Fold the heads that share keys into rows: `(batch, heads, rows, ...)` to `(batch, kv_heads, heads per kv head *
    rows, ...)`.
    """
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def _compared_in_runs(kernel: FlashCUDA, device: torch.device, dtype: torch.dtype, head_dim: int) -> Comparisons:
    """Compare a kernel with `Dense` on blocks of a text that are views of it, forward and backward: of queries in both
    layouts, tokens or heads first, and of keys as caches hold them.
    """
    random, size, count = torch.Generator().manual_seed(0), 64, 3
    q, grad = torch.randn(2, 1, 4, count * size, head_dim, generator=random).to(device, dtype)
    k, v = torch.randn(2, 1, 2, count * size, head_dim, generator=random).to(device, dtype)
    names = "output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values"
    kinds: tuple[Literal["causal", "full"], ...] = ("causal", "full")
    for kind in kinds:
        tile = Tile(0, size, 0, size, kind, count=count, step=size)
        work = Work(queries_of(q, tile), keys_of(k, tile), keys_of(v, tile), tile, scale=0.1)
        out, lse = Dense().forward(work)
        # where results are kept, the blocks of a text are views too
        kept = (in_one(x, tile, 1, count * size, 0.0).contiguous() for x in (out, lse))
        merged = Merged(*(queries_of(x, tile) for x in (*kept, grad)))
        expected = out, lse, *Dense().backward(work, merged)
        actual = *kernel.forward(work), *kernel.backward(work, merged)
        for name, one, other in zip(names, actual, expected, strict=True):
            yield f"{name} of a run of {kind} tiles", one, other
        q, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, grad))


objection_to_runs = Trial("A kernel of tiles, for the chunks of a text at once,", _compared_in_runs, tolerance=0.03)
"""The reason why a kernel scores each chunk by itself on a device for a dtype and a width, or an empty string."""
