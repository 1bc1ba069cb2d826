"""Rotate states by tables, with minimal computation and memory for the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from rope_patch.graphs import traced
from rope_patch.schemes.tools.rotary import RotaryLayout

EVERY = slice(None)
Tables = tuple[torch.Tensor, torch.Tensor]
"""The tables of cosine and sine."""

Rotate = Callable[[torch.Tensor], torch.Tensor]
"""A function that rotates states `(batch, heads, length, head_dim)`."""


def rotate(layout: RotaryLayout, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate states as `layout.rotate_wide` does; unless the tables need gradients, backward rotates the gradient back
    and keeps no states.

    Shape:
        x `(batch, heads, length, head_dim)`, cos `(batch or 1, 1, length, head_dim)`, sin `(batch or 1, 1, length,
        d/2)`; returns that of x.
    """
    if traced():
        return layout.rotate_in_graph(x, cos, sin)
    learned = cos.requires_grad or sin.requires_grad
    if torch.is_grad_enabled() and x.requires_grad and not learned:
        return cast(torch.Tensor, _Rotation.apply(x, cos, sin, layout))
    return layout.rotate_wide(x, cos, sin)


@dataclass(frozen=True)
class Rotation:
    """A `rotate` with its tables, at the positions of queries, for an executor that rotates a few queries at a time.

    Shape:
        cos `(batch or 1, 1, q_len, head_dim)`, sin `(batch or 1, 1, q_len, d/2)`.
    """

    layout: RotaryLayout
    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate all queries, or the queries that `part` selected."""
        return rotate(self.layout, x, self.cos, self.sin)

    def part(self, rows: slice, queries: slice) -> Rotation:
        """Restrict the rotation to some rows of the batch and some of their queries."""
        cos, sin = (x[rows if len(x) > 1 else slice(None), :, queries] for x in (self.cos, self.sin))
        return Rotation(self.layout, cos, sin)

    def back(self) -> Rotation:
        """The inverse rotation, which gradients need."""
        return Rotation(self.layout, self.cos, -self.sin)


class _Rotation(torch.autograd.Function):
    """A rotation whose backward rotates the gradient back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return layout.rotate_wide(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(ctx.layout, grad, cos, -sin), None, None, None
