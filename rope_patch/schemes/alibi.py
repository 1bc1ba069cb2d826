"""ALiBi: a linear penalty on distance instead of position embeddings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField, counted
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import NumbersAboveZero
from rope_patch.schemes.slots import Checkpoint, ModelShape
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class ALiBi(Scheme):
    """Add -slope_h |m - n| to the scaled scores; each head has its own horizon.

    Args:
        slopes: one per head; default the published ones. For n heads, n a power of two, they are 2^(-8 i / n); other
            head counts take the slopes of the power below, then every second one of the power above.
        symmetric: apply the same penalty on both sides, for bidirectional models; default True for those only.
        learned: train the slopes, starting from the given or published ones; all layers share them. The paper tried
            this (section 3) and extrapolated less well, hence False by default. A trained slope may fall below zero;
            its head then prefers far keys.
    """

    name = "alibi"
    summary = "penalises distance in a straight line, each head by a slope of its own"
    equation = "-slope_h |m - n|"
    source = Source(
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        2021,
        "https://arxiv.org/abs/2108.12409",
        "https://github.com/ofirpress/attention_with_linear_biases",
    )
    regime = "from-scratch"
    linear = True
    shared = ("slopes",)

    slopes: Annotated[tuple[float, ...], NumbersAboveZero("head")] | None = None
    symmetric: bool = False
    learned: bool = False

    @property
    def learns(self) -> bool:
        return self.learned

    @property
    def causal_only(self) -> bool:  # type: ignore[override]
        return not self.symmetric

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        if self.slopes is not None and len(self.slopes) != checkpoint.num_heads:
            raise InvalidField(
                f"alibi: slopes has {counted(len(self.slopes), 'value')}; this checkpoint has "
                f"{counted(checkpoint.num_heads, 'head')}"
            )
        return dataclasses.replace(self, symmetric=self.symmetric or checkpoint.bidirectional)

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        return {"slopes": torch.tensor(self.slopes or alibi_slopes(shape.num_heads))} if self.learned else {}

    def bias(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        if self.learned:
            slopes = weights["slopes"].to(torch.promote_types(weights["slopes"].dtype, torch.float32))
        else:
            slopes = torch.tensor(self.slopes or alibi_slopes(num_heads), device=distance.device)
        return -slopes.view(-1, *[1] * distance.ndim) * distance.abs()


def alibi_slopes(num_heads: int) -> list[float]:
    """The published slopes for any number of heads (paper, section 3, and the authors' code for other counts)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]
