"""The reuse of decisions for a decoded token: one layer reads positions, mask and cache, and layers with the same
inputs repeat its steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, DynamicLayer

from rope_patch.models.arguments import cache_in
from rope_patch.models.cached_keys import CachedKeys, positions_in
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import LayerState

Scored = tuple[torch.Tensor, "torch.Tensor | None"]
"""Output `(batch, 1, heads, value_dim)` and weights, as Transformers takes them from an attention function."""

Score = Callable[..., "Scored | None"]
"""A function that scores the queries, keys and values of a module, given its mask and arguments; None if it cannot."""


@dataclass(frozen=True, eq=False)
class Step:
    """A record of how one layer scored one query after a cache, which other layers repeat. The record keeps neither the
    cache nor its keys alive.

    Attributes:
        call: the call of the layer that made this record.
        cache: the cache of the forward.
        config: the config of the layer's attention module, which names the implementation.
        mask: the mask as the layer's hook and its attention function received it.
        scaling: factor on the products; None for head_dim^-0.5.
        form: the form of the states, see `form_of`.
        factors: factors on the queries, `(batch or 1, heads or 1, 1, 1)`; None without a scale.
        positions: positions of all keys, which are kept with the keys, `(batch or 1, kv_len)`; None if no layer reads
            them.
        taken: the way in which the layer was scored, for `explain`.
        score: a function that scores another layer.
    """

    call: ForwardCall
    cache: weakref.ref[Cache]
    config: Any
    mask: Any
    scaling: float | None
    form: tuple[Any, ...]
    factors: torch.Tensor | None
    positions: torch.Tensor | None
    taken: str
    score: Score

    def followed_by(self, state: LayerState, module: nn.Module, kwargs: dict[str, Any]) -> ForwardCall | None:
        """Derive the call of another layer for the same token, whose attention `module` gets these arguments; None if
        the inputs of that layer may differ.
        """
        first, cache, index, hidden = self.call, cache_in(kwargs), state.layer.cache_index, kwargs["hidden_states"]
        if cache is None or cache is not self.cache() or module.config is not self.config or not grows(cache, index):
            return None
        if kwargs.get("attention_mask") is not self.mask:
            return None
        if hidden.shape != first.states.shape or hidden.dtype != first.states.dtype:
            return None
        layer = cast(Any, cache).layers[index]
        # operators on keys with positions also run Python: keys get their positions back after the cache was updated
        keys = layer.keys.plain() if isinstance(layer.keys, CachedKeys) else layer.keys
        if keys is None or keys.shape[2] != first.start:
            return None
        if first.past is not None and getattr(layer.keys, "positions", None) is not first.past:
            past = positions_in(cache, index, cast(int, first.start), state.layer.name)
            if first.forward.earlier(past) is not first.past:
                return None
        layer.keys = keys
        return first.repeated(state=state, cache=cache, cache_index=index, states=hidden, step=self)

    def attend(
        self,
        call: ForwardCall,
        module: nn.Module,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> Scored | None:
        """Score `states`, the queries, keys and values of a layer's call as they arrive, in the way in which the first
        layer was scored. Return output and weights; None if the step does not fit these inputs.
        """
        if mask is not self.mask or scaling != self.scaling or torch.is_grad_enabled():
            return None
        if kwargs.get("position_bias") is not None or form_of(*states) != self.form:
            return None
        query, key, value = states
        scored = self.score(module, query if self.factors is None else query * self.factors, key, value, mask, kwargs)
        if scored is None:
            return None
        if self.positions is not None:
            layer = cast(Any, call.cache).layers[call.cache_index]
            layer.keys = CachedKeys.of(layer.keys, self.positions)
        if call.state.watch is not None:
            call.state.watch(self.taken, None)
        return scored


def keep_step(
    call: ForwardCall,
    module: nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    scaling: float | None,
    factors: torch.Tensor | None,
    taken: str,
    score: Score,
) -> None:
    """Record how the one query of a call was scored, unless it depends on the layer. The arguments are the fields of
    `Step`; `states`, each `(batch, heads or kv_heads, length, head_dim)`, are queries, keys and values as they arrived.
    """
    cache, state = call.cache, call.state
    if cache is None or call.added is not None or call.is_request or states[0].shape[2] > 1:
        return
    if state.kind in call.forward.steps or not grows(cache, call.cache_index):
        return
    if call.forward.traced or (call.past is None and state.follows_positions):
        return
    positions = cast(Any, cache).layers[call.cache_index].keys.positions if state.follows_positions else None
    places = call.repeated(cache=None), weakref.ref(cache), module.config
    call.forward.steps[state.kind] = Step(*places, mask, scaling, form_of(*states), factors, positions, taken, score)


def grows(cache: Cache, index: int) -> bool:
    """Whether a layer keeps all its keys in memory that grows with them."""
    return index < len(cache.layers) and type(cache.layers[index]) is DynamicLayer


def form_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """The dtype and the shapes of these states, each `(batch, heads or kv_heads, length, head_dim)`, and whether
    autocast is on.
    """
    return query.dtype, query.shape, key.shape, value.shape, torch.is_autocast_enabled(query.device.type)
