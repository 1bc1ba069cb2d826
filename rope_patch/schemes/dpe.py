"""DPE: each group of pairs counts far tokens in its own steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import AtLeast, WholeNumbers
from rope_patch.schemes.slots import Checkpoint, Region, near_and_far
from rope_patch.schemes.tools.positions import Grouped, PerPair


@dataclass(frozen=True)
class DimensionWise(Scheme):
    """Group far positions as Self-Extend does, with a group size for each group of pairs, because pairs differ in the
    distances that they were trained on.

    The authors find the steps by a retrieval task for each group of pairs and model: [2, 8, 2, 8, 32, 32, 32, 4] for
    Llama-3-8B, [2, 16, 8, 8, 32, 8, 2, 4] for Qwen2.5-7B, both for 16 times their length. They apply the steps to every
    head, or to the 48 most influential dimensions of each head; this class applies them to every head. Equal steps give
    `self_extend`.

    Args:
        window: w in tokens, at least 1; 1,024 in the released configs.
        groups: tokens that share a position, at least 1, one number for each group of pairs, from the fastest to the
            slowest.
        sizes: number of pairs in each group; default equal groups.
        shift: `"fractional"` is w - w/s, as in the authors' prefill; `"floor"` is w - floor(w/s), as when they decode.
            They are equal if each s divides w.
    """

    name = "dpe"
    summary = "keeps near distances and counts far ones in steps that differ by pair"
    title = "DPE"
    equation = "distance of pair i = m - n if m - n < w else floor(m/s_i) - floor(n/s_i) + w - w/s_i"
    source = Source(
        "Effective Length Extrapolation via Dimension-Wise Positional Embeddings Manipulation",
        2025,
        "https://arxiv.org/abs/2504.18857",
        "https://github.com/LuLuLuyi/DPE",
    )
    sweep = None  # its authors search for a step per group of pairs, which no sweep does

    window: Annotated[int, AtLeast(1)]
    groups: Annotated[tuple[int, ...], WholeNumbers("group of pairs")]
    sizes: Annotated[tuple[int, ...], WholeNumbers("group of pairs")] | None = None
    shift: Literal["fractional", "floor"] = "fractional"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None and len(self.sizes) != len(self.groups):
            raise InvalidField(f"dpe: groups has {len(self.groups)} numbers, sizes {len(self.sizes)}")

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        pairs, number = checkpoint.pairs, len(self.groups)
        if pairs is None:
            raise InvalidField("dpe: this checkpoint does not rotate pairs of dimensions, or not as many in all layers")
        if self.sizes is None and pairs % number:
            raise InvalidField(f"dpe: {pairs} pairs cannot be shared equally by {number} groups; set sizes")
        sizes = self.sizes or (pairs // number,) * number
        if sum(sizes) != pairs:
            raise InvalidField(f"dpe: sizes={list(sizes)} add to {sum(sizes)}; this checkpoint has {pairs} pairs")
        return dataclasses.replace(self, sizes=sizes)

    def segments(self) -> tuple[Region, ...]:
        if self.sizes is None:
            raise ValueError("dpe: call resolve() first to fill in the sizes")
        w = self.window
        shifts = [w - (w / step if self.shift == "fractional" else w // step) for step in self.groups]
        moved = PerPair(tuple(map(Grouped, self.groups, shifts)), self.sizes)
        plain = PerPair(tuple(map(Grouped, self.groups)), self.sizes)
        return near_and_far(w, moved, plain)
