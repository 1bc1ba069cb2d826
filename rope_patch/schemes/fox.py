"""The Forgetting Transformer: each token decides how much of all earlier ones to forget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import ModelShape
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class FoX(Scheme):
    """Multiply a key's weight by all forget gates after it; each token and head has a gate between 0 and 1.

    The product of the gates from n + 1 to m is exp(c_m - c_n), where c is the running sum of their logarithms. It is a
    bias that depends on the text: a head remembers while its gates stay near 1, and drops the past at a token whose
    gate is near 0. With the same gate at every token it is ALiBi with slope 1 / `horizon`. The paper uses no rotation;
    list `RoPE()` as well to keep the checkpoint's.

    Args:
        horizon: tokens after which the initial gates reduce a weight by the factor e, at least 1; default the training
            length, within which a pretrained model loses no key. All heads start with it.
        initial_std: standard deviation of the initial gate weights; default 0, where their gradient is not zero.

    The released code starts with gate weights of normal(0, 0.02) and offsets of zero, so gates of 1/2; use
    `horizon=1.4427, initial_std=0.02` for training from scratch. Three parts of it are left out: gates that do not
    read the text, with horizons in geometric progression over the heads; the norms, output gates and shifts of its
    "Pro" block; and the pruning of forgotten keys.
    """

    name = "fox"
    summary = "every token decides how much of the past each head forgets"
    equation = "sum_(l=n+1..m) ln sigmoid(w_h . x_l + b_h)"
    source = Source(
        "Forgetting Transformer: Softmax Attention with a Forget Gate",
        2025,
        "https://arxiv.org/abs/2503.02130",
        "https://github.com/zhixuan-lin/forgetting-transformer",
    )
    regime = "from-scratch"  # without `RoPE()`, a checkpoint loses all positions it knows
    causal_only = True
    precise = ("gate_offset",)  # a long horizon depends on the last digits of a gate near 1

    horizon: Annotated[float, AtLeast(1)] | None = None
    initial_std: Annotated[float, AtLeast(0)] = 0.0

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        rate = 1 / (self.horizon or shape.training_length)
        # sigmoid(offset) = exp(-rate)
        offset = -rate - math.log(-math.expm1(-rate))
        return {
            "gate_weight": self.initial_std * torch.randn(shape.num_heads, shape.hidden_size, generator=random),
            "gate_offset": torch.full((shape.num_heads,), offset),
        }

    def running_bias(self, states: torch.Tensor, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        weight, offset = weights["gate_weight"], weights["gate_offset"]
        dtype = torch.promote_types(offset.dtype, torch.float32)
        gates = (states.to(dtype) @ weight.to(dtype).T).to(dtype) + offset.to(dtype)
        return torch.nn.functional.logsigmoid(gates)
