"""Attention over a paged cache on a CPU: one new token of each request for all at once, and parts of prompts.

The cache holds keys as the farthest region wants them (`anchor_of`), so only keys of a near window are turned, a few of
many. A kernel in C++ reads each block once, for all query heads that share its keys, under a running softmax.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch._inductor.codecache import CppCodeCache

from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.errors import RopePatchWarning
from rope_patch.models.base import RotaryTables
from rope_patch.mounting.layer_state import UNROTATED, LayerState
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import PositionMap


def regions_of(state: LayerState) -> tuple[Region, ...]:
    """The regions of a layer, nearest first."""
    return tuple(sorted(state.regions or (ALL_PAIRS,), key=lambda region: region.start))


def anchor_of(state: LayerState) -> PositionMap | None:
    """The position map by which the keys in the cache are rotated; None where requests are scored one by one."""
    regions, scheme = regions_of(state), state.scheme
    anchor = regions[-1].key_map if state.rotates else UNROTATED
    near = [region for region in regions if region.key_map != anchor]
    if (
        scheme.slots - {"segments", "frequencies", "query_scale", "bias"}
        or scheme.length_dependent
        or scheme.decays
        or scheme.learns
        or "running_bias" in state.methods
        or any(region.pairs is not None for region in regions)
        or any(min(region.stop, region.keys_below) == math.inf for region in near)
        or (anchor != UNROTATED and factor_of(state) != 1)
    ):
        return None
    return anchor


def factor_of(state: LayerState) -> float:
    """What multiplies rotated queries and keys."""
    if not state.rotates:
        return 1.0
    if state.frequencies == "late":
        return float(state.own_frequencies(None, {}, torch.device("cpu")).attention_scaling)
    return float(cast(RotaryTables, state.layer.rotary).attention_scaling)


# each part of -ffast-math that loops need to become vectors: the whole would change how the process rounds
FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-ffinite-math-only", "-ffp-contract=fast", "-ftree-loop-vectorize")
SIZES = ("heads", "kv_heads", "size", "head_dim", "pairs", "adjacent")
TABLES = ("first", "second", "query_cos", "query_sin", "key_cos", "key_sin", "scale")


def _struct(sizes: tuple[str, ...], pointers: tuple[str, ...]) -> type[ctypes.Structure]:
    """A struct of paged_attention.cpp: sizes, the cap of scores, and pointers."""
    fields = [(name, ctypes.c_int64) for name in sizes], [(name, ctypes.c_void_p) for name in pointers]
    return type("Struct", (ctypes.Structure,), {"_fields_": [*fields[0], ("softcap", ctypes.c_float), *fields[1]]})


@functools.cache
def kernel() -> Any:
    """The library of paged_attention.cpp, built once on a machine; None, with a warning, without a C++ compiler."""
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    try:
        return CppCodeCache.load(source, extra_flags=FLAGS)
    except RuntimeError as error:
        warnings.warn(f"requests are scored one by one: {error}", RopePatchWarning, stacklevel=2)
        return None


class Paged(ABC):
    """Some new tokens of a forward, for the layers of a group: what they share, and their attention.

    Args:
        state: of one of the layers.
        m: positions of the queries, `(queries,)`.
        blocks: of the cache, `(..., longest in blocks)`.
        sizes: kv_heads, block_size and head_dim of the cache.
    """

    struct: ClassVar[type[ctypes.Structure]]
    prefix: ClassVar[str]

    def __init__(self, state: LayerState, m: torch.Tensor, blocks: torch.Tensor, sizes: tuple[int, int, int]) -> None:
        self.state, self.m, self.sizes, self.forward_cache = state, m, sizes, ForwardCache()
        self.regions, self.anchor = regions_of(state), cast(PositionMap, anchor_of(state))
        frequencies = state.frequencies_of(None, {}, torch.device("cpu"), anchored=False) if state.rotates else None
        self._inv_freq = torch.empty(0) if frequencies is None else frequencies.inv_freq
        layout = cast(RotaryLayout, state.layer.layout)
        adjacent = all(isinstance(half, slice) and half.step in (None, 1) for half in layout.halves)
        pairs = self._inv_freq.shape[-1]
        self.common: dict[str, Any] = {"pairs": pairs, "adjacent": int(adjacent and pairs % 16 == 0)}
        self.common |= {"kv_heads": sizes[0], "size": sizes[1], "head_dim": sizes[2], "blocks": blocks.int()}
        self.common |= {name: torch.tensor(getattr(layout, name)).int() for name in ("first", "second")}

    def tables(self, what: str, moved: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """cos and sin by these names, `(all of moved, d/2)`."""
        found = rotation_tables(torch.cat([*moved, self.m[:0]])[None], self._inv_freq, 1.0, torch.float32)
        return dict(zip((f"{what}_cos", f"{what}_sin"), found, strict=True))

    @abstractmethod
    def fields(self, heads: int) -> dict[str, Any]:
        """Of the struct, besides `common`."""

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        scaling: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of one layer, `(queries, heads, head_dim)`.

        Shape:
            query `(queries, heads, head_dim)`, in the rotation of `anchor_of`; cache `(blocks, kv_heads, 2, block_size,
            head_dim)`, keys before values, contiguous, head_dim and block_size multiples of 16; sinks `(heads,)`.
        """
        query, heads = query.to(cache.dtype).contiguous(), query.shape[1]
        plan, _ = self.forward_cache.once((heads, scaling, softcap), lambda: self._plan(heads, scaling, softcap))
        output, sinks = torch.empty_like(query), None if sinks is None else sinks.float().contiguous()
        pointers = (None if x is None else ctypes.c_void_p(x.data_ptr()) for x in (query, cache, sinks, output))
        getattr(kernel(), self.prefix + str(cache.dtype).removeprefix("torch."))(ctypes.byref(plan), *pointers)
        return output

    def _plan(self, heads: int, scaling: float, softcap: float) -> tuple[ctypes.Structure, dict[str, Any]]:
        """The kernel's argument, and the memory that it points to."""
        scale = torch.full((len(self.m), heads), scaling * factor_of(self.state) ** 2)
        if self.state.scales:
            scale = scale * self.state.scheme.query_scale(self.m[None], heads)[:, 0].T
        fields = {**self.common, **self.fields(heads), "heads": heads, "scale": scale, "softcap": softcap}
        held = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in fields.items()}
        values = {name: x.data_ptr() if isinstance(x, torch.Tensor) else x for name, x in held.items()}
        return self.struct(**values), held


