"""Fourier position embedding: the half that learns nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.typing import NO_WEIGHTS, Frequencies, RotarySpec, Weights


@dataclass(frozen=True)
class FoPECut(Scheme):
    """Stop the rotation of pairs that do not complete a turn within L tokens.

    Training covered only a part of their circle, so longer distances would bring unseen angles. Without rotation these
    pairs compare content alone, which works at every distance. FoPE's other half, which replaces each pair by a Fourier
    series, is not included.

    The paper trains with the cut. A model trained without it uses the slow pairs: on the embedded checkpoint the loss
    at L rises from 2.114 to 2.876 nats per token, and at 4L it falls from 5.091 to 4.268, far above the 2.079 of
    the sliding window (12 windows, protocol `last`).

    It cuts the frequencies of the scheme listed with it, or of the checkpoint if it is listed alone. A pair that the
    other scheme slows is cut if it no longer completes a turn. By default the released code cuts before it
    interpolates; it offers the order used here as an option.

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
    sweep = None  # needs training

    training_length: Annotated[int, AtLeast(1)] | None = None

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        slowest = 2 * math.pi / (self.training_length or rotary.training_length)
        inv_freq = frequencies.inv_freq
        return dataclasses.replace(frequencies, inv_freq=torch.where(inv_freq < slowest, 0.0, inv_freq))
