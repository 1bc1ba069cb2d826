"""The attention function of patched modules: rotates, scales, and scores by region."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention import engine
from rope_patch.attention.call import EVERY, Call
from rope_patch.attention.decay import Decay
from rope_patch.attention.forward_cache import wants_gradient
from rope_patch.attention.fused.launch import Fused
from rope_patch.attention.inputs import AttentionInputs, Content
from rope_patch.attention.masks import keys_seen, read_mask, shows_later_keys
from rope_patch.attention.rotation import rotate
from rope_patch.errors import UnsupportedModel, UnsupportedPositions
from rope_patch.models.base import is_causal
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.models.paged import Request, attend_by_request
from rope_patch.mounting.late import LateCall, Tables
from rope_patch.mounting.running_bias import running_sums
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import PositionMap, Weights


def late_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rope_patch: LateCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function that Transformers calls instead of `sdpa_attention_forward` and similar ones.

    If the scheme has only one region and no bias, it delegates to the attention that was there before.

    Args:
        attention_mask: as Transformers builds it, or groups.
        scaling: multiplies the products; default head_dim^-0.5.
        rope_patch: the call object from the hook of this layer.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key and value `(batch, kv_heads, kv_len, head_dim)`, in the rotation
        that the hook requested; returns `(batch, q_len, heads, head_dim)`, and the weights under eager attention.

    Raises:
        UnsupportedModel: the model passes an argument that the scheme's attention does not support.
        UnsupportedPositions: the number of keys differs from the cache's announcement, or the mask has an unknown form.
    """
    if rope_patch is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass its keyword arguments to its attention")
    paged = isinstance(kwargs.get("cache"), PagedAttentionCache)
    for name in ("position_bias",) if paged else ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} passes {name!r}, which patched attention does not support")
    call, state = rope_patch, rope_patch.state
    if paged:

        def attend(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any) -> torch.Tensor:
            mask, part = request.mask(state.layer.sliding_window), call.of_request(request)
            return late_attention(module, q, k, v, mask, scaling, dropout, part, **others)[0]

        row = {"position_ids": call.position_ids, "forward_cache": call.forward_cache}
        return attend_by_request(attend, module, query, key, value, **{**kwargs, **row})
    expected = query.shape[2] if call.kv_length is None else call.kv_length
    if key.shape[2] != expected:
        raise UnsupportedPositions(
            f"{state.layer.name}: {key.shape[2]} keys arrive where its cache announced {expected}; the way in which "
            f"{type(module).__name__} keeps keys is not supported"
        )
    call.remember()
    if isinstance(key, CachedKeys):  # of a static cache
        key = key.plain()
    scheme, implementation = state.scheme, state.config._attn_implementation
    projected = query
    learned = state.weights()
    query = scaled_query(call, query, learned)

    def shared(what: str, compute: Callable[[], Any]) -> Any:
        # layers share the mask, and therefore all that depends on it
        place = what, query.shape[2], key.shape[2], call.start
        return call.forward_cache.derived(place, compute, attention_mask) if call.shareable else compute()

    def masked() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        lengths = query.shape[2], key.shape[2]
        return shared("mask", lambda: read_mask(attention_mask, call.position_ids, *lengths, call.start, state.config))

    def seen() -> torch.Tensor | None:
        return shared("seen", lambda: keys_seen(*masked()))

    readable = attention_mask is None or isinstance(attention_mask, torch.Tensor)
    if scheme.length_dependent and readable:
        call = dataclasses.replace(call, tokens=seen())
    # if every step rotates the keys of a whole cache, they are rotated and scored a few at a time
    scores = (
        state.scores
        or call.is_request
        or (scheme.length_dependent and query.shape[2] == 1 and implementation == "sdpa")
    )
    if (scores or scheme.length_dependent) and not torch.compiler.is_compiling():
        _refuse_part_of_a_row(scheme, implementation)
    if query.shape[2] > 1 and readable and (scores or scheme.causal_only):
        causal = is_causal(module, kwargs.get("is_causal"))
        call.looks_ahead = _looks_ahead(call, masked()[0], attention_mask, causal)
    if not scores:
        rotated = RotatedCall(query, key, call.forward_cache, call, learned)
        previous = _previous_attention(module, implementation)
        arguments = rotated.query(ALL_PAIRS), rotated.key(ALL_PAIRS), value, attention_mask
        return previous(module, *arguments, scaling=scaling, dropout=dropout, **kwargs)

    if torch.is_autocast_enabled(query.device.type):  # as for `scaled_dot_product_attention`
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, projected = (x.to(dtype) for x in (query, key, value, projected))
    mask, groups = masked()
    running_bias = None if call.added is None else running_sums(call.added, seen())
    by_content = state.methods & {"content_bias", "weight_factor", "relative_values"}
    inputs = AttentionInputs(
        branches=(),
        value=value,
        query_positions=call.position_ids,
        key_positions=call.key_positions(key.shape[2]),
        mask=mask,
        groups=groups,
        # one query without a mask is a decoding step and sees every key
        causal=query.shape[2] > 1 and not call.looks_ahead,
        query_start=call.start,
        scattered=call.scattered,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        running_bias=running_bias,
        bias=call.forward_cache.bias(scheme, query, learned) if "bias" in state.methods else None,
        content=Content(scheme, learned, call.states, projected, key) if by_content else None,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
    )
    mode = "oracle" if implementation in ("eager", "paged|eager") else state.attention
    output, weights = engine.score(inputs, RotatedCall(query, key, call.forward_cache, call, learned), mode)
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _looks_ahead(call: LateCall, mask: torch.Tensor | None, given: torch.Tensor | None, causal: bool) -> bool:
    """Whether some query of a call may see keys after it: by its materialised `mask`, made of the `given` one, or
    without one unless it is `causal`. A compiled graph trusts a causal model and asserts it where it matters.

    Raises:
        UnsupportedPositions: one may, but the scheme has no meaning for such keys.
    """
    state = call.state
    reason = f"{state.scheme} is undefined for keys after the query, which this call shows; pass a causal mask"
    if mask is None or (torch.compiler.is_compiling() and not causal):
        ahead = not causal
    elif torch.compiler.is_compiling():
        if state.both_ways != state.regions or state.scheme.causal_only:
            hidden = ~shows_later_keys(mask, call.start)
            torch._assert_async(hidden, "rope_patch: the mask shows keys after the query; run eagerly")
        return False
    else:
        ahead = call.forward_cache.derived("ahead", lambda: bool(shows_later_keys(mask, call.start)), given)
    if ahead and state.scheme.causal_only:
        raise UnsupportedPositions(reason)
    return ahead


