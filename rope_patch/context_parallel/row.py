"""A row that several processes share, as every layer of a forward sees it.

The mask of a forward is replaced by a `RowMask`, which describes the whole row: which tokens other processes hold,
their positions, and which tokens see each other. It reaches every attention function, also when checkpointing calls a
block again.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Literal

import torch

from rope_patch.attention.forward import Forward
from rope_patch.attention.masks import groups_as_mask
from rope_patch.context_parallel.sharding import Sharding
from rope_patch.mounting.forward_call import ForwardCall

Backend = Literal["gather", "ulysses"]
"""The exchange between processes in a layer: `gather` all keys and values, or divide heads."""


@dataclass(eq=False)
class Row:
    """A row, or a batch of rows, that processes share.

    Attributes:
        positions: positions of all tokens, `(batch or 1, length)`.
        groups: segment ids of all tokens, see `Visibility`, `(batch or 1, length)`.
        lengths: tokens of each row, without pads, `(batch or 1,)`.
        scattered: whether the distance of two tokens of a segment may differ from the distance of their slots.
        forward: the `Forward` of the layers without a scheme.
    """

    sharding: Sharding
    backend: Backend
    positions: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    scattered: bool
    forward: Forward = field(default_factory=Forward)

    def runs(self, forward: Forward) -> list[Run]:
        """The runs of queries that this process scores, computed once for the layers of a `forward`."""
        return forward.shared(_runs)(self)


def _runs(row: Row) -> list[Run]:
    slots = [slice(0, row.sharding.length)]
    if row.backend == "gather":
        slots = list(row.sharding.runs(row.sharding.rank))
    stops = itertools.accumulate(each.stop - each.start for each in slots)
    return [
        Run(row, slice(stop - (each.stop - each.start), stop), each) for each, stop in zip(slots, stops, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Run:
    """A run of consecutive queries of a row.

    Attributes:
        queries: the run's range among the queries of this process.
        slots: slots of the run in the row.
        forward: the data that the layers share for this run.
    """

    row: Row
    queries: slice
    slots: slice
    forward: Forward = field(default_factory=Forward)

    def keys(self, causal: bool, window: int | None) -> slice:
        """The slots of the keys that some query may see."""
        if not causal:
            return slice(0, self.row.sharding.length)
        return slice(0 if window is None else max(0, self.slots.start - window + 1), self.slots.stop)

    def mask(self, keys: slice, causal: bool, window: int | None) -> torch.Tensor:
        """Segment ids of these slots of `keys` in the form of a mask; under a window, or for one query, a mask with one
        number for each pair, `(batch or 1, 1, q_len, kv_len)`.
        """
        groups, slots, place = self.row.groups, (self.slots.start, self.slots.stop), (keys.start, keys.stop)
        if window is None and self.slots.stop - self.slots.start > 1:
            return self.forward.shared(_groups_as_mask)(groups, place)
        return self.forward.shared(_seen)(groups, slots, place, causal, window)

    def of_call(self, call: ForwardCall, keys: slice, heads: slice | None, added: torch.Tensor | None) -> ForwardCall:
        """Restrict a call to these queries and `keys`; `added` is as in `ForwardCall`, for the whole row, `(batch,
        length, heads)`.
        """
        positions, part = self.row.positions, self.forward.shared(_part)
        return dataclasses.replace(
            call,
            forward=self.forward,
            states=call.states[:, self.queries],
            position_ids=part(positions, self.slots.start, self.slots.stop),
            query_start=self.slots.start - keys.start,
            kv_length=keys.stop - keys.start,
            past=part(positions, keys.start, self.slots.start),
            scattered=self.row.scattered,
            added=None if added is None else added[:, keys],
            heads=heads,
            row_lengths=self.row.lengths,
            is_request=True,
        )


def _part(positions: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return positions[:, start:stop].contiguous()


def _groups_as_mask(groups: torch.Tensor, keys: tuple[int, int]) -> torch.Tensor:
    return groups_as_mask(groups[:, slice(*keys)])


def _seen(
    groups: torch.Tensor, queries: tuple[int, int], keys: tuple[int, int], causal: bool, window: int | None
) -> torch.Tensor:
    """A boolean `(batch or 1, 1, q_len, kv_len)`, true for the keys of these slots that each query sees."""
    own, others = groups[:, slice(*queries), None], groups[:, None, slice(*keys)]
    same = ((own == others) | (own < 0)) & (others >= 0)
    m, n = (torch.arange(*bounds, device=groups.device) for bounds in (queries, keys))
    distance = m[:, None] - n
    near = (distance >= 0) | (not causal)
    return (same & (near if window is None else near & (distance < window)))[:, None]


class RowMask(torch.Tensor):
    """A `Row` as an `attention_mask`, `(batch or 1, 1, 1, tokens)`: Transformers passes four axes through unchanged."""

    row: Row

    @classmethod
    def from_row(cls, row: Row) -> RowMask:
        """Make a mask with the segment ids of the tokens of this process."""
        mask = row.sharding.shard(row.groups, 1)[:, None, None].as_subclass(cls)
        mask.row = row
        return mask
