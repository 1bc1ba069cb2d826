"""Attention cut at a window: the baseline that every extension has to beat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Checkpoint, Region, nothing_for
from rope_patch.schemes.tools.positions import Identity


@dataclass(frozen=True)
class SlidingWindow(Scheme):
    """Attend only to keys with m - n < w: no distance is out of range, and nothing beyond w is seen directly.

    Args:
        window: w in tokens, at least 1; default the training length, also with any `target`.
    """

    name = "window"
    summary = "attends the nearest L tokens only"
    title = "sliding window"
    equation = "attend only m - n < w"
    source = Source("Longformer: The Long-Document Transformer", 2020, "https://arxiv.org/abs/2004.05150")
    sweep = None  # the other reference

    window: Annotated[int, AtLeast(1)] | None = None

    fields_for = nothing_for

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return self if self.window else dataclasses.replace(self, window=checkpoint.training_length)

    def segments(self) -> tuple[Region, ...]:
        if self.window is None:
            raise ValueError("window: call resolve() first to fill in the training length")
        return (Region(Identity(), Identity(), start=1 - self.window, stop=self.window),)
