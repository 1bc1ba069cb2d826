"""Ways to score regions on a GPU: the Triton kernel and FlexAttention, to be compared with flash per region; single
kernels; and how far kernels and executors are from the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks import attention, models
from benchmarks.comparison import Shape, Side
from rope_patch.attention import engine
from rope_patch.attention.cudnn_kernels import CuDNN, CuDNNWindows
from rope_patch.attention.executors import flex as flex_executor
from rope_patch.attention.executors import fused
from rope_patch.attention.forward import Forward
from rope_patch.attention.pieces import Tile
from rope_patch.attention.problem import Problem
from rope_patch.attention.tile_kernels import Dense, FlashCPU, FlashCUDA, Kernel, Merged, Work
from rope_patch.attention.turner import Branch, Fused, Turner
from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.slots import ALL_PAIRS, Region


def flex(shape: Shape, scheme: str, backward: bool = False) -> Side:
    """FlexAttention for each region, merged by log-sum-exp."""
    inputs = attention.in_regions(shape, scheme, backward)
    masks = [block_mask(branch.region or ALL_PAIRS, shape) for branch in inputs.branches]
    one = torch.compile(flex_attention) if shape.device == "cuda" else flex_attention  # a CPU has no log-sum-exp then
    return attention.side(shape, lambda: by_flex(inputs, masks, one), attention.leaves(inputs), backward)


def by_flex(inputs: Problem, masks: Sequence[Any], one: Callable[..., Any]) -> torch.Tensor:
    """Output of `oracle.attend`, `(batch, heads, q_len, value_dim)`."""
    parts = [_in_region(inputs, branch, mask, one) for branch, mask in zip(inputs.branches, masks, strict=True)]
    shares = torch.stack([lse for _, lse in parts]).softmax(dim=0)[..., None]
    total = sum(share * out for share, (out, _) in zip(shares, parts, strict=True))
    return torch.as_tensor(total).to(inputs.value.dtype)


def _in_region(
    inputs: Problem, branch: Branch, mask: Any, one: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    states, grouped = (branch.query, branch.key, inputs.value), branch.query.shape[1] != branch.key.shape[1]
    options = {"block_mask": mask, "scale": inputs.scaling, "enable_gqa": grouped}
    out, extra = one(*states, **options, return_aux=AuxRequest(lse=True))
    return out, extra.lse


def block_mask(region: Region, shape: Shape) -> Any:
    """Which pairs of a causal text a region has."""
    first, end, below = (
        int(min(max(x, -shape.length), shape.length)) for x in (region.start, region.stop, region.keys_below)
    )

    def seen(_batch: Any, _head: Any, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        distance = m // region.chunk - n // region.chunk
        return (m >= n) & (distance >= first) & (distance < end) & (n < below)

    return create_block_mask(seen, None, None, shape.length, shape.length, device=shape.device)


def alibi(shape: Shape, executor: str, backward: bool = False) -> Side:
    """ALiBi by the executor `flex` or `fused`, as in the second layer of a forward: its mask and slopes are there."""
    query, key, value = states = [
        shape.random(1, heads, shape.length, shape.head_dim).requires_grad_(backward)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    positions, forward = torch.arange(shape.length, device=shape.device)[None], Forward()
    problem = Problem(
        branches=(),
        value=value,
        query_positions=positions,
        key_positions=positions,
        mask=None,
        causal=True,
        query_start=0,
        scaling=shape.head_dim**-0.5,
        bias=forward.bias(ALiBi(), query),
        query=query,
        key=key,
        turner=Turner(forward, positions, positions, (ALL_PAIRS,)),
    )
    attend = {"flex": flex_executor.attend, "fused": fused.attend}[executor]
    return attention.side(shape, lambda: attend(problem)[0], states, backward)


def kernel(shape: Shape, scheme: str, backward: bool = False) -> Side:
    """The Triton kernel, whose regions share their queries and keys here: reading others costs the same."""
    inputs = attention.in_regions(shape, scheme, backward)
    first, nothing = inputs.branches[0], (None,) * len(inputs.branches)
    regions = tuple(branch.region or ALL_PAIRS for branch in inputs.branches)
    call = Fused(first.query, first.key, regions, nothing, nothing)
    leaves = [inputs.value, first.query, first.key]
    return attention.side(shape, lambda: fused.launched(inputs, call), leaves, backward)


# --- a kernel alone ---

KERNELS: dict[str, Callable[[], Kernel]] = {
    "flash": FlashCUDA,
    "cudnn": partial(CuDNN, least=0, narrowest=0),
    "windows": partial(CuDNNWindows, least=0),
}
"""Kernels of tiles by name. A row of the catalogue times each, and one compares its values."""
REGIONS = ("near", "far")
"""The two parts of ReRoPE: a band, and all that is farther."""


def part(shape: Shape, kernel: str, region: str, backward: bool = False) -> Side:
    """One region of ReRoPE by one kernel, backward alone or forward alone; the window is an eighth of the length."""
    made, work = _kernel(shape, kernel), _work(shape, region)
    if not backward:
        return Side(lambda: made.forward(work))
    out, lse = made.forward(work)
    merged = Merged(out, lse, torch.randn_like(out))
    return Side(lambda: made.backward(work, merged))


def kernel_error(shape: Shape, kernel: str, region: str) -> tuple[float, None]:
    """The largest error of output, log-sum-exp and gradients, relative to the norm of what plain products give."""
    made, work, dense = _kernel(shape, kernel), _work(shape, region), Dense()
    merged = Merged(*dense.forward(work), torch.randn_like(work.q))
    expected = merged.out, merged.lse, *dense.backward(work, merged)
    return _largest((*made.forward(work), *made.backward(work, merged)), expected), None


def _kernel(shape: Shape, name: str) -> Kernel:
    return KERNELS[name]() if shape.device == "cuda" else FlashCPU()  # a CPU has one kernel alone


def _work(shape: Shape, region: str) -> Work:
    length, window = shape.length, shape.length // 8
    query, key, value = (
        shape.random(1, heads, length, shape.head_dim) for heads in (shape.heads, *2 * [shape.kv_heads])
    )
    if region == "near":
        return Work(query, key, value, Tile(0, length, 0, length, "band", 0, window), shape.head_dim**-0.5)
    tile = Tile(window, length, 0, length - window, "causal")
    key, value = key[:, :, : tile.k1], value[:, :, : tile.k1]
    return Work(query[:, :, window:], key, value, tile, shape.head_dim**-0.5)


# --- executors ---

_ONE_TOKEN = ("one_rotation", "one_call", "traced", "joined")
_NO_RIVALS = (*_ONE_TOKEN, "reference", "chunked", "graph", "decayed", "block", "products")
"""Executors that are the definition, or compute no prefill with gradients on a GPU."""
WITHOUT_BIAS = ("intervals",)
"""Executors whose kernels have no bias."""


def executors() -> list[str]:
    """The others of the table for a GPU, by name."""
    return [name for name in dict.fromkeys(row.executor.name for row in engine.TABLE["cuda"]) if name not in _NO_RIVALS]


def executor_error(shape: Shape, scheme: str, executor: str) -> tuple[float, None]:
    """The largest error of an attention module under a scheme, computed by an executor: of its output and the gradient
    of its input, relative to the norm of the definition's.
    """

    def found(executor: str) -> list[torch.Tensor]:
        every = [
            models.attention_module(shape, scheme, backward, executor=executor).run() for backward in (False, True)
        ]
        return [every[0], *every[1]]

    return _largest(found(executor), found("reference")), None


def _largest(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)
