"""Fourier position embedding: of its two halves, the one that learns nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class FoPECut(Scheme):
    """Pairs that do not complete a turn within L tokens turn no more.

    Training showed only a part of their circle, so at longer distances they would meet angles that it never showed.
    Without rotation they compare content alone, which holds at every distance. FoPE's other half, a Fourier series in
    place of each pair, is not part of this.

    The paper trains with the cut. A model that was trained without it uses the slow pairs: on the embedded checkpoint
    the loss at L rises from 2.114 to 2.876 nats per token, and at 4L it falls from 5.091 to 4.268, far above 2.079 of
    attention cut at L (12 windows, protocol `last`).

    It cuts the frequencies of the scheme it is listed beside, of the checkpoint where it stands alone. A pair that this
    scheme has slowed is cut where it no longer completes a turn; the released code cuts before it interpolates by
    default, and has this order as an option.

    Args:
        training_length: L in tokens; default from the checkpoint.
    """

    name = "fope_cut"
    summary = "stops the pairs that never complete a turn within L"
    title = "FoPE's cut"
    equation = "theta_i <- theta_i if theta_i >= 2 pi / L, else 0"
    source = Source(
        "Fourier Position Embedding: Enhancing Attention's Periodic Extension for Length Generalization",
        2024,
        "https://arxiv.org/abs/2412.17739",
        "https://github.com/TsinghuaC3I/Fourier-Position-Embedding",
    )
    regime = "fine-tune"
    refines = True
    sweep = None  # made to be trained with

    training_length: int | None = None

    def __post_init__(self) -> None:
        self._at_least("training_length", 1, int, optional=True)

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return self.refine(Frequencies(inverse_frequencies(rotary.dim, rotary.base)), rotary, weights)

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        slowest = 2 * math.pi / (self.training_length or rotary.training_length)
        given = frequencies.inv_freq
        return dataclasses.replace(frequencies, inv_freq=torch.where(given < slowest, 0.0, given))
