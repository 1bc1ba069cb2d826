"""Kernels for GPUs, written in Triton, an optional dependency."""

from __future__ import annotations

import importlib.util
import os

import torch


def compiles(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for this device, or interprets."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return importlib.util.find_spec("triton") is not None and (device.type == "cuda" or interprets)
