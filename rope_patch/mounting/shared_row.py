"""Attention where several processes share a row.

The mask of a forward is replaced by a `RowMask`, which knows the whole row: which tokens other processes hold, their
positions, and which tokens see each other. It reaches every attention function, also when checkpointing calls a block
again. There the keys of all processes meet the queries of this one, and each run of queries is scored like a chunk of a
text whose earlier keys are cached. Keys are exchanged once and rotated here, whatever the number of regions.

Source: keys gathered as for Llama 3, 2407.21783, section 3.3.2; heads exchanged as in DeepSpeed Ulysses, 2309.14509.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import nn

from rope_patch.attention import engine
from rope_patch.attention.call import Call
from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.attention.inputs import AttentionInputs
from rope_patch.attention.masks import Groups, read_mask
from rope_patch.attention.shares import Shares
from rope_patch.errors import UnsupportedPositions
from rope_patch.models.base import is_causal
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.scoring import late_attention

Backend = Literal["gather", "ulysses"]
"""What processes exchange in a layer: all keys and values, or heads."""


@dataclass(eq=False)
class Row:
    """A row, or a batch of rows, that processes share.

    Attributes:
        positions: of all tokens, `(batch or 1, length)`.
        groups: of all tokens, see `AttentionInputs`, `(batch or 1, length)`.
        lengths: tokens of each row, without pads, `(batch or 1,)`.
        scattered: whether the distance of two tokens of a group may differ from that of their slots.
        forward_cache: for layers without a scheme.
    """

    shares: Shares
    backend: Backend
    positions: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    scattered: bool
    forward_cache: ForwardCache = field(default_factory=ForwardCache)

    def runs(self, forward_cache: ForwardCache) -> list[Run]:
        """The runs of queries that this process scores, for the layers that share a `forward_cache`."""
        if self.backend == "ulysses":
            slots = [slice(0, self.shares.length)]
        else:
            slots = list(self.shares.runs(self.shares.rank))
        stops = [sum(each.stop - each.start for each in slots[: n + 1]) for n in range(len(slots))]

        def runs() -> list[Run]:
            return [
                Run(self, slice(stop - (each.stop - each.start), stop), each)
                for each, stop in zip(slots, stops, strict=True)
            ]

        return cast("list[Run]", forward_cache.derived("runs", runs, self.positions))


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive queries of a row.

    Attributes:
        queries: their range among the queries of this process.
        slots: their slots in the row.
        forward_cache: shared by the layers for this run.
    """

    row: Row
    queries: slice
    slots: slice
    forward_cache: ForwardCache = field(default_factory=ForwardCache)

    def keys(self, causal: bool, window: int | None) -> slice:
        """The slots of the keys that some query may see."""
        if not causal:
            return slice(0, self.row.shares.length)
        return slice(0 if window is None else max(0, self.slots.start - window + 1), self.slots.stop)

    def mask(self, keys: slice, causal: bool, window: int | None) -> torch.Tensor:
        """For these slots of `keys`, groups in the form of a mask; under a window, or for one query, one number for
        each pair, `(batch or 1, 1, q_len, kv_len)`.
        """
        groups = self.row.groups[:, keys]
        if window is None and self.slots.stop - self.slots.start > 1:
            return cast(torch.Tensor, self.forward_cache.once(("groups", keys.stop), lambda: Groups.of(groups)))

        def seen() -> torch.Tensor:
            own = self.row.groups[:, self.slots, None]
            same = ((own == groups[:, None]) | (own < 0)) & (groups[:, None] >= 0)
            distance = torch.arange(self.slots.start, self.slots.stop, device=groups.device)[:, None] - torch.arange(
                keys.start, keys.stop, device=groups.device
            )
            near = (distance >= 0) | (not causal)
            return (same & (near if window is None else near & (distance < window)))[:, None]

        return cast(torch.Tensor, self.forward_cache.once(("mask", keys.start, keys.stop, window), seen))

    def of_call(self, call: ForwardCall, keys: slice, heads: slice | None, added: torch.Tensor | None) -> ForwardCall:
        """The part of a call for these queries and `keys`; `added` as in `ForwardCall`, of the whole row,
        `(batch, length, heads)`.
        """
        positions = self.row.positions
        return dataclasses.replace(
            call,
            forward_cache=self.forward_cache,
            states=call.states[:, self.queries],
            position_ids=self.forward_cache.once("positions", lambda: positions[:, self.slots].contiguous()),
            query_start=self.slots.start - keys.start,
            kv_length=keys.stop - keys.start,
            past=positions[:, keys.start : self.slots.start],
            scattered=self.row.scattered,
            added=None if added is None else added[:, keys],
            heads=heads,
            row_lengths=self.row.lengths,
            is_request=True,
            counted=False,
        )


