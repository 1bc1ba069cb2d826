"""The rotation of queries and keys for each region, as data: positions, frequencies, and the rotation that states
arrive with.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from rope_patch.attention import rotation_kernel
from rope_patch.attention.forward import Forward
from rope_patch.attention.pieces import narrowed
from rope_patch.attention.rotation import EVERY, Rotate, Rotation, Tables, rotate
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import UNROTATED, pairs_of
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import Frequencies, PositionMap

Side = Literal["query", "key"]

Bounds = tuple[Any, Any]
"""Start and stop of a slice, because a slice itself cannot be hashed."""


@dataclass(frozen=True)
class Branch:
    """Queries and keys rotated for one region, `(batch, heads or kv_heads, length, head_dim)`; for all pairs if
    `region` is None. Keys begin at slot `first`; no query sees an older one in this region. `turn` is the rotation that
    the queries still need.
    """

    region: Region | None
    query: torch.Tensor
    key: torch.Tensor
    first: int = 0
    turn: Rotation | None = None

    def queries(self, rows: slice, heads: slice, queries: slice) -> torch.Tensor:
        """The rotated queries of some rows of the batch and some heads."""
        some = self.query[rows, heads, queries]
        return some if self.turn is None else self.turn.part(rows, queries)(some)

    def turned(self) -> Branch:
        """Rotate the queries, if that is still to be done."""
        return self if self.turn is None else Branch(self.region, self.turn(self.query), self.key, self.first)

    def rows(self, start: int, stop: int, newest: int | None) -> Branch:
        """Restrict the branch to the queries `start` to `stop`, and to the keys in slots before `newest` if it is
        given.
        """
        keys = slice(None) if newest is None else slice(0, max(0, newest - self.first))
        return Branch(self.region, self.query[:, :, start:stop], self.key[:, :, keys], self.first)


@dataclass(frozen=True)
class Fused:
    """Unrotated queries and keys, and the tables of each region, for the fused kernel.

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
        """Drop the regions whose keys all come after the query."""
        seen = [region.stop > 0 for region in self.regions]
        return dataclasses.replace(
            self,
            regions=tuple(itertools.compress(self.regions, seen)),
            query_tables=tuple(itertools.compress(self.query_tables, seen)),
            key_tables=tuple(itertools.compress(self.key_tables, seen)),
        )


