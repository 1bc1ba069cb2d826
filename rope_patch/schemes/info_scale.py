"""InfoScale: a query scale that keeps the entropy of attention over random vectors as the text grows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Checkpoint
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class InfoScale(Scheme):
    """Sharpen attention so that as much of it stays on the tokens that matter, however many others there are.

    The scale is about the square root of `logn`: for a large d it is sqrt(ln(m + 1) / ln L). The released code also
    scales texts shorter than L, by less than 1; here they are unchanged.

    Args:
        training_length: L in tokens, at least 2; default from the checkpoint.
        head_dim: d, at least 1; default the dimensions of a head that rotate.
    """

    name = "info_scale"
    summary = "sharpens attention as the text grows, by the root of log-n at most"
    title = "InfoScale"
    equation = "q_m max(1, sqrt((1 - (m + 1)^(-2/d)) / (1 - L^(-2/d))))"
    source = Source(
        "Information Entropy Invariance: Enhancing Length Extrapolation in Attention Mechanisms",
        2025,
        "https://arxiv.org/abs/2501.08570",
        "https://github.com/HT-NEKO/Information-Entropy-Invariance",
    )
    absolute = True
    sweep = None  # a sweep adds log-n, which is stronger

    training_length: Annotated[int, AtLeast(2)] | None = None
    head_dim: Annotated[int, AtLeast(1)] | None = None

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        pairs = checkpoint.pairs
        if self.head_dim is None and pairs is None:
            raise InvalidField("info_scale: this checkpoint does not rotate; set head_dim")
        trained, dim = self.training_length or checkpoint.training_length, self.head_dim or 2 * (pairs or 0)
        return dataclasses.replace(self, training_length=trained, head_dim=dim)

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        if self.training_length is None or self.head_dim is None:
            raise ValueError("info_scale: call resolve() first to fill in the training length")
        exponent = -2 / self.head_dim
        spread = -torch.expm1((positions + 1).float().log() * exponent)  # 1 - n^(-2/d), without its rounding
        trained = -math.expm1(math.log(self.training_length) * exponent)
        return (spread / trained).sqrt().clamp(min=1.0)[None]
