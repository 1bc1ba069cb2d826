"""The late mount at work: a hook on each attention module, and the attention function that it leads to.

The hook hands the module an identity rotation (cos 1, sin 0) and one small object, a `LateCall`, in the keyword
arguments, which Transformers passes on to the attention function. There queries and keys are rotated and scored. The
cache therefore keeps unrotated keys, and any region may place them anew.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache, QuantizedCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention import engine, oracle
from rope_patch.attention.engine import AttentionMode
from rope_patch.attention.inputs import AttentionInputs, Branch
from rope_patch.attention.masks import as_mask
from rope_patch.attention.spans import Span, find_spans
from rope_patch.errors import UnsupportedModel, UnsupportedPositions
from rope_patch.models.base import AttentionLayer
from rope_patch.positions import Constant, Identity, key_positions
from rope_patch.rotary import rotation_tables
from rope_patch.schemes.base import Region, Scheme
from rope_patch.typing import Frequencies, PositionMap, RotarySpec

IMPLEMENTATION = "rope_patch"
"""Name under which the attention function is registered while any patched model needs it."""

# the modules that look the name up; when the last one goes, so does the name
_users: weakref.WeakSet[LateAttention] = weakref.WeakSet()


def register_attention() -> None:
    """Make the attention function known to Transformers under its own name; no other name is touched."""
    ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = late_attention


def release_attention(hook: LateAttention) -> None:
    """Forget one user of the name, and the name with the last of them."""
    _users.discard(hook)
    if not _users and IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS._local_mapping:
        del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]


@dataclass
class SharedTables:
    """What the layers of one stack compute once per forward: key positions and rotation tables.

    The memory lasts from one forward of the stack to the next, and only for the very tensor of positions it was
    computed from. While compiling it is not used: the compiler shares equal expressions itself.
    """

    position_ids: torch.Tensor | None = None
    memory: dict[Any, Any] = field(default_factory=dict)

    def forget(self) -> None:
        """Start a forward."""
        self.position_ids, self.memory = None, {}

    def once(self, position_ids: torch.Tensor, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, or what it returned for this key and these positions before."""
        if torch.compiler.is_compiling():
            return compute()
        if self.position_ids is not position_ids:
            self.position_ids, self.memory = position_ids, {}
        if key not in self.memory:
            self.memory[key] = compute()
        return self.memory[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTables:
        copied = memo[id(self)] = SharedTables()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"position_ids": None, "memory": {}}


