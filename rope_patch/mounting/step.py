"""A decoded token: one layer looks at positions and mask and makes a plan; layers that see the same repeat it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache, DynamicLayer

from rope_patch.attention.slot_plan import SlotPlan
from rope_patch.models.cached_keys import positions_in
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import LayerState


@dataclass(frozen=True)
class Step:
    """How one layer scored one query after a cache, which the step does not keep alive.

    Attributes:
        call: of that layer.
        mask: as its hook and its attention function received it.
        plan: for states of this `form`.
        scaling: multiplies the products.
    """

    call: ForwardCall
    cache: weakref.ref[Cache]
    mask: Any
    plan: SlotPlan
    scaling: float
    form: tuple[Any, ...]

    def followed_by(self, state: LayerState, cache: Cache, hidden: torch.Tensor, mask: Any) -> ForwardCall | None:
        """The call of another layer, with input `hidden` `(batch, 1, hidden)`; None if it may see something else."""
        first, index, start = self.call, state.layer.index, cast(int, self.call.start)
        same = cache is self.cache() and mask is self.mask and hidden.shape == first.states.shape
        if not same or not grows(cache, index) or cache.layers[index].keys.shape[2] != start:
            return None
        if getattr(cache.layers[index].keys, "positions", None) is not first.past:
            past = positions_in(cache, index, start, state.layer.name)
            if first.forward_cache.same(("past", start), past) is not first.past:
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
        form = form_of(query, key, value)
        if mask is not self.mask or scaling != self.scaling or form != self.form or not plain:
            return None
        return self.plan.attend(query, key, value, scaling)


def keep_step(call: ForwardCall, mask: Any, plan: SlotPlan, scaling: float, *states: torch.Tensor) -> None:
    """Keep how one query was scored, unless it depends on the layer. States are query, key and value, `(batch, heads
    or kv_heads, length, head_dim)`.
    """
    cache, state = call.cache, call.state
    if cache is None or call.past is None or call.added is not None or states[0].shape[2] > 1:
        return
    if grows(cache, state.layer.index) and not call.is_request:
        step = Step(call.repeated(cache=None), weakref.ref(cache), mask, plan, scaling, form_of(*states))
        call.forward_cache.once(("step", state.kind), lambda: step)


def grows(cache: Cache, index: int) -> bool:
    """Whether a layer keeps all its keys in memory that grows with them."""
    return index < len(cache.layers) and type(cache.layers[index]) is DynamicLayer


def form_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """The dtype and the shapes of these states, each `(batch, heads or kv_heads, length, head_dim)`."""
    return query.dtype, query.shape, key.shape, value.shape
