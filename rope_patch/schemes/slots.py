"""The inputs of a scheme's slots, and the regions they return: plain data with documented shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.errors import InvalidField
from rope_patch.schemes.tools.positions import Identity, pairs_of
from rope_patch.typing import PositionMap


@dataclass(frozen=True)
class Checkpoint:
    """Properties of a checkpoint from which a scheme takes its defaults.

    Attributes:
        training_length: L in tokens, the length from which a scheme counts, see `under`. Read from a config, L is the
            original length, before the checkpoint's own scaling (8,192 for Llama 3.1).
        num_heads: number of query heads.
        max_length: the length in tokens that the checkpoint reads today, under its own scaling (131,072 for
            Llama 3.1); the same as `training_length` without one.
        bidirectional: whether tokens see later keys.
        buckets: number of its relative buckets, and the distance from which all distances share the last bucket; None
            without bucketed biases.
        has_table: whether the checkpoint adds learned position rows to its input.
        pairs: d/2, the number of pairs of dimensions that rotate; None if none rotate, or if layers differ.
        native: the `Scheme` of its own frequencies; None if the library does not know it, or if nothing rotates.
    """

    training_length: int
    num_heads: int
    max_length: int
    bidirectional: bool = False
    buckets: tuple[int, int] | None = None
    has_table: bool = False
    pairs: int | None = None
    native: Any = None

    def under(self, scheme: Any) -> Checkpoint:  # schemes are built on this module, so their type is not known here
        """The checkpoint with the L that `scheme` builds on.

        A scheme that keeps the checkpoint's own frequencies counts from the length that they read today, so its L is
        `max_length`. Frequencies that replace them undo the checkpoint's own scaling, so their L is the original
        length. Under a scheme by layer L may differ between layers, so such a scheme calls this for each of its parts.
        """
        owner = scheme.frequency_owner
        keeps = owner is None or self._in_full(owner) == self._in_full(self.native)
        return dataclasses.replace(self, training_length=self.max_length) if keeps and not scheme.by_layer else self

    def _in_full(self, frequencies: Any) -> dict[str, Any]:
        """The fields of a frequency scheme, with this checkpoint's values for the open ones."""
        if frequencies is None:
            return {}
        fields = frequencies.resolve(self).to_dict()
        original = "original_max_position_embeddings"
        return fields | ({original: fields[original] or self.training_length} if original in fields else {})


