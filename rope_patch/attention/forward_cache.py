"""Values that the layers of one stack share and compute once per forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rope_patch.attention.inputs import AHEAD, AttentionInputs, DistanceBias
from rope_patch.attention.spans import Span, spans_of
from rope_patch.schemes.base import Scheme
from rope_patch.typing import NO_WEIGHTS, Weights


def wants_gradient(weights: Weights) -> bool:
    """Whether a gradient must flow into learned parameters."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights.values())


class ForwardCache:
    """Values shared by the layers of one forward, which see the same mask and the same positions.

    While compiling nothing is remembered: the compiler itself shares equal expressions, and a graph must not depend on
    an object.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, or its earlier result under this `key`."""
        if torch.compiler.is_compiling():
            return compute()
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def known(self, key: Any) -> Any:
        """The earlier result under this `key`; None without one."""
        return self._known.get(key)

    def derived(self, what: Any, compute: Callable[[], Any], *sources: Any) -> Any:
        """`compute()`, or its earlier result under the key `what` for the same objects `sources`. The sources are kept,
        so that no other object takes over their identity.
        """
        if torch.compiler.is_compiling():
            return compute()  # the compiled graph would be valid for these identities only
        return self.once((what, *map(id, sources)), lambda: (sources, compute()))[1]

    def same(self, key: Any, value: torch.Tensor) -> torch.Tensor:
        """An earlier layer's tensor under this `key` if it equals this layer's `value`, of any shape, so that layers
        also share what is computed from it.
        """
        first = self.once(key, lambda: value)
        return first if first is value or torch.equal(first, value) else value

    def spans(self, inputs: AttentionInputs) -> tuple[Span, ...] | None:
        """The spans of a call, found once for all layers that share its mask."""
        mask, groups, start = inputs.mask, inputs.groups, int(inputs.query_start)
        place = (None if groups is None else groups.data_ptr(), start, inputs.q_length)
        return self.derived(("spans", *place), lambda: (groups, spans_of(inputs)), mask)[1]

    def bias(
        self,
        scheme: Scheme,
        like: torch.Tensor,
        weights: Weights = NO_WEIGHTS,
        num_heads: int | None = None,
        some: slice | None = None,
    ) -> DistanceBias:
        """The bias of a scheme for queries `like` `(batch, heads, q_len, head_dim)`: one object for all layers with
        the same `weights`, which computes its values once. If `like` has only `some` heads, `num_heads` counts all.
        """
        heads, device = num_heads or like.shape[1], like.device

        def bias(distance: torch.Tensor) -> torch.Tensor:
            values = scheme.bias(distance, heads, weights)
            return values if some is None or len(values) == 1 else values[some]

        def table(low: int, high: int) -> torch.Tensor:
            distances = torch.arange(low, high, device=device)
            if wants_gradient(weights):
                return bias(distances)  # each layer needs its own graph, since backward may free it
            return self.derived(("bias", heads, low, high), lambda: bias(distances), *weights.values())

        return self.derived(("bias", heads), lambda: DistanceBias(bias, scheme.linear, table), *weights.values())


class Ahead:
    """Tables of consecutive positions, which outlive a forward: tokens that follow find theirs computed."""

    def __init__(self) -> None:
        self._blocks: dict[Any, tuple[Any, int, int, tuple[torch.Tensor, ...]]] = {}
        self._counted = torch.arange(0)

    def counted(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions 0 to below `length`, `(1, length)`, a view."""
        found = self._counted
        if found.device != device or len(found) < length or found._version > 0:
            with torch.inference_mode(False):  # its version shows whether somebody wrote to a view
                self._counted = found = torch.arange(length + AHEAD, device=device)
        return found[None, :length]

    def rows(
        self,
        key: Any,
        source: torch.Tensor,
        first: int,
        stop: int,
        compute: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """Tables of the positions from `first` to below `stop`, which follow from `source` and the `key` alone.
        `compute` makes them for positions `(1, length)`, which are the axis 2 of its results.
        """
        if source.is_inference():  # it would not tell that it was written to
            return compute(torch.arange(first, stop, device=source.device)[None])
        state = source.data_ptr(), source._version
        found, low, high, tables = self._blocks.get(key, ((None, None), 0, 0, ()))
        if found[0] is not source or found[1] != state or not low <= first <= stop <= high:
            low, high = first, stop + AHEAD
            with torch.inference_mode(False), torch.no_grad():  # a later token may want gradients
                tables = compute(torch.arange(low, high, device=source.device)[None])
            self._blocks[key] = (source, state), low, high, tables
        return tuple([table.narrow(2, first - low, stop - first) for table in tables])


class StackForwardCache(threading.local):
    """The `ForwardCache` of a stack's current forward.

    Each thread has its own, so that several threads can run one model.

    Attributes:
        counted: whether the stack counts the positions of this forward itself, from the number of cached tokens.
        ahead, steps: what the next forwards may use too: tables, and the last decoded token under each kind of layer.
    """

    counted = False

    def __init__(self) -> None:
        self._position_ids: torch.Tensor | None = None
        self._forward = ForwardCache()
        self.ahead = Ahead()
        self.steps: dict[Any, Any] = {}

    def forget(self) -> None:
        """Start a forward."""
        self._position_ids, self._forward = None, ForwardCache()

    def of(self, position_ids: torch.Tensor) -> ForwardCache:
        """The cache for this positions tensor (by identity), `(batch or 1, length)`."""
        if torch.compiler.is_compiling():
            return ForwardCache()
        if self._position_ids is not position_ids:
            self.counted &= self._position_ids is None  # positions of another call
            self._position_ids, self._forward = position_ids, ForwardCache()
        return self._forward

    def current(self, position_ids: Any) -> ForwardCache | None:
        """The cache for this positions tensor, if a layer has begun it."""
        return self._forward if position_ids is not None and self._position_ids is position_ids else None

    def __reduce__(self) -> tuple[type[StackForwardCache], tuple[()]]:
        return StackForwardCache, ()  # a copy of a model remembers nothing