@dataclass(eq=False)
class LateForward:
    """Pre-hook of the stack: a new forward shares nothing with the last one."""

    shared: SharedTables

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget; no argument changes."""
        if not torch.compiler.is_compiling():
            self.shared.forget()


@dataclass(eq=False)
class LateAttention:
    """Pre-hook of one attention module, and all that its attention function needs to know.

    Attributes:
        scheme: with its defaults filled in.
        layer: the attention module, its layout and its rotary tables.
        spec: the checkpoint's rotary embedding.
        rotate: whether queries and keys are to arrive unrotated.
        own_frequencies: whether the scheme's frequencies are computed here; else the model's tables are read.
        attention: how to score.
        shared: the stack's tables.
        config: the config of the model, whose attention implementation is live.
    """

    scheme: Scheme
    layer: AttentionLayer
    spec: RotarySpec
    rotate: bool
    own_frequencies: bool
    attention: AttentionMode
    shared: SharedTables
    config: Any
    implementation: str = IMPLEMENTATION

    def __post_init__(self) -> None:
        self.regions: tuple[Region, ...] = self.scheme.segments() if "segments" in self.scheme.slots else ()
        # keys after the query lie in regions of negative distance, which a causal model never looks at
        if getattr(self.layer.module, "is_causal", True):
            self.regions = tuple(region for region in self.regions if region.stop > 0)
        self._parameters = inspect.signature(type(self.layer.module).forward).parameters
        _users.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _users.add(self)
        register_attention()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_parameters"}

    @property
    def parameters(self) -> list[str]:
        """Names of the module's positional arguments, without `self`."""
        if "_parameters" not in self.__dict__:
            self._parameters = inspect.signature(type(self.layer.module).forward).parameters
        return [name for name in self._parameters if name != "self"]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with an identity rotation where wanted, and with the `LateCall`."""
        if cast(Any, module.config)._attn_implementation != self.implementation:
            return None  # somebody chose another attention for this module: leave its positions alone
        kwargs = dict(zip(self.parameters, args, strict=False)) | kwargs
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        hidden = kwargs["hidden_states"]
        start = self._query_start(cache, hidden.shape[1])
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + (start or 0))[None]
        if position_ids.ndim != 2:
            raise UnsupportedPositions(
                f"{self.layer.name}: position_ids of shape {tuple(position_ids.shape)}; (batch, length) is allowed"
            )
        if self.rotate:
            cos, sin = kwargs["position_embeddings"]
            kwargs["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))
        kwargs["rope_patch"] = LateCall(self, position_ids, start)
        return (), kwargs

    def _query_start(self, cache: Cache | None, q_length: int) -> int | torch.Tensor | None:
        """Slot of the first query among the keys that the cache will return; None without a cache."""
        if cache is None:
            return None
        if isinstance(cache, QuantizedCache):
            raise UnsupportedPositions(f"{type(cache).__name__}: quantised caches are not supported")
        offset = cache.get_query_offset(self.layer.index)
        start = offset - cache.get_mask_sizes(q_length, self.layer.index)[1]
        # a static layer hands out its live counter, which the update will advance
        return start.clone() if isinstance(start, torch.Tensor) else start

    def frequencies(self, position_ids: torch.Tensor) -> Frequencies:
        """f of this layer for these positions."""
        rotary = self.layer.rotary
        if not self.own_frequencies:
            return Frequencies(rotary.inv_freq, rotary.attention_scaling)
        length = position_ids.amax(dim=-1) + 1 if self.scheme.length_dependent else None
        found = self.scheme.frequencies(self.spec, length)
        return Frequencies(found.inv_freq.to(position_ids.device), found.attention_scaling)


@dataclass(eq=False)
class LateCall:
    """One forward of one attention module, on its way from the hook to the attention function.

    Attributes:
        state: the hook.
        position_ids: `(batch or 1, q_len)`, positions of the queries.
        query_start: slot of the first query among the keys; None without a cache.
    """

    state: LateAttention
    position_ids: torch.Tensor
    query_start: int | torch.Tensor | None

    def key_positions(self, kv_length: int) -> torch.Tensor:
        """`(batch or 1, kv_len)`; shared by the layers of one forward where the cache's counters are numbers."""
        compute = lambda: key_positions(self.position_ids, kv_length, self.query_start)  # noqa: E731
        if isinstance(self.query_start, torch.Tensor):
            return compute()
        return self.state.shared.once(self.position_ids, ("keys", kv_length, self.query_start), compute)

    def spans(self, inputs: AttentionInputs) -> tuple[Span, ...] | None:
        """The spans of this call, found once for all layers that share its mask."""
        start, batch_size = int(inputs.query_start), inputs.value.shape[0]
        # the mask is kept beside what was found for it, so that its identity stays its own
        key = ("spans", id(inputs.mask), start, batch_size)
        return self.state.shared.once(
            self.position_ids,
            key,
            lambda: (inputs.mask, find_spans(self.position_ids, inputs.mask, start, batch_size)),
        )[1]

    def rotated(self, x: torch.Tensor, positions: torch.Tensor, position_map: PositionMap) -> torch.Tensor:
        """R_f(phi(positions)) x, `x` of shape `(batch, heads, length, head_dim)`."""
        layout, rotary = self.state.layer.layout, self.state.layer.rotary
        if isinstance(position_map, Constant):
            if position_map.value == 0 and rotary.attention_scaling == 1.0 and not self.state.own_frequencies:
                return x  # the identity rotation
            positions = positions[:, :1]  # one angle for all tokens
        assert layout is not None  # for the type checker: layers without rotation are left alone

        def tables() -> tuple[torch.Tensor, torch.Tensor]:
            frequencies = self.state.frequencies(self.position_ids)
            return rotation_tables(
                position_map(positions), frequencies.inv_freq, frequencies.attention_scaling, x.dtype
            )

        key = (id(positions), position_map, rotary.layer_type, x.dtype)
        shareable = positions is self.position_ids or not isinstance(self.query_start, torch.Tensor)
        if isinstance(position_map, Constant) or not shareable:
            cos, sin = tables()
        else:
            cos, sin = self.state.shared.once(self.position_ids, key, tables)
        return layout.rotate(x, cos, sin)


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
    """The attention function of patched modules: rotates, scales, scores by region.

    Where the scheme has one region only and no bias, the attention that was there before does the work.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key and value `(batch, kv_heads, kv_len, head_dim)`, unrotated where
        the plan says so; returns `(batch, q_len, heads, head_dim)`.

    Raises:
        UnsupportedModel: when the model calls it with something that the scheme's attention cannot honour.
    """
    if rope_patch is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass its keyword arguments on to its attention")
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} passes {name!r}, which patched attention cannot honour")
    call, state = rope_patch, rope_patch.state
    scheme = state.scheme
    m, n = call.position_ids, call.key_positions(key.shape[2])
    if "query_scale" in scheme.slots:
        query = query * scheme.query_scale(m)[:, None, :, None].to(query.dtype)

    branches = _branches(call, query, key, m, n)
    if len(branches) == 1 and branches[0].region is None and "bias" not in scheme.slots and state.attention == "auto":
        previous = _previous_attention(module, state.config._attn_implementation)
        return previous(
            module,
            branches[0].query,
            branches[0].key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            **kwargs,
        )

    start = 0 if call.query_start is None else call.query_start
    causal = kwargs.get("is_causal")
    inputs = AttentionInputs(
        branches=branches,
        value=value,
        query_positions=m,
        key_positions=n,
        mask=as_mask(attention_mask, call.position_ids, query.shape[2], key.shape[2], start, state.config),
        # one query beside no mask is a decoding step: it sees every key there is
        causal=(getattr(module, "is_causal", True) if causal is None else causal) and query.shape[2] > 1,
        query_start=start,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        bias=_bias(scheme, query.shape[1]),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
    )
    if state.attention == "oracle" or state.config._attn_implementation == "eager":
        output, weights = oracle.attend(inputs)
        return output.transpose(1, 2).contiguous(), weights.to(query.dtype)
    output = engine.attend(inputs, state.attention, lambda: call.spans(inputs))
    return output.transpose(1, 2).contiguous(), None


def _branches(
    call: LateCall, query: torch.Tensor, key: torch.Tensor, m: torch.Tensor, n: torch.Tensor
) -> tuple[Branch, ...]:
    state = call.state
    if not state.rotate:
        regions = state.regions or (None,)
        return tuple(Branch(region, query, key) for region in regions)
    if not state.regions:
        return (Branch(None, call.rotated(query, m, Identity()), call.rotated(key, n, Identity())),)
    return tuple(
        Branch(region, call.rotated(query, m, region.query_map), call.rotated(key, n, region.key_map))
        for region in state.regions
    )


def _bias(scheme: Scheme, num_heads: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if "bias" not in scheme.slots:
        return None
    return lambda distance: scheme.bias(distance, num_heads)


def _previous_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that the module would have called unpatched."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if implementation == "eager" and eager is None:
        raise UnsupportedModel(f"{type(module).__module__} has no eager_attention_forward")
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