@dataclass(frozen=True)
class Target:
    """A target length for a scheme, with the data that determine the scheme's open fields.

    Attributes:
        scheme: name of the scheme, for errors.
        tokens: the target length.
        checkpoint: the checkpoint to extend.
        given: the fields that the user set, by name.
    """

    scheme: str
    tokens: int
    checkpoint: Checkpoint
    given: Mapping[str, Any]

    @property
    def training_length(self) -> int:
        """The training length L in tokens: the checkpoint's, unless `original_max_position_embeddings` is given."""
        return self.given.get("original_max_position_embeddings") or self.checkpoint.training_length

    @property
    def window(self) -> int:
        """The window w in tokens: the given window, or L/2.

        Raises:
            InvalidField: the given window is not below L, which leaves no trained distance beyond the window.
        """
        window = self.given.get("window") or max(1, self.training_length // 2)
        if window >= self.training_length:
            raise InvalidField(
                f"{self.scheme}: window={window} is not allowed with target={self.tokens}; it must be below the "
                f"training length of {self.training_length} tokens"
            )
        return window

    def factor(self, window: int = 0) -> float:
        """The smallest factor k = max(1, (l - w) / (L - w)) that keeps distances beyond a window w < L in range."""
        return max(1.0, (self.tokens - window) / (self.training_length - window))


@classmethod  # type: ignore[misc]
def factor_for(cls: type, target: Target) -> dict[str, Any]:
    """The `Scheme.fields_for` of a scheme whose `factor` is the target over the training length."""
    return {"factor": target.factor()}


@classmethod  # type: ignore[misc]
def rows_for(cls: type, target: Target) -> dict[str, Any]:
    """The `Scheme.fields_for` of a scheme with a row for each of `num_positions`: the target, but at least L."""
    return {"num_positions": max(target.tokens, target.training_length)}


@classmethod  # type: ignore[misc]
def nothing_for(cls: type, target: Target) -> dict[str, Any]:
    """The `Scheme.fields_for` of a scheme that reaches every length unchanged."""
    return {}


@dataclass(frozen=True)
class ModelShape:
    """Sizes for a scheme's learned parameters. `num_heads` counts query heads, `head_dim` is the dimension of queries
    and keys, `training_length` is L in tokens, and `rotary_dim` is the rotated part d of a head; None if all of it
    rotates.
    """

    num_heads: int
    head_dim: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    training_length: int
    value_dim: int
    rotary_dim: int | None = None

    @property
    def pairs(self) -> int:
        """The number d/2 of rotating pairs of dimensions in a head."""
        return (self.rotary_dim or self.head_dim) // 2


@dataclass(frozen=True)
class Pairs:
    """Some queries and all keys they may attend to, as a content bias receives them.

    Attributes:
        query: `(batch, heads, q_len, head_dim)`, as projected: not rotated, not scaled.
        key: `(batch, heads, kv_len, head_dim)`, as projected, repeated where heads share keys.
        m, n: integer positions, `(batch or 1, q_len, 1)` and `(batch or 1, 1, kv_len)`.
        scores: lambda(m) <R q, R k> * scaling, float32 at least, `(batch, heads, q_len, kv_len)`.
        seen: boolean, broadcasts to `scores`: the pairs that are not masked.
        scaling: factor of the products of queries and keys.
        states: input of the attention module at the queries, `(batch, q_len, hidden)`.
    """

    query: torch.Tensor
    key: torch.Tensor
    m: torch.Tensor
    n: torch.Tensor
    scores: torch.Tensor
    seen: torch.Tensor
    scaling: float
    states: torch.Tensor | None = None

    @property
    def distance(self) -> torch.Tensor:
        """The distances m - n, `(batch or 1, q_len, kv_len)`."""
        return self.m - self.n


@dataclass(frozen=True)
class Tokens:
    """The input of a stack, or of one of its blocks.

    Attributes:
        states: x, `(batch, length, hidden)`.
        positions: integer, `(batch or 1, length)`.
        ids: `(batch, length)`; None if the model received vectors instead of tokens.
        block: index of the layer that the states enter; 0 at the input.
        remaining: number of layers still to pass, this one included.
        seen: false on pads, `(batch or 1, length)`, for a scheme that is `stateful`; None without known pads.
    """

    states: torch.Tensor
    positions: torch.Tensor
    ids: torch.Tensor | None = None
    block: int = 0
    remaining: int = 1
    seen: torch.Tensor | None = None


Bounds = tuple[float, float, int, float]
"""The fields `start`, `stop`, `chunk` and `keys_below` of a `Region`."""


@dataclass(frozen=True)
class Region:
    """The pairs (m, n) with start <= floor(m/chunk) - floor(n/chunk) < stop, and the positions that rotate them.

    A map may give every rotated pair of dimensions its own positions (`PerPair`, or any callable with an attribute
    `pairs`); these have d/2 as an additional last axis. One map of a region may have this axis and the other not;
    regions of a scheme may differ in the same way.

    Attributes:
        query_map, key_map: phi_q and phi_k of this region.
        start, stop: bounds of the distance; infinite if open.
        chunk: the unit of distance in tokens.
        keys_below: only keys at positions below this belong to the region.
    """

    query_map: PositionMap
    key_map: PositionMap
    start: float = -math.inf
    stop: float = math.inf
    chunk: int = 1
    keys_below: float = math.inf

    @classmethod
    def between(cls, bounds: Bounds) -> Region:
        """The region with these bounds, whose pairs are rotated by their true positions."""
        return cls(Identity(), Identity(), *bounds)

    @property
    def bounds(self) -> Bounds:
        """The numbers that define which pairs belong to the region, without the positions that rotate them."""
        return self.start, self.stop, self.chunk, self.keys_below

    def contains(self, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """A boolean in the broadcast shape of `m` and `n`, true for pairs in this region."""
        unit, mode = self.chunk, "floor"
        distance = m - n if unit == 1 else m.div(unit, rounding_mode=mode) - n.div(unit, rounding_mode=mode)
        return (distance >= self.start) & (distance < self.stop) & (n < self.keys_below)

    def slots(self, slot: int, position: int) -> slice:
        """The slots of the keys that the query at this `slot` and `position` sees in this region, if distance is a
        difference of slots.
        """
        behind = slot - position  # slot of a key minus its position
        here = position // self.chunk
        newest = (here - int(max(0, self.start)) + 1) * self.chunk - 1
        oldest = -behind if self.stop == math.inf else (here - int(self.stop) + 1) * self.chunk
        stop = min(newest, position, self.keys_below - 1) + 1
        return slice(max(0, oldest + behind), max(0, int(stop) + behind))

    def within(self, window: float) -> Region:
        """Restrict the region to pairs that are closer than `window` tokens."""
        return self if self.stop <= window else dataclasses.replace(self, stop=window)

    @property
    def pairs(self) -> int | None:
        """The length d/2 of the pair axis, if the positions of queries or keys have one in this region; else None."""
        return pairs_of(self.query_map) or pairs_of(self.key_map)

    def rotated_positions(self, m: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions phi_q(m) and phi_k(n), in the shapes of `m` and `n`; both have an additional last axis of
        length d/2 or 1 if the region has `pairs`.
        """
        query, key = self.query_map(m), self.key_map(n)
        if self.pairs is None:
            return query, key
        query, key = (
            positions if pairs_of(phi) else positions[..., None]
            for phi, positions in ((self.query_map, query), (self.key_map, key))
        )
        return query, key

    def rotated_distance(self, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """The distance phi_q(m) - phi_k(n) in the broadcast shape of `m` and `n`, with d/2 as an additional last axis
        if the region has `pairs`.
        """
        query, key = self.rotated_positions(m, n)
        return query - key

    @property
    def translation_invariant(self) -> bool:
        """Whether membership depends on m - n alone."""
        return self.chunk == 1 and self.keys_below == math.inf


def near_and_far(window: float, later: PositionMap, earlier: PositionMap) -> tuple[Region, Region, Region]:
    """Three regions: true positions for pairs closer than `window` tokens, and one region for each direction beyond.
    Beyond the window the later token is rotated to the position `later`, and the other to `earlier`, so both directions
    agree.
    """
    return (
        Region(Identity(), Identity(), start=1 - window, stop=window),
        Region(later, earlier, start=window),
        Region(earlier, later, stop=1 - window),
    )


ALL_PAIRS = Region(Identity(), Identity())  # every pair, rotated by its true positions
