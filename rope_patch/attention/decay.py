"""Rotations with a decay: queries grow and keys decay, counted from the end of each block of queries.

The score of a pair (m, n) is multiplied by exp(-decay (m - n)), dimension by dimension. Counted from one fixed
position, the factors exp(-decay m) and exp(decay n) overflow or underflow in a long text. Counted from the last query
of a block, a query's factor is at most exp(decay * rows), and a key's factor underflows only where it is negligible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch.schemes.tools.rotary import RotaryLayout

LARGEST_EXPONENT = 80.0  # reached only if positions skip by more than a block; its exp, and so the score, is finite


ROWS = 1024  # queries per block: small enough for float16, large enough that keys are scaled only a few times


@dataclass(frozen=True)
class Decay:
    """The decay of the pairs of one layer, at a `rate` per token of distance, `(d/2,)`."""

    layout: RotaryLayout
    rate: torch.Tensor

    def factor(self, exponent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The decay factor exp(rate * exponent) for each dimension of states `like` `(batch, heads, length, head_dim)`.

        Shape:
            exponent `(batch or 1, length)`, or with d/2 as an additional last axis if pairs differ; returns `(batch or
            1, 1, length, head_dim)`.
        """
        exponent = exponent if exponent.ndim == 3 else exponent[..., None]
        factor = (exponent * self.rate.to(like.device)).clamp(max=LARGEST_EXPONENT).exp()
        return self.layout.wide(factor[:, None].to(like.dtype), like.shape[-1])
