"""Tiles by the kernels of cuDNN, nearly twice as fast as FlashAttention-2 on Hopper: the ones inside torch, and the
ones of `nvidia-cudnn-frontend` (extra `gpu`), which also have windows. Kernels without windows score bands in squares.

Neither changes a setting of torch. `torch.backends.cuda.enable_cudnn_sdp(False)` switches both off.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend

from rope_patch.attention.chunk_runs import keys_of, longer, queries_of
from rope_patch.attention.merging import merge, summed
from rope_patch.attention.pieces import Tile
from rope_patch.attention.squares import squares_of
from rope_patch.attention.terms import upcast
from rope_patch.attention.tile_kernels import Dense, FlashCUDA, Merged, Tensors, Work
from rope_patch.attention.trials import Comparisons, Trial


@dataclass(frozen=True)
class CuDNN(FlashCUDA):
    """The kernel of cuDNN where `scaled_dot_product_attention` would take it. It has no windows: a wide band is scored
    in squares (`squares_of`), and a narrow one is a call of flash.

    cuDNN plans each new shape for twenty milliseconds or more, which a tile has to be worth. So queries are padded to
    one of sixteen lengths in every octave, and keys along with them where causality hides what is added: other texts
    find the same plans. A length that is a multiple of a sixteenth of the power of two below it is not copied.

    Attributes:
        least: floating-point operations of a tile that is worth a plan: the smallest that was measured. For a run of
            chunks half of it suffices: its plan serves every text of as many chunks.
        narrowest: width of a band that is worth its squares. On an H100 they took the time of flash at 1,024 tokens,
            and 0.56 of it at 4,096.
    """

    name = "cuDNN"
    least: float = 2**37
    narrowest: int = 2**11
    whole = True

    @property
    def eager(self) -> CuDNN:
        """A copy of the kernel that also takes the smallest tiles, for its trial."""
        return dataclasses.replace(self, least=0, narrowest=0)

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._takes(work):
            return super().forward(work)
        length = work.q.shape[2]
        if not (more := _rounded(length) - length):
            return self._forward(work)
        out, lse = self._forward(_padded(work, more))
        return out[:, :, :length], lse[:, :, :length]

    def backward(self, work: Work, merged: Merged) -> Tensors:
        if not self._takes(work):
            return super().backward(work, merged)
        if not (more := _rounded(work.q.shape[2]) - work.q.shape[2]):
            return self._backward(work, merged)
        larger = Merged(*(longer(x, more) for x in (merged.out, merged.lse, merged.grad)))
        grad_q, grad_k, grad_v = self._backward(_padded(work, more), larger)
        return grad_q[:, :, : work.q.shape[2]], grad_k[:, :, : work.k.shape[2]], grad_v[:, :, : work.k.shape[2]]

    def _takes(self, work: Work) -> bool:
        (batch, heads, q_length, dim), tile = work.q.shape, work.tile
        seen = work.k.shape[2] if tile.kind != "band" else min(tile.high - tile.low, work.k.shape[2])
        operations = (2 if tile.kind == "causal" else 4) * batch * heads * dim * q_length * seen
        least = self.least if tile.count == 1 else self.least / 2
        return operations >= least and dim <= 128 and _ends_with_query(tile) and self._scores(work)

    def _scores(self, work: Work) -> bool:
        """Whether PyTorch would choose cuDNN for this tile, or for the squares of this band."""
        tile = work.tile
        if tile.kind != "band":
            return _is_chosen(work.q, work.k, work.v, tile.kind == "causal")
        width = tile.high - tile.low
        if width < self.narrowest:
            return False
        side = min(width, work.q.shape[2])
        return _is_chosen(work.q[:, :, :side], work.k[:, :, :side], work.v[:, :, :side], True)

    def _forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        if work.tile.kind != "band":
            return _attend(work)
        out = summed(torch.empty_like(work.q))
        lse = out.new_empty(out.shape[:3], dtype=torch.float32)
        for row, square in itertools.product(range(len(out)), squares_of(work.tile)):
            part, part_lse = (_turned(square, x) for x in _attend(_in_square(square, work, row)))
            into, into_lse = _queries(square, out[row]), _queries(square, lse[row])
            if square.kind == "causal":  # the first of these queries
                into.copy_(part)
                into_lse.copy_(part_lse)
            else:
                merge(into, into_lse, part, part_lse)
        return out.to(work.q.dtype), lse

    def _backward(self, work: Work, merged: Merged) -> Tensors:
        return _gradients(work, merged) if work.tile.kind != "band" else _by_squares(_gradients, work, merged)


@dataclass(frozen=True)
class CuDNNWindows(CuDNN):
    """The kernel of cuDNN through `nvidia-cudnn-frontend`: a band is one call, as is a causal tile behind cached keys.

    Its operators `torch.ops.cudnn.sdpa_fwd` and `sdpa_bwd` (version 1.32, `cudnn/sdpa/fwd/torch_op.py`) keep 128 plans,
    by shape, strides and scale. `window_left` counts the keys that a query sees, its own included.

    Attributes:
        least: half of what squares are worth. The band of a window of 1,024 tokens in 8,192, with 32 heads of 64, has
            2^36 operations: 0.46 ms by FlashAttention-2 on an H200, and about 0.2 ms here. A plan, built in 20 to 40 ms
            for all layers, is paid back after some hundred calls, and smaller tiles gain no more than a call here takes
            the host longer, about 0.1 ms.
    """

    name = "cuDNN with windows"
    least: float = 2**36
    narrowest: int = 0

    def climbs(self, query: torch.Tensor, key: torch.Tensor, chunk: int) -> bool:
        """Whether stairs are worth a plan, are cuDNN's, and were right when they were tried."""
        _, heads, length, dim = query.shape
        if dim > 128 or 2 * heads * dim * length * key.shape[2] < self.least / 2:
            return False
        q, k = query[:, :, :chunk], key[:, :, :chunk]
        one = Work(q, k, k, Tile(0, q.shape[2], 0, k.shape[2]), 1.0)
        return self._scores(one) and not objection_to_stairs(query.device, query.dtype, dim)

    def forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(work) if work.tile.kind != "stairs" else _climbed(work)

    def _scores(self, work: Work) -> bool:
        """Whether PyTorch would choose cuDNN for these states; the shape of the tile is no concern of it."""
        return _is_chosen(work.q, work.k, work.v, False)

    def _forward(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _frontend().sdpa_fwd(work.q, work.k, work.v, work.scale, *_bounds(work.tile))
        return out, lse[..., 0]

    def _backward(self, work: Work, merged: Merged) -> Tensors:
        exact = torch.are_deterministic_algorithms_enabled()
        known = merged.grad, work.q, work.k, work.v, merged.out, merged.lse[..., None]
        gradients: Tensors = _frontend().sdpa_bwd(*known, work.scale, *_bounds(work.tile), is_deterministic=exact)
        return gradients


@dataclass(frozen=True)
class FlashWithoutWindows(FlashCUDA):
    """Flash by an implementation that refuses the gradients of a window: FlashAttention-4 as torch 2.11 activates it
    (`torch/nn/attention/_fa4.py`). Gradients of a band come from squares, or from products where its last key is not
    that of its last query.
    """

    name = "flash without windows"

    def backward(self, work: Work, merged: Merged) -> Tensors:
        if work.tile.kind != "band":
            return super().backward(work, merged)
        if not _ends_with_query(work.tile):
            return Dense().backward(work, merged)
        return _by_squares(super().backward, work, merged)


def _frontend() -> Any:
    """The operators of `nvidia-cudnn-frontend`, which its module registers in `torch.ops`."""
    _register()
    return torch.ops.cudnn


@functools.cache
def _register() -> None:
    importlib.import_module("cudnn.sdpa.fwd.torch_op")


def _bounds(tile: Tile) -> tuple[bool, bool, int]:
    """The arguments `is_causal`, `causal_bottom_right` and `window_left` of cuDNN, which hide the pairs outside a tile;
    its diagonal ends at the last query and the last key.
    """
    rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    seen, window = tile.kind != "full", tile.high - tile.low if _has_window(tile) else -1
    return seen, seen and keys > rows, window


def _is_chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Whether PyTorch's attention would choose cuDNN for these states, by its settings and its rules."""
    by = torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return by == _CUDNN


_CUDNN = SDPBackend.CUDNN_ATTENTION.value


def _has_window(tile: Tile) -> bool:
    """Whether the last query of a band does not see its first key."""
    return tile.kind == "band" and tile.high - tile.low < tile.k1 - tile.k0


def _ends_with_query(tile: Tile) -> bool:
    """Whether the last key of a tile is the newest one that its last query sees; true for tiles that are no band."""
    return tile.kind != "band" or tile.distance - tile.low == (tile.k1 - tile.k0) - (tile.q1 - tile.q0)


# --- stairs ---


def _climbed(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of stairs: every step has all keys, and a length of its own."""
    (steps, _, size, _), tile, device = work.q.shape, work.tile, work.q.device
    fewest = tile.k1 - tile.k0
    keys = torch.arange(fewest, fewest + steps * tile.step, tile.step, dtype=torch.int32, device=device)
    queries = torch.full((steps,), size, dtype=torch.int32, device=device)
    if tile.short:
        queries[-1:].fill_(size - tile.short)
    k, v = (x.expand(steps, -1, -1, -1) for x in (work.k, work.v))
    lengths = {"seq_len_q": queries, "seq_len_kv": keys, "return_lse": True}
    out, lse = _frontend().sdpa_fwd(longer(work.q, _rounded(size) - size), k, v, work.scale, **lengths)
    return out[:, :, :size], lse[:, :, :size, 0]


def _compared_on_stairs(device: torch.device, dtype: torch.dtype, head_dim: int) -> Comparisons:
    """Compare stairs, of which the last step has fewer queries, with `Dense`."""
    random, size, count, short = torch.Generator().manual_seed(0), 512, 4, 100
    length = count * size
    q, k, v = (
        torch.randn(1, length, heads, head_dim, generator=random).to(device, dtype).transpose(1, 2)
        for heads in (8, 2, 2)
    )
    tile = Tile(0, size, 0, size, "stairs", count=count, step=size, short=short)
    found = _climbed(Work(queries_of(q[:, :, : length - short], tile), k, v, tile, 0.1))
    for step in range(count):
        rows, keys = size - short * (step == count - 1), (step + 1) * size
        queries = q[:, :, step * size : step * size + rows]
        one = Work(queries, k[:, :, :keys], v[:, :, :keys], Tile(0, rows, 0, keys), 0.1)
        for name, of_all, of_one in zip(("output", "log-sum-exp"), found, Dense().forward(one), strict=True):
            yield f"{name} of step {step}", of_all[step, None, :, :rows], of_one


objection_to_stairs = Trial("The call of cuDNN for chunks that share their keys", _compared_on_stairs, tolerance=0.03)
"""The reason why stairs are scored in squares on a device for a dtype and a width, or an empty string."""


# --- lengths of plans ---


def _rounded(length: int) -> int:
    """Round a length up to a multiple of 64, with at most sixteen lengths in every octave, so that few plans are
    built.
    """
    step = max(64, 2 ** max(0, length.bit_length() - 5))
    return -(-length // step) * step


def _padded(work: Work, more: int) -> Work:
    """Pad the work by `more` queries, and by as many keys, which no other query sees."""
    if not more:
        return work
    tile = dataclasses.replace(work.tile, q1=work.tile.q1 + more)
    if tile.kind == "full":
        return dataclasses.replace(work, q=longer(work.q, more), tile=tile)
    high = tile.high if _has_window(work.tile) else tile.high + more
    tile = dataclasses.replace(tile, k1=tile.k1 + more, high=high)
    q, k, v = (longer(x, more) for x in (work.q, work.k, work.v))
    return dataclasses.replace(work, q=q, k=k, v=v, tile=tile)


# --- torch's cuDNN, and runs of squares for it ---


def _attend(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a tile that is no band."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(work.q, work.k, work.v, None, True, 0.0, work.tile.kind == "causal"), scale=work.scale
    )
    return out, lse[..., 0]


def _gradients(work: Work, merged: Merged) -> Tensors:
    """Gradients of queries, keys and values of a tile that is no band."""
    seed, lse = torch.zeros((), dtype=torch.int64, device=work.q.device), merged.lse[..., None].contiguous()
    gradients: Tensors = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(merged.grad, work.q, work.k, work.v, merged.out, lse, seed, seed, None, None, None),
        *(work.q.shape[2], work.k.shape[2], 0.0, work.tile.kind == "causal"),
        scale=work.scale,
    )
    return gradients


def _by_squares(gradients: Callable[[Work, Merged], Tensors], work: Work, merged: Merged) -> Tensors:
    """Gradients of queries, keys and values of a band, cut into squares for a kernel that has no gradients of bands."""
    of_q, of_k, of_v = (torch.zeros_like(upcast(x)) for x in (work.q, work.k, work.v))
    for row, square in itertools.product(range(len(of_q)), squares_of(work.tile)):
        known = (_turned(square, _queries(square, x[row])) for x in (merged.out, merged.lse, merged.grad))
        shares = gradients(_in_square(square, work, row), Merged(*known))
        share_q, share_k, share_v = (_turned(square, share) for share in shares)
        _queries(square, of_q[row]).add_(share_q)
        _keys(square, of_k[row]).add_(share_k)
        _keys(square, of_v[row]).add_(share_v)
    return of_q.to(work.q.dtype), of_k.to(work.k.dtype), of_v.to(work.v.dtype)


def _in_square(square: Tile, work: Work, row: int) -> Work:
    """The work of a run of squares in one row of the batch; the squares become the batch."""
    q = _turned(square, _queries(square, work.q[row]))
    k, v = (_turned(square, _keys(square, x[row])) for x in (work.k, work.v))
    kind: Literal["full", "causal"] = "full" if square.kind == "full" else "causal"
    return Work(q, k, v, Tile(0, q.shape[2], 0, k.shape[2], kind), work.scale)


def _turned(square: Tile, x: torch.Tensor) -> torch.Tensor:
    """Reverse queries or keys of an upper triangle, which makes it a causal one; a second call undoes it."""
    return x.flip(2) if square.kind == "upper" else x


def _queries(square: Tile, x: torch.Tensor) -> torch.Tensor:
    """A view of the queries of a run of squares, `(count, heads, rows, ...)`, of `(heads, length, ...)`."""
    return queries_of(x[None, :, square.queries], square)


def _keys(square: Tile, x: torch.Tensor) -> torch.Tensor:
    """A view of the keys of a run of squares, `(count, kv_heads, columns, dim)`, of `(kv_heads, length, dim)`."""
    return keys_of(x[None, :, square.keys], square)
