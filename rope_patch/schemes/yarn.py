"""YaRN: interpolate the slow pairs, leave the fast ones, and sharpen the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.typing import Frequencies, RotarySpec


@dataclass(frozen=True)
class YaRN(Scheme):
    """NTK-by-parts with a temperature: pairs that turn often within L keep their frequency, pairs that never complete
    a turn are interpolated, a linear ramp leads from one to the other, and all scores grow with the log of k because
    a longer context spreads the softmax thinner.

    The paper's ramp is linear in the number of rotations; all released code, and this, is linear in the index of the
    dimension.

    Args:
        factor: k, at least 1.
        beta_fast: pairs with more rotations than this within L are kept, 32 by default.
        beta_slow: pairs with fewer rotations than this are interpolated, 1 by default.
        attention_factor: multiplies cos and sin; default 0.1 ln k + 1.
        truncate: round the ends of the ramp outwards to whole dimensions, True by default.
        mscale, mscale_all_dim: DeepSeek's form of the temperature,
            (0.1 mscale ln k + 1) / (0.1 mscale_all_dim ln k + 1), where both are given.
        original_max_position_embeddings: L in tokens; default from the checkpoint.
    """

    name = "yarn"
    equation = "theta_i/k r_i + theta_i (1 - r_i), r = ramp(low, high); t = 0.1 ln k + 1"
    source = Source(
        "YaRN: Efficient Context Window Extension of Large Language Models",
        2023,
        "https://arxiv.org/abs/2309.00071",
        "https://github.com/jquesnelle/yarn",
    )
    rope_type = "yarn"

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        self._at_least("factor", 1, float)
        self._above_zero("beta_slow")
        self._at_least("beta_fast", self.beta_slow, float)
        self._above_zero("attention_factor", optional=True)
        self._require("truncate", bool, True, "True or False")
        self._above_zero("mscale", optional=True)
        self._above_zero("mscale_all_dim", optional=True)
        self._at_least("original_max_position_embeddings", 1, int, optional=True)

    def frequencies(self, rotary: RotarySpec, length: torch.Tensor | None = None) -> Frequencies:
        wavelengths = rotary.base ** (torch.arange(0, rotary.dim, 2).float() / rotary.dim)
        keep = 1 - self._ramp(rotary)
        extrapolated, interpolated = 1.0 / wavelengths, 1.0 / (self.factor * wavelengths)
        inv_freq = interpolated * (1 - keep) + extrapolated * keep
        return Frequencies(inv_freq, self._attention_scaling())

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        trained = self.original_max_position_embeddings or rotary.training_length
        return {**super().rope_parameters(rotary), "original_max_position_embeddings": trained}

    def _ramp(self, rotary: RotarySpec) -> torch.Tensor:
        """0 for pairs that are kept, 1 for pairs that are interpolated, `(d/2,)`."""
        trained = self.original_max_position_embeddings or rotary.training_length

        def dimension(rotations: float) -> float:
            return rotary.dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        if low == high:
            high += 0.001  # a step instead of a division by zero
        return ((torch.arange(rotary.dim // 2).float() - low) / (high - low)).clamp(0, 1)

    def _attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0
