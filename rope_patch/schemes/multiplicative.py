"""Multiplicative positions: a learned vector that the token is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.slots import ModelShape, Target, Tokens
from rope_patch.schemes.tools.tables import rows_at
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Multiplicative(Scheme):
    """Each dimension of the token at position m is multiplied by that dimension of row m of a table.

    A sum x_m + p_m keeps the word and the place apart until the first projection; a product makes the place change
    what the word says, and leaves a word of zeros without a place. The rows start as ones, so nothing changes before
    they are trained. Past the last row there is nothing.

    The post proposes the product beside the sum, without a start or an experiment of its own: the start is ours.

    Args:
        num_positions: rows of the table; default L, with a `target` as many as that, at least L.
    """

    name = "multiplicative"
    summary = "multiplies each token by a learned vector of its position"
    equation = "x_m * p_m"
    source = Source(
        "The position encodings of Transformers that researchers rack their brains over (in Chinese)",
        2021,
        "https://kexue.fm/archives/8130",
    )
    regime = "fine-tune"
    absolute = True
    shared = ("position_factors",)
    sweep = None  # learned: there is nothing to measure before it is trained

    num_positions: int | None = None

    def __post_init__(self) -> None:
        self._at_least("num_positions", 1, int, optional=True)

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"num_positions": max(target.tokens, target.training_length)}

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        return {"position_factors": torch.ones(self.num_positions or shape.training_length, shape.hidden_size)}

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x = tokens.states
        return (x * rows_at(weights["position_factors"], tokens.positions, self.name)).to(x.dtype)
