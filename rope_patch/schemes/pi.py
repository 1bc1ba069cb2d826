"""Position interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import factor_for
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class PositionInterpolation(Scheme):
    """Squeeze k L positions into the L trained ones: no angle is new, but neighbours are k times closer.

    Args:
        factor: k, the target length over the training length, at least 1; with a `target` of l tokens, l / L, as in
            the paper (equation 4).
    """

    name = "pi"
    summary = "squeezes all positions into the trained range"
    title = "PI"
    equation = "theta_i / k"
    source = Source(
        "Extending Context Window of Large Language Models via Positional Interpolation",
        2023,
        "https://arxiv.org/abs/2306.15595",
    )
    aliases = ("linear_scaling", "superhot")
    regime = "fine-tune"
    rope_type = "linear"
    sweep = (Sweep("factor", "target", (1,)),)

    factor: Annotated[float, AtLeast(1)]

    fields_for = factor_for

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return Frequencies(inverse_frequencies(rotary.dim, rotary.base) / self.factor)
