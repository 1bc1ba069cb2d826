"""Giraffe: the truncated basis, and power scaling."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import Target
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights

_PAPER = Source(
    "Giraffe: Adventures in Expanding Context Lengths in LLMs",
    2023,
    "https://arxiv.org/abs/2308.10882",
    "https://github.com/abacusai/Long-Context",
)


@dataclass(frozen=True)
class TruncatedBasis(Scheme):
    """Keep pairs that complete a turn within t, give slower ones one common small frequency, and stop the slowest.

    Beyond t the model then meets no unseen angle, and no slow pair of whose turn it saw only a part.

    Args:
        cutoff_length: t in tokens, at least 1, about the training length; with any `target`, L.
    """

    name = "giraffe"
    summary = "keeps fast pairs, gives slow ones one common frequency, stops the slowest"
    title = "Giraffe"
    equation = "theta if theta >= 2pi/t; 2pi/(16t) if theta >= 2pi/(8t); else 0"
    source = _PAPER
    regime = "fine-tune"
    sweep = (Sweep("cutoff_length", "L", (1, 1 / 2)),)

    cutoff_length: Annotated[int, AtLeast(1)]

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"cutoff_length": target.training_length}

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        inv_freq = inverse_frequencies(rotary.dim, rotary.base)
        cutoff = 2 * math.pi / self.cutoff_length
        slow = torch.where(inv_freq >= cutoff / 8, torch.full_like(inv_freq, cutoff / 16), torch.zeros_like(inv_freq))
        return Frequencies(torch.where(inv_freq >= cutoff, inv_freq, slow))


@dataclass(frozen=True)
class PowerScaling(Scheme):
    """Slow pairs the more, the slower they are: the fastest not at all, the slowest by (d/2)^k.

    It slows the frequencies of the scheme listed with it, or of the checkpoint if it is listed alone. The released code
    can also divide by a common factor first (`pi+giraffe_power`). The index counts from 0, as in that code; counted
    from 1, the last pair would stop.

    Args:
        power: k, above 0.
    """

    name = "giraffe_power"
    summary = "slows every pair by a power, slow pairs most"
    title = "Giraffe, power"
    equation = "theta_i <- theta_i (1 - 2i/d)^k"
    source = _PAPER
    regime = "fine-tune"
    refines = True
    sweep = None  # its authors chose the exponent by training

    power: Annotated[float, Above(0)]

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        inv_freq = frequencies.inv_freq
        share = 1 - torch.arange(0, rotary.dim, 2, device=inv_freq.device).float() / rotary.dim
        return dataclasses.replace(frequencies, inv_freq=inv_freq * share**self.power)
