"""The late mount: the hook on each attention module, and the object that it passes to the attention function.

The hook gives the module an identity rotation (cos 1, sin 0) and one small object, a `LateCall`, in the keyword
arguments, which Transformers passes to the attention function. There queries and keys are rotated and scored, so every
region may use other positions.

If the rotation of far keys depends only on each key's own position (its anchor), the hook requests that rotation
instead of the identity. The cache then holds keys rotated for the far region, and a decoding step rotates only the few
keys of the near window, by the difference.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import Cache, QuantizedCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention.forward_cache import ForwardCache, StackForwardCache
from rope_patch.attention.inputs import AttentionMode
from rope_patch.attention.masks import Groups, groups_of_documents, groups_of_pads, keys_seen, read_mask
from rope_patch.errors import UnsupportedModel, UnsupportedPositions
from rope_patch.models.arguments import Arguments, by_name, check_tokens, counted_positions, tokens_of
from rope_patch.models.base import AttentionLayer, RotaryTables, is_causal
from rope_patch.models.cached_keys import (
    CACHE_TAG,
    OWN_ROTATION,
    CacheTagging,
    cache_in,
    cache_tag,
    is_static,
    positions_in,
    positions_in_graph,
    remember,
)
from rope_patch.models.paged import Request
from rope_patch.mounting.identity_table import IdentityTable
from rope_patch.mounting.parameters import LearnedWeights
from rope_patch.mounting.running_bias import contributions
from rope_patch.mounting.stack_positions import PASSED
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Constant, follow_on, joined, key_positions, query_start
from rope_patch.typing import Frequencies, PositionMap, Weights

IMPLEMENTATION = "rope_patch"
"""Name under which the attention function is registered while any patched model needs it."""

UNROTATED = Constant(0)
"""The position of states without rotation."""

Tables = tuple[torch.Tensor, torch.Tensor]

# the modules that look up the name; it is unregistered with the last one
_users: weakref.WeakSet[LateAttention] = weakref.WeakSet()
_registering = threading.RLock()  # reentrant: a thread that holds it may collect a user as garbage


def _forget_unused(name: str) -> None:
    with _registering:
        # `list`, because the length of a weak set may still include dead members
        if not list(_users) and name in ALL_ATTENTION_FUNCTIONS._local_mapping:
            del ALL_ATTENTION_FUNCTIONS[name]


@dataclass(eq=False)
class LateForward:
    """Pre-hook of the stack: a new forward shares nothing with the last one, and pads need no mask of all pairs.

    Attributes:
        scorers: the attention modules, if they cover every layer of the stack and read groups; else empty.
        counts: whether this hook must count tokens, because the stack has no positions.
    """

    forward_caches: tuple[StackForwardCache, ...]
    scorers: tuple[nn.Module, ...]
    counts: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with pads and packed documents as groups, one number per key.

        Transformers would build a mask with a number per pair of tokens.
        """
        kwargs = by_name(module, args, kwargs)
        check_tokens(module, kwargs)
        changed = {}
        if self.counts and kwargs.get("position_ids") is None:
            changed["position_ids"] = counted_positions(kwargs)
        if torch.compiler.is_compiling():
            return ((), {**kwargs, **changed}) if changed else None
        for forward_cache in self.forward_caches:
            forward_cache.forget()
        chosen = cast(Any, module.config)._attn_implementation == "sdpa" and all(map(_is_ours, self.scorers))
        groups = None
        if self.scorers and chosen:
            causal = is_causal(self.scorers[0], kwargs.get("is_causal"))
            groups = _groups(kwargs, cast(Any, module.config), causal)
        if groups is not None:
            changed["attention_mask"] = Groups.of(groups)
        return ((), {**kwargs, **changed}) if changed else None


def _groups(kwargs: dict[str, Any], config: Any, causal: bool) -> torch.Tensor | None:
    """Groups of the keys of a forward, if Transformers would otherwise build a mask."""
    tokens = tokens_of(kwargs)
    if tokens is None or tokens.shape[1] == 1:
        return None
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim == 3:
        positions = positions[0]  # of the text, see `OneAxis`
    if isinstance(mask, torch.Tensor):
        return groups_of_pads(mask) if mask.ndim == 2 and not mask.all() else None
    if not causal:
        return None  # in both directions Transformers does not separate documents
    use_cache = getattr(config, "use_cache", False) if kwargs.get("use_cache") is None else kwargs["use_cache"]
    without_cache = kwargs.get("past_key_values") is None and not use_cache
    if mask is None and without_cache and isinstance(positions, torch.Tensor) and positions.ndim == 2:
        documents = groups_of_documents(positions)
        return documents if documents.any() else None
    return None


LONG = 64
"""From this many tokens on, `IdentityTable` saves more than it costs."""


