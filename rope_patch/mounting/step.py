"""A decoded token: one layer looks at positions and mask and makes a plan, which layers that see the same repeat."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache, DynamicLayer

from rope_patch.attention.executors.joined import SlotPlan
from rope_patch.attention.problem import Problem
from rope_patch.models.cached_keys import CachedKeys, positions_in
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import LayerState


@dataclass(frozen=True)
class Step:
    """How one layer scored one query after a cache. It keeps neither the cache nor its keys alive.

    Attributes:
        call: of that layer.
        cache: of the forward.
        mask: as its hook and its attention function received it.
        scaling: multiplies the products.
        plan: for states of this `form`.
    """

    call: ForwardCall
    cache: weakref.ref[Cache]
    mask: Any
    scaling: float
    plan: SlotPlan
    form: tuple[Any, ...]

    def followed_by(
        self, state: LayerState, cache: Cache | None, hidden: torch.Tensor, mask: Any
    ) -> ForwardCall | None:
        """The call of another layer for the same token, with input `hidden` `(batch, 1, hidden)`; None if it may see
        something else.
        """
        first, index = self.call, state.layer.cache_index
        if cache is None or cache is not self.cache() or mask is not self.mask or not grows(cache, index):
            return None
        if hidden.shape != first.states.shape or hidden.dtype != first.states.dtype:
            return None
        start, keys = cast(int, first.start), cast(Any, cache).layers[index].keys
        held = keys.plain() if isinstance(keys, CachedKeys) else keys  # a shape of a subclass takes its time
        if held.shape[2] != start:
            return None
        if getattr(keys, "positions", None) is not first.past:
            past = positions_in(cache, index, start, state.layer.name)
            if first.forward.earlier(past) is not first.past:
                return None
        return first.repeated(state=state, cache=cache, states=hidden, step=self)

    def attend(
        self,
        mask: Any,
        scaling: float,
        kwargs: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor | None:
        """The output, `(batch, heads, 1, value_dim)`; None if the plan is for other inputs than these."""
        plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and not torch.is_grad_enabled()
        if mask is not self.mask or scaling != self.scaling or form_of(query, key, value) != self.form or not plain:
            return None
        return self.plan.attend(query, key, value)


def keep_step(call: ForwardCall, problem: Problem, mask: Any) -> None:
    """Keep how the one query of a call was scored by its plan, unless it depends on the layer."""
    cache, state = call.cache, call.state
    if cache is None or call.past is None or call.added is not None or problem.q_length > 1:
        return
    if not grows(cache, state.layer.cache_index) or call.is_request or problem.plan is None:
        return
    if state.kind not in call.forward.steps:
        query, key = cast(tuple[torch.Tensor, torch.Tensor], (problem.query, problem.key))
        form, first = form_of(query, key, problem.value), call.repeated(cache=None)
        step = Step(first, weakref.ref(cache), mask, problem.scaling, problem.plan, form)
        call.forward.steps[state.kind] = step


def grows(cache: Cache, index: int) -> bool:
    """Whether a layer keeps all its keys in memory that grows with them."""
    return index < len(cache.layers) and type(cache.layers[index]) is DynamicLayer


def form_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """The dtype and the shapes of these states, each `(batch, heads or kv_heads, length, head_dim)`."""
    return query.dtype, query.shape, key.shape, value.shape
