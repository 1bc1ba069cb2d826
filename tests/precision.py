"""How exact a way to run a model has to be in each dtype: as exact as its definition in that dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest error relative to the norm. The definition scores in float32 whatever the dtype; what is faster does not."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference relative to that of what is expected; the result has to be finite."""
    assert found.isfinite().all()
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def assert_near(
    found: torch.Tensor, defined: torch.Tensor, tolerance: float, exact: Callable[[], torch.Tensor] | None = None
) -> None:
    """The result of a fast path is near that of the definition in the same dtype.

    Args:
        found, defined: both, as one vector each.
        tolerance: the largest error relative to the norm.
        exact: computes the definition of the same weights in float64. Where the definition itself is farther from it
            than the tolerance, the result depends so much on the last digits of states that no path with other
            rounding can be nearer. Then the path may differ from the definition by as much as this from float64.
    """
    error = relative_error(found, defined)
    if error > tolerance and exact is not None:
        tolerance = max(tolerance, relative_error(defined, exact()))
    assert error <= tolerance, f"relative error {error:g}, allowed {tolerance:g}"


def in_one(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """All gradients as one vector, each of length one."""
    every = [gradient.double().flatten() for gradient in gradients.values()]
    return torch.cat([gradient / gradient.norm().clamp(min=1e-12) for gradient in every])
