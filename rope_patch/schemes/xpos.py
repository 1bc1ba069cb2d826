"""XPos: rotation with a decay, so that far scores fade instead of oscillating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class XPos(Scheme):
    """Shrink every pair's share of the score by zeta_i per `scale_base` tokens of distance, fast pairs most.

    Queries are scaled by zeta_i^(m / scale_base) and keys by zeta_i^(-n / scale_base). Both overflow or underflow in a
    long text, so both exponents count from the end of each block of queries, which changes no product. For the same
    reason, the released code counts from the middle of the text.

    Args:
        scale_base: tokens per factor of zeta_i, 512 by default; above 0.
        gamma: zeta_i = (2i/d + gamma) / (1 + gamma), 0.4 by default; above 0.
    """

    name = "xpos"
    summary = "a rotation whose scores fade with distance"
    equation = "RoPE, each pair times zeta_i^((m-n)/scale_base), zeta_i = (2i/d + gamma)/(1 + gamma)"
    source = Source(
        "A Length-Extrapolatable Transformer",
        2022,
        "https://arxiv.org/abs/2212.10554",
        "https://github.com/microsoft/torchscale",
    )
    regime = "from-scratch"
    decays = True
    causal_only = True

    scale_base: Annotated[float, Above(0)] = 512.0
    gamma: Annotated[float, Above(0)] = 0.4

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        zeta = (torch.arange(0, rotary.dim, 2).float() / rotary.dim + self.gamma) / (1 + self.gamma)
        return Frequencies(inverse_frequencies(rotary.dim, rotary.base), decay=-zeta.log() / self.scale_base)
