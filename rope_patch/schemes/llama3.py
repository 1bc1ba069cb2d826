"""The frequency scaling of Llama 3.1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import factor_for
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class Llama3Scaling(Scheme):
    """Keep pairs with short wavelengths, divide those with long ones by k, and blend linearly in between.

    Args:
        factor: k, at least 1; with a `target` of l tokens, l / L. Llama 3.1 (8) and Llama 3.2 (32) both reach 16 L.
        low_freq_factor: frequencies of wavelengths above L / low_freq_factor are divided by k; 1 in Llama 3.1.
        high_freq_factor: wavelengths below L / high_freq_factor stay; 4 in Llama 3.1; above low_freq_factor.
        original_max_position_embeddings: L in tokens; default from the checkpoint; 8192 in Llama 3.1.
    """

    name = "llama3"
    summary = "divides slow pairs by k, keeps fast ones, blends those between"
    title = "Llama 3"
    equation = "theta_i (s + (1 - s)/k), s = clamp((L theta_i / 2 pi - low) / (high - low), 0, 1)"
    source = Source("The Llama 3 Herd of Models", 2024, "https://arxiv.org/abs/2407.21783")
    regime = "fine-tune"
    rope_type = "llama3"
    sweep = (Sweep("factor", "target", (1, 2)),)

    factor: Annotated[float, AtLeast(1)]
    low_freq_factor: Annotated[float, Above(0)] = 1.0
    high_freq_factor: Annotated[float, Above(0)] = 4.0
    original_max_position_embeddings: Annotated[int, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise InvalidField(
                f"llama3: high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )

    fields_for = factor_for

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        low, high = self.low_freq_factor, self.high_freq_factor
        trained = self.original_max_position_embeddings or rotary.training_length
        inv_freq = inverse_frequencies(rotary.dim, rotary.base)
        wavelength = 2 * math.pi / inv_freq
        kept = (trained / wavelength - low) / (high - low)
        blended = (1 - kept) * inv_freq / self.factor + kept * inv_freq
        scaled = torch.where(wavelength > trained / low, inv_freq / self.factor, blended)
        return Frequencies(torch.where(wavelength < trained / high, inv_freq, scaled))
