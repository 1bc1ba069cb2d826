"""One forward of a stack: values that its layers share, each computed once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from rope_patch.attention.terms import DistanceBias
from rope_patch.graphs import traced
from rope_patch.schemes.base import Scheme
from rope_patch.typing import NO_WEIGHTS, Weights

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def wants_gradient(weights: Weights) -> bool:
    """Whether a gradient must flow into learned parameters."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights.values())


class BiasTables:
    """Biases by distance that follow from a scheme's fields alone, kept from one forward to the next: a table grows to
    twice its length where a text outgrows it, so that few of the tokens of a text compute one.
    """

    least = 64
    """The number of distances in the shortest table."""

    def __init__(self) -> None:
        self._tables: dict[Any, torch.Tensor] = {}

    def values(self, key: Any, compute: Callable[[int, int], torch.Tensor], high: int) -> torch.Tensor:
        """The biases b(0) to b(high - 1), `(heads, high)`. `compute` gives the values from one distance to below
        another, always the same for the same `key`.
        """
        table = self._tables.get(key)
        if table is None or table.shape[-1] < high:
            with torch.inference_mode(False):  # another forward may be differentiated
                table = self._tables[key] = compute(0, max(self.least, 1 << (high - 1).bit_length()))
        return table[:, :high]


class Forward:
    """One forward of the layers of a stack, which see the same mask and the same positions.

    Attributes:
        counted: whether the stack itself counted the positions of the queries, from the number of cached tokens. Nobody
            has to read them then.
        steps: how a layer of each kind scored one query, see `mounting.step`.
        tables: those that the forwards of a stack share; by default this forward has its own.
    """

    def __init__(self, counted: bool = False, tables: BiasTables | None = None) -> None:
        self.counted = counted
        self.tables = BiasTables() if tables is None else tables
        self.steps: dict[Any, Any] = {}
        self._functions: dict[Any, Any] = {}
        self._pasts: dict[torch.Size, torch.Tensor] = {}

    @property
    def traced(self) -> bool:
        """Whether a compiler traces this forward, so that no value is known and nothing may be remembered."""
        return traced()

    def shared(self, compute: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
        """Wrap a function so that it computes once in this forward for the same arguments.

        Tensors are the same if they are one object, which the forward keeps alive; numbers, data classes and tuples if
        they are equal. While compiling nothing is remembered: the compiler itself shares equal expressions, and a graph
        must not depend on an object.

        Example:
            >>> positions = forward.shared(key_positions)(position_ids, kv_length, start)
        """
        if self.traced:
            return compute
        if compute not in self._functions:
            self._functions[compute] = functools.cache(compute)
        return cast("Callable[Arguments, Value]", self._functions[compute])

    def earlier(self, past: torch.Tensor) -> torch.Tensor:
        """The first layer's `past`, the positions of its cached keys, `(batch or 1, slots)` or `(batch, kv_heads,
        slots)`, if it equals this layer's; else this layer's. Layers with the same tensor also share what is computed
        from it.
        """
        first = self._pasts.setdefault(past.shape, past)
        return first if first is past or torch.equal(first, past) else past

    def bias(
        self,
        scheme: Scheme,
        like: torch.Tensor,
        weights: Weights = NO_WEIGHTS,
        num_heads: int | None = None,
        some: slice | None = None,
    ) -> DistanceBias:
        """The bias of a scheme for queries `like` `(batch, heads, q_len, head_dim)`. All layers with the same `weights`
        get one object, which computes its values once. If `like` has only `some` heads, `num_heads` counts all.
        """
        bounds = None if some is None else (some.start, some.stop)
        heads, named = num_heads or like.shape[1], tuple(weights.items())
        return self.shared(_distance_bias)(self, scheme.bias, scheme.linear, heads, bounds, named, like.device)


def _distance_bias(
    forward: Forward,
    compute: Callable[..., torch.Tensor],
    linear: bool,
    heads: int,
    some: tuple[int, int] | None,
    named: tuple[tuple[str, torch.Tensor], ...],
    device: torch.device,
) -> DistanceBias:
    weights = dict(named)

    def bias(distance: torch.Tensor) -> torch.Tensor:
        values = compute(distance, heads, weights)
        return values if some is None or len(values) == 1 else values[slice(*some)]

    def values(low: int, high: int) -> torch.Tensor:
        return bias(torch.arange(low, high, device=device))

    def table(low: int, high: int) -> torch.Tensor:
        if low >= 0 and not (weights or forward.traced):
            return forward.tables.values((compute, heads, some, device), values, high)[:, low:]
        # each layer needs a graph of its own where weights learn, since backward may free it
        return values(low, high) if wants_gradient(weights) else forward.shared(values)(low, high)

    return DistanceBias(bias, linear, table)


class StackForwards(threading.local):
    """The current `Forward` of a stack. Each thread has its own, so that several threads can run one model."""

    def __init__(self) -> None:
        self._position_ids: torch.Tensor | None = None
        self._tables = BiasTables()
        self._forward = Forward(tables=self._tables)
        self._counted = False

    def forget(self, counted: bool) -> None:
        """Begin a new forward; `counted` says whether the stack counted the positions itself."""
        if traced():
            return
        self._position_ids, self._forward, self._counted = None, Forward(tables=self._tables), counted

    @property
    def traced(self) -> bool:
        """Whether a compiler traces the current forward."""
        return traced()

    def for_positions(self, position_ids: torch.Tensor) -> Forward:
        """The forward that has this very positions tensor, `(batch or 1, length)`; a new one for another tensor."""
        if traced():
            return Forward()
        if self._position_ids is not position_ids:
            self._counted &= self._position_ids is None  # positions of another call
            self._position_ids, self._forward = position_ids, Forward(self._counted, self._tables)
        return self._forward

    def current(self, position_ids: Any) -> Forward | None:
        """The forward with this positions tensor if a layer has begun it, else None."""
        if position_ids is None or traced():
            return None
        return self._forward if self._position_ids is position_ids else None

    def __reduce__(self) -> tuple[type[StackForwards], tuple[()]]:
        return StackForwards, ()  # a copy of a model remembers nothing
