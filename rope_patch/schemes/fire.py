"""FIRE: a small network of the distance relative to the query's position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import ModelShape, Pairs
from rope_patch.typing import NO_WEIGHTS, Weights

_EPSILON = 1e-6  # keeps the quotient finite, as in the paper's listing


@dataclass(frozen=True)
class FIRE(Scheme):
    """Let a network learn the bias as a function of psi(m-n) / psi(max(m, threshold)), which lies between 0 and 1.

    Dividing by the query's own position keeps every distance within the trained range, however long the text. The
    logarithm in psi separates near distances, and the threshold preserves absolute distances in short texts. With
    suitable weights the bias equals that of T5, ALiBi or KERPLE.

    Args:
        width: width of the hidden layer, 32 by default.
        threshold: initial threshold of the normaliser in tokens, 512 by default. A learned number multiplies it.
        initial_scale: multiplies the initial last layer, so that a pretrained model changes little; 1 is the
            published start, for training from scratch. Above 0.
        per_layer: give each layer its own network; False shares one among all layers (the paper's FIRE-S).

    The initial c = 0.1, the 1e-6 in the quotient and the start of both layers, uniform in plus and minus sqrt(1 /
    inputs), come from the listing in the paper's appendix.
    """

    name = "fire"
    summary = "a small network turns the share of distance in position into a bias"
    equation = "f_h(psi(m-n) / psi(max(m, threshold))), psi(x) = log(1 + |c x|), f a network of two layers"
    source = Source(
        "Functional Interpolation for Relative Positions Improves Long Context Transformers",
        2023,
        "https://arxiv.org/abs/2310.04418",
    )
    regime = "from-scratch"
    shared = ("log_scale", "threshold_factor", "input_weight", "input_offset", "output_weight", "output_offset")
    absolute = True
    causal_only = True

    width: Annotated[int, AtLeast(1)] = 32
    threshold: Annotated[float, Above(0)] = 512.0
    initial_scale: Annotated[float, Above(0)] = 0.01
    per_layer: bool = True

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        def uniform(*size: int, inputs: int) -> torch.Tensor:
            return (2 * torch.rand(size, generator=random) - 1) / math.sqrt(inputs)

        return {
            "log_scale": torch.tensor([0.1]),
            "threshold_factor": torch.tensor([1.0]),
            "input_weight": uniform(self.width, inputs=1),
            "input_offset": uniform(self.width, inputs=1),
            "output_weight": self.initial_scale * uniform(shape.num_heads, self.width, inputs=self.width),
            "output_offset": self.initial_scale * uniform(shape.num_heads, inputs=self.width),
        }

    def content_bias(self, pairs: Pairs, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        learned = {name: weights[name].to(pairs.scores.dtype) for name in type(self).shared}

        def psi(x: torch.Tensor) -> torch.Tensor:
            return (learned["log_scale"] * x).abs().log1p()

        m, distance = (x.to(pairs.scores.dtype) for x in (pairs.m, pairs.distance))
        reach = torch.maximum(m, (learned["threshold_factor"] * self.threshold).abs())
        seen = psi(distance) / (psi(reach) + _EPSILON)
        hidden = (seen[..., None] * learned["input_weight"] + learned["input_offset"]).relu()
        return (hidden @ learned["output_weight"].T + learned["output_offset"]).movedim(-1, 1)
