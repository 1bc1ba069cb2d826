"""The relative bias of Inkling: each token mixes its own profile of distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.slots import ModelShape, Pairs
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Inkling(Scheme):
    """The query's token chooses, head by head, how its scores depend on distance: a mixture of learned profiles.

    A layer learns `rank` profiles over the nearest `extent` distances; the state that enters attention is projected to
    `rank` numbers per head, which mix them. Farther keys get no bias, so no distance is new in a longer text where
    `extent` is below the training length; and nothing rotates. Products are made for `extent` distances per query and
    head and then picked out by distance, so no pair has a vector of its own.

    Args:
        extent: nearest distances that have a bias, in tokens; 1024 by default, as in Transformers' config.
        rank: number of profiles, 16 by default, likewise.
        scale: a, of the growth of scores with the position; 0.1 by default, likewise.
        floor: n0 in tokens: from there on scores and biases are multiplied by tau(m) = 1 + a ln((m+1) / n0). Default
            none, without tau, likewise.
        initial_scale: multiplies the profiles as they start, so that a pretrained model changes little; 1 is the
            published start, for training from scratch. Above 0.

    `r_proj` and `rel_logits_proj` have the shapes of the parameters that Transformers keeps under these names
    (`r_proj.weight`, `rel_logits_proj.proj`), and both start at normal(0, 0.02). Inkling gives its layers with a
    window an extent of that window and no tau; here all layers are alike. tau follows positions, where Transformers
    counts slots of the cache, pads included.
    """

    name = "inkling"
    summary = "the query's token mixes learned profiles of distance"
    equation = "b = tau(m) (W_h x_m) . P_(m-n) for m-n < extent, else 0; tau(m) = 1 + a ln max(1, (m+1)/n0)"
    source = Source(
        "Inkling, in Transformers",
        2026,
        "https://huggingface.co/thinkingmachines/Inkling",
        "https://github.com/huggingface/transformers",
    )
    regime = "from-scratch"  # without `RoPE()`, nothing is left of the positions that a checkpoint knows
    causal_only = True

    extent: int = 1024
    rank: int = 16
    scale: float = 0.1
    floor: int | None = None
    initial_scale: float = 0.01

    def __post_init__(self) -> None:
        self._at_least("extent", 1, int)
        self._at_least("rank", 1, int)
        self._at_least("scale", 0, float)
        self._at_least("floor", 1, int, optional=True)
        self._above_zero("initial_scale")

    @property
    def methods(self) -> frozenset[str]:
        return frozenset({"content_bias", "query_scale"} if self.floor else {"content_bias"})

    @property
    def absolute(self) -> bool:  # type: ignore[override]
        return self.floor is not None

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        width = shape.num_heads * self.rank
        return {
            "r_proj": 0.02 * torch.randn(width, shape.hidden_size, generator=random),
            "rel_logits_proj": 0.02 * self.initial_scale * torch.randn(self.rank, self.extent, generator=random),
        }

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        return self._tau(positions.float())[None]

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        if pairs.states is None:
            raise ValueError("inkling: a bias of states wants those of the queries in pairs.states")
        dtype, distance = pairs.scores.dtype, pairs.distance[:, None]
        projection, profiles = (weights[name].to(dtype) for name in ("r_proj", "rel_logits_proj"))
        mixture = (pairs.states.to(dtype) @ projection.T).unflatten(-1, (-1, self.rank)).transpose(1, 2)
        by_distance = mixture @ profiles
        if self.floor:
            by_distance = by_distance * self._tau(pairs.m.to(dtype))[:, None]
        rows = distance.clamp(0, self.extent - 1).expand(pairs.scores.shape)
        return by_distance.gather(-1, rows).masked_fill((distance < 0) | (distance >= self.extent), 0)

    def _tau(self, positions: torch.Tensor) -> torch.Tensor:
        return 1 + self.scale * ((positions + 1) / (self.floor or 1)).clamp(min=1).log()
