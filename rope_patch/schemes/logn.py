"""Log-n scaling of the query."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.slots import Checkpoint
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class LogN(Scheme):
    """Sharpen attention with the log of the context, so that its entropy does not grow with the number of keys.

    Args:
        training_length: L in tokens, at least 2; default from the checkpoint. Positions below L are left alone.
        clip: max(1, ln(m+1) / ln L) for use without training; without it ln(m+1) / ln L, the form to train with.
    """

    name = "logn"
    equation = "q_m max(1, ln(m + 1) / ln L)"
    source = Source(
        "Entropy invariance and scaled attention; Overcoming a Theoretical Limitation of Self-Attention",
        2021,
        "https://kexue.fm/archives/8823",
        "https://github.com/bojone/rerope",
    )
    absolute = True
    sweep = None  # joins the best schemes in the second round of every sweep

    training_length: int | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        self._at_least("training_length", 2, int, optional=True)
        self._require("clip", bool, True, "True or False")

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return self if self.training_length else dataclasses.replace(self, training_length=checkpoint.training_length)

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        if self.training_length is None:
            raise ValueError("logn: resolve() has to fill in the training length first")
        # pads may stand at negative positions; nobody attends from there
        scale = (positions.clamp(min=0).float() + 1).log() / math.log(self.training_length)
        return (scale.clamp(min=1.0) if self.clip else scale)[None]
