"""NTK-RoPE-mixed: interpolation that grows smoothly from fast to slow pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import factor_for
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class NTKMixed(Scheme):
    """Slow every pair by its own factor, from almost 1 for the fastest to exactly k for the slowest.

    In a number system of mixed bases, the factors of all digits multiply to k. If they grow with a power of the index
    below 1, the fast pairs get a larger share than under one common base.

    Args:
        factor: k, at least 1; with a `target` of l tokens, l / L, as in the post.
        exponent: exponent of the index, above 0; 0.625 in the post, 0.75 in the released code.
    """

    name = "ntk_mixed"
    summary = "slows pairs more and more from the fastest to the slowest"
    title = "NTK-mixed"
    equation = "theta_i exp(-a (i+1)^exponent), a = ln k / (d/2)^exponent"
    source = Source(
        "Transformer upgrade 11: taking base-beta positions to the end",
        2023,
        "https://kexue.fm/archives/9706",
        "https://github.com/bojone/rerope",
    )
    sweep = (Sweep("factor", "target", (1, 2, 1.5)),)

    factor: Annotated[float, AtLeast(1)]
    exponent: Annotated[float, Above(0)] = 0.625

    fields_for = factor_for

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        pairs = rotary.dim // 2
        share = (torch.arange(1, pairs + 1).double() / pairs) ** self.exponent
        slowed = (-math.log(self.factor) * share).exp().float()
        return Frequencies(inverse_frequencies(rotary.dim, rotary.base) * slowed)
