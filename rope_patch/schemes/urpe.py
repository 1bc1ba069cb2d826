"""Universal RPE: a learned number per distance multiplies the attention weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Checkpoint, ModelShape
from rope_patch.schemes.tools.buckets import relative_buckets
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class URPE(Scheme):
    """Multiply softmax(s) by c, a number per head and distance, without normalising the row again.

    Rows of a softmax sum to one with any bias, so in a text of equal tokens no bias by distance distinguishes
    positions. Rows of c softmax(s) need not sum to one, and the paper proves that Transformers with c approximate every
    continuous function of a sequence. It keeps the checkpoint's other positions. All factors start at one, which
    changes nothing.

    Args:
        max_distance: in tokens; all distances beyond it share a factor on either side. By default every distance within
            the training length has its own factor. With buckets, all distances from this one on share the last bucket,
            default 128.
        num_buckets: use T5's buckets, both directions together, instead of single distances. The paper's equation has
            single distances; the released code supports both and defaults to 64 buckets.
        per_layer: separate factors for each layer; by default all layers share them, as in the released code.
    """

    name = "urpe"
    summary = "multiplies attention weights by a learned factor per distance"
    equation = "c = table[clip(m-n), h], not renormalised"
    source = Source(
        "Your Transformer May Not be as Powerful as You Expect",
        2022,
        "https://arxiv.org/abs/2205.13401",
        "https://github.com/lsj2408/URPE",
    )
    regime = "fine-tune"
    shared = ("distance_factors",)
    sweep = None  # learned: there is nothing to measure before it is trained

    max_distance: Annotated[int, AtLeast(1)] | None = None
    num_buckets: Annotated[int, AtLeast(4)] | None = None
    per_layer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        single = (self.num_buckets or 0) // 4
        if self.max_distance is not None and self.max_distance <= single:
            raise InvalidField(
                f"urpe: max_distance={self.max_distance} is not allowed; {self.num_buckets} buckets hold single "
                f"distances up to {single}, and max_distance must lie beyond"
            )

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return dataclasses.replace(self, max_distance=self._farthest(checkpoint.training_length))

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        rows = self.num_buckets or 2 * self._farthest(shape.training_length) + 1
        return {"distance_factors": torch.ones(rows, shape.num_heads)}

    def weight_factor(self, distance: torch.Tensor, num_heads: int, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        table = weights["distance_factors"]
        if self.num_buckets:
            rows = relative_buckets(-distance, True, self.num_buckets, self._farthest())
        else:
            farthest = len(table) // 2
            rows = distance.clamp(-farthest, farthest) + farthest
        return table.to(torch.promote_types(table.dtype, torch.float32))[rows].movedim(-1, 0)

    def _farthest(self, training_length: int = 0) -> int:
        if self.max_distance is not None:
            return self.max_distance
        return max(128, self.num_buckets // 4 + 1) if self.num_buckets else max(1, training_length - 1)
