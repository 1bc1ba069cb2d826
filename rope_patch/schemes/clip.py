"""CoPE's clipped RoPE: a soft end for the slow pairs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.typing import NO_WEIGHTS, Frequencies, RotarySpec, Weights


@dataclass(frozen=True)
class ClippedRoPE(Scheme):
    """Slow the last pairs along half a cosine: the first of them keeps its frequency, and the slowest pair stops.

    Pairs that never complete a turn within L meet unseen angles beyond it. A hard cut (`fope_cut`) leaves a step in the
    spectrum that oscillates in the scores; this has none. The paper fine-tunes with it.

    It clips the frequencies of the scheme listed with it, or of the checkpoint if it is listed alone.

    Args:
        pairs: n, how many pairs from the slowest on are clipped; default those whose wavelength is beyond L. The
            released code has 20 of 64.
    """

    name = "clip"
    summary = "slows the last pairs along a cosine until the slowest stops"
    title = "CoPE's clip"
    equation = "theta_i (1 + cos(pi j / (n - 1))) / 2 for j = 0 .. n - 1 among the last n pairs"
    source = Source(
        "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs",
        2026,
        "https://arxiv.org/abs/2602.05258",
        "https://github.com/hrlics/CoPE",
    )
    regime = "fine-tune"
    refines = True
    sweep = None  # needs training

    pairs: Annotated[int, AtLeast(1)] | None = None

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """Slow the last pairs of these frequencies; the arguments are those of `Scheme.refine`.

        Raises:
            InvalidField: the checkpoint has fewer pairs than `pairs`.
        """
        inv_freq = frequencies.inv_freq
        if self.pairs is not None and self.pairs > inv_freq.shape[-1]:
            raise InvalidField(
                f"clip: pairs={self.pairs} is not allowed; this checkpoint has {inv_freq.shape[-1]} pairs"
            )
        slow = (inv_freq < 2 * math.pi / rotary.training_length).sum(dim=-1, keepdim=True)
        n = slow if self.pairs is None else torch.full_like(slow, self.pairs)
        j = torch.arange(inv_freq.shape[-1], device=inv_freq.device) - (inv_freq.shape[-1] - n)
        share = (1 + torch.cos(math.pi * j.clamp(min=0).double() / (n - 1).clamp(min=1))) / 2
        return dataclasses.replace(frequencies, inv_freq=inv_freq * share.to(inv_freq.dtype))
