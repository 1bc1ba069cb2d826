"""ReRoPE and its leaky form: distances beyond the window stay within the trained range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Region, Target, near_and_far
from rope_patch.schemes.tools.positions import Constant, Interpolated

_POST = Source(
    "Transformer upgrade 12: ReRoPE, unlimited extrapolation?",
    2023,
    "https://kexue.fm/archives/9708",
    "https://github.com/bojone/rerope",
)


@dataclass(frozen=True)
class ReRoPE(Scheme):
    """Keep true positions within the window, and use one constant distance beyond: min(m - n, w).

    Near words keep their order; all far words get the same distance, which the model knows.

    Args:
        window: w in tokens, at least 1; a quarter to a half of the training length works best. With any `target`, L/2,
            the first value of a sweep (docs/sweep.md).
    """

    name = "rerope"
    summary = "keeps near distances and holds all far ones at the window's edge"
    equation = "distance = min(m - n, w)"
    source = _POST
    sweep = (Sweep("window", "L", (1 / 2, 3 / 8, 5 / 8, 1 / 4)),)

    window: Annotated[int, AtLeast(1)]

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"window": target.window}

    def segments(self) -> tuple[Region, ...]:
        return near_and_far(self.window, Constant(self.window), Constant(0))


@dataclass(frozen=True)
class LeakyReRoPE(Scheme):
    """Keep true positions within the window; beyond it distances grow k times slower: w + (m - n - w) / k.

    Args:
        window: w in tokens, at least 1; with a `target`, L/2.
        factor: k, at least 1, large enough to keep the longest distance within the training length. With a `target` of
            l tokens, (l - w) / (L - w), the smallest such k; a sweep tries twice as much first.
    """

    name = "leaky_rerope"
    summary = "keeps near distances and lets far ones grow k times slower"
    title = "Leaky ReRoPE"
    equation = "distance = m - n if m - n < w else w + (m - n - w) / k"
    source = _POST
    sweep = (Sweep("factor", "target", (2, 1, 4), window=1 / 2),)

    window: Annotated[int, AtLeast(1)]
    factor: Annotated[float, AtLeast(1)]

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"window": target.window, "factor": target.factor(target.window)}

    def segments(self) -> tuple[Region, ...]:
        w, k = self.window, self.factor
        shifted, plain = Interpolated(k, shift=w - w / k), Interpolated(k)
        return near_and_far(w, shifted, plain)
