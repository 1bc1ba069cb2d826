"""Multiplicative positions: a learned vector multiplies the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import ModelShape, Tokens, rows_for
from rope_patch.schemes.tools.tables import rows_at
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Multiplicative(Scheme):
    """Multiply the token at position m by row m of a table, dimension by dimension.

    A sum x_m + p_m keeps word and position apart until the first projection. A product lets the position change the
    word's meaning, and gives a zero vector no position. The rows start at one, so nothing changes before training.
    Positions past the last row are an error.

    The post proposes the product as an alternative to the sum, without initial values or an experiment; the initial
    values are our choice.

    Args:
        num_positions: rows of the table; default L; with a `target`, as many as its tokens, but at least L.
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

    num_positions: Annotated[int, AtLeast(1)] | None = None

    fields_for = rows_for

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        return {"position_factors": torch.ones(self.num_positions or shape.training_length, shape.hidden_size)}

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x = tokens.states
        return (x * rows_at(weights["position_factors"], tokens.positions, self.name)).to(x.dtype)
