"""The late mount: pre-hooks of a stack and of its attention modules; docs/architecture/mounting.md describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import QuantizedCache
from transformers.generation.continuous_batching import PagedAttentionCache

from rope_patch.attention.forward import StackForwards
from rope_patch.attention.masks import groups_as_mask, groups_of_documents, groups_of_pads
from rope_patch.errors import UnsupportedModel, UnsupportedPositions
from rope_patch.models.arguments import Arguments, by_name, cache_in, check_tokens, slot_positions, tokens_of
from rope_patch.models.base import AttentionLayer, RotaryTables, is_causal
from rope_patch.models.cached_keys import CACHE_TAG, tag_cache
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.identity_table import IdentityTable
from rope_patch.mounting.layer_state import LayerState
from rope_patch.mounting.registration import Registration, scores_here
from rope_patch.mounting.running_bias import contributions
from rope_patch.mounting.running_stack import StackLink, stack_of
from rope_patch.mounting.stack_positions import PASSED
from rope_patch.schemes.tools.positions import UNROTATED, Identity, query_start
from rope_patch.typing import PositionMap

LONG = 64  # from this many tokens on, `IdentityTable` saves more than it costs


@dataclass(eq=False)
class StackHook:
    """Pre-hook of the stack: it begins a new `Forward`, and turns pads into segment ids, so that no mask of all pairs
    is built.

    Attributes:
        scorers: the attention modules, if they cover every layer of the stack and read segment ids; else empty.
        counts: whether this hook must count slots, because the stack has no positions.
    """

    forwards: tuple[StackForwards, ...]
    scorers: tuple[nn.Module, ...]
    counts: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return the arguments with pads and packed documents as segment ids: one number per key instead of one per
        pair.
        """
        kwargs = by_name(module, args, kwargs)
        check_tokens(module, kwargs)
        changed = {}
        if self.counts and kwargs.get("position_ids") is None and tokens_of(kwargs) is not None:
            changed["position_ids"] = slot_positions(kwargs)
        counted = kwargs.get("position_ids") is None and kwargs.get("attention_mask") is None
        for forwards in self.forwards:
            forwards.forget(counted)
        if self._reads_groups(cast(Any, module.config), kwargs):
            causal = is_causal(self.scorers[0], kwargs.get("is_causal"))
            groups = groups_of_row(kwargs, cast(Any, module.config), causal, self.forwards[0].traced)
            if groups is not None:
                changed["attention_mask"] = groups_as_mask(groups)
        return ((), {**kwargs, **changed}) if changed else None

    def _reads_groups(self, config: Any, kwargs: dict[str, Any]) -> bool:
        """Whether every layer reads segment ids, and the forward has several tokens."""
        tokens = tokens_of(kwargs)
        if not self.scorers or tokens is None or tokens.shape[1] == 1:
            return False
        return config._attn_implementation == "sdpa" and all(map(scores_here, self.scorers))


def groups_of_row(kwargs: dict[str, Any], config: Any, causal: bool, compiling: bool) -> torch.Tensor | None:
    """Segment ids of the keys of a forward, `(batch or 1, keys)`, if Transformers would otherwise build a mask. While
    compiling, Transformers builds one unless a cache is empty, because it cannot see that there are no pads and that no
    document ends.
    """
    tokens = cast(torch.Tensor, tokens_of(kwargs))
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim == 3:
        positions = positions[0]  # the positions of the text, see `PassPositions`
    if isinstance(mask, torch.Tensor):
        return groups_of_pads(mask) if mask.ndim == 2 and (compiling or not mask.all()) else None
    if not causal:
        return None  # in both directions Transformers does not separate documents
    use_cache = getattr(config, "use_cache", False) if kwargs.get("use_cache") is None else kwargs["use_cache"]
    without_cache = cache_in(kwargs) is None and not use_cache
    if mask is not None or not without_cache:
        return None
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        documents = groups_of_documents(positions)
        return documents if compiling or documents.any() else None
    return groups_of_pads(tokens.new_ones(tokens.shape[:2])) if compiling and positions is None else None


