"""A decoded token: one layer looks at positions and mask and makes a plan. Layers that see the same repeat it, and the
next token goes on from it.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache, DynamicLayer

from rope_patch.attention import decode
from rope_patch.attention.inputs import AttentionInputs
from rope_patch.attention.slot_plan import SlotPlan
from rope_patch.models.cached_keys import positions_in
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import UNROTATED, LayerState
from rope_patch.mounting.rotated_call import RotatedCall
from rope_patch.typing import NO_WEIGHTS


@dataclass(frozen=True)
class Step:
    """How one layer scored one query after a cache. It keeps neither the cache nor its states alive.

    Attributes:
        rotated, inputs: of that layer, with states that have a shape and a dtype but no memory.
        cache: of the forward.
        mask: as its hook and its attention function received it.
        plan: for states of this `form`.
        setting: what the user may change between two forwards, see `setting_of`.
    """

    rotated: RotatedCall
    inputs: AttentionInputs
    cache: weakref.ref[Cache]
    mask: Any
    plan: SlotPlan
    form: tuple[Any, ...]
    setting: str | None

    @property
    def call(self) -> ForwardCall:
        """Of that layer."""
        return self.rotated.late

    def followed_by(
        self, state: LayerState, cache: Cache | None, hidden: torch.Tensor, position_ids: Any, mask: Any
    ) -> ForwardCall | None:
        """The call of another layer for the same token, or of a layer for the next token, with input `hidden`
        `(batch, 1, hidden)`; None if it may see something else.
        """
        first, index = self.call, state.layer.cache_index
        goes_on = cache is self.cache() and mask is self.mask
        if cache is None or not goes_on or not grows(cache, index):
            return None
        if hidden.shape != first.states.shape or hidden.dtype != first.states.dtype:
            return None
        if state.forward_cache.current(position_ids) is not first.forward_cache:
            return self._next(state, cache, hidden, position_ids)
        start, keys = cast(int, first.start), cache.layers[index].keys
        if keys.shape[2] != start:
            return None
        if getattr(keys, "positions", None) is not first.past:
            past = positions_in(cache, index, start, state.layer.name)
            if first.forward_cache.same(("past", start), past) is not first.past:
                return None
        return first.repeated(state=state, cache=cache, states=hidden, step=self)

    def _next(self, state: LayerState, cache: Cache, hidden: torch.Tensor, position_ids: Any) -> ForwardCall | None:
        """The call of a layer for the next token."""
        first, keys, positions = self.call, cache.layers[state.layer.cache_index].keys, self.call.all_positions()
        if getattr(keys, "positions", None) is not positions or self.mask is not None:
            return None  # an operation changed the cache
        if position_ids is None or position_ids.shape != first.position_ids.shape or torch.is_grad_enabled():
            return None
        if self.setting is None or setting_of(state, hidden.device) != self.setting:
            return None
        start = cast(int, first.start) + 1
        call = first.repeated(
            state=state,
            forward_cache=state.forward_cache.of(position_ids),
            states=hidden,
            position_ids=position_ids,
            query_start=start,
            kv_length=start + 1,
            past=positions,
            counted=state.forward_cache.counted,
            # an identity is the same at every position
            rotation=first.rotation if state.rotates and first.anchor in (None, UNROTATED) else None,
        )
        if not call.goes_on():
            return None
        like = self.rotated.queries
        key, value = (x[:, :, :1].expand(-1, -1, start + 1, -1) for x in (self.rotated.keys, self.inputs.value))
        rotated = RotatedCall(like, key, call.forward_cache, call, NO_WEIGHTS)
        inputs = dataclasses.replace(
            self.inputs,
            value=value,
            query_positions=position_ids,
            key_positions=call.key_positions(start + 1),
            query_start=start,
        )
        plan, form = decode.plan(inputs, rotated, rotated.decay()), (self.form[0], like.shape, key.shape, value.shape)
        step = dataclasses.replace(self, rotated=rotated, inputs=inputs, plan=plan, form=form)
        state.forward_cache.steps[state.kind] = step
        return call.repeated(cache=cache, step=step)

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
        if mask is not self.mask or scaling != self.inputs.scaling or form != self.form or not plain:
            return None
        return self.plan.attend(query, key, value, scaling)


def keep_step(rotated: RotatedCall, inputs: AttentionInputs, mask: Any) -> None:
    """Keep how the one query of a call was scored by its plan, unless it depends on the layer."""
    call, state = rotated.late, rotated.late.state
    cache, steps = call.cache, state.forward_cache.steps
    if cache is None or call.past is None or call.added is not None or inputs.q_length > 1:
        return
    if not grows(cache, state.layer.cache_index) or call.is_request or rotated.plan is None:
        return
    known = steps.get(state.kind)
    if known is not None and known.call.forward_cache is call.forward_cache:
        return
    states = rotated.queries, rotated.keys, inputs.value
    query, key, value = (x.new_empty(()).expand(x.shape) for x in states)
    steps[state.kind] = Step(
        RotatedCall(query, key, call.forward_cache, call.repeated(cache=None), NO_WEIGHTS),
        dataclasses.replace(inputs, value=value),
        weakref.ref(cache),
        mask,
        rotated.plan,
        form_of(*states),
        setting_of(state, inputs.value.device),
    )


def setting_of(state: LayerState, device: torch.device) -> str | None:
    """The model's attention implementation; None under autocast, where a plan is for what was cast at its token."""
    return None if torch.is_autocast_enabled(device.type) else cast(str, state.config._attn_implementation)


def grows(cache: Cache, index: int) -> bool:
    """Whether a layer keeps all its keys in memory that grows with them."""
    return index < len(cache.layers) and type(cache.layers[index]) is DynamicLayer


def form_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """The dtype and the shapes of these states, each `(batch, heads or kv_heads, length, head_dim)`."""
    return query.dtype, query.shape, key.shape, value.shape
