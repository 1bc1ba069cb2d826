"""Giraffe: the truncated basis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class TruncatedBasis(Scheme):
    """Pairs that complete a turn within t stay; slower ones get one common small frequency, the slowest none.

    The model meets no angle beyond t that it could not have met before, and no slow pair that it saw only part of.

    Args:
        cutoff_length: t in tokens, at least 1; about the training length.
    """

    name = "giraffe"
    equation = "theta if theta >= 2pi/t; 2pi/(16t) if theta >= 2pi/(8t); else 0"
    source = Source(
        "Giraffe: Adventures in Expanding Context Lengths in LLMs",
        2023,
        "https://arxiv.org/abs/2308.10882",
        "https://github.com/abacusai/Long-Context",
    )
    regime = "fine-tune"
    sweep = (Sweep("cutoff_length", "L", (1, 1 / 2)),)

    cutoff_length: int

    def __post_init__(self) -> None:
        self._at_least("cutoff_length", 1, int)

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        inv_freq = inverse_frequencies(rotary.dim, rotary.base)
        turn = 2 * math.pi / self.cutoff_length
        slow = torch.where(inv_freq >= turn / 8, torch.full_like(inv_freq, turn / 16), torch.zeros_like(inv_freq))
        return Frequencies(torch.where(inv_freq >= turn, inv_freq, slow))
