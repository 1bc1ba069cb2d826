"""The inputs of an attention function, in one object that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rope_patch.attention.rotation import Rotation
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Pairs, Region
from rope_patch.typing import Weights

# fmt: off
AttentionMode = Literal[
    "auto", "oracle", "chunked", "segmented", "fused", "reference", "joined", "merged", "products", "block", "graph"
]
# fmt: on
"""How to score: `auto` takes the fastest exact executor. `oracle`, `chunked`, `segmented` and `fused` prefer one and
take another where it does not apply; the names of executors force one."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x`, any shape, in the dtype of scores: float64 if it has that already, else float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Branch:
    """Queries and keys rotated for one region, `(batch, heads or kv_heads, length, head_dim)`; if `region` is None, for
    all pairs. Keys begin at slot `first`; no query sees an older one in this region. `turn` is what queries still need.
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
        """The branch with rotated queries."""
        return self if self.turn is None else Branch(self.region, self.turn(self.query), self.key, self.first)

    def rows(self, start: int, stop: int, newest: int | None) -> Branch:
        """The branch for the queries `start` to `stop` and the keys in slots before `newest`, or all."""
        keys = slice(None) if newest is None else slice(0, max(0, newest - self.first))
        return Branch(self.region, self.query[:, :, start:stop], self.key[:, :, keys], self.first)


@dataclass(frozen=True)
class DistanceBias:
    """b(m - n).

    Attributes:
        function: maps distances of any shape to `(heads, *shape)`, float32.
        linear: whether it is a multiple of the distance, on either side.
        table: maps two distances to the values from the first to below the second, `(heads, distances)`; default
            computed by `function`.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    linear: bool = False
    table: Callable[[int, int], torch.Tensor] | None = None

    def values(self, low: int, high: int) -> torch.Tensor:
        """b(low) to b(high - 1), `(heads, high - low)`."""
        return self.function(torch.arange(low, high)) if self.table is None else self.table(low, high)

    @property
    def learned(self) -> bool:
        """Whether a gradient must flow into it."""
        return self.values(0, 1).requires_grad


