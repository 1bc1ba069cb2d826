"""The late mount at work: the hook on each attention module, and what it hands to the attention function.

The hook gives the module an identity rotation (cos 1, sin 0) and one small object, a `LateCall`, in the keyword
arguments, which Transformers passes on to the attention function. There queries and keys are rotated and scored, so
any region may place them anew.

Where the regions of a scheme share a rotation of far keys that follows from each key's own position (its anchor), the
hook asks for that rotation instead of the identity: the cache then holds keys as the far region wants them, and a
decoding step turns only the few keys of the near window, by the difference.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, QuantizedCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention.decay import Decay
from rope_patch.attention.inputs import AttentionInputs, AttentionMode
from rope_patch.attention.masks import as_mask_argument, groups_of_documents, groups_of_pads, keys_seen, read_mask
from rope_patch.attention.spans import Span, find_spans
from rope_patch.errors import UnsupportedPositions
from rope_patch.models.arguments import Arguments, by_name, counted_positions, tokens_of
from rope_patch.models.base import AttentionLayer, RotaryTables
from rope_patch.models.cached_keys import (
    OWN_ROTATION,
    cache_in,
    is_static,
    positions_in,
    positions_in_graph,
    remember,
    sign,
    signature_of,
)
from rope_patch.mounting.memo import SharedTables
from rope_patch.mounting.parameters import LearnedWeights
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import follow_on, joined, key_positions, query_start
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import Frequencies, PositionMap

IMPLEMENTATION = "rope_patch"
"""Name under which the attention function is registered while any patched model needs it."""

Tables = tuple[torch.Tensor, torch.Tensor]

# the modules that look the name up; when the last one goes, so does the name
_users: weakref.WeakSet[LateAttention] = weakref.WeakSet()
_registering = threading.RLock()  # reentrant: a thread that holds it may collect a user as garbage


def _forget_unused(name: str) -> None:
    with _registering:
        # counted by looking: a set of weak references still has the length it had before its members died
        if not list(_users) and name in ALL_ATTENTION_FUNCTIONS._local_mapping:
            del ALL_ATTENTION_FUNCTIONS[name]


@dataclass(eq=False)
class LateForward:
    """Pre-hook of the stack: a new forward shares nothing with the last one, and pads need no mask of all pairs.

    Attributes:
        shared: the stack's tables.
        scorers: the attention modules where every layer of the stack is among them and reads groups; else empty.
        counts: whether the stack knows no positions, so that its tokens are to be counted here.
    """

    shared: SharedTables
    scorers: tuple[nn.Module, ...]
    counts: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with pads and packed documents as groups of keys, a number for each.

        Transformers would turn them into a mask with a number for every pair of tokens.
        """
        kwargs = by_name(module, args, kwargs)
        changed = {}
        if self.counts and kwargs.get("position_ids") is None:
            changed["position_ids"] = counted_positions(kwargs)
        if torch.compiler.is_compiling():
            return ((), {**kwargs, **changed}) if changed else None
        self.shared.forget()
        chosen = cast(Any, module.config)._attn_implementation == "sdpa" and all(map(_is_ours, self.scorers))
        groups = _groups(kwargs, cast(Any, module.config)) if self.scorers and chosen else None
        if groups is not None:
            changed["attention_mask"] = as_mask_argument(groups)
        return ((), {**kwargs, **changed}) if changed else None


def _groups(kwargs: dict[str, Any], config: Any) -> torch.Tensor | None:
    """Groups of the keys of a forward, where Transformers would make a mask for them."""
    tokens = tokens_of(kwargs)
    if tokens is None or tokens.shape[1] == 1:
        return None
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, torch.Tensor):
        return groups_of_pads(mask) if mask.ndim == 2 and not mask.all() else None
    use_cache = config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
    without_cache = kwargs.get("past_key_values") is None and not use_cache
    if mask is None and without_cache and isinstance(positions, torch.Tensor) and positions.ndim == 2:
        documents = groups_of_documents(positions)
        return documents if documents.any() else None
    return None


def _is_ours(module: nn.Module) -> bool:
    return cast(Any, module.config)._attn_implementation == IMPLEMENTATION


