"""What a scheme does to each pair of a query and a key, without a model: which distance rotates it, what is added."""

from __future__ import annotations

import math

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint, ModelShape
from rope_patch.typing import Weights


def rotated_distances(scheme: Scheme, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """phi_q(m) - phi_k(n) of the region that holds each pair; NaN where no region does, so that it is not attended.

    Args:
        scheme: with its defaults filled in, see `Scheme.resolve`. One without segments leaves m - n as it is.
        m, n: integer positions of queries and keys, broadcastable.

    Returns:
        float64, the broadcast shape of `m` and `n`.
    """
    if "segments" not in scheme.slots:
        return (m - n).double()
    distances = torch.full(torch.broadcast_shapes(m.shape, n.shape), math.nan, dtype=torch.float64)
    for region in scheme.segments():
        there = region.query_map(m).double() - region.key_map(n).double()
        distances = torch.where(region.contains(m, n), there, distances)
    return distances


def bias_matrices(
    scheme: Scheme, num_heads: int, length: int, weights: Weights | None = None, bidirectional: bool = False
) -> torch.Tensor:
    """b(m, n) of a scheme whose bias depends on the distance: float64, `(heads, length, length)`, rows are queries.

    Args:
        scheme: fills `bias` by distance, such as `ALiBi()`.
        num_heads: of the model.
        length: positions, from 0.
        weights: learned parameters by name; default as they start in an untrained model.
        bidirectional: whether keys after the query are seen; their pairs are NaN otherwise.

    Raises:
        InvalidField: the scheme has no such bias, or the weights are for another number of heads.
    """
    if "bias" not in scheme.methods:
        raise InvalidField(f"{scheme} fills {', '.join(sorted(scheme.slots))} and has no bias by distance, as alibi")
    resolved = scheme.resolve(Checkpoint(length, num_heads, length, bidirectional))
    if weights is None:
        shape = ModelShape(num_heads, 64, 64 * num_heads, 1, 1, length, 64)
        weights = resolved.parameters(shape, torch.Generator().manual_seed(0))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    bias = resolved.bias(distance, num_heads, weights).detach().double()
    if len(bias) != num_heads:
        raise InvalidField(f"num_heads={num_heads} is not allowed; the weights of {scheme} are for {len(bias)} heads")
    return bias if bidirectional else bias.masked_fill(distance < 0, math.nan)
