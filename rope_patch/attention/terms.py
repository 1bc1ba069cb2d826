"""Terms that a scheme adds to scores, weights and values, besides its rotations: by distance and by content."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Pairs
from rope_patch.typing import Weights

HALF = (torch.bfloat16, torch.float16)
"""The dtypes of half precision."""


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Upcast half precision to float32; float32 and float64 stay. `x` has any shape."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply x @ y, `(batch, heads, ..., ...)` each, in the dtype of scores; on a GPU half precision is multiplied
    without an upcast copy.
    """
    if x.is_cuda and x.dtype in HALF:
        found = torch.bmm(x.flatten(0, 1), y.flatten(0, 1), out_dtype=torch.float32)
        return found.unflatten(0, x.shape[:2])
    return upcast(x) @ upcast(y)


@dataclass(frozen=True)
class DistanceBias:
    """A bias b(m - n) by distance.

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
        """The biases b(low) to b(high - 1), `(heads, high - low)`."""
        return self.function(torch.arange(low, high)) if self.table is None else self.table(low, high)

    @property
    def learned(self) -> bool:
        """Whether the bias needs a gradient."""
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

    def bias(
        self, m: torch.Tensor, n: torch.Tensor, scaling: float, scores: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The bias b(q_m, k_n, m, n) for positions `(batch or 1, length)` and `scores` `(batch, heads, q_len, kv_len)`,
        which are products times `scaling`; the bias and `seen` broadcast to their shape. None if the scheme has no such
        bias.
        """
        if "content_bias" not in self.scheme.methods:
            return None
        repeats = self.query.shape[1] // self.key.shape[1]
        pairs = Pairs(
            query=self.query,
            key=self.key if repeats == 1 else self.key.repeat_interleave(repeats, dim=1),
            m=m[:, :, None],
            n=n[:, None, :],
            scores=scores,
            seen=torch.ones((), dtype=torch.bool, device=scores.device) if seen is None else seen,
            scaling=scaling,
            states=self.states,
        )
        return self.scheme.content_bias(pairs, self.weights)

    def factor(self, distance: torch.Tensor) -> torch.Tensor | None:
        """The factor c(m, n) on attention weights, `(batch or 1, heads, q_len, kv_len)`; None if the scheme has none of
        it.
        """
        if "weight_factor" not in self.scheme.methods:
            return None
        return self.scheme.weight_factor(distance, self.query.shape[1], self.weights).transpose(0, 1)

    def values(self, attention: torch.Tensor, distance: torch.Tensor) -> torch.Tensor | None:
        """The sum over n of attention(m, n) u(m, n), `(batch, heads, q_len, value_dim)`; None if the scheme adds
        nothing to values.
        """
        if "relative_values" not in self.scheme.methods:
            return None
        return self.scheme.relative_values(attention, distance, self.weights)

    def rows(self, queries: slice, keys: slice) -> Content:
        """Restrict the terms to some queries and keys."""
        query, key, states = self.query[:, :, queries], self.key[:, :, keys], self.states[:, queries]
        return dataclasses.replace(self, query=query, key=key, states=states)
