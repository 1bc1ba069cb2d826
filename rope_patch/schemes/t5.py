"""The learned biases of T5."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Checkpoint, ModelShape, Target
from rope_patch.schemes.tools.buckets import relative_buckets
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class T5Bias(Scheme):
    """Add a learned number per head, for each bucket of n - m, to the scores.

    Near distances have a bucket each, farther ones share logarithmic buckets, and all beyond `max_distance` share the
    last one. So T5 meets no unknown distance in texts longer than its training length.

    Args:
        num_buckets: number of buckets; default as many as the checkpoint has.
        max_distance: distance in tokens from which all distances share the last bucket; default the checkpoint's. A
            larger value extends the logarithmic buckets and leaves single distances unchanged.
        bidirectional: use half of the buckets for keys after the query; default True if the model sees them.
        interpolation: k, at least 1. Buckets are those of (n - m) / k, truncated to an integer, so that distances k
            times as long fall into trained buckets. With a `target` of l tokens, l / L: position interpolation for
            buckets.
        per_layer: give each layer its own table, as in umT5; False shares one among all layers, as in T5.

    A checkpoint with such tables keeps them. In other checkpoints the tables start at zero.
    """

    name = "t5"
    summary = "a learned bias for each bucket of distances"
    title = "T5"
    equation = "table[bucket((n - m) / k), h]"
    source = Source(
        "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
        2019,
        "https://arxiv.org/abs/1910.10683",
        "https://github.com/google-research/text-to-text-transfer-transformer",
    )
    regime = "fine-tune"
    shared = ("relative_attention_bias",)
    sweep = None  # learned: there is nothing to measure before it is trained

    num_buckets: Annotated[int, AtLeast(4)] | None = None
    max_distance: Annotated[int, AtLeast(2)] | None = None
    bidirectional: bool | None = None
    interpolation: Annotated[float, AtLeast(1)] = 1.0
    per_layer: bool = False

    @classmethod
    def fields_for(cls, target: Target) -> dict[str, Any]:
        return {"interpolation": target.factor()}

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        own_buckets, own_distance = checkpoint.buckets or (32, 128)
        if checkpoint.buckets and self.num_buckets not in (None, own_buckets):
            raise InvalidField(
                f"t5: num_buckets={self.num_buckets} is not allowed; this checkpoint's table has {own_buckets} rows"
            )
        both = checkpoint.bidirectional if self.bidirectional is None else self.bidirectional
        buckets, farthest = self.num_buckets or own_buckets, self.max_distance or own_distance
        single = buckets // (4 if both else 2)
        if farthest <= single:
            raise InvalidField(
                f"t5: max_distance={farthest} is not allowed; {buckets} buckets hold single distances up to {single}, "
                "and max_distance must lie beyond"
            )
        return dataclasses.replace(self, num_buckets=buckets, max_distance=farthest, bidirectional=both)

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        return {"relative_attention_bias": torch.zeros(self.num_buckets or 32, shape.num_heads)}

    def bias(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        relative = -distance
        if self.interpolation != 1:
            relative = (relative / self.interpolation).trunc().long()
        buckets = relative_buckets(relative, bool(self.bidirectional), self.num_buckets or 32, self.max_distance or 128)
        table = weights["relative_attention_bias"]
        return table.to(torch.promote_types(table.dtype, torch.float32))[buckets].movedim(-1, 0)
