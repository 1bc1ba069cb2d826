"""Resonance RoPE: wavelengths are whole numbers of tokens."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rope_patch.schemes.base import Scheme, Source
from rope_patch.typing import NO_WEIGHTS, Frequencies, RotarySpec, Weights


@dataclass(frozen=True)
class Resonance(Scheme):
    """Round each wavelength, so that a pair completes a turn in a whole number of tokens.

    A pair with a fractional wavelength meets a new angle at every position, however long the text. With a whole
    wavelength of at most L tokens it repeats the same few angles, so a longer text brings no new angle. The paper
    fine-tunes with it: the fastest pair of RoPE turns in 6 tokens instead of 6.28, and so is soon out of phase.

    It rounds the frequencies of the scheme listed with it (the paper's "Resonance YaRN" is `yarn+resonance`), or of the
    checkpoint if it is listed alone. A frequency of 0 stays 0, and no wavelength becomes shorter than 1 token. A
    learned frequency is rounded when it is used, and receives the gradient of the rounded frequency.
    """

    name = "resonance"
    summary = "rounds wavelengths to whole numbers of tokens"
    equation = "theta_i <- 2 pi / round(2 pi / theta_i)"
    source = Source(
        "Resonance RoPE: Improving Context Length Generalization of Large Language Models",
        2024,
        "https://arxiv.org/abs/2403.00071",
        "https://github.com/sheryc/resonance_rope",
    )
    regime = "fine-tune"
    refines = True
    sweep = None  # rounds another scheme's frequencies; alone it extends nothing

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        inv_freq = frequencies.inv_freq.double()
        rounded = 2 * math.pi / (2 * math.pi / inv_freq).round().clamp(min=1)
        straight_through = inv_freq + (rounded - inv_freq).detach()
        return dataclasses.replace(frequencies, inv_freq=straight_through.to(frequencies.inv_freq.dtype))
