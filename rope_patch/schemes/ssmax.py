"""Scalable-Softmax: a learned query scale per head that grows with the log of the context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above
from rope_patch.schemes.slots import ModelShape
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class SSMax(Scheme):
    """Let each head of each layer learn how fast its attention sharpens as the context grows.

    With n = m + 1 visible keys, the softmax of s ln(n) z weights a key by n^(s z). So the largest weight need not
    vanish as keys are added, as it does under a plain softmax. Each packed document is counted from its own first
    token.

    Args:
        initial_scale: initial s, above 0; default one over the mean of ln n for n = 1 to L, which scales a trained
            model by 1 on average: 0.168 at L = 1024. Axolotl starts at 0.43 (figure 1 of the paper), OLMo-core at 1.
    """

    name = "ssmax"
    summary = "each head learns how fast attention sharpens as the text grows"
    equation = "q_m s_h ln(m + 1)"
    source = Source("Scalable-Softmax Is Superior for Attention", 2025, "https://arxiv.org/abs/2501.19399")
    regime = "fine-tune"
    absolute = True
    sweep = None  # learned: there is nothing to measure before it is trained
    causal_only = True  # m + 1 is the number of visible keys only if later keys are masked

    initial_scale: Annotated[float, Above(0)] | None = None

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        length = max(2, shape.training_length)
        mean_log = math.lgamma(length + 1) / length
        return {"scale": torch.full((shape.num_heads,), self.initial_scale or 1 / mean_log)}

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        scale = weights["scale"].to(torch.promote_types(weights["scale"].dtype, torch.float32))
        return scale.view(-1, *[1] * positions.ndim) * (positions + 1).to(scale.dtype).log()
