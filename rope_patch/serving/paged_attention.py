"""Attention over a paged cache on a CPU: the new tokens of all requests at once.

The cache holds keys in the rotation of the farthest region (`anchor_of`), so only keys of a near window are rotated,
which are few. A kernel in C++ reads each block once, for all query heads that share its keys, with a running softmax.
The rotation of a query or a key depends on its position alone, so tables are kept from one forward to the next.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._inductor.codecache import CppCodeCache

from rope_patch.errors import RopePatchWarning
from rope_patch.models.base import RotaryTables
from rope_patch.mounting.layer_state import LayerState
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import UNROTATED
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import PositionMap


def regions_of(state: LayerState) -> tuple[Region, ...]:
    """The regions of a layer, nearest first."""
    return tuple(sorted(state.regions or (ALL_PAIRS,), key=lambda region: region.start))


def anchor_of(state: LayerState) -> PositionMap | None:
    """The position map by which the keys in the cache are rotated; None if requests are scored one by one."""
    regions, scheme = regions_of(state), state.scheme
    anchor = regions[-1].key_map if state.rotates else UNROTATED
    near = [region for region in regions if region.key_map != anchor]
    if (
        scheme.slots - {"segments", "frequencies", "query_scale", "bias"}
        or scheme.length_dependent
        or scheme.decays
        or scheme.learns
        or scheme.by_head
        or "running_bias" in state.methods
        or any(region.pairs is not None for region in regions)
        or any(min(region.stop, region.keys_below) == math.inf for region in near)
        or (anchor != UNROTATED and factor_of(state) != 1)
    ):
        return None
    return anchor


def factor_of(state: LayerState) -> float:
    """The factor on rotated queries and keys."""
    if not state.rotates:
        return 1.0
    if state.frequencies == "late":
        return float(state.source.of_scheme(None, torch.device("cpu")).attention_scaling)
    return float(cast(RotaryTables, state.layer.rotary).attention_scaling)


# each part of -ffast-math that loops need to become vectors: the whole would change how the process rounds
FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-ffinite-math-only", "-ffp-contract=fast", "-ftree-loop-vectorize")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENDLESS = 1 << 40
"""The bound of an open region, beyond any position."""


def _struct(sizes: tuple[str, ...], pointers: tuple[str, ...], numbers: tuple[str, ...] = ()) -> Any:
    """Declare a struct of paged_attention.cpp."""
    kinds = ((sizes, ctypes.c_int64), (numbers, ctypes.c_float), (pointers, ctypes.c_void_p))
    fields = [(name, kind) for names, kind in kinds for name in names]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


PAIRS, REGIONS = ("first", "second"), ("start", "stop", "chunk", "below", "turned")
GROUP = _struct(
    ("heads", "kv_heads", "size", "head_dim", "pairs", "adjacent", "regions", "positions", "scale_step", "bias_step"),
    (*PAIRS, *REGIONS, "query_cos", "query_sin", "key_cos", "key_sin", "scale", "bias"),
    ("softcap",),
)
BATCH = _struct(("requests", "blocks_each", "factor"), ("begins", "lengths", "blocks", "factors"))


def _filled(struct: Any, values: dict[str, Any]) -> tuple[ctypes.Structure, dict[str, Any]]:
    """Fill a struct with values; the second result keeps its contiguous tensors alive."""
    held = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in values.items()}
    return struct(**{name: x.data_ptr() if isinstance(x, torch.Tensor) else x for name, x in held.items()}), held


@functools.cache
def kernel() -> Any:
    """Load the library of paged_attention.cpp, built once on a machine; None, with a warning, without a C++
    compiler.
    """
    source = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    try:
        library = CppCodeCache.load(source, extra_flags=FLAGS)
    except RuntimeError as error:
        warnings.warn(f"requests are scored one by one: {error}", RopePatchWarning, stacklevel=2)
        return None
    library.write.argtypes = 6 * [ctypes.c_int64] + 4 * [ctypes.c_void_p]
    for dtype in DTYPES:
        attend = getattr(library, _name(dtype))
        attend.argtypes = 2 * [ctypes.c_void_p] + [ctypes.c_int64] + 4 * [ctypes.c_void_p]
    return library


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Batch:
    """The requests of a forward, for all layers.

    Args:
        begins: start of each request's new tokens among the tokens of the batch, `(requests + 1,)`.
        lengths: lengths of the requests with their new tokens, `(requests,)`.
        blocks: cache blocks of each request, `(requests, longest in blocks)`.
        factors: index of the factor of each request, `(requests,)`; None without factors.

    Attributes:
        longest: the length of the longest request, by factor.
    """

    def __init__(
        self, begins: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor, factors: torch.Tensor | None = None
    ) -> None:
        values = {"requests": len(lengths), "blocks_each": blocks.shape[1], "begins": begins.int()}
        values |= {"lengths": lengths.int(), "blocks": blocks.int(), "factors": factors}
        if factors is None:
            self.longest = {0: int(lengths.max())}
        else:
            self.longest = {index: int(lengths[factors == index].max()) for index in factors.unique().tolist()}
        structs = {index: _filled(BATCH, values | {"factor": index}) for index in self.longest}
        self._held = list(structs.values())
        self.structs = {index: ctypes.addressof(struct) for index, (struct, _) in structs.items()}


class Attention:
    """The attention of the layers of a group over their caches, which keep keys in the rotation of `anchor_of`.

    Args:
        state: state of one of the layers.
        heads: number of query heads of a layer.
        sizes: kv_heads, block_size and head_dim of the caches; the last two are multiples of 16.
        scaling: factor on the scores.
        softcap: softcap of the scores; 0 for none.
    """

    def __init__(
        self, state: LayerState, heads: int, sizes: tuple[int, int, int], scaling: float, softcap: float = 0.0
    ) -> None:
        self._state, self._heads, self._scaling, self._positions = state, heads, scaling, 0
        self._regions, self._anchor = regions_of(state), cast(PositionMap, anchor_of(state))
        frequencies = state.source.frequencies(None, torch.device("cpu"), anchored=False) if state.rotates else None
        self._inv_freq = torch.empty(0) if frequencies is None else frequencies.inv_freq
        layout = cast(RotaryLayout, state.layer.layout)
        adjacent = all(isinstance(half, slice) and half.step in (None, 1) for half in layout.halves)
        pairs = self._inv_freq.shape[-1]
        self._near = [region for region in self._regions if region.key_map != self._anchor]
        turned = [self._near.index(region) if region in self._near else -1 for region in self._regions]
        self._common: dict[str, Any] = {"pairs": pairs, "adjacent": int(adjacent and pairs % 16 == 0), "heads": heads}
        self._common |= dict(zip(("kv_heads", "size", "head_dim"), sizes, strict=True))
        self._common |= {"regions": len(turned), "turned": torch.tensor(turned), "softcap": softcap}
        self._common |= {name: torch.tensor(getattr(layout, name)).int() for name in PAIRS}
        bounds = [(region.start, region.stop, region.chunk, region.keys_below) for region in self._regions]
        whole = [[math.ceil(min(max(bound, -ENDLESS), ENDLESS)) for bound in each] for each in bounds]
        self._common |= dict(zip(REGIONS, torch.tensor(whole).T, strict=False))

    def attend(
        self,
        batch: Batch,
        query: torch.Tensor,
        cache: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
        factor: int = 0,
    ) -> None:
        """Fill the output of one layer, `(tokens, heads, head_dim)`, at the tokens of the requests under one factor.

        Shape:
            query `(tokens, heads, head_dim)`, in the rotation of `anchor_of`; cache `(blocks, kv_heads, 2, block_size,
            head_dim)`, keys before values, contiguous; sinks `(heads,)`.
        """
        if factor not in batch.longest:
            return
        if batch.longest[factor] > self._positions:
            self._grow(batch.longest[factor])
        if query.dtype != cache.dtype or query.stride()[1:] != (query.shape[2], 1):
            query = query.to(cache.dtype).contiguous()
        result = output.to(cache.dtype).contiguous()  # usually no copy
        sinks = None if sinks is None else sinks.float().contiguous()
        getattr(kernel(), _name(cache.dtype))(
            ctypes.addressof(self._struct),
            batch.structs[factor],
            query.stride(0),
            query.data_ptr(),
            cache.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            result.data_ptr(),
        )
        if result is not output:
            output.copy_(result)

    def _grow(self, length: int) -> None:
        """Make tables for twice as many positions as needed now."""
        self._positions = -(-2 * length // 16) * 16
        n, scheme, bias = torch.arange(self._positions), self._state.scheme, None
        scale = torch.full((1, self._heads), self._scaling * factor_of(self._state) ** 2)
        if self._state.scales:
            scale = scale * scheme.query_scale(n[None], self._heads)[:, 0].T
        if "bias" in self._state.methods:
            bias = scheme.bias(n, self._heads, {}).float()
        query = self._tables("query", [region.query_map(n) - self._anchor(n) for region in self._regions])
        key = self._tables("key", [region.key_map(n) - self._anchor(n) for region in self._near])
        fields = {**self._common, **query, **key, "positions": len(n), "scale": scale, "bias": bias}
        fields["scale_step"] = self._heads if len(scale) > 1 else 0
        fields["bias_step"] = 0 if bias is None or len(bias) == 1 else len(n)
        self._struct, self._held = _filled(GROUP, fields)

    def _tables(self, what: str, moved: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute tables of cos and sin by their names, `(positions of all of moved, d/2)`."""
        found = rotation_tables(torch.cat([*moved, torch.arange(0)])[None], self._inv_freq, 1.0, torch.float32)
        return dict(zip((f"{what}_cos", f"{what}_sin"), found, strict=True))


def written(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new keys and values, `(tokens, kv_heads, head_dim)`, to slots `(tokens,)` of a cache as in `Attention`. A
    slot below 0 belongs to a token that only pads the batch and is not written.
    """
    kv_heads, _, size, head_dim = cache.shape[1:]
    library, new, width = kernel(), len(slots), cache.element_size()
    if library is None:
        kept = slots >= 0
        block, offset = slots[kept] // size, slots[kept] % size
        cache[block, :, 0, offset] = key[:new][kept].to(cache.dtype)
        cache[block, :, 1, offset] = value[:new][kept].to(cache.dtype)
        return
    key, value = (x.to(cache.dtype) for x in (key, value))
    key, value = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (key, value))
    sizes, slots = (new, kv_heads, size, head_dim * width), slots.long()
    steps = key.stride(0) * width, value.stride(0) * width
    library.write(*sizes, *steps, key.data_ptr(), value.data_ptr(), slots.data_ptr(), cache.data_ptr())


def held(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of a request, each `(1, kv_heads, length, head_dim)`, from a cache as in `Attention`."""
    states: Sequence[torch.Tensor] = cache[blocks].unbind(2)
    return tuple(state.transpose(0, 1).flatten(1, 2)[None, :, :length] for state in states)
