"""STRING: the best-trained positions replace the least-trained ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast, AtMost
from rope_patch.schemes.slots import Checkpoint, Region
from rope_patch.schemes.tools.positions import Identity, Interpolated
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class STRING(Scheme):
    """Keep true distances below S; from S on, restart distances at W.

    A text of L tokens has L - 1 pairs at distance 1 and one at distance L - 1, so a model learns long distances least,
    even those within its training length. Here the farthest S - W of them are never used. The scheme works within the
    trained length, on models that are already long; beyond 2 L - W tokens no S keeps all distances below L.

    Args:
        shift: S in tokens, at least 1; default a third of the checkpoint's maximum length. The authors suggest a
            quarter to two fifths.
        window: W in tokens, from 0 to S; W = S is RoPE. Default 128, or S / 2 if that is less. It separates the keys
            beyond S from the nearest ones; the authors suggest up to 512.
        attention_factor: its square multiplies the scores. 1 is the equation; the released code multiplies cos and sin
            by 0.1 ln 2 + 1.

    The released code decodes with this function, but its prefill counts the key at distance S twice, as S and as W.
    When the released vLLM decodes, far keys are whole cache blocks, so S is up to a block larger.
    """

    name = "string"
    summary = "replaces the rarest, longest trained distances by shorter ones"
    equation = "distance = m - n if m - n < S else m - n - S + W"
    source = Source(
        "Why Does the Effective Context Length of LLMs Fall Short?",
        2024,
        "https://arxiv.org/abs/2410.18745",
        "https://github.com/HKUNLP/STRING",
    )
    sweep = None  # works within the trained length; a sweep measures beyond it

    shift: Annotated[int, AtLeast(1)] | None = None
    window: Annotated[int, AtLeast(0), AtMost("shift")] | None = None
    attention_factor: Annotated[float, Above(0)] = 1.0

    @property
    def methods(self) -> frozenset[str]:
        return frozenset({"segments"} | ({"query_scale"} if self.attention_factor != 1 else set()))

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        shift = self.shift or max(1, checkpoint.max_length // 3)
        window = min(128, shift // 2) if self.window is None else self.window
        return dataclasses.replace(self, shift=shift, window=window)

    def segments(self) -> tuple[Region, ...]:
        if self.shift is None or self.window is None:
            raise ValueError("string: call resolve() first to fill in the shift")
        s, back = self.shift, self.shift - self.window
        # only queries move, so that the cache keeps keys in the model's own rotation
        return (
            Region(Identity(), Identity(), start=1 - s, stop=s),
            Region(Interpolated(1, shift=-back), Identity(), start=s),
            Region(Interpolated(1, shift=back), Identity(), stop=1 - s),
        )

    def query_scale(self, positions: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        return torch.full_like(positions, self.attention_factor**2, dtype=torch.float32)[None]
