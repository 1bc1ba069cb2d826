"""What a comparison is: two ways to do the same work at the same shape, and how they may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_SMALL = 640
"""Tokens that are enough to take the paths of long texts, and cost nothing."""
_NARROW = 32
"""Dimensions of a head that are enough for every kernel: most of a small model's time is its random weights."""


@dataclass(frozen=True)
class Shape:
    """Sizes of attention; the batch is always one row.

    Attributes:
        dtype: by name, as torch spells it.
    """

    length: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "float32"
    device: str = "cpu"

    def random(self, *sizes: int) -> torch.Tensor:
        """A tensor of normal numbers, in the dtype and on the device of this shape."""
        return torch.randn(*sizes, dtype=getattr(torch, self.dtype), device=self.device)

    def small(self) -> Shape:
        """The same at a length and a width that take no time."""
        kv_heads, head_dim = min(self.kv_heads, 2), min(self.head_dim, _NARROW)
        heads = kv_heads * (self.heads // self.kv_heads)
        length = min(self.length, _SMALL)
        return dataclasses.replace(self, length=length, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def __str__(self) -> str:
        grouped = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"{self.length} tokens, {self.heads}{grouped} heads of {self.head_dim}, {self.dtype}"


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Side:
    """One way to do the work, its inputs made.

    Attributes:
        run: what is timed; what it returns is thrown away.
        reset: puts its inputs back before every run, outside the timed part.
    """

    run: Callable[[], Any]
    reset: Callable[[], Any] = _nothing


Maker = Callable[[Shape], Side]
"""Makes the inputs of one way to do the work. It can be pickled, so that a fresh process can make them too."""


@dataclass(frozen=True)
class Comparison:
    """A row of the table that is still to be measured.

    Attributes:
        name: `group/scheme/…/length/dtype`, unique.
        work, yardstick_name: what is compared, without the shape.
        ours, yardstick: the two sides.
        target: largest allowed ratio of times; None where the ratio is for the record.
        memory_target: largest allowed ratio of peak extra memory; None where memory is not measured.
        shared: work that both sides do anyway, whose peak is taken off the peaks of both.
        flops: of one side, for rates; None where there is no meaningful count.
    """

    name: str
    work: str
    yardstick_name: str
    ours: Maker
    yardstick: Maker
    shape: Shape
    target: float | None = None
    memory_target: float | None = None
    shared: Maker | None = None
    flops: Callable[[Shape], float] | None = None

    def small(self) -> Comparison:
        """The same at a length and a width that take no time."""
        return dataclasses.replace(self, shape=self.shape.small())


@dataclass(frozen=True)
class Figure:
    """A row with a number of its own instead of a ratio: seconds or a count.

    Attributes:
        name, work, yardstick_name, shape, target: as of a `Comparison`; the target is the largest number.
        unit: of the number.
        read: the number, and that of the yardstick where there is one.
        rounds: how often to read it.
    """

    name: str
    work: str
    yardstick_name: str
    unit: str
    read: Callable[[Shape], tuple[float, float | None]]
    shape: Shape
    target: float
    rounds: int = 1
    memory_target: None = None

    def small(self) -> Figure:
        """The same at a width that takes no time, once."""
        heads = min(self.shape.heads, 4)
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, heads=heads, kv_heads=heads), rounds=1)