@dataclass(eq=False)
class LateAttention:
    """Pre-hook of one attention module, and all that its attention function needs to know.

    Attributes:
        function: the attention function that the module is to call.
        scheme: with its defaults filled in.
        layer: the attention module, its layout and its rotary tables.
        rotate: whether queries and keys are rotated by the attention function.
        anchored: whether they may arrive, and be cached, in the rotation of the farthest region's keys.
        own_frequencies: whether the scheme's frequencies are computed here; else the model's tables are read.
        weights: where the scheme's learned parameters are.
        attention: how to score.
        shared: the stack's tables.
        config: the config of the model, whose attention implementation is live.
    """

    function: Callable[..., Any]
    scheme: Scheme
    layer: AttentionLayer
    rotate: bool
    anchored: bool
    own_frequencies: bool
    weights: LearnedWeights
    attention: AttentionMode
    shared: SharedTables
    config: Any

    def __post_init__(self) -> None:
        self.regions: tuple[Region, ...] = self.scheme.segments() if "segments" in self.scheme.slots else ()
        # keys after the query lie in regions of negative distance, which a causal model never looks at
        if self.layer.is_causal:
            self.regions = tuple(region for region in self.regions if region.stop > 0)
        self.anchor: PositionMap | None = None
        if self.anchored and self.regions:
            self.anchor = max(self.regions, key=lambda region: region.start).key_map
        kept = "unrotated" if self.anchor is None else f"rotated by {self.anchor}"
        self.written_by = signature_of(self.scheme, kept if self.rotate else OWN_ROTATION)
        self.follows_positions = bool(self.rotate or self.regions or self.scheme.slots & {"bias", "values"})

    def register(self) -> None:
        """Make the attention function known to Transformers under its own name; no other name is touched."""
        with _registering:
            _users.add(self)
            ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = self.function
        # a patched model that is thrown away leaves nothing behind either
        weakref.finalize(self, _forget_unused, IMPLEMENTATION).atexit = False

    def release(self) -> None:
        """Forget this user of the name, and the name with the last of them."""
        with _registering:
            _users.discard(self)
            _forget_unused(IMPLEMENTATION)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.register()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with the rotation that is wanted first, and with the `LateCall`."""
        if not _is_ours(module):
            return None  # somebody chose another attention for this module: leave its positions alone
        kwargs = by_name(module, args, kwargs)
        cache = cache_in(kwargs)
        if cache is not None:
            sign(cache, self.layer.index, self.written_by, accepts_plain=False)
        hidden = kwargs["hidden_states"]
        start = self._query_start(cache, hidden.shape[1])
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + (start or 0))[None]
        if position_ids.ndim != 2:
            raise UnsupportedPositions(
                f"{self.layer.name}: position_ids of shape {tuple(position_ids.shape)}; (batch, length) is allowed"
            )
        call = LateCall(self, position_ids, start)
        if cache is not None:
            call = self._with_past(call, cache, hidden.shape[1], kwargs.get("attention_mask"))
        if self.rotate and self.layer.rotary is not None:
            kwargs["position_embeddings"] = self._first_rotation(kwargs["position_embeddings"], position_ids, hidden)
        kwargs["rope_patch"] = call
        return (), kwargs

    def _with_past(self, call: LateCall, cache: Cache, q_length: int, mask: Any) -> LateCall:
        """The call with what its cache tells: how many keys will arrive, and where those stand that are there."""
        kv_length = cache.get_mask_sizes(q_length, self.layer.index)[0]
        call = dataclasses.replace(call, cache=cache, kv_length=kv_length)
        is_first = isinstance(call.start, int) and call.start == 0
        if not self.follows_positions or (is_first and not is_static(cache, self.layer.index)):
            return call

        def look() -> torch.Tensor | None:
            if not isinstance(mask, torch.Tensor):
                return None  # a module that chooses its mask itself: all keys are taken to be seen
            return keys_seen(*read_mask(mask, call.position_ids, q_length, kv_length, call.start, self.config))

        seen = self.shared.derived(call.position_ids, ("seen", kv_length), mask, look)
        call = dataclasses.replace(call, seen=seen)
        if is_first:
            return call
        if torch.compiler.is_compiling():
            return self._with_past_in_graph(call, cache, seen)
        start = int(call.start)
        if start == 0:
            return call
        past = positions_in(cache, self.layer.index, start, self.layer.name)
        past = self.shared.same(call.position_ids, ("past", start), past)
        scattered = self.shared.derived(
            call.position_ids,
            ("scattered", start),
            past,
            lambda: not bool(follow_on(past, call.position_ids, seen)),
        )
        return dataclasses.replace(call, past=past, scattered=scattered)

    def _with_past_in_graph(self, call: LateCall, cache: Cache, seen: torch.Tensor | None) -> LateCall:
        """`_with_past` where values cannot be looked at: keys follow on, or the graph stops when it is run."""
        index, name = self.layer.index, self.layer.name
        if is_static(cache, index):
            past = positions_in_graph(cache, index, call.position_ids, name)
            return dataclasses.replace(call, past=past, scattered=past is not None)
        past = positions_in(cache, index, cast(int, call.start), name)
        if past.ndim == 3:
            return dataclasses.replace(call, past=past, scattered=True)
        torch._assert_async(
            follow_on(past, call.position_ids, seen), "rope_patch: a gap before position_ids; run eagerly"
        )
        return dataclasses.replace(call, past=past)

    def _first_rotation(self, given: Tables, position_ids: torch.Tensor, hidden: torch.Tensor) -> Tables:
        """The tables that the module itself applies, to queries and keys alike."""
        if self.anchor is None:
            cos, sin = given
            dtype, kind = cos.dtype, hidden.device.type
            if torch.is_autocast_enabled(kind):  # or the cache would hold keys in float32 beside values that are not
                dtype = torch.get_autocast_dtype(kind)
            return torch.ones_like(cos, dtype=dtype), torch.zeros_like(sin, dtype=dtype)
        anchor, rotary = self.anchor, cast(RotaryTables, self.layer.rotary)
        return self.shared.once(
            position_ids,
            ("anchor", rotary.layer_type, anchor, hidden.dtype),
            lambda: rotary.tables(anchor(position_ids), like=hidden),
        )

    def _query_start(self, cache: Cache | None, q_length: int) -> int | torch.Tensor | None:
        """Slot of the first query among the keys that the cache will return; None without a cache."""
        if cache is None:
            return None
        if isinstance(cache, QuantizedCache):
            raise UnsupportedPositions(f"{type(cache).__name__}: quantised caches are not supported")
        return query_start(cache, self.layer.index, q_length)

    def frequencies(self, lengths: torch.Tensor) -> Frequencies:
        """f of this layer for rows of these lengths, `(batch or 1,)`."""
        if not self.own_frequencies:
            rotary = cast(RotaryTables, self.layer.rotary)
            if self.anchor is not None:
                return Frequencies(rotary.inv_freq)  # the factor came in with the first rotation
            return Frequencies(rotary.inv_freq, rotary.attention_scaling)
        found = self.scheme.frequencies(self.layer.spec, lengths if self.scheme.length_dependent else None)
        return dataclasses.replace(found, inv_freq=found.inv_freq.to(lengths.device))


@dataclass(eq=False)
class LateCall:
    """One forward of one attention module, on its way from the hook to the attention function.

    Attributes:
        state: the hook.
        position_ids: `(batch or 1, q_len)`, positions of the queries.
        query_start: slot of the first query among the keys; None without a cache.
        tokens: `(batch or 1, kv_len)`, true on keys that are no pads; None where no pads are known of.
        cache: that the keys come from; None where there is none.
        kv_length: how many keys it is going to return.
        past: positions of the keys before the first query, `(batch or 1, start)` or `(batch, kv_heads, start)`; None
            where there are none, or none that need be known.
        scattered: whether distance is something else than a difference of slots for some key that can be seen.
        seen: true on keys that some query can see, `(batch or 1, kv_len)`; None for all of them.
    """

    state: LateAttention
    position_ids: torch.Tensor
    query_start: int | torch.Tensor | None
    tokens: torch.Tensor | None = None
    cache: Cache | None = None
    kv_length: int | None = None
    past: torch.Tensor | None = None
    scattered: bool = False
    seen: torch.Tensor | None = None

    @property
    def start(self) -> int | torch.Tensor:
        """Slot of the first query among the keys."""
        return 0 if self.query_start is None else self.query_start

    @property
    def lengths(self) -> torch.Tensor:
        """How long each row is, in tokens, its pads left out on either side: `(batch or 1,)`."""
        positions = None if self.tokens is None else self.key_positions(self.tokens.shape[-1])
        if positions is None or positions.ndim == 3:
            return self.position_ids.amax(dim=-1) + 1
        return torch.where(cast(torch.Tensor, self.tokens), positions, 0).amax(dim=-1) + 1

    @property
    def _shareable(self) -> bool:
        """Whether key positions are the same for all layers: a static cache counts in a tensor of each layer."""
        return not isinstance(self.query_start, torch.Tensor)

    def remember(self) -> None:
        """Leave on the keys in the cache, which has been updated, where they stand."""
        if self.cache is None or not self.state.follows_positions:
            return
        shared, index, past, positions = self.state.shared, self.state.layer.index, self.past, self.position_ids
        static = is_static(self.cache, index)
        if static and torch.compiler.is_compiling():
            return
        if past is not None:
            positions = shared.derived(self.position_ids, "all", past, lambda: joined(past, self.position_ids))
        in_order = True
        if static and not torch.compiler.is_compiling():
            in_order = shared.derived(self.position_ids, "in order", positions, lambda: self._in_order(positions))
        remember(self.cache, index, positions, in_order)

    def _in_order(self, positions: torch.Tensor) -> bool:
        """Whether a token after the last slot can be expected to stand one after it, in every row."""
        if positions.ndim == 3:
            return False
        ends_in_tokens = self.seen is None or bool(self.seen[:, positions.shape[-1] - 1].all())
        return ends_in_tokens and bool(follow_on(positions, positions[:, -1:] + 1, self.seen))

    def key_positions(self, kv_length: int) -> torch.Tensor:
        """`(batch or 1, kv_len)`, or `(batch, kv_heads, kv_len)` where the heads keep different keys; shared by the
        layers of one forward where that is possible.
        """
        shared, start = self.state.shared, self.query_start

        def counted() -> torch.Tensor:
            return key_positions(self.position_ids, kv_length, start)

        if self.scattered:
            past = cast(torch.Tensor, self.past)
            place = ("keys", kv_length)
            return shared.derived(self.position_ids, place, past, lambda: joined(past, counted()[:, past.shape[-1] :]))
        return shared.once(self.position_ids, ("keys", kv_length, start), counted) if self._shareable else counted()

    def spans(self, inputs: AttentionInputs) -> tuple[Span, ...] | None:
        """The spans of this call, found once for all layers that share its mask."""
        start, batch_size, causal = int(inputs.query_start), inputs.value.shape[0], inputs.causal
        positions, mask, groups = inputs.query_positions, inputs.mask, inputs.groups
        # the mask is kept beside what was found for it, so that its identity stays its own
        return self.state.shared.once(
            self.position_ids,
            ("spans", id(mask), None if groups is None else groups.data_ptr(), start, inputs.q_length, batch_size),
            lambda: (mask, groups, find_spans(positions, mask, groups, start, batch_size, causal)),
        )[2]

    def decay(self) -> Decay | None:
        """How the layer's pairs fade with distance; None where they do not."""
        state = self.state
        if not state.scheme.decays:
            return None
        rate = state.frequencies(self.lengths).decay
        return Decay(cast(RotaryLayout, state.layer.layout), cast(torch.Tensor, rate))

    def rotated_query(self, query: torch.Tensor, position_map: PositionMap) -> torch.Tensor:
        """R_f(phi_q(m)) q, `(batch, heads, q_len, head_dim)`."""
        return self._rotated(query, self.position_ids, position_map, ("q",))

    def rotated_key(
        self, key: torch.Tensor, position_map: PositionMap, slots: slice | torch.Tensor | None = None
    ) -> torch.Tensor:
        """R_f(phi_k(n)) k of some slots, `(batch, kv_heads, slots, head_dim)`.

        Args:
            key: of all slots.
            position_map: phi_k.
            slots: default all. Given as a slice, the result lives in memory that the next layer overwrites.
        """
        positions = self.key_positions(key.shape[2])
        if slots is None:
            # layers may keep different keys; what follows from `past` keeps it, see `key_positions`
            kept = id(self.past) if self.scattered and not torch.compiler.is_compiling() else None
            return self._rotated(key, positions, position_map, ("k", key.shape[2], self.query_start, kept))
        if isinstance(slots, torch.Tensor):  # while compiling: nothing is remembered
            return self._rotated(key[:, :, slots], positions[..., slots], position_map, ("k",))
        place = ("k", key.shape[2], self.query_start, slots.start, slots.stop)
        return self._rotated(key[:, :, slots], positions[..., slots], position_map, place, into_scratch=True)

    def _rotated(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        position_map: PositionMap,
        place: tuple[Any, ...],
        into_scratch: bool = False,
    ) -> torch.Tensor:
        state = self.state
        layout, anchor = state.layer.layout, state.anchor
        if position_map == anchor:
            return x
        assert layout is not None  # for the type checker: layers without rotation are left alone

        def tables() -> Tables:
            moved = position_map(positions) if anchor is None else position_map(positions) - anchor(positions)
            frequencies = state.frequencies(self.lengths)
            return rotation_tables(moved, frequencies.inv_freq, frequencies.attention_scaling, x.dtype)

        key = (*place, position_map, state.layer.layer_type, x.dtype)
        shared = self._shareable or place == ("q",)
        cos, sin = state.shared.once(self.position_ids, key, tables) if shared else tables()
        if into_scratch:
            return layout.rotate_into(state.shared.scratch(x), x, cos, sin)
        return layout.rotate(x, cos, sin)
