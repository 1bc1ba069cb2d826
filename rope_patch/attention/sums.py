"""Gradients as sums of what tiles contribute: nothing is filled with zeros, added or copied where one tile says all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rope_patch.attention.chunk_runs import in_one, in_place
from rope_patch.attention.pieces import Tile
from rope_patch.attention.terms import upcast

Run = tuple[slice, slice]
"""Rows of the batch, and slots of a tile in them."""


class Gradient:
    """The gradient of states `like`, `(batch, heads, length, dim)`, of which every part is written once."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self._all: torch.Tensor | None = None

    def all(self) -> torch.Tensor:
        """The gradient, in the shape and dtype of `like`: zeros where nothing was written."""
        if self._all is None:
            self._all = torch.zeros_like(self.like)
        return self._all

    def without(self, gaps: Sequence[slice]) -> torch.Tensor:
        """All of it before anything is written, when everything but the slots in `gaps` will be."""
        self._all = torch.empty_like(self.like)
        for gap in gaps:
            self._all[:, :, gap].zero_()
        return self._all

    def write(self, place: tuple[slice, ...], part: torch.Tensor) -> None:
        """Write a part, of any dtype; one that is all of the gradient becomes it."""
        if part.shape == self.like.shape:
            self._all = part.to(self.like.dtype)
        else:
            self.all()[place].copy_(part)


class Sum:
    """The contributions of tiles to a part of a gradient: at the `place` `(rows, heads, slots)`, whose first token is
    in slot `first`. If the tiles, by their `runs`, do not overlap, they are written directly; otherwise they are
    accumulated in float32, because half precision would lose small shares.
    """

    def __init__(self, into: Gradient, place: tuple[slice, ...], runs: Sequence[Run], first: int = 0) -> None:
        self._into, self._place, self._first, self._part = into, place, first, into.like[place]
        batch = len(self._part)
        self._runs = sorted((rows.indices(batch)[:2], run.start - first, run.stop - first) for rows, run in runs)
        self._disjoint = all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(self._runs))
        self._sum: torch.Tensor | None = None
        self._is_written = False

    def add(self, rows: slice, slots: slice, share: torch.Tensor, run: Tile | None = None) -> None:
        """The contribution of one tile, or of a `run` of them, which may be written to afterwards."""
        gaps = run is not None and run.has_gaps
        if run is not None and not gaps:
            share = in_one(share, run, len(self._part[rows]), slots.stop - slots.start, 0.0)
        if self._sum is None and share.shape == self._part.shape:  # the first one, and it is for every token
            self._sum = share if self._disjoint else upcast(share)
            return
        if self._sum is None:
            self._sum = self._begun()
        here = self._sum[rows, :, slots.start - self._first : slots.stop - self._first]
        if run is not None and gaps:
            share, here = in_place(share, here, run)
        if self._disjoint:
            here.copy_(share)
        else:
            here.add_(share)

    def close(self) -> None:
        """Write the sum into the gradient."""
        if self._sum is not None and not self._is_written:
            self._into.write(self._place, self._sum)

    def _begun(self) -> torch.Tensor:
        """The sum before the first tile: the part of the gradient itself, if no tile is rounded before it is added."""
        self._is_written = self._disjoint or upcast(self._part[:0]).dtype == self._part.dtype
        if not self._is_written:
            return torch.zeros_like(self._part, dtype=torch.float32)
        every_row = all(rows == (0, len(self._part)) for rows, *_ in self._runs)
        if self._disjoint and every_row and self._part.shape == self._into.like.shape:
            return self._into.without(self._gaps())
        return self._into.all()[self._place]

    def _gaps(self) -> list[slice]:
        """The slots between tiles that do not overlap, if each is in every row."""
        bounds = [0, *(bound for _, *run in self._runs for bound in run), self._part.shape[2]]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return [slice(start, stop) for start, stop in pairs if start < stop]
