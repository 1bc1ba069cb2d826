"""One call of an attention function, as the engine sees it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rope_patch.attention.decay import Decay
from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.attention.inputs import AttentionInputs
from rope_patch.attention.rotation import Rotation
from rope_patch.attention.slot_plan import Rotate, SlotPlan
from rope_patch.attention.spans import Span
from rope_patch.schemes.slots import ALL_PAIRS, Region

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine."""


@dataclass(frozen=True)
class Fused:
    """Queries and keys as they arrived, and their rotation in each region, for the fused kernel.

    The rotation is x cos + x[partner] sin with full-width tables. The sine carries the sign; a dimension without
    rotation has cosine 1 and sine 0.

    Attributes:
        queries, keys: `(batch, heads or kv_heads, length, head_dim)`. A query scale is folded into the queries, or into
            their tables.
        regions: disjoint.
        query_tables, key_tables: cos and sin for each region, in shapes that expand to that of the queries or keys;
            None without rotation.
        partner: integer, `(head_dim,)`, its own inverse; None without rotation.
        in_order: whether every visible key has the same distance from its query in positions and in slots. If False,
            every region scans all keys.
        window: in slots, of sliding-window attention; infinite without a window.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    regions: tuple[Region, ...]
    query_tables: tuple[Tables | None, ...]
    key_tables: tuple[Tables | None, ...]
    partner: torch.Tensor | None = None
    in_order: bool = True
    window: float = math.inf

    def past(self) -> Fused:
        """Without the regions whose keys all come after the query."""
        seen = [region.stop > 0 for region in self.regions]
        return dataclasses.replace(
            self,
            regions=tuple(itertools.compress(self.regions, seen)),
            query_tables=tuple(itertools.compress(self.query_tables, seen)),
            key_tables=tuple(itertools.compress(self.key_tables, seen)),
        )


@dataclass(eq=False)
class Call:
    """Queries and keys, and their rotation in each region. In this class nothing rotates, and all pairs are one region.

    Both stay as they arrived, `(batch, heads or kv_heads, length, head_dim)`; `forward_cache` is that of this forward.
    A decoding step leaves its `plan` here.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    forward_cache: ForwardCache
    plan: SlotPlan | None = field(default=None, init=False)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Disjoint; `ALL_PAIRS` alone by default."""
        return (ALL_PAIRS,)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient must flow into queries, or into the parameters of a rotation or bias."""
        return torch.is_grad_enabled() and self.queries.requires_grad

    def query(self, region: Region) -> torch.Tensor:
        """The queries rotated for a region, `(batch, heads, q_len, head_dim)`."""
        return self.queries

    def query_turn(self, region: Region) -> Rotation | None:
        """What turns `queries` into `query`, for a path that rotates a few at a time; None if nothing does."""
        return None

    def key(self, region: Region, slots: slice | torch.Tensor, rows: slice) -> torch.Tensor:
        """The keys of some `slots` and `rows` rotated for a region, `(batch, kv_heads, slots, head_dim)`."""
        return self.keys[rows, :, slots]

    def query_rotation(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        """`query` of every region as a function of queries at the same positions, which keeps no states alive."""
        number = len(self.regions)
        return lambda queries: (queries,) * number

    def key_rotation(self, region: Region, slots: slice, rows: slice) -> Callable[[slice], Rotate] | None:
        """`key` likewise, as a function of the keys of some `rows`, for each run of slots among these; None if nothing
        is left to rotate.
        """
        return None

    def rotates_keys(self, region: Region) -> bool:
        """Whether `key` computes anything."""
        return False

    def fused(self, in_order: bool) -> Fused:
        """The same for the fused kernel; `in_order` if distance is a difference of slots."""
        nothing = (None,) * len(self.regions)
        return Fused(self.queries, self.keys, self.regions, nothing, nothing, in_order=in_order)

    def spans(self, inputs: AttentionInputs) -> tuple[Span, ...] | None:
        """See `find_spans`; called only when spans help."""
        return self.forward_cache.spans(inputs)

    def decay(self) -> Decay | None:
        """How scores decay with distance; None if they do not."""
        return None
