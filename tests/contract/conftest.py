"""Learned parameters start where they change little, often at zero, where every comparison would hold. Here they start
anywhere, as if they had been trained.
"""

from __future__ import annotations

import pytest
import torch

from rope_patch import parameters


class TrainedParameters(parameters.SchemeParameters):
    """Off their start, the same way for the same names and shapes."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__(values)
        with torch.no_grad():
            for name, value in values.items():
                random = torch.Generator().manual_seed(len(name))
                getattr(self, name).add_(0.3 * torch.randn(value.shape, generator=random).to(value))


@pytest.fixture(autouse=True)
def _trained_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "SchemeParameters", TrainedParameters)
