"""The choice of the kernel that scores tiles: the fastest one that equals the definition on this device."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch.nn.attention import current_flash_attention_impl

from rope_patch.attention.cudnn_kernels import CuDNN, CuDNNWindows, FlashWithoutWindows
from rope_patch.attention.pieces import Tile
from rope_patch.attention.terms import HALF
from rope_patch.attention.tile_kernels import Dense, FlashCPU, FlashCUDA, Kernel, Merged, Work
from rope_patch.attention.trials import Comparisons, Trial


def kernel_for(query: torch.Tensor, value: torch.Tensor, masked: bool) -> Kernel:
    """The fastest correct kernel for a `query` and a `value`, `(batch, heads or kv_heads, length, dim)`; `masked` if
    tiles will have masks.
    """
    return next(kernel for kernel, why in candidates(query, value, masked) if not why)


def candidates(query: torch.Tensor, value: torch.Tensor, masked: bool) -> Iterator[tuple[Kernel, str]]:
    """The kernels for queries and values `(batch, heads or kv_heads, length, dim)` in the order in which they are
    asked, each with the reason why it is not taken; the reason is empty for those that may be.
    """
    half, head_dim = query.dtype in HALF, query.shape[-1]
    if query.device.type == "cpu":
        why = "" if half or query.dtype == torch.float32 else f"it does not take {query.dtype}"
        yield FlashCPU(query.shape[0] * query.shape[1], torch.get_num_threads()), why
    elif query.device.type == "cuda":
        case, implementation = (query.device, query.dtype, head_dim), current_flash_attention_impl()
        flash = FlashCUDA(implementation)
        why = "states are not in half precision" if not half else "tiles have masks" if masked else ""
        if not why and (head_dim != value.shape[-1] or head_dim % 8 or head_dim > 256):
            why = f"queries of width {head_dim} and values of width {value.shape[-1]} do not suit it"
        refused = why or objection(flash, *case)
        for kernel in _of_cudnn():
            yield kernel(implementation), refused or objection(kernel().eager, *case)
        yield flash, refused
        if implementation is not None:
            other = FlashWithoutWindows(implementation)
            yield other, why or objection(other, *case)
    yield Dense(), ""


def account(query: torch.Tensor, value: torch.Tensor, masked: bool) -> str:
    """The name of the kernel for queries and values `(batch, heads or kv_heads, length, dim)`, and why faster ones are
    not taken.
    """
    refused: list[str] = []
    for kernel, why in candidates(query, value, masked):
        if not why:
            return "; ".join([kernel.name, *refused])
        refused.append(f"not {kernel.name}: {why}")
    raise AssertionError("plain products take all states")


def has_flash(like: torch.Tensor, head_dim: int) -> bool:
    """Whether flash scores states of the dtype of `like`, of any shape, and this width, and equals the definition on
    their device.
    """
    if like.device.type != "cuda" or like.dtype not in HALF or head_dim % 8 or head_dim > 256:
        return False
    return not objection(FlashCUDA(current_flash_attention_impl()), like.device, like.dtype, head_dim)


@functools.cache
def _of_cudnn() -> tuple[type[CuDNN], ...]:
    """The cuDNN kernels that may be tried, the fastest first; without the extra `gpu`, only the one inside torch."""
    return (CuDNNWindows, CuDNN) if importlib.util.find_spec("cudnn") else (CuDNN,)


def _compared(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> Comparisons:
    """Compare a kernel with `Dense` on small tiles of every kind, forward and backward."""
    random = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, 1, 4, 24, head_dim, generator=random).to(device, dtype)
    k, v = torch.randn(2, 1, 2, 24, head_dim, generator=random).to(device, dtype)
    names = "output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values"
    tiles = (
        Tile(0, 24, 0, 24),
        Tile(0, 24, 0, 24, "causal"),
        Tile(8, 24, 1, 24, "band", 0, 8, distance=7),
        Tile(0, 24, 0, 24, "band", 0, 8),  # one that begins before the first key, and one without a beginning
        Tile(0, 16, 0, 24, "band", 0, 24, distance=8),
    )
    for tile in tiles:
        queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        work = Work(q[:, :, queries], k[:, :, keys], v[:, :, keys], tile, scale=0.1)
        merged = Merged(*Dense().forward(work), grad[:, :, queries])
        expected = (merged.out, merged.lse, *Dense().backward(work, merged))
        actual = (*kernel.forward(work), *kernel.backward(work, merged))
        for name, one, other in zip(names, actual, expected, strict=True):
            yield f"{name} of a {tile.kind} tile", one, other


objection = Trial("A kernel of tiles", _compared, tolerance=0.03)
"""The reason why a kernel is not used on a device for a dtype and a width, or an empty string."""
