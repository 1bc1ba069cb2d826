"""A call as the engine reads it: queries and keys that are rotated for each region when they are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from rope_patch.attention.call import Call, Fused, Tables
from rope_patch.attention.decay import Decay
from rope_patch.attention.forward_cache import wants_gradient
from rope_patch.attention.rotation import Rotation, rotate
from rope_patch.attention.slot_plan import EVERY, Rotate, part
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import UNROTATED
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import pairs_of
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import PositionMap, Weights


@dataclass(eq=False)
class RotatedCall(Call):
    """A call whose queries and keys are rotated for each region, if the mount rotates them here.

    Attributes:
        learned: the scheme's learned parameters of this layer.
        rotated_keys: rotated keys of all slots, shared by regions with the same rotation.
    """

    late: ForwardCall
    learned: Weights
    rotated_keys: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def layout(self) -> RotaryLayout:
        """How the layer pairs dimensions."""
        return cast(RotaryLayout, self.late.state.layer.layout)

    @property
    def differentiable(self) -> bool:
        return wants_gradient({**self.learned, "queries": self.queries})

    @property
    def regions(self) -> tuple[Region, ...]:
        state = self.late.state
        return (state.both_ways if self.late.looks_ahead else state.regions) or (ALL_PAIRS,)

    def query(self, region: Region) -> torch.Tensor:
        if not self.late.state.rotates:
            return self.queries
        if self._turns_by_matrix:
            return self._one_query[self.regions.index(region)]
        return self._rotated(self.queries, self.late.position_ids, region.query_map, ("q",), EVERY)

    def query_turn(self, region: Region) -> Rotation | None:
        late, like = self.late, self.queries
        if not (late.state.rotates and self._few_kernels) or region.query_map == late.anchor or self._turns_by_matrix:
            return None
        cos, sin = self._tables(late.position_ids, region.query_map, ("q",), like, EVERY)
        return None if cos.requires_grad or sin.requires_grad else Rotation(self.layout, cos, sin)

    @property
    def _turns_by_matrix(self) -> bool:
        """Whether the only query is rotated for all regions by one product."""
        return self.queries.shape[2] == 1 and len(self.late.state.regions) > 0 and not torch.compiler.is_compiling()

    @functools.cached_property
    def _one_query(self) -> tuple[torch.Tensor, ...]:
        return self.query_rotation()(self.queries)

    def query_rotation(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        if not self.late.state.rotates:
            return super().query_rotation()
        if self._turns_by_matrix:
            return functools.partial(_product, matrices=self._matrices())
        positions, like = self.late.position_ids, self.queries
        each = [self._rotation(positions, region.query_map, ("q",), EVERY, like) for region in self.regions]
        return lambda queries: tuple(queries if rotate is None else rotate(queries) for rotate in each)

    def _matrices(self) -> torch.Tensor:
        """All rotations of the only query, `(head_dim, regions * head_dim)`, with a batch axis if rows differ."""
        queries, position = self.queries, self._position

        def rotations(positions: torch.Tensor) -> tuple[torch.Tensor]:
            """Of each position `(batch or 1, length)`: `(batch or 1, 1, length, head_dim, regions * head_dim)`."""
            moved = [self._remaining(positions, region.query_map) for region in self.regions]
            by_pair = any(x.ndim == 3 for x in moved)
            if by_pair:
                pairs = len(self.layout.first)
                moved = [x if x.ndim == 3 else x[..., None].expand(*x.shape, pairs) for x in moved]
            cos, sin = self._computed(torch.stack(moved, dim=1), queries.dtype, by_pair, EVERY)
            matrix = self.layout.matrix(self.layout.wide(cos, queries.shape[-1]), sin)
            return (matrix.permute(0, 2, 3, 1, 4).flatten(3)[:, None],)

        place = "one query", self.late.state.tables, queries.dtype
        if position is None:
            matrices = self._shared(place, lambda: rotations(self.late.position_ids))[0]
        else:
            matrices = self._ahead(place, position, position + 1, rotations)[0]
        return cast(torch.Tensor, matrices[:, 0, 0] if len(matrices) > 1 else matrices.view(matrices.shape[-2:]))

    @functools.cached_property
    def _position(self) -> int | None:
        """Position of the only query in every row, if it is known without a look at it and follows cached keys without
        a gap, and if later tokens have the same frequencies.
        """
        late, scheme = self.late, self.late.state.scheme
        known = late.forward_cache.known("first positions")
        if known is None or late.scattered or not (self._turns_by_matrix and isinstance(late.start, int)):
            return None
        return None if scheme.learned_frequencies or scheme.length_dependent or len(set(known)) > 1 else known[0]

    def _ahead(
        self, place: tuple[Any, ...], first: int, stop: int, compute: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """`Ahead.rows` for tables of these frequencies."""
        frequencies, ahead = self.late.frequencies(self.learned), self.late.state.forward_cache.ahead
        source = frequencies.inv_freq
        key = place, self.late.anchor, frequencies.attention_scaling, source.device
        return ahead.rows(key, source, first, stop, compute)

    def key(self, region: Region, slots: slice | torch.Tensor, rows: slice) -> torch.Tensor:
        if not self.rotates_keys(region):
            return super().key(region, slots, rows)
        if not isinstance(slots, slice) or slots.stop is not None or rows != EVERY:
            return self._rotated_key(region.key_map, slots, rows)
        rotated, place = self.rotated_keys, (region.key_map, slots.start or 0)
        if place not in rotated:
            rotated[place] = self._rotated_key(region.key_map, slots, rows)
        return rotated[place]

    def _rotated_key(self, key_map: PositionMap, slots: slice | torch.Tensor, rows: slice) -> torch.Tensor:
        return self._rotated(self.keys[rows, :, slots], *self._placed(key_map, slots, rows))

    def key_rotation(self, region: Region, slots: slice, rows: slice) -> Callable[[slice], Rotate] | None:
        if not self.rotates_keys(region):
            return None
        position, key_map, keys = self._position, region.key_map, self.keys
        if position is None:
            positions, _, place, _ = self._placed(key_map, slots, rows)
            cos, sin = self._tables(positions, key_map, place, keys, rows)
        else:
            place, behind = ("k", key_map, self.late.state.tables, keys.dtype), position - int(self.late.start)
            span = behind + slots.start, behind + slots.stop
            cos, sin = self._ahead(place, *span, lambda positions: self._made(positions, key_map, keys, EVERY))

        def of(some: slice) -> Rotate:
            run = slice(some.start - slots.start, some.stop - slots.start)
            return self._apply(part(cos, run), part(sin, run))

        return of

    def _placed(
        self, key_map: PositionMap, slots: slice | torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, PositionMap, tuple[Any, ...] | None, slice]:
        """Positions of keys, their map, the key under which layers share their tables, if they can, and `rows`."""
        late = self.late
        positions = late.key_positions(self.keys.shape[2])
        positions = (positions if len(positions) == 1 else positions[rows])[..., slots]
        place: tuple[Any, ...] | None = None
        if late.shareable and not isinstance(slots, torch.Tensor):
            # layers may keep different keys; the forward cache keeps `past` alive, see `ForwardCall.key_positions`
            kept = id(late.past) if late.scattered and not torch.compiler.is_compiling() else None
            place = ("k", self.keys.shape[2], late.query_start, kept, slots.start, slots.stop, rows.start, rows.stop)
        return positions, key_map, place, rows

    def rotates_keys(self, region: Region) -> bool:
        return self.late.state.rotates and region.key_map != self.late.anchor

    def fused(self, in_order: bool) -> Fused:
        state, late = self.late.state, self.late
        if not state.rotates:
            return super().fused(in_order)
        layout, head_dim = self.layout, self.queries.shape[-1]

        def tables(positions: torch.Tensor, position_map: PositionMap, place: Any) -> Tables | None:
            if position_map == late.anchor:
                return None

            def compute() -> Tables:
                cos, sin = self._computed(
                    self._remaining(positions, position_map), self.queries.dtype, _has_pairs(position_map), EVERY
                )
                return layout.wide(cos, head_dim), layout.signed(sin, head_dim)

            return cast(Tables, self._shared((place, position_map, state.tables, "fused"), compute))

        keys = late.key_positions(self.keys.shape[2])
        device = self.queries.device
        return Fused(
            self.queries,
            self.keys,
            self.regions,
            query_tables=tuple(tables(late.position_ids, region.query_map, "q") for region in self.regions),
            key_tables=tuple(tables(keys, region.key_map, ("k", id(keys))) for region in self.regions),
            partner=_partners(layout, head_dim, device),
            in_order=in_order,
        )

    def decay(self) -> Decay | None:
        if not self.late.state.decays:
            return None

        def compute() -> Decay:
            rate = self.late.frequencies(self.learned, own=True).decay
            return Decay(self.layout, cast(torch.Tensor, rate))

        return cast(Decay, self._shared(("decay", self.late.state.tables), compute))

    def _rotated(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        position_map: PositionMap,
        place: tuple[Any, ...] | None,
        rows: slice,
    ) -> torch.Tensor:
        """R_f(phi(positions)) x, of some `rows` of the batch."""
        rotation = self._rotation(positions, position_map, place, rows, x)
        return x if rotation is None else rotation(x)

    def _rotation(
        self,
        positions: torch.Tensor,
        position_map: PositionMap,
        place: tuple[Any, ...] | None,
        rows: slice,
        like: torch.Tensor,
    ) -> Rotate | None:
        """R_f(phi(positions)) as a function of states of the dtype and width of `like`; None if they have it."""
        if position_map == self.late.anchor:
            return None
        return self._apply(*self._tables(positions, position_map, place, like, rows))

    def _apply(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
        """The rotation of states by these tables."""
        apply = functools.partial(rotate, self.layout) if self._few_kernels else self.layout.rotate
        return functools.partial(apply, cos=cos, sin=sin)

    @property
    def _few_kernels(self) -> bool:
        """Whether to rotate with the fewest kernels. Without regions, results are bit for bit those of the attention
        module, unless every token rotates all cached keys again, which no module does.
        """
        state = self.late.state
        return len(state.regions) > 0 or (state.scheme.length_dependent and self.queries.shape[2] == 1)

    def _tables(
        self,
        positions: torch.Tensor,
        position_map: PositionMap,
        place: tuple[Any, ...] | None,
        like: torch.Tensor,
        rows: slice,
    ) -> Tables:
        """The tables that rotate states `like`, shared by layers under the key `place`."""

        def tables() -> Tables:
            return self._made(positions, position_map, like, rows)

        if place is None:
            return tables()
        return cast(Tables, self._shared((place, position_map, self.late.state.tables, like.dtype), tables))

    def _made(self, positions: torch.Tensor, position_map: PositionMap, like: torch.Tensor, rows: slice) -> Tables:
        """The tables that rotate states `like`. For regions, cos is `wide`."""
        moved = self._remaining(positions, position_map)
        cos, sin = self._computed(moved, like.dtype, _has_pairs(position_map), rows)
        return self.layout.wide(cos, like.shape[-1]) if self._few_kernels else cos, sin

    def _remaining(self, positions: torch.Tensor, position_map: PositionMap) -> torch.Tensor:
        """The remaining rotation of states at these positions, with d/2 as a last axis if the map has pairs."""
        anchor = self.late.anchor
        if anchor in (None, UNROTATED):
            return position_map(positions)
        done = anchor(positions)
        return position_map(positions) - (done[..., None] if _has_pairs(position_map) else done)

    def _computed(self, moved: torch.Tensor, dtype: torch.dtype, by_pair: bool, rows: slice) -> Tables:
        frequencies = self.late.frequencies(self.learned)
        inv_freq, scaling = frequencies.inv_freq, frequencies.attention_scaling
        if inv_freq.ndim == 2 and len(inv_freq) > 1:  # each row of the batch has its own
            inv_freq, scaling = inv_freq[rows], scaling[rows] if isinstance(scaling, torch.Tensor) else scaling
        return rotation_tables(moved, inv_freq, scaling, dtype, by_pair)

    def _shared(self, key: Any, compute: Callable[[], Any]) -> Any:
        """A value that layers compute once, unless their frequencies are learned."""
        return compute() if self.late.state.scheme.learned_frequencies else self.forward_cache.once(key, compute)


@functools.lru_cache(maxsize=16)
def _partners(layout: RotaryLayout, head_dim: int, device: torch.device) -> torch.Tensor:
    """`RotaryLayout.partners` on a device, copied once."""
    return torch.tensor(layout.partners(head_dim), device=device)


def _product(query: torch.Tensor, matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The only query, `(batch, heads, 1, head_dim)`, under each of the `RotatedCall._matrices`."""
    batch, heads, _, head_dim = query.shape
    rotated = query.reshape(-1, head_dim) @ matrices if matrices.ndim == 2 else query[:, :, 0] @ matrices
    return rotated.view(batch, heads, 1, -1).split(head_dim, dim=-1)


def _has_pairs(position_map: PositionMap) -> bool:
    return pairs_of(position_map) is not None
