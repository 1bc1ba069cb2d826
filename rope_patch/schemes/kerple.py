"""KERPLE: learned distance kernels as biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above
from rope_patch.schemes.slots import ModelShape
from rope_patch.typing import NO_WEIGHTS, Weights

_FLOOR = 0.01  # the minimum of r1 and r2 in the authors' code


@dataclass(frozen=True)
class KERPLE(Scheme):
    """Penalise distance; each head learns the strength r1 and the shape r2 of its penalty.

    Both forms are conditionally positive definite: up to a constant, which softmax cancels, they are inner products of
    positions, so adding them concatenates positional features to queries and keys. The logarithm fades so slowly that
    far keys still count in longer texts; the power with r2 = 1 is ALiBi with learned slopes.

    Args:
        variant: `"log"`, the best in the paper, or `"power"`.
        initial_scale: multiplies the published start of r1, so that a pretrained model changes little; 1 is the
            published start, for training from scratch. Above 0.
        per_layer: separate r1 and r2 for each layer, as in the released code, or the same for all.

    As in the released code, r1 starts uniform in [0, 2] and r2 in [0, 1]; for the power the ranges are swapped. Neither
    falls below 0.01 (r1 below 0.01 `initial_scale`), and the power's r2 does not exceed 2. The released code clamps the
    parameters themselves; here the values are clamped when read, and gradients ignore the clamp.
    """

    name = "kerple"
    summary = "penalises distance by a learned logarithm or power"
    equation = "log: -r1_h log(1 + r2_h |m-n|); power: -r1_h |m-n|^r2_h"
    source = Source(
        "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
        2022,
        "https://arxiv.org/abs/2205.09921",
        "https://github.com/chijames/KERPLE",
    )
    regime = "from-scratch"
    shared = ("kernel_scale", "kernel_shape")

    variant: Literal["log", "power"] = "log"
    initial_scale: Annotated[float, Above(0)] = 0.01
    per_layer: bool = True

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        most_scale, most_shape = (2, 1) if self.variant == "log" else (1, 2)
        scale, curve = torch.rand(2, shape.num_heads, generator=random)
        return {"kernel_scale": scale * most_scale * self.initial_scale, "kernel_shape": curve * most_shape}

    def bias(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        scale, curve = (
            weights[name].view(-1, *[1] * distance.ndim).to(torch.promote_types(weights[name].dtype, torch.float32))
            for name in ("kernel_scale", "kernel_shape")
        )
        scale = _clamped(scale, _FLOOR * self.initial_scale)
        far = distance.abs().to(scale.dtype)
        if self.variant == "log":
            return -scale * (1 + _clamped(curve, _FLOOR) * far).log()
        return -scale * far ** _clamped(curve, _FLOOR, 2.0)


def _clamped(x: torch.Tensor, least: float, most: float | None = None) -> torch.Tensor:
    """Clamp x, but pass the gradient through unclamped, so that a parameter can leave a bound again."""
    return x + (x.clamp(least, most) - x).detach()