@dataclass(eq=False)
class TagHook:
    """Pre-hook of the first attention module, for a scheme that changes only the tables: it marks the cache with its
    writer.

    Attributes:
        tag, accepts_plain: the arguments of `tag_cache`.
        link: the link to the stack; it leads nowhere in a copy of the layer alone, whose new stack may have another
            scheme.
    """

    link: StackLink
    layer: AttentionLayer
    tag: str
    accepts_plain: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the cache among the arguments; they stay unchanged."""
        if self.link.stack is None:
            return
        kwargs = by_name(module, args, kwargs)
        check_tokens(module, kwargs)
        cache = cache_in(kwargs)
        if cache is not None:
            tag_cache(cache, self.layer.cache_index, self.tag, self.accepts_plain)


@dataclass(eq=False)
class LayerHook:
    """Pre-hook of one attention module: it makes a `ForwardCall` of the arguments.

    Attributes:
        registration: the registered name of the attention function, which exists as long as this hook or a copy of it.
    """

    state: LayerState
    registration: Registration

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return the arguments with the module's rotation replaced, and with the `ForwardCall`."""
        kwargs = by_name(module, args, kwargs)
        call = self._follow(module, kwargs)
        if call is None:
            if isinstance(kwargs.get("cache"), PagedAttentionCache):
                self._check_paged(module, kwargs["cache"])
            if not scores_here(module):
                return None  # the user chose another attention for this module, which needs its own positions
            call = self._look(module, kwargs)
        if call.rotation is not None:
            kwargs["position_embeddings"] = call.rotation
        kwargs["rope_patch"] = call
        return (), kwargs

    def _follow(self, module: nn.Module, kwargs: dict[str, Any]) -> ForwardCall | None:
        """The call for a decoded token, derived from an earlier layer of this kind with the same inputs; None if this
        layer must read its own.
        """
        state = self.state
        forward = state.forwards.current(kwargs.get("position_ids"))
        step = None if forward is None or PASSED in kwargs else forward.steps.get(state.kind)
        return None if step is None else step.followed_by(state, module, kwargs)

    def _look(self, module: nn.Module, kwargs: dict[str, Any]) -> ForwardCall:
        """Make the call from the module's positions, mask and cache."""
        state, hidden, cache = self.state, kwargs["hidden_states"], cache_in(kwargs)
        stack_of(module, state.layer.name)  # refuses a copy of this layer, which has no stack
        paged = isinstance(kwargs.get("cache"), PagedAttentionCache)
        index = state.layer.cache_index
        if cache is not None:
            tag_cache(cache, index, state.cache_tag)
        if isinstance(cache, QuantizedCache):
            raise UnsupportedPositions(f"{type(cache).__name__}: quantised caches are not supported")
        start = None if cache is None else query_start(cache, index, hidden.shape[1])
        if isinstance(start, torch.Tensor) and not state.forwards.traced:
            start = int(start)  # the counter of a static cache, read once
        position_ids = self._positions(kwargs, start)
        anchor = state.anchor_for(keeps_keys=paged or cache is not None)
        call = ForwardCall(state, state.forwards.for_positions(position_ids), hidden, position_ids, start, anchor)
        call.cache_index, call.is_paged = index, paged
        if cache is not None:
            call.look_back(cache, kwargs.get("attention_mask"))
        if "running_bias" in state.methods:
            added = state.scheme.running_bias(hidden, state.weights(module))
            slots = hidden.shape[1] if call.kv_length is None else call.kv_length
            call.added = contributions(added, cache, index, state.num_layers, slots)
        call.rotation = self._rotation(call, kwargs)
        return call

    def _rotation(self, call: ForwardCall, kwargs: dict[str, Any]) -> Any:
        """The tables that the module receives to rotate by; None if it keeps the model's tables."""
        state, anchor, hidden, shared = self.state, call.anchor, call.states, call.forward.shared
        if state.rotates and state.layer.rotary is not None:
            if anchor in (None, UNROTATED):
                fewer = not call.forward.traced and hidden.shape[1] >= LONG
                return shared(_identity)(kwargs["position_embeddings"], hidden.device.type, fewer)
            like = hidden.dtype, hidden.device
            return shared(_tables_at)(state.layer.rotary, anchor, call.position_ids, *like)
        if (own := state.own_tables) is not None:
            return shared(_tables_at)(own.on(hidden.device), IDENTITY, call.position_ids, hidden.dtype, hidden.device)
        return None

    def _check_paged(self, module: nn.Module, cache: PagedAttentionCache) -> None:
        """Refuse a row of continuous batching that the scheme would not score, because the module has another
        implementation now, another scheme wrote keys to the cache, or the scheme needs more than keys.
        """
        state = self.state
        if not scores_here(module):
            raise UnsupportedModel(
                f"{state.layer.name} now has attn_implementation={cast(Any, module.config)._attn_implementation!r}, "
                f"which would bypass {state.scheme}; set auto_switch_to_flash=False in the ContinuousBatchingConfig"
            )
        if "running_bias" in state.methods:
            raise UnsupportedPositions(f"{state.scheme}: a paged cache cannot keep its sums over earlier tokens")
        tag = vars(cache).setdefault(CACHE_TAG, state.cache_tag)
        if tag != state.cache_tag:
            raise UnsupportedPositions(
                f"the paged cache holds keys written under {tag}, which {state.cache_tag} would misread; "
                "create a new manager"
            )

    def _positions(self, kwargs: dict[str, Any], start: int | torch.Tensor | None) -> torch.Tensor:
        """Positions of the queries, `(batch or 1, q_len)`, or slots counted from `start` if the module received none.
        Positions on other axes, and modules that receive none, are refused.
        """
        layer, hidden = self.state.layer, kwargs["hidden_states"]
        passed = kwargs.pop(PASSED, None)
        position_ids = kwargs.get("position_ids") if passed is None else passed
        if position_ids is None and not layer.gets_positions:
            raise UnsupportedPositions(f"{layer.name} does not receive position_ids")
        if position_ids is None:
            return (torch.arange(hidden.shape[1], device=hidden.device) + (start or 0))[None]
        if position_ids.ndim != 2:
            raise UnsupportedPositions(
                f"{layer.name}: position_ids of shape {tuple(position_ids.shape)}; (batch, length) is allowed"
            )
        return cast(torch.Tensor, position_ids)


IDENTITY = Identity()


def _tables_at(
    rotary: RotaryTables,
    position_map: PositionMap,
    position_ids: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Compute the tables of a rotary module at mapped positions."""
    return rotary.compute(position_map(position_ids), like=torch.empty(0, dtype=dtype, device=device))


def _identity(tables: Any, device_type: str, fewer: bool) -> Any:
    """Identity tables of the same form as `tables`; if `fewer`, as `IdentityTable`, which skips operators."""
    if isinstance(tables, torch.Tensor):  # cos + i sin
        return torch.ones_like(tables)
    cos, sin = tables
    dtype = cos.dtype
    # otherwise the cache would hold float32 keys beside half-precision values
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    one, zero = torch.ones_like(cos, dtype=dtype), torch.zeros_like(sin, dtype=dtype)
    return (IdentityTable.from_tensor(one, 1), IdentityTable.from_tensor(zero, 0)) if fewer else (one, zero)
