"""Merge the attention of two parts of the keys by their log-sum-exp. On a GPU, one kernel merges large outputs and
reads and writes each once.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from rope_patch.attention.terms import upcast
from rope_patch.attention.trials import Comparisons, Trial

LARGE = 2**20
"""The size of an output from which on the kernel takes less time than starting the operators that it replaces."""


def summed(out: torch.Tensor) -> torch.Tensor:
    """The accumulator for `merge`, from the output of the first part of the keys, `(batch, heads, q_len, value_dim)`:
    in float32 or wider, or in half precision if it is large and on a GPU, where the kernel rounds once per part.
    """
    narrow = out.is_cuda and out.dtype in (torch.bfloat16, torch.float16) and out.numel() >= LARGE
    folds = narrow and compiles(out.device) and not objection(out.device, out.dtype, out.shape[-1])
    return out if folds else upcast(out)


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge another part of the keys into output and log-sum-exp, `(batch, heads, q_len, value_dim)` and
    `(batch, heads, q_len)`, in place.
    """
    if out.dtype in (torch.bfloat16, torch.float16):
        _fold(out, lse, part, part_lse)
        return
    out.lerp_(part.to(out.dtype), (part_lse - lse).sigmoid_()[..., None].to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


def compiles(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for this device, or interprets."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interprets) and importlib.util.find_spec("triton") is not None


def _compared(device: torch.device, dtype: torch.dtype, value_dim: int) -> Comparisons:
    """Compare the kernel with the operators that it replaces, on outputs of this dtype and width."""
    random = torch.Generator().manual_seed(0)
    out, part = (torch.randn(1, 2, 40, value_dim, generator=random).to(device, dtype) for _ in range(2))
    lse, part_lse = (torch.randn(1, 2, 40, generator=random).to(device) for _ in range(2))
    share, merged = (part_lse - lse).sigmoid()[..., None], lse.logaddexp(part_lse)
    expected = out.float().lerp(part.float(), share)
    _fold(out, lse, part, part_lse)
    yield "output", out, expected
    yield "log-sum-exp", lse, merged


objection = Trial("The Triton kernel that merges parts", _compared, tolerance=0.01)
"""The reason why the kernel is not used on a device for a dtype and a width, or an empty string."""

TOKENS = 32
"""Tokens in a block of the kernel."""


def _fold(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    from rope_patch.attention.triton_kernels import States, fold

    batch, heads, length, dim = out.shape
    with torch.cuda.device_of(out):
        fold[-(-length // TOKENS), heads, batch](
            *map(States.from_tensor, (out, lse, part, part_lse)), length, TOKENS, dim
        )
