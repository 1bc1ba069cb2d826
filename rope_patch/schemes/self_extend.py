"""Self-Extend: grouped positions for distant context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Region, Target, near_and_far
from rope_patch.schemes.tools.positions import Grouped


@dataclass(frozen=True)
class SelfExtend(Scheme):
    """Keep true positions within the window; beyond it G neighbours share one position.

    Far words need no exact position: floor(m/G) + W - floor(W/G) against floor(n/G) continues where the window ends
    and grows G times slower. The released code drops the shift while the whole input is shorter than W; this function
    is the same at every length.

    Args:
        group_size: G, at least 1; with a `target` of l tokens, the smallest with (L - W) G + W >= l, the paper's
            maximum length.
        window: W in tokens, at least 1; with a `target`, L/2 (2.024 nats at 4 L; L/4 has 2.037: docs/sweep.md).
        shift: `"floor"` is W - floor(W/G), as in the paper and the later code; `"fractional"` is W - W/G, as in the
            authors' patch for Transformers 4.38.
    """

    name = "self_extend"
    summary = "keeps near distances and counts far ones in groups"
    title = "Self-Extend"
    equation = "distance = m - n if m - n < W else floor(m/G) + W - floor(W/G) - floor(n/G)"
    source = Source(
        "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning",
        2024,
        "https://arxiv.org/abs/2401.01325",
        "https://github.com/datamllab/LongLM",
    )
    aliases = ("long_lm",)
    sweep = (
        Sweep("group_size", "target", (1, 1.5, 2), window=1 / 2),
        Sweep("group_size", "target", (1, 1.5, 2), window=1 / 4),
    )

    group_size: Annotated[int, AtLeast(1)]
    window: Annotated[int, AtLeast(1)]
    shift: Literal["floor", "fractional"] = "floor"

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"window": target.window, "group_size": math.ceil(target.factor(target.window))}

    def segments(self) -> tuple[Region, ...]:
        w, g = self.window, self.group_size
        shifted, plain = Grouped(g, shift=w - (w // g if self.shift == "floor" else w / g)), Grouped(g)
        return near_and_far(w, shifted, plain)
