"""One forward of one attention module, as its hook passes it to the attention function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache

from rope_patch.attention.decay import Decay
from rope_patch.attention.forward import Forward
from rope_patch.attention.masks import keys_seen, read_mask
from rope_patch.attention.rotation import EVERY
from rope_patch.attention.turner import Turner
from rope_patch.errors import UnsupportedPositions
from rope_patch.graphs import require
from rope_patch.models.cached_keys import is_static, positions_in, positions_in_graph, remember
from rope_patch.models.paged import Request
from rope_patch.mounting.layer_state import FrequencySource, LayerState
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.schemes.tools.positions import follow_on, joined, key_positions
from rope_patch.schemes.tools.rotary import RotaryLayout
from rope_patch.typing import Frequencies, PositionMap, Weights

Rows = tuple[int, ...]
"""The indices of some rows of a batch."""

_SLOTS = "_rope_patch_slots"
"""Attribute of positions in a cache that equal the slots of the keys, so that a step need not read them."""


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
        added: the addend of each slot to the running sums of the scheme's bias, `(batch, kv_len, heads)`; None without
            such a bias.
        looks_ahead: whether a query may see keys after it.
        cache_index: index of the layer in the cache.
        is_paged: whether the call is a row of continuous batching, whose requests are calls of their own.
        is_request: whether the call is one request in a row of continuous batching, or one run of a row that processes
            share.
        heads: the query heads of the layer that arrive; None for all.
        row_lengths: `lengths` of rows of which only a part arrives.
        length: length of all rows, under a scheme whose regions depend on it.
        documents: numbers of the documents of a row, `(batch or 1, q_len)`, if the scheme reads the length of each;
            None with earlier keys.
        rotation: the tables by which the module rotates; None for the model's own tables.
        step: the `mounting.step.Step` of an earlier layer with the same inputs; None if this layer reads its own.
    """

    state: LayerState
    forward: Forward
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
    cache_index: int = 0
    is_paged: bool = False
    is_request: bool = False
    heads: slice | None = None
    row_lengths: torch.Tensor | None = None
    length: int | None = None
    documents: torch.Tensor | None = None
    rotation: Any = None
    step: Any = None

    @property
    def start(self) -> int | torch.Tensor:
        """The slot of the first query among the keys."""
        return 0 if self.query_start is None else self.query_start

    @property
    def lengths(self) -> torch.Tensor:
        """The length of each row in tokens, without pads on either side, `(batch or 1,)`; or, if `documents` are known,
        the length of each token's document, `(batch or 1, q_len)`.
        """
        if self.row_lengths is not None:
            return self.row_lengths
        if self.documents is not None:
            return self.forward.shared(_document_lengths)(self.position_ids, self.tokens, self.documents)
        keys = None if self.tokens is None else self.key_positions(self.tokens.shape[-1])
        return self.forward.shared(_lengths)(self.position_ids, self.tokens, keys)

    def num_heads(self, query: torch.Tensor) -> int:
        """The number of the layer's query heads; `query` `(batch, heads, q_len, head_dim)` has all or some of them."""
        return query.shape[1] if self.heads is None else self.state.layer.heads.num

    def repeated(self, **changed: Any) -> ForwardCall:
        """Copy this call with some attributes `changed`, in a tenth of the time of `dataclasses.replace`."""
        call = object.__new__(ForwardCall)
        vars(call).update(vars(self), **changed)
        return call

    def of_request(self, request: Request) -> ForwardCall:
        """Restrict this call to one request in a row of continuous batching."""
        return dataclasses.replace(
            self,
            forward=request.forward,
            states=self.states[:, request.queries],
            position_ids=request.position_ids,
            query_start=request.start,
            kv_length=request.kv_length,
            is_paged=False,
            is_request=True,
        )

    def rows_by_length(self) -> Mapping[int, Rows]:
        """The indices of the rows with each length, for a scheme whose regions depend on the length.

        Raises:
            UnsupportedPositions: the values of positions cannot be read here, or the documents of a row have different
                lengths.
        """
        if self.forward.traced:  # a graph cannot put a scheme into words either
            raise UnsupportedPositions(
                "the regions of this scheme follow the length of the text, which a compiled graph does not know; set "
                "length=..., or run eagerly"
            )
        if self.forward.shared(_is_packed)(self.position_ids):
            raise UnsupportedPositions(
                f"{self.state.scheme}: this row packs several texts, each of a length of its own; set length=..., or "
                "give each text a row"
            )
        return self.forward.shared(_by_length)(self.lengths)

    def of_rows(self, rows: Rows, kv_length: int) -> ForwardCall:
        """Restrict this call to some rows of the batch, whose `kv_length` keys have arrived already."""
        some = functools.partial(self.forward.shared(some_rows), rows=rows)
        return self.repeated(
            states=some(self.states),
            position_ids=some(self.position_ids),
            cache=None,
            kv_length=kv_length,
            past=some(self.past),
            seen=some(self.seen),
            added=some(self.added),
            row_lengths=some(self.row_lengths),
        )

    def turner(self, kv_length: int, learned: Weights) -> Turner:
        """Describe the rotations of the queries and of `kv_length` keys, with the layer's `learned` parameters."""
        state, frequencies, layout = self.state, None, None
        keys = self.key_positions(kv_length)
        if state.rotates:
            frequencies, layout = self._frequencies(learned), state.layer.layout
            if state.by_head:
                frequencies, keys = self._by_head(frequencies, keys)
        regions = state.both_ways if self.looks_ahead else state.regions
        if self.length is not None:
            regions = self.forward.shared(LayerState.regions_at)(state, self.length, self.looks_ahead)
        # a token that rotates all cached keys again does what no module does; nor does one rotate by head
        again = state.by_head or (state.scheme.length_dependent and self.position_ids.shape[1] == 1)
        return Turner(
            self.forward,
            self.position_ids,
            keys,
            regions or (ALL_PAIRS,),
            layout,
            frequencies,
            self.anchor,
            exact=len(regions) == 0 and not again,
            learned=tuple(learned.values()),
            # tables of all heads are as large as the keys: they live no longer than their layer needs them
            shares=not (state.scheme.learned_frequencies or state.by_head),
            by_head=state.by_head,
        )

    def _frequencies(self, learned: Weights) -> Frequencies:
        """The frequencies f of the layer for the rows of this call."""
        lengths = self.lengths if self.state.scheme.length_dependent else None
        device, source = self.position_ids.device, self.state.source
        if self.state.scheme.learned_frequencies:
            return source.frequencies(lengths, device, self.anchor is not None, learned)
        return self.forward.shared(FrequencySource.frequencies)(source, lengths, device, self.anchor is not None)

    def _by_head(self, frequencies: Frequencies, keys: torch.Tensor) -> tuple[Frequencies, torch.Tensor]:
        """The frequencies f of the query heads that arrive, and the key positions repeated for each of them."""
        inv_freq = frequencies.inv_freq[:, self.heads or EVERY]
        if keys.ndim == 3:
            keys = keys.repeat_interleave(inv_freq.shape[1] // keys.shape[1], dim=1)
        return dataclasses.replace(frequencies, inv_freq=inv_freq), keys

    def decay(self, learned: Weights) -> Decay | None:
        """The decay of the layer's scores with distance; None if they do not decay."""
        state = self.state
        if not state.decays:
            return None
        lengths = self.lengths if state.scheme.length_dependent else None
        own = state.source.of_scheme(lengths, self.position_ids.device, learned)
        return Decay(cast(RotaryLayout, state.layer.layout), cast(torch.Tensor, own.decay))

    def key_positions(self, kv_length: int) -> torch.Tensor:
        """Positions of all keys, `(batch or 1, kv_len)`, or `(batch, kv_heads, kv_len)` if heads keep different keys;
        shared by the layers of one forward if possible.
        """
        start, past, shared = self.query_start, self.past, self.forward.shared
        if past is not None and kv_length == past.shape[-1] + self.position_ids.shape[-1]:
            return shared(joined)(past, self.position_ids)
        counted = shared(key_positions)(self.position_ids, kv_length, start)
        return shared(_completed)(past, counted) if self.scattered and past is not None else counted

    def look_back(self, cache: Cache, mask: Any) -> None:
        """Read a cache before its update: set the number of keys, the positions of cached keys, and the fields that
        follow. `mask` is the mask that the module receives, if any.
        """
        state, index, q_length = self.state, self.cache_index, self.states.shape[1]
        self.cache, self.kv_length = cache, cache.get_mask_sizes(q_length, index)[0]
        is_first = isinstance(self.start, int) and self.start == 0
        if not state.follows_positions or (is_first and not is_static(cache, index)):
            return
        if isinstance(mask, torch.Tensor):  # else the module chooses its own mask; all keys count as visible
            sizes = q_length, self.kv_length, self.start, state.config._attn_implementation
            self.seen = self.forward.shared(_keys_seen)(mask, self.position_ids, *sizes)
        if is_first:
            return
        if self.forward.traced:
            self._look_back_in_graph(cache)
            return
        self.past = self.forward.earlier(positions_in(cache, index, int(self.start), state.layer.name))
        if self.forward.counted and hasattr(self.past, _SLOTS):
            return
        self.scattered = self.forward.shared(_are_scattered)(self.past, self.position_ids, self.seen)

    def _look_back_in_graph(self, cache: Cache) -> None:
        """Like `look_back`, but without access to values: the graph asserts that positions have no gap."""
        index, name = self.cache_index, self.state.layer.name
        if is_static(cache, index):
            self.past = positions_in_graph(cache, index, self.position_ids, name)
            self.scattered = self.past is not None
            return
        self.past = positions_in(cache, index, cast(int, self.start), name)
        self.scattered = self.past.ndim == 3
        if not self.scattered:
            follows = follow_on(self.past, self.position_ids, self.seen)
            require(follows, UnsupportedPositions, "a gap before position_ids; run eagerly")

    def remember(self) -> None:
        """Store positions on the keys in the cache after its update."""
        if self.cache is None or not self.state.follows_positions:
            return
        static = is_static(self.cache, self.cache_index)
        if static and self.forward.traced:
            return
        positions, in_order = self.position_ids, True
        if self.past is not None:
            positions = self.forward.shared(joined)(self.past, positions)
        if self.forward.counted and self.seen is None and not self.scattered:
            setattr(positions, _SLOTS, True)
        if static:
            in_order = self.forward.shared(_ends_in_order)(positions, self.seen)
        remember(self.cache, self.cache_index, positions, in_order)


def _lengths(
    position_ids: torch.Tensor, tokens: torch.Tensor | None, key_positions: torch.Tensor | None
) -> torch.Tensor:
    if tokens is None or key_positions is None or key_positions.ndim == 3:
        return position_ids.amax(dim=-1) + 1
    return torch.where(tokens, key_positions, 0).amax(dim=-1) + 1


def _is_packed(position_ids: torch.Tensor) -> bool:
    return bool((position_ids.diff(dim=-1) < 0).any())


def _by_length(lengths: torch.Tensor) -> Mapping[int, Rows]:
    rows: dict[int, Rows] = {}
    for row, length in enumerate(lengths.tolist()):
        rows[length] = (*rows.get(length, ()), row)
    return rows


def some_rows(states: torch.Tensor | None, rows: Rows) -> torch.Tensor | None:
    """Select some rows of `(batch, ...)`; a tensor that all rows share, `(1, ...)`, stays as it is."""
    return states if states is None or len(states) == 1 else states[list(rows)]


def _document_lengths(position_ids: torch.Tensor, tokens: torch.Tensor | None, documents: torch.Tensor) -> torch.Tensor:
    positions = position_ids if tokens is None else torch.where(tokens, position_ids, 0)
    positions, documents = torch.broadcast_tensors(positions, documents)
    longest = torch.zeros_like(positions).scatter_reduce(-1, documents, positions, "amax")
    return longest.gather(-1, documents) + 1


def _completed(past: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Concatenate the positions `past` of the first keys and the rest of `counted`, which has positions for all
    keys.
    """
    return joined(past, counted[:, past.shape[-1] :])


def _keys_seen(
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    q_length: int,
    kv_length: int,
    start: int | torch.Tensor,
    implementation: str,
) -> torch.Tensor | None:
    return keys_seen(*read_mask(mask, position_ids, q_length, kv_length, start, implementation))


def _are_scattered(past: torch.Tensor, position_ids: torch.Tensor, seen: torch.Tensor | None) -> bool:
    return not bool(follow_on(past, position_ids, seen))


def _ends_in_order(positions: torch.Tensor, seen: torch.Tensor | None) -> bool:
    """Whether, in every row, the next token is expected one position after the last slot."""
    if positions.ndim == 3:
        return False
    ends_in_tokens = seen is None or bool(seen[:, positions.shape[-1] - 1].all())
    return ends_in_tokens and bool(follow_on(positions, positions[:, -1:] + 1, seen))