@dataclass(frozen=True)
class Content:
    """A scheme's terms in scores, weights and values that are more than a bias by distance. They depend on queries and
    keys as projected, `(batch, heads or kv_heads, length, head_dim)`, and on `states`, the module's input at the
    queries, `(batch, q_len, hidden)`.
    """

    scheme: Scheme
    weights: Weights
    states: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    def bias(self, inputs: AttentionInputs, scores: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor | None:
        """b(q_m, k_n, m, n) for `scores` `(batch, heads, q_len, kv_len)`; it and `seen` broadcast to their shape. None
        if the scheme has no such bias.
        """
        if "content_bias" not in self.scheme.methods:
            return None
        repeats = self.query.shape[1] // self.key.shape[1]
        pairs = Pairs(
            query=self.query,
            key=self.key if repeats == 1 else self.key.repeat_interleave(repeats, dim=1),
            m=inputs.query_positions[:, :, None],
            n=inputs.key_positions[:, None, :],
            scores=scores,
            seen=torch.ones((), dtype=torch.bool, device=scores.device) if seen is None else seen,
            scaling=inputs.scaling,
            states=self.states,
        )
        return self.scheme.content_bias(pairs, self.weights)

    def factor(self, distance: torch.Tensor) -> torch.Tensor | None:
        """c(m, n), `(batch or 1, heads, q_len, kv_len)`; None for 1."""
        if "weight_factor" not in self.scheme.methods:
            return None
        return self.scheme.weight_factor(distance, self.query.shape[1], self.weights).transpose(0, 1)

    def values(self, attention: torch.Tensor, distance: torch.Tensor) -> torch.Tensor | None:
        """sum_n attention(m, n) u(m, n), `(batch, heads, q_len, value_dim)`; None for 0."""
        if "relative_values" not in self.scheme.methods:
            return None
        return self.scheme.relative_values(attention, distance, self.weights)

    def rows(self, queries: slice, keys: slice) -> Content:
        """The terms of some queries and keys."""
        query, key, states = self.query[:, :, queries], self.key[:, :, keys], self.states[:, queries]
        return dataclasses.replace(self, query=query, key=key, states=states)


@dataclass(frozen=True)
class AttentionInputs:
    """One attention call.

    Attributes:
        branches: the rotated queries and keys of each region.
        value: `(batch, kv_heads, kv_len, value_dim)`.
        query_positions, key_positions: integer, `(batch or 1, q_len)` and `(batch or 1, kv_len)`; the latter
            `(batch, kv_heads, kv_len)` if heads keep different keys, see `by_head`.
        mask: `(batch or 1, heads or 1, q_len, kv_len)`, boolean (True is attended) or added to the scores. None means
            causal by slot if `causal`, else all pairs.
        groups: only without a mask: integer, `(batch or 1, kv_len)`. A query sees the keys of its own group. Values
            below zero are pads, which no token sees and which see all tokens. None for one group.
        causal: whether keys after the query are hidden, by the mask or without one.
        query_start: slot of the first query among the keys.
        scattered: whether the distance of some visible cached key differs from its difference of slots.
        scaling: multiplies the scores.
        bias: by distance, added after scaling.
        running_bias: c of a bias c_m - c_n, by slot: float64, `(batch or 1, heads, kv_len)`.
        content: all other terms of the scheme.
        softcap: c in c tanh(s / c), applied to the scaled scores before any bias or mask.
        sinks: one extra score per head that enters the softmax without a value.
        dropout: probability, applied to the attention weights.
    """

    branches: tuple[Branch, ...]
    value: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    query_start: int | torch.Tensor
    scaling: float
    bias: DistanceBias | None = None
    running_bias: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    groups: torch.Tensor | None = None
    content: Content | None = None
    scattered: bool = False

    @property
    def q_length(self) -> int:
        """Number of queries."""
        return self.query_positions.shape[-1]

    @property
    def kv_length(self) -> int:
        """Number of key slots."""
        return self.value.shape[2]

    @property
    def by_head(self) -> bool:
        """Whether heads keep different keys in the cache, as after eviction by some libraries."""
        return self.key_positions.ndim == 3

    @property
    def m(self) -> torch.Tensor:
        """Positions of the queries, `(batch or 1, 1, q_len, 1)`."""
        return self.query_positions[:, None, :, None]

    @property
    def n(self) -> torch.Tensor:
        """Positions of the keys, `(batch or 1, heads or 1, 1, kv_len)`."""
        if not self.by_head:
            return self.key_positions[:, None, None, :]
        repeats = self.branches[0].query.shape[1] // self.key_positions.shape[1]
        return self.key_positions.repeat_interleave(repeats, dim=1)[:, :, None, :]

    @property
    def running_bias_of_pairs(self) -> torch.Tensor | None:
        """c_m - c_n of all pairs, float64, `(batch or 1, heads, q_len, kv_len)`; None without one."""
        if self.running_bias is None:
            return None
        queries = torch.arange(self.q_length, device=self.running_bias.device) + self.query_start
        return self.running_bias[..., queries, None] - self.running_bias[..., None, :]

    @property
    def fits_kernels(self) -> bool:
        """Whether scores are products of rotated states plus a bias by distance, as plain kernels compute them."""
        return self.softcap is None and self.sinks is None and self.dropout == 0.0 and self.content is None

    def with_branches(self, branches: tuple[Branch, ...]) -> AttentionInputs:
        """The call with these queries and keys."""
        return dataclasses.replace(self, branches=branches)

    def turned(self) -> AttentionInputs:
        """The call with rotated queries."""
        return self.with_branches(tuple(branch.turned() for branch in self.branches))

    @property
    def visibility(self) -> Visibility:
        """Which keys the queries may see."""
        lengths = self.q_length, self.kv_length
        return Visibility(self.mask, self.groups, self.causal, self.query_start, *lengths)

    def visible(self) -> torch.Tensor | None:
        """Boolean `(batch or 1, 1, q_len, kv_len)` by slot and group, or the mask; None for all pairs."""
        return self.visibility.pairs(self.value.device)

    def rows(self, start: int, stop: int) -> AttentionInputs:
        """The call for the queries `start` to `stop`, without keys that none of them can see."""
        keys = slice(None)
        if self.mask is None and self.causal and isinstance(self.query_start, int):
            keys = slice(0, self.query_start + stop)
        branches = tuple(branch.rows(start, stop, keys.stop) for branch in self.branches)
        return dataclasses.replace(
            self,
            branches=branches,
            value=self.value[:, :, keys],
            query_positions=self.query_positions[:, start:stop],
            key_positions=self.key_positions[..., keys],
            mask=None if self.mask is None else self.mask[:, :, start:stop],
            groups=None if self.groups is None else self.groups[:, keys],
            query_start=self.query_start + start,
            running_bias=None if self.running_bias is None else self.running_bias[..., keys],
            content=None if self.content is None else self.content.rows(slice(start, stop), keys),
        )