def _identity(given: Any, device_type: str) -> Any:
    """Identity tables in the form of those `given`."""
    if isinstance(given, torch.Tensor):  # cos + i sin
        return torch.ones_like(given)
    cos, sin = given
    dtype = cos.dtype
    if torch.is_autocast_enabled(device_type):  # otherwise the cache would hold float32 keys with values that are not
        dtype = torch.get_autocast_dtype(device_type)
    one, zero = torch.ones_like(cos, dtype=dtype), torch.zeros_like(sin, dtype=dtype)
    if torch.compiler.is_compiling() or cos.shape[-2] < LONG:
        return one, zero
    return IdentityTable.of(one, 1), IdentityTable.of(zero, 0)


def _is_ours(module: nn.Module) -> bool:
    return cast(Any, module.config)._attn_implementation == IMPLEMENTATION


@dataclass(eq=False)
class LateAttention:
    """Pre-hook of one attention module, with all data that its new attention `function` needs.

    Attributes:
        frequencies: `late` if the scheme's frequencies are computed here, `model` if the model's tables are read.
        num_layers: number of the stack's layers that keep keys in a cache.
        config: the model's config, with its current attention implementation.
    """

    function: Callable[..., Any]
    scheme: Scheme
    layer: AttentionLayer
    rotation: Literal["module", "late", "anchored"]
    frequencies: Literal["model", "late"]
    weights: LearnedWeights
    attention: AttentionMode
    forward_cache: StackForwardCache
    config: Any
    num_layers: int

    def __post_init__(self) -> None:
        slots = self.scheme.slots
        self.both_ways: tuple[Region, ...] = self.scheme.segments() if "segments" in slots else ()
        # regions of negative distance contain only keys after the query, which a causal call never sees
        self.regions = tuple(region for region in self.both_ways if region.stop > 0)
        self.rotate = self.rotation != "module"
        self.anchor: PositionMap | None = None
        if self.rotation == "anchored" and self.regions:
            self.anchor = max(self.regions, key=lambda region: region.start).key_map
        kept = "unrotated" if self.anchor is None else f"rotated by {self.anchor}"
        self.kept = kept if self.rotate else OWN_ROTATION
        self.cache_tag = cache_tag(self.scheme, self.kept)
        self.follows_positions = bool(self.rotate or self.regions or slots & {"bias", "values"} or self.scheme.decays)
        rotary = self.layer.rotary
        self.tables = None if rotary is None else (rotary.layer_type, id(rotary.module))  # layers may share them
        # properties that every call needs
        self.methods, self.decays, self.scales = self.scheme.methods, self.scheme.decays, "query_scale" in slots
        self.scores = bool(slots & {"segments", "bias", "values"}) or self.decays or self.attention != "auto"

    @property
    def reads_groups(self) -> bool:
        """Whether pads and documents may be passed as groups of keys instead of a mask."""
        return self.scores and self.layer.sliding_window is None

    def anchor_for(self, keeps_keys: bool) -> PositionMap | None:
        """The rotation that the module should apply. Without a cache, no rotation is the least work."""
        if self.anchor is None or (keeps_keys and self.anchor != UNROTATED):
            return self.anchor
        return UNROTATED if cast(RotaryTables, self.layer.rotary).attention_scaling == 1 else None

    def register(self) -> None:
        """Register the attention function with Transformers under its own name; no other name changes."""
        with _registering:
            _users.add(self)
            ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = self.function
        # also unregister when a patched model is garbage-collected
        weakref.finalize(self, _forget_unused, IMPLEMENTATION).atexit = False

    def release(self) -> None:
        """Remove this user of the name, and the name with its last user."""
        with _registering:
            _users.discard(self)
            _forget_unused(IMPLEMENTATION)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.register()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments with the module's rotation replaced, and with the `LateCall`."""
        kwargs = by_name(module, args, kwargs)
        paged = isinstance(kwargs.get("cache"), PagedAttentionCache)
        if paged:
            self._look_at_batch(module, kwargs["cache"])
        if not _is_ours(module):
            return None  # the user chose another attention for this module, which needs its own positions
        cache = cache_in(kwargs)
        if cache is not None:
            CacheTagging(self.layer.index, self.cache_tag).tag(cache)
        hidden = kwargs["hidden_states"]
        if isinstance(cache, QuantizedCache):
            raise UnsupportedPositions(f"{type(cache).__name__}: quantised caches are not supported")
        start = None if cache is None else query_start(cache, self.layer.index, hidden.shape[1])
        passed = kwargs.pop(PASSED, None)
        position_ids = kwargs.get("position_ids") if passed is None else passed
        if position_ids is None and not self.layer.gets_positions:
            raise UnsupportedPositions(f"{self.layer.name} does not receive position_ids")
        if position_ids is None:
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + (start or 0))[None]
        if position_ids.ndim != 2:
            raise UnsupportedPositions(
                f"{self.layer.name}: position_ids of shape {tuple(position_ids.shape)}; (batch, length) is allowed"
            )
        call = LateCall(
            self,
            self.forward_cache.of(position_ids),
            hidden,
            position_ids,
            start,
            self.anchor_for(paged or cache is not None),
        )
        if cache is not None:
            self._look_back(call, cache, hidden.shape[1], kwargs.get("attention_mask"))
        if "running_bias" in self.methods:
            added = self.scheme.running_bias(hidden, self.weights())
            slots = hidden.shape[1] if call.kv_length is None else call.kv_length
            call.added = contributions(added, cache, self.layer.index, self.num_layers, slots)
        if self.rotate and self.layer.rotary is not None:
            kwargs["position_embeddings"] = self._first_rotation(kwargs["position_embeddings"], call, hidden)
        kwargs["rope_patch"] = call
        return (), kwargs

    def _look_at_batch(self, module: nn.Module, cache: PagedAttentionCache) -> None:
        """Refuse a row of continuous batching that the scheme would not score.

        Raises:
            UnsupportedModel: the module now has another attention implementation.
            UnsupportedPositions: another scheme wrote keys to the cache, or the scheme needs more than keys.
        """
        if not _is_ours(module):
            raise UnsupportedModel(
                f"{self.layer.name} now has attn_implementation={cast(Any, module.config)._attn_implementation!r}, "
                f"which would bypass {self.scheme}; set auto_switch_to_flash=False in the ContinuousBatchingConfig"
            )
        if "running_bias" in self.methods:
            raise UnsupportedPositions(f"{self.scheme}: a paged cache cannot keep its sums over earlier tokens")
        tag = vars(cache).setdefault(CACHE_TAG, self.cache_tag)
        if tag != self.cache_tag:
            raise UnsupportedPositions(
                f"the paged cache holds keys written under {tag}, which {self.cache_tag} would misread; "
                "create a new manager"
            )

    def _look_back(self, call: LateCall, cache: Cache, q_length: int, mask: Any) -> None:
        """Set on the call what follows from its cache: the number of keys, and the positions of cached ones."""
        call.cache, call.kv_length = cache, cache.get_mask_sizes(q_length, self.layer.index)[0]
        kv_length = call.kv_length
        is_first = isinstance(call.start, int) and call.start == 0
        if not self.follows_positions or (is_first and not is_static(cache, self.layer.index)):
            return

        def look() -> torch.Tensor | None:
            if not isinstance(mask, torch.Tensor):
                return None  # the module chooses its own mask; all keys count as visible
            return keys_seen(*read_mask(mask, call.position_ids, q_length, kv_length, call.start, self.config))

        call.seen = seen = call.forward_cache.derived(("seen", kv_length), look, mask)
        if is_first:
            return
        if torch.compiler.is_compiling():
            self._look_back_in_graph(call, cache, seen)
            return
        start = int(call.start)
        if start == 0:
            return
        past = positions_in(cache, self.layer.index, start, self.layer.name)
        call.past = past = call.forward_cache.same(("past", start), past)
        call.scattered = call.forward_cache.derived(
            ("scattered", start), lambda: not bool(follow_on(past, call.position_ids, seen)), past
        )

    def _look_back_in_graph(self, call: LateCall, cache: Cache, seen: torch.Tensor | None) -> None:
        """`_look_back` without access to values: the graph asserts that positions have no gap."""
        index, name = self.layer.index, self.layer.name
        if is_static(cache, index):
            call.past = positions_in_graph(cache, index, call.position_ids, name)
            call.scattered = call.past is not None
            return
        call.past = positions_in(cache, index, cast(int, call.start), name)
        call.scattered = call.past.ndim == 3
        if not call.scattered:
            follows = follow_on(call.past, call.position_ids, seen)
            torch._assert_async(follows, "rope_patch: a gap before position_ids; run eagerly")

    def _first_rotation(self, given: Any, call: LateCall, hidden: torch.Tensor) -> Any:
        """The tables that the module itself applies to both queries and keys, in the form of those `given`."""
        if call.anchor in (None, UNROTATED):
            return call.forward_cache.derived("identity", lambda: _identity(given, hidden.device.type), given)
        anchor, rotary = call.anchor, cast(RotaryTables, self.layer.rotary)
        return call.forward_cache.once(
            ("anchor", self.tables, anchor, hidden.dtype),
            lambda: rotary.given(anchor(call.position_ids), like=hidden),
        )

    def frequencies_of(self, call: LateCall, weights: Weights) -> Frequencies:
        """f of this layer for the rows of a call, with its learned `weights`."""
        if self.frequencies == "model":
            rotary = cast(RotaryTables, self.layer.rotary)
            if call.anchor is not None:
                return Frequencies(rotary.inv_freq)  # the first rotation already applied the factor
            return Frequencies(rotary.inv_freq, rotary.attention_scaling)
        return self.own_frequencies(call, weights)

    def own_frequencies(self, call: LateCall, weights: Weights) -> Frequencies:
        """f of the scheme itself, with its decay."""
        lengths = call.lengths if self.scheme.length_dependent else None
        found = self.scheme.frequencies_on(self.layer.spec, lengths, weights)
        return dataclasses.replace(found, inv_freq=found.inv_freq.to(call.position_ids.device))


