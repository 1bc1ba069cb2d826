"""Memory that is returned uninitialised, filled with values that no result can hide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

ALLOCATIONS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
"""What returns it, where it is looked up."""


def fill(x: torch.Tensor) -> torch.Tensor:
    """The tensor, any shape, full of NaN, or of the largest number of its dtype."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(torch.nan)
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every allocation of `ALLOCATIONS` be filled, but within a graph that is compiled."""
    for owner, name in ALLOCATIONS:
        monkeypatch.setattr(owner, name, _filling(getattr(owner, name)))


def _filling(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        return x if torch.compiler.is_compiling() or x.requires_grad or x.is_meta else fill(x)

    return filled