class Step(Paged):
    """One new token of each request.

    Args:
        lengths: of the requests with their new token, `(requests,)`.
        blocks: of each request, `(requests, longest in blocks)`.
    """

    struct = _struct(
        (*SIZES, "requests", "columns", "blocks_each", "versions", "bias_heads"),
        (*TABLES, "blocks", "lengths", "turn", "bias"),
    )
    prefix = ""

    def __init__(
        self, state: LayerState, lengths: torch.Tensor, blocks: torch.Tensor, sizes: tuple[int, int, int]
    ) -> None:
        super().__init__(state, m := lengths.long() - 1, blocks, sizes)
        n, anchor = torch.arange(int(lengths.max())), self.anchor
        self.distance = distance = m[:, None] - n
        far = [region for region in self.regions if region.key_map == anchor]
        # where a key is scored as it is, the version of the query; then the row of a key's turn; -1 for no score
        turn = torch.full(distance.shape, -1, dtype=torch.int32)
        turns, rows = [], len(far)
        for region in self.regions:
            inside = region.contains(m[:, None], n) & (distance >= 0)
            if region in far:
                turn.masked_fill_(inside, far.index(region))
                continue
            row, column = inside.nonzero(as_tuple=True)
            # relative to the query, whose own turn is saved; for most schemes the same for all requests
            moved = (region.key_map(n) - anchor(n))[column] - (region.query_map(m) - anchor(m))[row]
            values, place = _distinct(moved)
            turn[row, column] = (place + rows).int()
            turns.append(values)
            rows += len(values)
        # the last version is the query as it comes, for the keys that are turned
        versions = [region.query_map(m) - anchor(m) for region in far] + [torch.zeros_like(m)]
        self.common |= {"requests": len(m), "columns": len(n), "blocks_each": blocks.shape[1], "lengths": lengths.int()}
        self.common |= {"versions": len(versions), "turn": turn}
        self.common |= self.tables("query", versions) | self.tables("key", turns)

    def fields(self, heads: int) -> dict[str, Any]:
        """A bias by distance."""
        if "bias" not in self.state.methods:
            return {}
        bias = _bias(self.state, heads, self.distance.clamp(min=0))
        return {"bias": bias, "bias_heads": bias.shape[1]}


