"""Dual chunk attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import AtLeast
from rope_patch.schemes.slots import Checkpoint, Region, nothing_for
from rope_patch.schemes.tools.positions import Constant, Periodic


@dataclass(frozen=True)
class DualChunkAttention(Scheme):
    """Keep the position of a key within its chunk; the query's position depends on how many chunks back it looks.

    The period is s = chunk_size - local_window, and r = m mod s. The query is at r for its own chunk, at
    min(r + s, chunk_size) for the previous one, so that neighbours across the border keep their distance, and at
    min(2s - 1, chunk_size) for all earlier ones. No distance exceeds the chunk size. The released code does this. In
    the paper (section 3, equations 3 to 6) the period is the chunk itself, s = chunk_size, and the window comes on top:
    with c = s + local_window the query is at min(r + s, c - 1) and at c - 1. Any `target` is reached without changes.

    Args:
        chunk_size: in tokens, at least 2; default three quarters of the training length.
        local_window: in tokens, at least 1, and below chunk_size in the released form; default an eighth of the
            training length, or in the paper's form the training length minus chunk_size.
        constants: `"released"` or `"paper"`.
    """

    name = "dca"
    summary = "reads in chunks, so that no distance exceeds those of training"
    title = "DCA"
    equation = "key n mod s; query r, min(r + s, c), min(2s - 1, c) for the same, the previous and earlier chunks"
    source = Source(
        "Training-Free Long-Context Scaling of Large Language Models",
        2024,
        "https://arxiv.org/abs/2402.17463",
        "https://github.com/HKUNLP/ChunkLlama",
    )
    absolute = True
    causal_only = True
    aliases = ("chunk_llama", "dual_chunk")
    sweep = (Sweep("chunk_size", "L", (3 / 4, 1 / 2, 7 / 8)),)

    chunk_size: Annotated[int, AtLeast(2)] | None = None
    local_window: Annotated[int, AtLeast(1)] | None = None
    constants: Literal["released", "paper"] = "released"

    def __post_init__(self) -> None:
        super().__post_init__()
        has_both = self.chunk_size is not None and self.local_window is not None
        if has_both and self.constants == "released" and self.local_window >= self.chunk_size:  # type: ignore[operator]
            raise InvalidField(f"dca: local_window={self.local_window} must be below chunk_size={self.chunk_size}")

    fields_for = nothing_for

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        trained = checkpoint.training_length
        chunk_size = self.chunk_size or max(2, 3 * trained // 4)
        window = trained - chunk_size if self.constants == "paper" else min(trained // 8, chunk_size - 1)
        local_window = self.local_window or max(1, window)
        return dataclasses.replace(self, chunk_size=chunk_size, local_window=local_window)

    def segments(self) -> tuple[Region, ...]:
        if self.chunk_size is None or self.local_window is None:
            raise ValueError("dca: call resolve() first to fill in the chunk size")
        if self.constants == "paper":
            s, most = self.chunk_size, self.chunk_size + self.local_window - 1
            farthest = most
        else:
            s, most = self.chunk_size - self.local_window, self.chunk_size
            farthest = min(2 * s - 1, most)
        key = Periodic(s)
        return (
            Region(Periodic(s), key, start=0, stop=1, chunk=s),
            Region(Periodic(s, shift=s, most=most), key, start=1, stop=2, chunk=s),
            Region(Constant(farthest), key, start=2, chunk=s),
        )
