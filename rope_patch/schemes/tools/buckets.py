"""Buckets of distances: each near distance has its own bucket, farther ones share logarithmic buckets."""

from __future__ import annotations

import math

import torch


def relative_buckets(
    relative_position: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """Map the distance n - m to its bucket, an integer below `num_buckets`.

    Half of the buckets of a direction hold single distances, the other half hold distances up to `max_distance` at
    equal steps of the logarithm; the last one also holds all farther distances. The order of operations matches
    Transformers, so that bucket edges fall on the same distances.

    Args:
        relative_position: n - m, integer, of any shape.
        bidirectional: give each direction half of the buckets; otherwise keys after the query fall into the first
            bucket.
        num_buckets: number of buckets of both directions together.
        max_distance: distance in tokens from which all distances share the last bucket.

    Source:
        T5, 1910.10683, section 2.1, and the authors' code (mesh_tensorflow).
    """
    if bidirectional:
        num_buckets //= 2
        later = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        later = torch.zeros_like(relative_position, dtype=torch.long)
        distance = -relative_position.clamp(max=0)
    exact = num_buckets // 2
    steps = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    # `torch.where` below drops the logarithm of zero
    shared = (exact + steps.clamp(min=0).long()).clamp(max=num_buckets - 1)
    return later + torch.where(distance < exact, distance, shared)


def signed_log_buckets(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Map the distance m - n to its signed bucket: the distance itself up to half of the buckets, a logarithmic step
    beyond.

    Bucket `num_buckets - 1` ends at the distance `max_distance - 1`. Farther distances get higher buckets; the caller
    clips them. The order of operations matches the released code, so that edges fall on the same distances.

    Args:
        distance: m - n, integer, of any shape.
        num_buckets: number of buckets of one direction.
        max_distance: the distance in tokens after which the caller clips, above half of `num_buckets`.

    Source:
        DeBERTaV3, 2111.09543, and the authors' code (`make_log_bucket_position`).
    """
    single = num_buckets // 2
    size = distance.abs().clamp(min=single)
    steps = (size / single).log() / torch.log(torch.tensor((max_distance - 1) / single)) * (single - 1)
    shared = (steps.ceil().long() + single) * distance.sign()
    return torch.where(distance.abs() <= single, distance, shared)
