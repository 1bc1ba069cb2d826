"""LM-Infinite: the first tokens and the last ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Region, Target
from rope_patch.schemes.tools.positions import Constant, Identity


@dataclass(frozen=True)
class LMInfinite(Scheme):
    """Attend to a local window and the first few tokens, which serve as attention sinks, and cap distances.

    Args:
        local_window: w in tokens, at least 1; with any `target`, L, the paper's limit on distances.
        n_global: number of tokens at the start that stay visible, at least 0.
    """

    name = "lm_infinite"
    summary = "attends a window and the first tokens"
    title = "LM-Infinite"
    equation = "attend n < n_global or m - n < w; distance = min(m - n, w)"
    source = Source(
        "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models",
        2023,
        "https://arxiv.org/abs/2308.16137",
        "https://github.com/Glaciohound/LM-Infinite",
    )
    causal_only = True
    sweep = (Sweep("local_window", "L", (1, 3 / 4, 1 / 2)),)

    local_window: Annotated[int, AtLeast(1)]
    n_global: Annotated[int, AtLeast(0)] = 10

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"local_window": target.training_length}

    @property
    def absolute(self) -> bool:  # type: ignore[override]
        return self.n_global > 0

    def segments(self) -> tuple[Region, ...]:
        w = self.local_window
        return (
            Region(Identity(), Identity(), start=1 - w, stop=w),
            Region(Constant(w), Constant(0), start=w, keys_below=self.n_global),
        )