def _distinct(moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and the place of each of `moved` among them: a range if that is short, because sorting costs more."""
    if len(moved) and torch.equal(moved, moved.floor()):
        low, high = (int(bound) for bound in moved.aminmax())
        if high - low < len(moved):
            return torch.arange(low, high + 1), moved - low
    return moved.unique(return_inverse=True)


class Part(Paged):
    """Some new tokens of one request, under a scheme without a bias.

    Args:
        start, length: position of the first one, and the one after the last.
        blocks: of the request, `(its blocks,)`.
    """

    struct = _struct((*SIZES, "queries", "regions"), (*TABLES, "blocks", "begin", "end", "turned"))
    prefix = "part_"

    def __init__(
        self, state: LayerState, start: int, length: int, blocks: torch.Tensor, sizes: tuple[int, int, int]
    ) -> None:
        super().__init__(state, m := torch.arange(start, length), blocks, sizes)
        n = torch.arange(len(blocks) * sizes[1])
        near = [region for region in self.regions if region.key_map != self.anchor]
        turned = [near.index(region) * len(n) if region in near else -1 for region in self.regions]
        begin, end = zip(*(_seen(region, m) for region in self.regions), strict=True)
        self.common |= {"queries": len(m), "regions": len(turned), "turned": torch.tensor(turned).int()}
        self.common |= {"begin": torch.stack(begin).int(), "end": torch.stack(end).int()}
        self.common |= self.tables("query", [region.query_map(m) - self.anchor(m) for region in self.regions])
        self.common |= self.tables("key", [region.key_map(n) - self.anchor(n) for region in near])

    def fields(self, heads: int) -> dict[str, Any]:
        """None."""
        return {}


def _seen(region: Region, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key that a query at m sees in a region, and the one after the last, both `(queries,)`."""
    begin, end = torch.zeros_like(m), m + 1
    if region.stop != math.inf:
        begin = ((m // region.chunk - math.ceil(region.stop) + 1) * region.chunk).clamp(min=0)
    if region.start != -math.inf:
        end = end.minimum((m // region.chunk - math.ceil(region.start) + 1) * region.chunk)
    return begin, end if region.keys_below == math.inf else end.clamp(max=math.ceil(region.keys_below))


def _bias(state: LayerState, heads: int, distance: torch.Tensor) -> torch.Tensor:
    """By distance, `(requests, heads or 1, columns)`."""
    values = state.scheme.bias(torch.arange(int(distance.max()) + 1), heads, {})
    return values[:, distance].transpose(0, 1).float()


def written(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new keys and values, `(tokens, kv_heads, head_dim)`, to slots `(tokens,)` of a cache as of `Paged`."""
    kv_heads, _, size, head_dim = cache.shape[1:]
    library, new = kernel(), len(slots)
    if library is None:
        block, offset = slots // size, slots % size
        cache[block, :, 0, offset] = key[:new].to(cache.dtype)
        cache[block, :, 1, offset] = value[:new].to(cache.dtype)
        return
    key, value = (x.to(cache.dtype) for x in (key, value))
    key, value = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (key, value))
    steps = (x.stride(0) * x.element_size() for x in (key, value))
    integers, slots = (new, kv_heads, size, head_dim * cache.element_size(), *steps), slots.long()
    pointers = (x.data_ptr() for x in (key, value, slots, cache))
    library.write(*map(ctypes.c_int64, integers), *map(ctypes.c_void_p, pointers))


def held(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of a request, each `(1, kv_heads, length, head_dim)`, from a cache as of `Paged`."""
    states: Sequence[torch.Tensor] = cache[blocks].unbind(2)
    return tuple(state.transpose(0, 1).flatten(1, 2)[None, :, :length] for state in states)
