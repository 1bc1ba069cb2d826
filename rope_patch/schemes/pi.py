"""Position interpolation."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class PositionInterpolation(Scheme):
    """Squeeze k L positions into the L that were trained: every angle has been seen, neighbours come k times closer.

    Args:
        factor: k, the target length over the training length, at least 1.
    """

    name = "pi"
    equation = "theta_i / k"
    source = Source(
        "Extending Context Window of Large Language Models via Positional Interpolation",
        2023,
        "https://arxiv.org/abs/2306.15595",
    )
    regime = "fine-tune"
    rope_type = "linear"
    sweep = (Sweep("factor", "k", (1,)),)

    factor: float

    def __post_init__(self) -> None:
        self._at_least("factor", 1, float)

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, rotary.base) / self.factor)