@dataclass(eq=False)
class Turner:
    """The rotations of one call. It holds no states, so that layers with the same positions can share what it computes.

    Attributes:
        forward: what the layers of this forward share.
        query_positions, key_positions: integer, `(batch or 1, q_len)` and `(batch or 1, kv_len)`; the latter `(batch,
            kv_heads, kv_len)` if heads keep different keys.
        regions: disjoint.
        layout: how dimensions are paired; None if nothing is rotated here.
        frequencies: f of the layer, for the rows of this call; None without a layout.
        anchor: the position map by which states are rotated already, `UNROTATED` for no rotation; None if they lack
            the attention factor too.
        exact: whether to rotate bit for bit as attention modules do, instead of with the fewest kernels.
        learned: the learned parameters of the layer, in any shape; layers share no tables if frequencies are among
            them.
        shares: whether other layers have the same frequencies.
        by_head: whether each query head has frequencies of its own; there is a key for each of them then.
    """

    forward: Forward
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    regions: tuple[Region, ...]
    layout: RotaryLayout | None = None
    frequencies: Frequencies | None = None
    anchor: PositionMap | None = None
    exact: bool = False
    learned: tuple[torch.Tensor, ...] = ()
    shares: bool = True
    by_head: bool = False

    def rotates(self, position_map: PositionMap) -> bool:
        """Whether states still need the rotation of a position map."""
        return self.layout is not None and position_map != self.anchor

    def turn(
        self,
        x: torch.Tensor,
        region: Region,
        side: Side,
        slots: slice | torch.Tensor | None = None,
        rows: slice | None = None,
    ) -> torch.Tensor:
        """Rotate queries or keys `(batch, heads or kv_heads, length, head_dim)` for a region, R_f(phi(positions)) x:
        all rows and slots, or only the given ones.
        """
        position_map = region.query_map if side == "query" else region.key_map
        if not self.rotates(position_map):
            return x
        return self._apply(*self._tables(position_map, side, x, slots, rows))(x)

    def later(self, region: Region, like: torch.Tensor) -> Rotation | None:
        """The rotation of queries `like`, for an executor that rotates a few at a time; None if there is none, if a
        gradient flows into it, or if heads differ.
        """
        if self.exact or self.by_head or not self.rotates(region.query_map):
            return None
        cos, sin = self._tables(region.query_map, "query", like)
        learns = cos.requires_grad or sin.requires_grad
        return None if learns else Rotation(cast(RotaryLayout, self.layout), cos, sin)

    def branches(
        self, query: torch.Tensor, key: torch.Tensor, start: int | None, definition: str, later: bool
    ) -> tuple[Branch, ...]:
        """Rotate queries and keys for each region, with keys from the oldest that a query may see there.

        Args:
            query, key: as they arrived, `(batch, heads or kv_heads, length, head_dim)`.
            start: slot of the first query; None if the oldest key of a query does not follow from it.
            definition: the reason why plain operators rotate for each region; empty if a kernel may rotate for all.
            later: whether queries may keep their rotation in `Branch.turn`.
        """
        oldest = [self._oldest(region, start) for region in self.regions]
        if not self.region_by_region(query, key, definition):
            return self._branches_at_once(query, key, oldest)
        keys: dict[tuple[PositionMap, int], torch.Tensor] = {}  # regions with the same rotation share them
        branches = []
        for region, first in zip(self.regions, oldest, strict=True):
            turn = self.later(region, query) if later and region != ALL_PAIRS else None
            if (region.key_map, first) not in keys:
                own = key[:, :, first:] if first else key
                keys[region.key_map, first] = self.turn(own, region, "key", slice(first, None) if first else None)
            rotated = self.turn(query, region, "query") if turn is None else query
            branches.append(Branch(_named(region), rotated, keys[region.key_map, first], first, turn))
        return tuple(branches)

    def region_by_region(self, query: torch.Tensor, key: torch.Tensor, definition: str) -> str:
        """The reason why no single kernel rotates these states for all regions, or an empty string; the arguments are
        those of `branches`.
        """
        if not definition and not self._can_be_at_once:
            return "rotations are learned, exact, or no rotation of pairs of dimensions"
        return definition or rotation_kernel.supports(query, key)

    @property
    def _can_be_at_once(self) -> bool:
        """Whether no gradient flows into the rotation, and it need not be bit for bit that of attention modules."""
        if self.layout is None or self.exact:
            return False
        numbers = (cast(Frequencies, self.frequencies).inv_freq, cast(Frequencies, self.frequencies).attention_scaling)
        return not any(isinstance(x, torch.Tensor) and x.requires_grad for x in numbers)

    def _branches_at_once(self, query: torch.Tensor, key: torch.Tensor, oldest: list[int]) -> tuple[Branch, ...]:
        """The branches, where one kernel rotates the queries of all regions, and one the keys."""
        call = self.fused(query, key, in_order=True)
        queries = rotation_kernel.rotations(query, call.query_tables, call.partner)
        read = min(itertools.compress(oldest, call.key_tables), default=0)  # the oldest key that is rotated
        rotated = rotation_kernel.rotations(key, call.key_tables, call.partner, read)
        keys: dict[tuple[int, int], torch.Tensor] = {}
        for whole, first in zip(rotated, oldest, strict=True):
            keys.setdefault((id(whole), first), whole[:, :, first:] if first else whole)
        return tuple(
            Branch(_named(region), turned, keys[id(whole), first], first)
            for region, turned, whole, first in zip(self.regions, queries, rotated, oldest, strict=True)
        )

    def _oldest(self, region: Region, start: int | None) -> int:
        """The oldest slot whose key a query may see in a region."""
        if region == ALL_PAIRS or start is None or not region.translation_invariant:
            return 0
        return min(region.slots(start, start).start, start)  # positions of new tokens may skip

    def by_matrix(self, like: torch.Tensor) -> bool:
        """Whether queries `like` are one token that a matrix rotates for all regions at once."""
        if self.layout is None or self.by_head or like.shape[2] > 1:
            return False
        return self.regions != (ALL_PAIRS,)

    def for_queries(
        self, like: torch.Tensor, kv_heads: int, scaling: float = 1.0, beside: bool = False
    ) -> tuple[Callable[[torch.Tensor], tuple[torch.Tensor, ...]], float]:
        """Build a function that rotates queries of the dtype and shape of `like` for every region, and writes each
        result over its last one. Queries that share keys become columns of one matrix, `(batch * kv_heads, head_dim,
        group * q_len)`. One query is also multiplied by `scaling`, at no cost; the factor that is left over is returned
        beside the function.
        """
        flat = len(like) * kv_heads, -1, like.shape[-1]
        if self.by_matrix(like):
            return self._by_matrix(like, flat[:2], scaling, beside), 1.0
        turns = [
            self._apply(*self._tables(region.query_map, "query", like)) if self.rotates(region.query_map) else None
            for region in self.regions
        ]

        def turned(queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if not any(turns):
                return (queries.reshape(flat).mT,) * len(turns)
            return tuple((queries if turn is None else turn(queries)).reshape(flat).mT for turn in turns)

        return turned, scaling

    def _by_matrix(
        self, like: torch.Tensor, rows: tuple[int, int], scaling: float, beside: bool
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        maps = tuple((region.query_map, beside and self.rotates(region.key_map)) for region in self.regions)
        compute, width = self.forward.shared(_matrices) if self.shares else _matrices, like.shape[-1]
        frequencies, layout = cast(Frequencies, self.frequencies), cast(RotaryLayout, self.layout)
        matrices = compute(self.query_positions, maps, self.anchor, frequencies, layout, like.dtype, width, scaling)
        batch, heads = like.shape[:2]
        shape = (batch, heads) if matrices.ndim == 3 else (batch * heads,)
        product = like.new_empty(*shape, matrices.shape[-1])
        parts = product.view(*rows, matrices.shape[-1]).split([(1 + both) * width for _, both in maps], dim=-1)
        columns = tuple(part.mT for part in parts)
        return functools.partial(_product, matrices=matrices, into=product, columns=columns)

    def for_keys(
        self, region: Region, like: torch.Tensor, slots: slice, rows: slice, beside: bool = False
    ) -> Callable[[slice], Rotate] | None:
        """Build a function from a run of slots among `slots` to the rotation of its keys, in some rows; None if nothing
        is left to rotate. With `beside` keys come out twice as wide, in one operator: k cos and k sin side by side.
        Their product with the queries of `for_queries(..., beside=True)` equals the product of rotated states.
        """
        if not self.rotates(region.key_map):
            return None
        cos, sin = self._tables(region.key_map, "key", like, slots, rows)
        if beside:
            layout = cast(RotaryLayout, self.layout)
            compute = self.forward.shared(_side_by_side) if self.shares else _side_by_side
            table = compute(cos, sin, layout, like.shape[-1])

        def of(some: slice) -> Rotate:
            run = slice(some.start - slots.start, some.stop - slots.start)
            if beside:
                length = run.stop - run.start
                into = like.new_empty(len(range(len(like))[rows]), like.shape[1], length, 2, like.shape[-1])
                return functools.partial(_beside, table=table.narrow(2, run.start, length), into=into)
            return self._apply(narrowed(cos, run), narrowed(sin, run))

        return of

    def fused(self, queries: torch.Tensor, keys: torch.Tensor, in_order: bool) -> Fused:
        """Describe the call for the fused kernel; `in_order` if distance is a difference of slots."""
        if self.layout is None:
            nothing = (None,) * len(self.regions)
            return Fused(queries, keys, self.regions, nothing, nothing, in_order=in_order)
        width, layout = queries.shape[-1], self.layout
        compute = self.forward.shared(_full_tables) if self.shares else _full_tables

        def tables(positions: torch.Tensor, position_map: PositionMap) -> Tables | None:
            if not self.rotates(position_map):
                return None
            frequencies = cast(Frequencies, self.frequencies)
            return compute(positions, position_map, self.anchor, frequencies, layout, queries.dtype, width)

        return Fused(
            queries,
            keys,
            self.regions,
            query_tables=tuple(tables(self.query_positions, region.query_map) for region in self.regions),
            key_tables=tuple(tables(self.key_positions, region.key_map) for region in self.regions),
            partner=_partners(layout, width, queries.device),
            in_order=in_order,
        )

    def _apply(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
        """Bind these tables to the function that rotates states."""
        layout = cast(RotaryLayout, self.layout)
        return functools.partial(layout.rotate if self.exact else functools.partial(rotate, layout), cos=cos, sin=sin)

    def _tables(
        self,
        position_map: PositionMap,
        side: Side,
        like: torch.Tensor,
        slots: slice | torch.Tensor | None = None,
        rows: slice | None = None,
    ) -> Tables:
        """The tables cos and sin that rotate states `like` for a position map."""
        positions = self.query_positions if side == "query" else self.key_positions
        compute = self.forward.shared(_tables) if self.shares else _tables
        place = slots if isinstance(slots, torch.Tensor) else _bounds(slots)
        layout = None if self.exact else self.layout
        frequencies = cast(Frequencies, self.frequencies)
        return compute(
            positions, place, _bounds(rows), position_map, self.anchor, frequencies, layout, like.dtype, like.shape[-1]
        )


def _named(region: Region) -> Region | None:
    """The region of a branch."""
    return None if region == ALL_PAIRS else region


def _bounds(some: slice | None) -> Bounds | None:
    return None if some is None or some == EVERY else (some.start, some.stop)


def _tables(
    positions: torch.Tensor,
    slots: Bounds | torch.Tensor | None,
    rows: Bounds | None,
    position_map: PositionMap,
    anchor: PositionMap | None,
    frequencies: Frequencies,
    layout: RotaryLayout | None,
    dtype: torch.dtype,
    width: int,
) -> Tables:
    """Compute the tables for the positions in some rows and slots; with a `layout`, cos is `wide`."""
    if rows is not None and len(positions) > 1:
        positions = positions[slice(*rows)]
    if slots is not None:
        positions = positions[..., slice(*slots) if isinstance(slots, tuple) else slots]
    if slots is not None and frequencies.inv_freq.ndim == 4:  # each token has its own frequencies
        own = frequencies.inv_freq[:, :, slice(*slots) if isinstance(slots, tuple) else slots]
        frequencies = dataclasses.replace(frequencies, inv_freq=own)
    moved = remaining(positions, position_map, anchor)
    cos, sin = _computed(moved, frequencies, dtype, pairs_of(position_map) is not None, rows)
    return cos if layout is None else layout.wide(cos, width), sin


def _full_tables(
    positions: torch.Tensor,
    position_map: PositionMap,
    anchor: PositionMap | None,
    frequencies: Frequencies,
    layout: RotaryLayout,
    dtype: torch.dtype,
    width: int,
) -> Tables:
    """Compute cos and sin with an entry for every dimension."""
    moved = remaining(positions, position_map, anchor)
    cos, sin = _computed(moved, frequencies, dtype, pairs_of(position_map) is not None)
    return layout.wide(cos, width), layout.signed(sin, width)


def _matrices(
    positions: torch.Tensor,
    maps: tuple[tuple[PositionMap, bool], ...],
    anchor: PositionMap | None,
    frequencies: Frequencies,
    layout: RotaryLayout,
    dtype: torch.dtype,
    width: int,
    scaling: float,
) -> torch.Tensor:
    """Matrices of all rotations of one query at `positions` `(batch or 1, 1)`, times `scaling`, side by side:
    `(head_dim, columns)`, with a batch axis if rows differ. Each of the `maps` comes with a flag, true if the partners
    of its dimensions follow, for keys that are `_beside`.
    """
    moved = [remaining(positions, position_map, anchor) for position_map, both in maps for _ in range(1 + both)]
    by_pair = any(x.ndim == 3 for x in moved)
    if by_pair:
        pairs = len(layout.first)
        moved = [x if x.ndim == 3 else x[..., None].expand(*x.shape, pairs) for x in moved]
    cos, sin = (table.transpose(1, 2) for table in _computed(torch.stack(moved, dim=1), frequencies, dtype, by_pair))
    matrix = rotations(cos, sin, layout, width, tuple(both for _, both in maps), scaling).flatten(2)
    return matrix if len(matrix) > 1 else matrix[0]


def rotations(
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    width: int,
    beside: tuple[bool, ...],
    scaling: float = 1.0,
) -> torch.Tensor:
    """The matrices of rotations by tables `(batch or 1, 1, rotations, d/2)`, times `scaling`, `(batch or 1, head_dim,
    rotations, head_dim)`; `beside` as for `_basis`.
    """
    eye, exchange = _basis(layout, width, cos.dtype, cos.device, scaling, beside)
    return (eye * layout.wide(cos, width)).addcmul_(exchange, layout.wide(sin, width))


@functools.lru_cache(maxsize=16)
def _basis(
    layout: RotaryLayout,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    scaling: float,
    beside: tuple[bool, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RotaryLayout.basis` with an axis of rotations, `(head_dim, rotations, head_dim)`, computed once. Where partners
    stand beside a rotation, it comes twice, with the two dimensions of each pair exchanged.
    """
    with torch.inference_mode(False):  # another forward may be differentiated
        like, partners = torch.empty(width, dtype=dtype, device=device), layout.partners(width)
        orders = [order for both in beside for order in (range(width), partners)[: 1 + both]]
        eye, exchange = (
            torch.stack([each[:, list(order)] for order in orders], dim=1) for each in layout.basis(like, scaling)
        )
    return eye, exchange


def remaining(positions: torch.Tensor, position_map: PositionMap, anchor: PositionMap | None) -> torch.Tensor:
    """Positions `(batch or 1, length)` by which states must still be rotated, beyond the rotation of `anchor`; with d/2
    as a last axis if the map has pairs.
    """
    if anchor is None or anchor == UNROTATED:
        return position_map(positions)
    done = anchor(positions)
    return position_map(positions) - (done if pairs_of(position_map) is None else done[..., None])


def _computed(
    moved: torch.Tensor, frequencies: Frequencies, dtype: torch.dtype, by_pair: bool, rows: Bounds | None = None
) -> Tables:
    """Compute cos and sin, `(batch or 1, heads or 1, length, d/2)`, for some rows, which may have frequencies of their
    own.
    """
    inv_freq, scaling = frequencies.inv_freq, frequencies.attention_scaling
    if rows is not None and inv_freq.ndim > 1 and len(inv_freq) > 1:
        inv_freq = inv_freq[slice(*rows)]
        scaling = scaling[slice(*rows)] if isinstance(scaling, torch.Tensor) else scaling
    return rotation_tables(moved, inv_freq, scaling, dtype, by_pair)


@functools.lru_cache(maxsize=16)
def _partners(layout: RotaryLayout, head_dim: int, device: torch.device) -> torch.Tensor:
    """`RotaryLayout.partners` on a device, copied once."""
    return torch.tensor(layout.partners(head_dim), device=device)


def _product(
    query: torch.Tensor, matrices: torch.Tensor, into: torch.Tensor, columns: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Multiply the only query, `(batch, heads, 1, head_dim)`, by each rotation of `_matrices`, and write it `into`
    memory of which the `columns` are views, `(batch * kv_heads, width, group)`.
    """
    if matrices.ndim == 2:
        torch.mm(query.reshape(-1, query.shape[-1]), matrices, out=into)
    else:
        torch.bmm(query[:, :, 0], matrices, out=into)
    return columns


def _side_by_side(cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout, head_dim: int) -> torch.Tensor:
    """The table that `_beside` multiplies keys with, `(batch or 1, heads or 1, length, 2, head_dim)`, from a `wide` cos
    and a sin by pair. The sine has the sign of the partner, because the query's dimensions change their places.
    """
    return torch.stack([cos, layout.signed(-sin, head_dim)], dim=-2)


def _beside(keys: torch.Tensor, table: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Multiply keys `(rows, heads, length, head_dim)` by each half of the table of `_side_by_side`, giving `(rows *
    heads, length, 2 head_dim)`, and write them `into` memory `(rows, heads, length, 2, head_dim)`, because new pages
    cost more than the product.
    """
    return torch.mul(keys.unsqueeze(3), table, out=into).view(-1, keys.shape[2], 2 * keys.shape[3])
