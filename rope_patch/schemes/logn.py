"""Log-n scaling of the query, including the forms that models of 2025 and 2026 were trained with."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import Checkpoint
from rope_patch.typing import NO_WEIGHTS, Weights

_FIELDS = {
    "clip": ("training_length", "clip", "power"),
    "llama4": ("scale", "floor"),
    "mistral": ("scale", "floor"),
    "inkling": ("scale", "floor"),
}
"""The fields of each form."""


@dataclass(frozen=True)
class LogN(Scheme):
    """Sharpen attention with the log of the context, so that its entropy does not grow with the number of keys.

    Args:
        training_length: L in tokens, at least 2; default from the checkpoint. Positions below L are unchanged.
        clip: use max(1, ln(m+1) / ln L), the form without training; False for ln(m+1) / ln L, the form to train with.
        form: `"clip"` is the form above. The others are the temperatures of released models: `"llama4"` grows in steps
            at m = n0 - 1, 2 n0 - 1, ...; `"mistral"` (Ministral 3, Mistral 4) at n0, 2 n0, ...; and `"inkling"` grows
            smoothly from n0. Llama 4 applies it only to its layers without rotation.
        power: p of the form above, above 0: (ln(m+1) / ln L)^p. Attention neither collapses nor becomes the mean of all
            values if its inverse temperature grows as ln n (p = 1; Chen et al. 2025, arXiv 2510.05554). 0.5 sharpens
            less, and 2 more.
        scale: a of the models' forms, above 0; default 0.1, their value.
        floor: n0 of the models' forms in tokens, at least 1; default the checkpoint's L. Llama 4 uses 8192.

    The models' formulas are those of Transformers 5.23.
    """

    name = "logn"
    summary = "sharpens attention as the text grows"
    title = "log-n"
    equation = (
        "q_m max(1, ln(m + 1) / ln L)^p; llama4: q_m (1 + a ln(1 + floor((m + 1) / n0))); "
        "mistral: q_m (1 + a ln(1 + floor(m / n0))); inkling: q_m (1 + a ln max(1, (m + 1) / n0))"
    )
    source = Source(
        "Entropy invariance and scaled attention; Overcoming a Theoretical Limitation of Self-Attention",
        2021,
        "https://kexue.fm/archives/8823",
        "https://github.com/bojone/rerope",
    )
    absolute = True
    aliases = ("logn_scaling", "logn_attention")
    sweep = None  # joins the best schemes in the second round of every sweep

    training_length: Annotated[int, AtLeast(2)] | None = None
    clip: bool = True
    form: Literal["clip", "llama4", "mistral", "inkling"] = "clip"
    scale: Annotated[float, Above(0)] | None = None
    floor: Annotated[int, AtLeast(1)] | None = None
    power: Annotated[float, Above(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "form" and field.name not in _FIELDS[self.form] and value != field.default:
                allowed = ", ".join(_FIELDS[self.form])
                raise InvalidField(f"logn: {field.name}={value!r} is not allowed; form={self.form!r} has {allowed}")

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        trained = checkpoint.training_length
        if self.form == "clip":
            return dataclasses.replace(self, training_length=self.training_length or trained)
        return dataclasses.replace(self, scale=self.scale or 0.1, floor=self.floor or trained)

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        count = positions + 1
        if self.training_length is not None:
            scale = count.float().log() / math.log(self.training_length)
            scale = scale.clamp(min=1.0) if self.clip else scale
            return (scale if self.power == 1 else scale**self.power)[None]
        if self.scale is None or self.floor is None:
            raise ValueError("logn: call resolve() first to fill in the training length")
        if self.form == "inkling":
            grown = (count.float() / self.floor).clamp(min=1.0).log()
        else:
            # integers: in float32 a position beyond 2^24 might fall on the wrong side of a step
            steps = (count if self.form == "llama4" else positions).div(self.floor, rounding_mode="floor")
            grown = steps.float().log1p()
        return (1 + self.scale * grown)[None]
