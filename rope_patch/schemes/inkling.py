"""The relative bias of Inkling: each token mixes its own profile of distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import ModelShape, Pairs
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Inkling(Scheme):
    """Let each query token choose, per head, how its scores depend on distance: by a mixture of learned profiles.

    A layer learns `rank` profiles over the nearest `extent` distances. The state that enters attention is projected to
    `rank` mixing weights per head. Farther keys get no bias, so a longer text brings no new distance if `extent` is
    below the training length. Nothing rotates. Products are computed for `extent` distances per query and head and then
    gathered by distance, so no pair needs its own vector.

    Args:
        extent: number of nearest distances with a bias, in tokens; 1024 by default, as in Transformers' config.
        rank: number of profiles; 16 by default, likewise.
        scale: a, the growth of scores with the position; 0.1 by default, likewise.
        floor: n0 in tokens. From there on scores and biases are multiplied by tau(m) = 1 + a ln((m+1) / n0). Default
            None, without tau, likewise.
        initial_scale: multiplies the initial profiles, so that a pretrained model changes little; 1 is the published
            start, for training from scratch. Above 0.

    `r_proj` and `rel_logits_proj` have the shapes of Transformers' parameters `r_proj.weight` and
    `rel_logits_proj.proj`, and both start at normal(0, 0.02). In Inkling, layers with a window have an extent of that
    window and no tau; here all layers are alike. tau uses positions; Transformers counts cache slots, pads included.
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
    regime = "from-scratch"  # without `RoPE()`, a checkpoint loses all positions it knows
    causal_only = True

    extent: Annotated[int, AtLeast(1)] = 1024
    rank: Annotated[int, AtLeast(1)] = 16
    scale: Annotated[float, AtLeast(0)] = 0.1
    floor: Annotated[int, AtLeast(1)] | None = None
    initial_scale: Annotated[float, Above(0)] = 0.01

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
            raise ValueError("inkling: pairs.states is missing; the bias is computed from the queries' states")
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
