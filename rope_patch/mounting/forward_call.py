"""One forward of one attention module, as its hook passes it to the attention function."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache

from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.attention.masks import keys_seen, read_mask
from rope_patch.models.cached_keys import is_static, positions_in, positions_in_graph, remember
from rope_patch.models.paged import Request
from rope_patch.mounting.layer_state import LayerState
from rope_patch.schemes.tools.positions import follow_on, joined, key_positions
from rope_patch.typing import Frequencies, PositionMap, Weights

_NEXT = "_rope_patch_next"
"""Attribute of the positions in a cache that are known to be consecutive, and alike in all rows: the one that follows.
A step that goes on need not read them."""


@dataclass(eq=False)
class ForwardCall:
    """One forward of one attention module.

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
        is_request: whether it is one request in a row of continuous batching, or one run of a row that processes share.
        heads: which of the layer's query heads arrive; None for all.
        row_lengths: `lengths` of rows of which only a part arrives.
        counted: whether the stack itself counted the positions, from the number of cached tokens.
        rotation: the tables by which the module rotates; None for those of the model.
        step: the `mounting.step.Step` of an earlier layer with the same positions; None if this layer looks for itself.
    """

    state: LayerState
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
    heads: slice | None = None
    row_lengths: torch.Tensor | None = None
    counted: bool = False
    rotation: Any = None
    step: Any = None

    @property
    def start(self) -> int | torch.Tensor:
        """Slot of the first query among the keys."""
        return 0 if self.query_start is None else self.query_start

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each row in tokens, without pads on either side, `(batch or 1,)`."""
        if self.row_lengths is not None:
            return self.row_lengths
        positions = None if self.tokens is None else self.key_positions(self.tokens.shape[-1])
        if positions is None or positions.ndim == 3:
            return self.position_ids.amax(dim=-1) + 1
        return torch.where(cast(torch.Tensor, self.tokens), positions, 0).amax(dim=-1) + 1

    @property
    def shareable(self) -> bool:
        """Whether layers can share key positions; a static cache counts in a separate tensor per layer."""
        return not isinstance(self.query_start, torch.Tensor)

    def num_heads(self, query: torch.Tensor) -> int:
        """The number of the layer's query heads, of which `query` `(batch, heads, q_len, head_dim)` has all or some."""
        return query.shape[1] if self.heads is None else self.state.layer.heads.num

    def repeated(self, **changed: Any) -> ForwardCall:
        """This call with some attributes `changed`, as `dataclasses.replace` in a tenth of the time."""
        call = object.__new__(ForwardCall)
        vars(call).update(vars(self), **changed)
        return call

    def of_request(self, request: Request) -> ForwardCall:
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

    def frequencies(self, learned: Weights, own: bool = False) -> Frequencies:
        """f of the layer for the rows of this call, with its `learned` parameters; of the scheme alone, with its decay,
        if `own`.
        """
        state, device = self.state, self.position_ids.device
        lengths = self.lengths if state.scheme.length_dependent else None
        if own:
            return state.own_frequencies(lengths, learned, device)
        return state.frequencies_of(lengths, learned, device, anchored=self.anchor is not None)

    def key_positions(self, kv_length: int) -> torch.Tensor:
        """`(batch or 1, kv_len)`, or `(batch, kv_heads, kv_len)` if heads keep different keys; shared by the layers of
        one forward if possible.
        """
        start, past, place = self.query_start, self.past, ("keys", kv_length)

        def counted() -> torch.Tensor:
            return key_positions(self.position_ids, kv_length, start)

        if past is not None and kv_length == past.shape[-1] + self.position_ids.shape[-1]:
            return self.all_positions()
        if self.scattered:
            past = cast(torch.Tensor, past)
            return self.forward_cache.derived(place, lambda: joined(past, counted()[:, past.shape[-1] :]), past)
        return self.forward_cache.once((*place, start), counted) if self.shareable else counted()

    def all_positions(self) -> torch.Tensor:
        """`past` and the positions of the new tokens, in the shape of `past`; one tensor for layers that share it."""
        past = self.past

        def compute() -> torch.Tensor:
            following = self._following()
            from_zero = following == self.kv_length and self.position_ids.dtype == torch.long
            if following is not None and from_zero:
                positions = self.state.forward_cache.ahead.counted(following, self.position_ids.device)
            else:
                positions = self.position_ids if past is None else joined(past, self.position_ids)
            if following is not None:
                setattr(positions, _NEXT, following)
            return positions

        return cast(torch.Tensor, self.forward_cache.derived("all", compute, past))

    def look_back(self, cache: Cache, mask: Any) -> None:
        """Set what follows from a cache, not yet updated: the number of keys, and the positions of cached ones. `mask`
        is the one that the module receives, if any.
        """
        state, index, q_length = self.state, self.state.layer.cache_index, self.states.shape[1]
        self.cache, self.kv_length = cache, cache.get_mask_sizes(q_length, index)[0]
        kv_length = self.kv_length
        is_first = isinstance(self.start, int) and self.start == 0
        if not state.follows_positions or (is_first and not is_static(cache, index)):
            return

        def look() -> torch.Tensor | None:
            if not isinstance(mask, torch.Tensor):
                return None  # the module chooses its own mask; all keys count as visible
            return keys_seen(*read_mask(mask, self.position_ids, q_length, kv_length, self.start, state.config))

        self.seen = self.forward_cache.derived(("seen", kv_length), look, mask)
        if is_first:
            return
        if torch.compiler.is_compiling():
            self._look_back_in_graph(cache)
            return
        start = int(self.start)
        if start == 0:
            return
        past = positions_in(cache, index, start, state.layer.name)
        self.past = past = self.forward_cache.same(("past", start), past)
        if self.goes_on():
            return
        self.scattered = self.forward_cache.derived(
            ("scattered", start), lambda: not bool(follow_on(past, self.position_ids, self.seen)), past
        )

    def goes_on(self) -> bool:
        """Whether every query follows known consecutive positions of cached keys."""
        following = getattr(self.past, _NEXT, None)
        return following is not None and set(self._first_positions(cast(torch.Tensor, self.past))) == {following}

    def _look_back_in_graph(self, cache: Cache) -> None:
        """`look_back` without access to values: the graph asserts that positions have no gap."""
        index, name = self.state.layer.cache_index, self.state.layer.name
        if is_static(cache, index):
            self.past = positions_in_graph(cache, index, self.position_ids, name)
            self.scattered = self.past is not None
            return
        self.past = positions_in(cache, index, cast(int, self.start), name)
        self.scattered = self.past.ndim == 3
        if not self.scattered:
            follows = follow_on(self.past, self.position_ids, self.seen)
            torch._assert_async(follows, "rope_patch: a gap before position_ids; run eagerly")

    def remember(self) -> None:
        """Store positions on the keys in the cache after its update."""
        if self.cache is None or not self.state.follows_positions:
            return
        shared, index = self.forward_cache, self.state.layer.cache_index
        static = is_static(self.cache, index)
        if static and torch.compiler.is_compiling():
            return
        positions, in_order = self.all_positions(), True
        if static:
            in_order = shared.derived("in order", lambda: self._in_order(positions), positions)
        remember(self.cache, index, positions, in_order)

    def _first_positions(self, past: torch.Tensor) -> list[int]:
        """Position of the first query after `past` in each row, read only if the stack did not count it."""
        start = past.shape[-1]
        counted = self.counted and getattr(past, _NEXT, None) == start
        read = self.position_ids[:, 0].tolist
        return cast(list[int], self.forward_cache.once("first positions", lambda: [start] if counted else read()))

    def _following(self) -> int | None:
        """The position after the last query, if all up to it are known to be consecutive, and alike in all rows."""
        past, length = self.past, self.position_ids.shape[1]
        start, known = (0, 0) if past is None else (past.shape[-1], getattr(past, _NEXT, None))
        if self.counted and known == start:
            return start + length
        if torch.compiler.is_compiling() or length > 1 or past is None or self.scattered or self.seen is not None:
            return None
        first = self._first_positions(past)
        return first[0] + 1 if len(set(first)) == 1 else None

    def _in_order(self, positions: torch.Tensor) -> bool:
        """Whether, in every row, the next token is expected one position after the last slot."""
        if positions.ndim == 3:
            return False
        ends_in_tokens = self.seen is None or bool(self.seen[:, positions.shape[-1] - 1].all())
        return ends_in_tokens and bool(follow_on(positions, positions[:, -1:] + 1, self.seen))
