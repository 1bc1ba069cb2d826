"""Detection of frequencies of a checkpoint that a cast to half precision has rounded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rope_patch.attention.terms import HALF


class Rounding(NamedTuple):
    """The rounding of frequencies: the dtype, and the largest error in radians per token."""

    dtype: torch.dtype
    error: float


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype has too few digits for frequencies."""
    return dtype.itemsize < torch.float32.itemsize


def rounding_of(frequencies: torch.Tensor, declared: torch.Tensor | None) -> Rounding | None:
    """Compare `frequencies` with the ones that a config describes, both `(d/2,)`, and return how they were rounded;
    None if they were not. They may have been cast back to a wider dtype. Without `declared` frequencies, half a step of
    the dtype is the largest error.
    """
    half = is_half(frequencies.dtype)
    if declared is None or declared.shape != frequencies.shape:
        error = float(frequencies.abs().max()) * torch.finfo(frequencies.dtype).eps / 2
        return Rounding(frequencies.dtype, error) if half else None
    wide, declared = frequencies.float(), declared.to(frequencies.device, torch.float32)
    if torch.equal(wide, declared):
        return None
    for dtype in (frequencies.dtype,) if half else HALF:
        if half or torch.equal(wide, declared.to(dtype).float()):
            return Rounding(dtype, float((wide - declared).abs().max()))
    return None


def rounding_sentence(rounding: Rounding, length: int, scheme: str) -> str:
    """A sentence, without a full stop, about rounded frequencies that a scheme keeps, with the error at position
    `length`.
    """
    name = str(rounding.dtype).removeprefix("torch.")
    return (
        f"a cast has rounded the model's own frequencies to {name}, so its angles are wrong by up to "
        f"{rounding.error * length:.2g} rad at position {length:,}, and {scheme} keeps them: load the model with "
        f"from_pretrained(..., dtype=torch.{name}), which keeps them in float32, instead of .to(torch.{name})"
    )