class RowMask(torch.Tensor):
    """A `Row` as an `attention_mask`, `(batch or 1, 1, 1, tokens)`: Transformers passes four axes through unchanged."""

    row: Row

    @classmethod
    def of(cls, row: Row) -> RowMask:
        """A mask with the groups of the tokens of this process."""
        mask = row.shares.own(row.groups, 1)[:, None, None].as_subclass(cls)
        mask.row = row
        return mask


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rope_patch: ForwardCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a row that processes share, for layers under a scheme (with the call object of their
    hook) and for all others. Shapes are those of `late_attention`, for the tokens of this process: queries
    `(batch, heads, tokens, head_dim)`.

    Raises:
        UnsupportedPositions: the mask is not a `RowMask`.
    """
    if not isinstance(attention_mask, RowMask):
        raise UnsupportedPositions(
            f"{type(module).__name__} receives a mask of its own, so its keys cannot be shared; context parallelism "
            "needs models that pass a mask with four axes through unchanged"
        )
    row, call, added = attention_mask.row, rope_patch, None
    shares, causal = row.shares, is_causal(module, kwargs.get("is_causal"))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):  # half as much to exchange
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if call is not None and call.added is not None:
        added = shares.gathered(call.added, dim=1)
    heads = None
    if row.backend == "ulysses":
        share = query.shape[1] // shares.number
        heads = slice(shares.rank * share, (shares.rank + 1) * share)
        copies = max(1, shares.number // key.shape[1])
        key, value = (shares.by_heads(x.repeat_interleave(copies, dim=1)) for x in (key, value))
        query = shares.by_heads(query)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"][heads]
    else:
        joined = shares.gathered(torch.cat([key, value], dim=-1), dim=2)
        key, value = joined.split([key.shape[-1], value.shape[-1]], dim=-1)
    window = kwargs.get("sliding_window") if call is None else call.state.layer.sliding_window
    outputs = []
    for run in row.runs(row.forward_cache if call is None else call.forward_cache):
        keys = run.keys(causal, window)
        states = query[:, :, run.queries], key[:, :, keys], value[:, :, keys], run.mask(keys, causal, window)
        if call is None:
            first = run.slots.start - keys.start
            kwargs |= {"forward_cache": run.forward_cache, "query_start": first, "causal": causal}
            outputs.append(_plain_attention(module, *states, scaling, dropout, **kwargs))
        else:
            part = run.of_call(call, keys, heads, added)
            outputs.append(late_attention(module, *states, scaling, dropout, part, **kwargs)[0])
    output = torch.cat(outputs, dim=1)
    if row.backend == "ulysses":
        output = shares.by_tokens(output.transpose(1, 2)).transpose(1, 2).contiguous()
    return output, None


def _plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float,
    *,
    query_start: int,
    causal: bool,
    forward_cache: ForwardCache,
    **kwargs: Any,
) -> torch.Tensor:
    """`late_attention` of a layer without a scheme: its queries and keys are rotated already."""
    q_length, kv_length = query.shape[2], key.shape[2]
    slots = torch.arange(kv_length, device=query.device)[None]
    mask, groups = read_mask(attention_mask, slots, q_length, kv_length, query_start, cast(Any, module).config)
    inputs = AttentionInputs(
        branches=(),
        value=value,
        query_positions=slots[:, query_start : query_start + q_length],
        key_positions=slots,
        mask=mask,
        groups=groups,
        causal=causal and q_length > 1,
        query_start=query_start,
        scaling=scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
    )
    output, _ = engine.score(inputs, Call(query, key, forward_cache))
    return output.transpose(1, 2)