@dataclass(eq=False)
class LateCall:
    """One forward of one attention module, passed from the hook to the attention function.

    Attributes:
        states: the module's input, `(batch, q_len, hidden)`.
        position_ids: `(batch or 1, q_len)`, positions of the queries.
        query_start: slot of the first query among the keys; None without a cache.
        anchor: the position map by which the module already rotated queries and keys, `UNROTATED` for no rotation; None
            if it applied neither a rotation nor the attention factor.
        tokens: `(batch or 1, kv_len)`, false on pads; None without known pads.
        kv_length: number of keys that the cache will return.
        past: positions of the keys before the first query, `(batch or 1, start)` or `(batch, kv_heads, start)`; None
            if there are none, or if they are not needed.
        scattered: whether the distance of some visible key differs from its difference of slots.
        seen: true on keys that some query can see, `(batch or 1, kv_len)`; None for all of them.
        added: what each slot adds to the running sums of the scheme's bias, `(batch, kv_len, heads)`; None without such
            a bias.
        looks_ahead: whether a query may see keys after it.
        is_request: whether it is one request in a row of continuous batching.
    """

    state: LateAttention
    forward_cache: ForwardCache
    states: torch.Tensor
    position_ids: torch.Tensor
    query_start: int | torch.Tensor | None
    anchor: PositionMap | None = None
    tokens: torch.Tensor | None = None
    cache: Cache | None = None
    kv_length: int | None = None
    past: torch.Tensor | None = None
    scattered: bool = False
    seen: torch.Tensor | None = None
    added: torch.Tensor | None = None
    looks_ahead: bool = False
    is_request: bool = False

    @property
    def start(self) -> int | torch.Tensor:
        """Slot of the first query among the keys."""
        return 0 if self.query_start is None else self.query_start

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each row in tokens, without pads on either side, `(batch or 1,)`."""
        positions = None if self.tokens is None else self.key_positions(self.tokens.shape[-1])
        if positions is None or positions.ndim == 3:
            return self.position_ids.amax(dim=-1) + 1
        return torch.where(cast(torch.Tensor, self.tokens), positions, 0).amax(dim=-1) + 1

    def of_request(self, request: Request) -> LateCall:
        """The part of this call for one request in a row of continuous batching."""
        return dataclasses.replace(
            self,
            forward_cache=request.forward_cache,
            states=self.states[:, request.queries],
            position_ids=request.position_ids,
            query_start=request.start,
            kv_length=request.kv_length,
            is_request=True,
        )

    @property
    def shareable(self) -> bool:
        """Whether layers can share key positions; a static cache counts in a separate tensor per layer."""
        return not isinstance(self.query_start, torch.Tensor)

    def remember(self) -> None:
        """Store positions on the keys in the cache after its update."""
        if self.cache is None or not self.state.follows_positions:
            return
        forward_cache, index, past, positions = self.forward_cache, self.state.layer.index, self.past, self.position_ids
        static = is_static(self.cache, index)
        if static and torch.compiler.is_compiling():
            return
        if past is not None:
            positions = forward_cache.derived("all", lambda: joined(past, self.position_ids), past)
        in_order = True
        if static and not torch.compiler.is_compiling():
            in_order = forward_cache.derived("in order", lambda: self._in_order(positions), positions)
        remember(self.cache, index, positions, in_order)

    def _in_order(self, positions: torch.Tensor) -> bool:
        """Whether, in every row, the next token is expected one position after the last slot."""
        if positions.ndim == 3:
            return False
        ends_in_tokens = self.seen is None or bool(self.seen[:, positions.shape[-1] - 1].all())
        return ends_in_tokens and bool(follow_on(positions, positions[:, -1:] + 1, self.seen))

    def key_positions(self, kv_length: int) -> torch.Tensor:
        """`(batch or 1, kv_len)`, or `(batch, kv_heads, kv_len)` if heads keep different keys; shared by the layers of
        one forward if possible.
        """
        start, place = self.query_start, ("keys", kv_length)

        def counted() -> torch.Tensor:
            return key_positions(self.position_ids, kv_length, start)

        if self.scattered:
            past = cast(torch.Tensor, self.past)
            return self.forward_cache.derived(place, lambda: joined(past, counted()[:, past.shape[-1] :]), past)
        return self.forward_cache.once((*place, start), counted) if self.shareable else counted()
