"""Small types that all packages share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Optional, TypeVar

import torch

Regime = Literal["training-free", "fine-tune", "from-scratch"]
"""The training that a pretrained checkpoint needs under a scheme."""

Slot = Literal["frequencies", "segments", "query_scale", "bias", "values", "embedding"]
"""A place in the one equation that a scheme can fill."""

PositionMap = Callable[["torch.Tensor"], "torch.Tensor"]
"""phi: a map from integer positions of any shape to the positions that rotate, of the same shape. A map with its own
rule for every rotated pair of dimensions declares `pairs`, their number d/2, and returns `(*shape, d/2)`, see
`PerPair`.
"""

Lengths = Optional["torch.Tensor"]
"""Length of each row in tokens, `(batch,)`, or of the document of each token, `(batch, length)`; None if nothing
depends on it."""

Weights = Mapping[str, "torch.Tensor"]
"""Learned parameters of a scheme by name."""

# the compiler of torch 2.11 breaks a graph at a `MappingProxyType` once any dict has changed
NO_WEIGHTS: Weights = {}


@dataclass(frozen=True)
class RotarySpec:
    """The facts about a checkpoint's rotary embedding that a frequency scheme needs.

    Attributes:
        dim: rotary dimension d; a checkpoint with partial rotary embeddings has d < head_dim.
        base: `rope_theta`, b in theta_i = b^(-2i/d).
        training_length: L, the training length of the checkpoint in tokens.
        rotating_pairs: number of leading pairs that rotate; the checkpoint does not rotate the others (`proportional`).
            None if all pairs rotate.
    """

    dim: int
    base: float
    training_length: int
    rotating_pairs: int | None = None


Data = TypeVar("Data", bound=type)


def equal_by_tensor(data: Data) -> Data:
    """Class decorator: two instances are equal if their tensors are the same objects and their other fields are equal.

    Tuples test `is` before `==`, and so did data classes until Python 3.13, which compares field by field. There `==`
    of two tensors is a tensor, whose truth value is an error.
    """
    values = operator.attrgetter(*(field.name for field in fields(data) if field.compare))

    def equal(self: Any, other: Any) -> bool:
        return (values(self),) == (values(other),) if type(other) is type(self) else NotImplemented

    data.__eq__ = equal  # type: ignore[method-assign, assignment]
    return data


@equal_by_tensor
@dataclass(frozen=True)
class Frequencies:
    """The frequencies f, and the factor on cos and sin.

    Attributes:
        inv_freq: radians per token, float32, `(d/2,)`; `(batch, d/2)` if they depend on the length of each row,
            `(batch, 1, length, d/2)` if they depend on the length of each document, and `(1, heads, d/2)` if each query
            head has its own.
        attention_scaling: factor on cos and sin of query and key, so scores get its square.
        decay: decay per token of distance, float32, `(d/2,)`: a pair's share of the score is multiplied by exp(-decay
            (m - n)).
    """

    inv_freq: torch.Tensor
    attention_scaling: float | torch.Tensor = 1.0
    decay: torch.Tensor | None = None
