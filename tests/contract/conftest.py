"""Learned parameters start where they change little, often at zero, where every comparison would hold. Here they start
anywhere, as if they had been trained, and otherwise in each layer.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import nn

from rope_patch import parameters


@pytest.fixture(autouse=True)
def _trained_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = parameters._hold

    def hold_trained(module: nn.Module, values: dict[str, torch.Tensor], *others: Any) -> None:
        hold(module, values, *others)
        with torch.no_grad():
            for name, value in getattr(module, parameters.NAME).named_parameters():
                seed = zlib.crc32(f"{name} of layer {getattr(module, 'layer_idx', None)}".encode())
                value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)

    monkeypatch.setattr(parameters, "_hold", hold_trained)
