"""The relative positions of Shaw et al.: a vector per clipped distance, added to keys and to values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import ModelShape, Pairs
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class ShawRelative(Scheme):
    """Add a learned vector per distance to the key, and another one to the value, of every pair of tokens.

    All distances beyond `max_distance` share a vector: the model knows only that a token is far, and on which side, so
    it can read longer texts than it was trained on. Queries are multiplied by the table, and attention weights are
    summed by distance before they meet the values, so no pair needs its own vector in memory. All vectors start at
    zero.

    Args:
        max_distance: k in tokens, 16 by default, as in the paper's base model.
        values: whether values get vectors too. In the paper's ablation keys alone work as well.
        shared_heads: share one table among all heads, as in the paper; False gives each head its own.
        per_layer: give each layer its own table, as in the paper; False shares one among all layers.
    """

    name = "shaw"
    summary = "learned vectors for each distance join keys and values"
    title = "Shaw"
    equation = "b = q . R^K_clip(n-m) * scaling; u = R^V_clip(n-m)"
    source = Source(
        "Self-Attention with Relative Position Representations",
        2018,
        "https://arxiv.org/abs/1803.02155",
        "https://github.com/tensorflow/tensor2tensor",
    )
    regime = "from-scratch"
    shared = ("key_table", "value_table")

    max_distance: Annotated[int, AtLeast(1)] = 16
    values: bool = True
    shared_heads: bool = True
    per_layer: bool = True

    @property
    def methods(self) -> frozenset[str]:
        return frozenset({"content_bias", "relative_values"} if self.values else {"content_bias"})

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        rows = [2 * self.max_distance + 1]
        if not self.shared_heads:
            rows = [shape.num_heads, *rows]
        tables = {"key_table": torch.zeros(*rows, shape.head_dim)}
        if self.values:
            tables["value_table"] = torch.zeros(*rows, shape.value_dim)
        return tables

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        table = weights["key_table"].to(pairs.scores.dtype)
        products = pairs.query.to(table.dtype) @ table.transpose(-1, -2)
        rows = self._rows(pairs.distance).expand(pairs.scores.shape)
        return products.gather(-1, rows) * pairs.scaling

    def relative_values(
        self, attention: torch.Tensor, distance: torch.Tensor, weights: Weights = NO_WEIGHTS
    ) -> torch.Tensor:
        table = weights["value_table"].to(attention.dtype)
        rows = self._rows(distance).expand(attention.shape)
        by_row = attention.new_zeros(*attention.shape[:-1], table.shape[-2]).scatter_add(-1, rows, attention)
        return by_row @ table

    def _rows(self, distance: torch.Tensor) -> torch.Tensor:
        """Rows of the tables, from the farthest earlier key to the farthest later one, with a head axis."""
        return ((-distance).clamp(-self.max_distance, self.max_distance) + self.max_distance)[:, None]
