"""Contextual positions: a token counts only if the query attends to such tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Checkpoint, ModelShape, Pairs
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class CoPE(Scheme):
    """Measure distance as the sum of the gates from the key to the query, which need not be an integer.

    The score of a pair opens the gate of its key, so a head may count words or sentences rather than tokens. A position
    between two integers interpolates their vectors. The query is multiplied by the integer vectors first, so no pair
    needs its own vector in memory. Masked keys have closed gates. All vectors start at zero.

    Args:
        max_positions: vectors in each layer's table, shared by its heads; default one per token of the training
            length. Larger counts are clipped to the last vector; the paper's experiments need only a few.

    As in the listing of the paper's appendix, gates read the scaled scores and the product of query and vector is not
    scaled. With `RoPE()` listed as well, the gates read the rotated scores.
    """

    name = "cope"
    summary = "counts what matters between two tokens, such as words, instead of tokens"
    equation = "b = q . e[p], p = sum_(j=n..m) sigmoid(s(m,j))"
    source = Source(
        "Contextual Position Encoding: Learning to Count What's Important", 2024, "https://arxiv.org/abs/2405.18719"
    )
    regime = "from-scratch"
    causal_only = True

    max_positions: Annotated[int, AtLeast(2)] | None = None

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return dataclasses.replace(self, max_positions=self.max_positions or max(2, checkpoint.training_length))

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        return {"position_table": torch.zeros(self.max_positions or max(2, shape.training_length), shape.head_dim)}

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        table = weights["position_table"].to(pairs.scores.dtype)
        gates = torch.where(pairs.seen, pairs.scores.sigmoid(), 0)
        counted = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=len(table) - 1)
        below = counted.detach().floor().long()
        products = pairs.query.to(table.dtype) @ table.T
        low, high = products.gather(-1, below), products.gather(-1, (below + 1).clamp(max=len(table) - 1))
        return low + (counted - below) * (high - low)
