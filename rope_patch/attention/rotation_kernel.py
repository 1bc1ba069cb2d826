"""Rotate queries or keys for every region at once: on a GPU one Triton kernel reads them once and writes all rotations,
and one adds up their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rope_patch.attention.merging import compiles
from rope_patch.attention.rotation import Tables
from rope_patch.attention.trials import Comparisons, Trial

LARGE = 2**20
"""The number of entries of the queries from which on the kernel takes less time than starting the operators that it
replaces.
"""

TOKENS = 32
"""Tokens in a block of the kernel."""


def supports(query: torch.Tensor, key: torch.Tensor) -> str:
    """The reason why the kernel does not rotate the states of a call `(batch, heads or kv_heads, length, head_dim)`, or
    an empty string: there are many on a device for which Triton compiles, and the kernel equalled the definition when
    it was tried.
    """
    if query.numel() < LARGE:  # asked first: it costs the host nothing, and a token needs no more
        return f"queries have {query.numel():,} entries, and it is faster from {LARGE:,} on"
    if not compiles(query.device):
        return f"Triton does not compile for a {query.device.type}"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or query.dtype != key.dtype:
        return f"it does not take queries of {query.dtype} and keys of {key.dtype}"
    return objection(query.device, query.dtype)


def rotations(
    x: torch.Tensor, tables: Sequence[Tables | None], partner: torch.Tensor | None, first: int | torch.Tensor = 0
) -> list[torch.Tensor]:
    """Rotate states by each of the tables, R x = x cos + x[partner] sin, with gradients for the states.

    Args:
        x: `(batch, heads, length, head_dim)`.
        tables: cos and sin in shapes that expand to that of `x`, the sine with its sign; None leaves the states as they
            are. Equal tables are one object, and so is their result.
        partner: integer, `(head_dim,)`, its own inverse; None if no table rotates.
        first: the slot before which results may be left out, a number or in memory of the device.

    Returns:
        one tensor of the shape and dtype of `x` for each table.
    """
    distinct = {id(table): table for table in tables if table is not None}
    flat = [one for table in distinct.values() for one in table]
    if not distinct:
        return [x] * len(tables)
    if torch.is_grad_enabled():
        made = _Rotations.apply(dense(x), first, partner, *flat)
    else:
        made = launch([dense(x)] * len(distinct), list(distinct.values()), partner, first)
    rotated = {id(None): x, **dict(zip(distinct, made, strict=True))}
    return [rotated[id(table)] for table in tables]


class _Rotations(torch.autograd.Function):
    """Rotations of the same states, whose backward adds up the gradients that it rotates back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, first: int | torch.Tensor, partner: torch.Tensor, *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(partner, *flat)
        ctx.set_materialize_grads(False)
        tables = _in_pairs(flat)
        return tuple(launch([x] * len(tables), tables, partner, first))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        partner, *flat = ctx.saved_tensors
        given = [(grad, table) for grad, table in zip(grads, _in_pairs(flat), strict=True) if grad is not None]
        if not given:
            return (None,) * (3 + len(flat))
        states, tables = [grad for grad, _ in given], [table for _, table in given]
        if torch.is_grad_enabled():  # a second derivative is wanted
            of_x = _sum_back(states, tables, partner)
        else:
            (of_x,) = launch([dense(grad) for grad in states], tables, partner, back=True)
        return (of_x, None, None, *(None for _ in flat))


def _in_pairs(flat: Sequence[torch.Tensor]) -> list[Tables]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _sum_back(grads: Sequence[torch.Tensor], tables: Sequence[Tables], partner: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients, each multiplied by the transpose of its rotation, by operators that can be
    differentiated.
    """
    pairs = zip(grads, tables, strict=True)
    return torch.stack([grad * cos + (grad * sin)[..., partner] for grad, (cos, sin) in pairs]).sum(dim=0)


def launch(
    states: Sequence[torch.Tensor],
    tables: Sequence[Tables | None],
    partner: torch.Tensor | None,
    first: int | torch.Tensor = 0,
    back: bool = False,
) -> list[torch.Tensor]:
    """Launch the kernel on states of one shape, `(batch, heads, length, head_dim)`, without gradients.

    Args:
        states: those that each table rotates.
        tables: of each; None without rotation, which only `back` may have.
        partner: as in `rotations`.
        first: the slot before which results may be left out, a number or in memory of the device.
        back: whether to multiply by the transposes and add up.

    Returns:
        the rotated states, or with `back` their sum alone.
    """
    from rope_patch.attention import triton_kernels as kernels

    strided, (batch, heads, length, dim) = kernels.States.from_tensor, states[0].shape
    rotated = [torch.empty_like(x) for x in (states[:1] if back else states)]
    by = tuple(table and tuple(strided(dense(x).expand_as(states[0])) for x in table) for table in tables)
    places = tuple(map(strided, states)), tuple(map(strided, rotated)), by, partner, first, length
    with torch.cuda.device_of(states[0]):
        kernels.rotate[-(-length // TOKENS), heads, batch](*places, back, TOKENS, dim)
    return rotated


def dense(x: torch.Tensor) -> torch.Tensor:
    """Copy states `(..., dim)` whose vectors have gaps between their entries, which no kernel reads."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _compared(device: torch.device, dtype: torch.dtype) -> Comparisons:
    """Compare rotations by two tables, and their gradient, with the definition."""
    random, shape = torch.Generator().manual_seed(0), (2, 2, 40, 16)
    x, *grads = (torch.randn(shape, generator=random).to(device, dtype) for _ in range(3))
    angles = torch.rand(2, 1, 1, 40, 8, generator=random)
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    tables = list(zip(cos.to(device, dtype), sin.to(device, dtype), strict=True))
    partner = torch.arange(16, device=device).roll(8)
    for number, found in enumerate(launch([x, x], tables, partner)):
        by_cos, by_sin = (table.float() for table in tables[number])
        yield f"rotation {number}", found, x.float() * by_cos + x.float()[..., partner] * by_sin
    (found,) = launch(grads, tables, partner, back=True)
    wide = [(cos.float(), sin.float()) for cos, sin in tables]
    yield "gradient", found, _sum_back([grad.float() for grad in grads], wide, partner)


objection = Trial("The Triton kernel that rotates states", _compared, tolerance=0.01)
"""The reason why the kernel is not used on a device for a dtype, or an empty string."""
