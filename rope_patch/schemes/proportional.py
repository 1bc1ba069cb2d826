"""Proportional RoPE: only the fastest share of the pairs rotates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast, AtMost
from rope_patch.schemes.slots import factor_for
from rope_patch.schemes.tools.rotary import inverse_frequencies
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Weights


@dataclass(frozen=True)
class Proportional(Scheme):
    """Rotate the first share of the pairs by theta_i / k, and the rest not at all; the base is spread over all pairs.

    Args:
        partial_rotary_factor: the share of pairs that rotate, above 0 and at most 1.
        factor: k, at least 1; with a `target` of l tokens, l / L: position interpolation of the pairs that rotate.
    """

    name = "proportional"
    summary = "turns a share of the pairs and leaves the rest unrotated"
    equation = "theta_i / k for i < p d/2, else 0"
    source = Source(
        "`proportional` in Transformers (Gemma 4)",
        2026,
        "https://huggingface.co/docs/transformers/main/en/internal/rope_utils",
    )
    regime = "from-scratch"
    rope_type = "proportional"
    chooses_pairs = True

    partial_rotary_factor: Annotated[float, Above(0), AtMost(1)] = 1.0
    factor: Annotated[float, AtLeast(1)] = 1.0

    fields_for = factor_for

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        turning = int(self.partial_rotary_factor * rotary.dim // 2)
        inv_freq = inverse_frequencies(rotary.dim, rotary.base)
        inv_freq[turning:] = 0
        return Frequencies(inv_freq / self.factor)