def scaled_query(call: LateCall, query: torch.Tensor, learned: Weights) -> torch.Tensor:
    """The queries `(batch, heads, q_len, head_dim)` times the scheme's scale of each position, if it has one."""
    if not call.state.scales:
        return query

    def scale() -> torch.Tensor:
        found = call.state.scheme.query_scale(call.position_ids.clamp(min=0), query.shape[1], learned)
        return found.transpose(0, 1)[..., None].to(query.dtype)

    return query * (
        scale() if learned else call.forward_cache.once(("query scale", query.shape[1], query.dtype), scale)
    )


@dataclass(eq=False)
class RotatedCall(Call):
    """A call whose queries and keys are rotated for each region, if the mount rotates them here.

    Attributes:
        learned: the scheme's learned parameters of this layer.
        rotated_keys: rotated keys of all slots, shared by regions with the same rotation.
    """

    late: LateCall
    learned: Weights
    rotated_keys: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def differentiable(self) -> bool:
        """See `Call`."""
        return wants_gradient({**self.learned, "queries": self.queries})

    @property
    def regions(self) -> tuple[Region, ...]:
        """See `Call`."""
        state = self.late.state
        return (state.both_ways if self.late.looks_ahead else state.regions) or (ALL_PAIRS,)

    def query(self, region: Region) -> torch.Tensor:
        """See `Call`."""
        if not self.late.state.rotate:
            return self.queries
        if self.queries.shape[2] == 1 and self.late.state.regions and not torch.compiler.is_compiling():
            return self._one_query[self.regions.index(region)]
        return self._rotated(self.queries, self.late.position_ids, region.query_map, place=("q",))

    @functools.cached_property
    def _one_query(self) -> tuple[torch.Tensor, ...]:
        """The only query rotated for each region, by one product with all rotations."""
        queries, positions, state = self.queries, self.late.position_ids, self.late.state

        def rotations() -> torch.Tensor:
            """`(batch or 1, head_dim, regions * head_dim)`."""
            layout = cast(RotaryLayout, state.layer.layout)
            moved = [self._moved(positions, region.query_map) for region in self.regions]
            cos, sin = self._computed(torch.cat(moved, dim=-1), queries.dtype)
            return layout.matrix(layout.wide(cos, queries.shape[-1]), sin)[:, 0].transpose(1, 2).flatten(2)

        found = self._shared(("one query", state.tables, queries.dtype), rotations)
        rotated = queries[:, :, 0] @ (found[0] if len(found) == 1 else found)
        return rotated.unflatten(-1, (-1, queries.shape[-1]))[:, :, None].unbind(dim=3)

    def key(self, region: Region, slots: slice | torch.Tensor = EVERY, rows: slice = EVERY) -> torch.Tensor:
        """See `Call`."""
        if not self.rotates_keys(region):
            return super().key(region, slots, rows)
        if not isinstance(slots, slice) or slots.stop is not None or rows != EVERY:
            return self._rotated_key(region.key_map, slots, rows)
        known, name = self.rotated_keys, (region.key_map, slots.start or 0)
        if name not in known:
            known[name] = self._rotated_key(region.key_map, slots, rows)
        return known[name]

    def _rotated_key(self, key_map: PositionMap, slots: slice | torch.Tensor, rows: slice) -> torch.Tensor:
        late = self.late
        positions = late.key_positions(self.keys.shape[2])
        positions = (positions if len(positions) == 1 else positions[rows])[..., slots]
        place: tuple[Any, ...] | None = None
        if late.shareable and not isinstance(slots, torch.Tensor):
            # layers may keep different keys; the forward cache keeps `past` alive, see `LateCall.key_positions`
            kept = id(late.past) if late.scattered and not torch.compiler.is_compiling() else None
            place = ("k", self.keys.shape[2], late.query_start, kept, slots.start, slots.stop, rows.start, rows.stop)
        return self._rotated(self.keys[rows, :, slots], positions, key_map, place)

    def rotates_keys(self, region: Region) -> bool:
        """See `Call`."""
        return self.late.state.rotate and region.key_map != self.late.anchor

    def fused(self, in_order: bool) -> Fused:
        """See `Call`."""
        state, late = self.late.state, self.late
        if not state.rotate:
            return super().fused(in_order)
        layout, head_dim = cast(RotaryLayout, state.layer.layout), self.queries.shape[-1]

        def tables(positions: torch.Tensor, position_map: PositionMap, place: Any) -> Tables | None:
            if position_map == late.anchor:
                return None

            def compute() -> Tables:
                cos, sin = self._computed(self._moved(positions, position_map), self.queries.dtype)
                return layout.wide(cos, head_dim), layout.signed(sin, head_dim)

            return cast(Tables, self._shared((place, position_map, state.tables, "fused"), compute))

        keys = late.key_positions(self.keys.shape[2])
        device = self.queries.device
        return Fused(
            self.queries,
            self.keys,
            self.regions,
            query_tables=tuple(tables(late.position_ids, region.query_map, "q") for region in self.regions),
            key_tables=tuple(tables(keys, region.key_map, ("k", id(keys))) for region in self.regions),
            partner=self.forward_cache.once("partners", lambda: torch.tensor(layout.partners(head_dim), device=device)),
            in_order=in_order,
        )

    def decay(self) -> Decay | None:
        """See `Call`."""
        state = self.late.state
        if not state.decays:
            return None
        layout = cast(RotaryLayout, state.layer.layout)
        return cast(Decay, self._shared(("decay", state.tables), lambda: Decay(layout, self._rate())))

    def _rate(self) -> torch.Tensor:
        return cast(torch.Tensor, self.late.state.own_frequencies(self.late, self.learned).decay)

    def _rotated(
        self, x: torch.Tensor, positions: torch.Tensor, position_map: PositionMap, place: tuple[Any, ...] | None
    ) -> torch.Tensor:
        """R_f(phi(positions)) x."""
        if position_map == self.late.anchor:
            return x
        layout = cast(RotaryLayout, self.late.state.layer.layout)
        cos, sin = self._tables(positions, position_map, place, x)
        return rotate(layout, x, cos, sin) if self._fast else layout.rotate(x, cos, sin)

    @property
    def _fast(self) -> bool:
        """Whether to rotate with the fewest kernels. Without regions, results are bit for bit those of the attention
        module, unless every token rotates all cached keys again, which no module does.
        """
        state = self.late.state
        return bool(state.regions) or (state.scheme.length_dependent and self.queries.shape[2] == 1)

    def _tables(
        self, positions: torch.Tensor, position_map: PositionMap, place: tuple[Any, ...] | None, like: torch.Tensor
    ) -> Tables:
        """The tables that rotate states `like`; layers with the same tables share them under the key `place`. For
        regions, cos is `wide`.
        """
        state = self.late.state

        def tables() -> Tables:
            cos, sin = self._computed(self._moved(positions, position_map), like.dtype)
            return cast(RotaryLayout, state.layer.layout).wide(cos, like.shape[-1]) if self._fast else cos, sin

        if place is None:
            return tables()
        return cast(Tables, self._shared((place, position_map, state.tables, like.dtype), tables))

    def _moved(self, positions: torch.Tensor, position_map: PositionMap) -> torch.Tensor:
        """The remaining rotation of states at these positions."""
        anchor = self.late.anchor
        return position_map(positions) if anchor is None else position_map(positions) - anchor(positions)

    def _computed(self, moved: torch.Tensor, dtype: torch.dtype) -> Tables:
        found = self.late.state.frequencies_of(self.late, self.learned)
        return rotation_tables(moved, found.inv_freq, found.attention_scaling, dtype)

    def _shared(self, key: Any, compute: Callable[[], Any]) -> Any:
        """A value that layers compute once, unless their frequencies are learned."""
        return compute() if self.late.state.scheme.learned_frequencies else self.forward_cache.once(key, compute)


def _refuse_part_of_a_row(scheme: Scheme, implementation: str) -> None:
    """Refuse context parallelism, which replaces one of two functions to fetch the keys of other processes.

    Raises:
        UnsupportedPositions: one of them belongs to context parallelism of torch or sequence parallelism of DeepSpeed.
    """
    for function in (nn.functional.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS.get(implementation)):
        if str(getattr(function, "__module__", "")).startswith(("torch.distributed.", "deepspeed.")):
            raise UnsupportedPositions(
                f"context parallelism is not supported: the attention of {scheme} sees only this process's part of the "
                "row; use a scheme of static frequencies (pi, yarn)"
            )


def _previous_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function of the unpatched module."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if implementation == "eager" and eager is None:
        raise UnsupportedModel(f"{type(module).__module__} has no eager_attention_forward")
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
