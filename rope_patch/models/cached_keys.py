"""Per-key positions and the writing scheme, carried through cache operations.

A late mount needs the positions to rotate keys when they are scored. A cache that has lost its positions is refused.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers import Cache

from rope_patch.errors import UnsupportedPositions
from rope_patch.graphs import traced
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.tools.positions import joined, key_positions

CACHE_TAG = "_rope_patch_cache_tag"  # attribute of a cache: the writer of its keys
_WHEN_READ = "_rope_patch_when_read"
"""Attribute of a static layer: its number of tokens when positions were stored, and whether they were in order."""

OWN_ROTATION = "in the model's own rotation"  # state of keys that the attention module rotates itself


def complete_layers(cache: Cache, num_layers: int) -> list[Any]:
    """The layers of a cache, after creating those that it has not created yet, so that more can follow them.

    Raises:
        UnsupportedPositions: the cache numbers its layers in its own way.
    """
    if type(cache).__len__ is not Cache.__len__:
        raise UnsupportedPositions(
            f"a {type(cache).__name__} numbers its layers in its own way and cannot keep more than keys; pass "
            "use_cache=False"
        )
    layers = cast(list[Any], cache.layers)
    # an empty cache creates layers on demand; after an early exit it has fewer layers than the model
    while len(layers) < num_layers and cache.layer_class_to_replicate is not None:
        layers.append(cast(Any, cache).layer_class_to_replicate())
    return layers


def cache_tag(scheme: Scheme, kept: str) -> str:
    """The tag for a cache's writer: a model may continue a cache with its own tag."""
    return f"{scheme} (keys {kept})"


class CachedKeys(torch.Tensor):
    """A key tensor of one layer, `(batch, kv_heads, slots, head_dim)`, with the position of each key.

    Operations that select, reorder or join keys return keys with positions; all others return plain tensors.

    Attributes:
        positions: integer, `(batch or 1, slots)`, or `(batch, kv_heads, slots)` if heads keep different keys.
        bare: the keys without positions, in the same memory, as a compiled graph takes them: none of its operators
            runs on a subclass. A static cache has marked that this tensor keeps its address.
    """

    positions: torch.Tensor
    bare: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, positions: torch.Tensor) -> CachedKeys:
        """Attach `positions` to `keys`, in the same memory and in the shapes above."""
        with_positions = keys.as_subclass(cls)
        with_positions.positions, with_positions.bare = positions, keys
        return with_positions

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if traced():  # in a graph keys are only added to, see `remember`
            return func(*_bare(args), **{name: _bare((value,))[0] for name, value in kwargs.items()})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func not in _MOVES_POSITIONS or not isinstance(result, torch.Tensor) or isinstance(result, cls):
            return result
        with torch._C.DisableTorchFunctionSubclass():
            positions = _moved_positions(func, args, kwargs, result)
        return result if positions is None else cls.of(result, positions)

    def plain(self) -> torch.Tensor:
        """View the keys as a plain tensor, in the same memory."""
        return self.bare

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedKeys:
        return type(self).of(copy.deepcopy(self.plain(), memo), copy.deepcopy(self.positions, memo))


def _bare(args: Any) -> list[Any]:
    """Replace keys with positions by `CachedKeys.bare` in the arguments of an operator, also within lists."""
    return [
        arg.bare if isinstance(arg, CachedKeys) else _bare(arg) if isinstance(arg, (list, tuple)) else arg
        for arg in args
    ]


def _names(*names: str) -> set[Any]:
    found = (getattr(owner, name, None) for name in names for owner in (torch, torch.Tensor))
    return {function for function in found if callable(function)}  # `torch.cpu` and `torch.cuda` are modules


_GATHERING = _names("gather", "take_along_dim")
_JOINING = _names("cat")
_COPYING = _names("to", "cpu", "cuda", "contiguous", "clone", "detach")
_MOVES_POSITIONS = (
    _GATHERING | _JOINING | _COPYING | _names("__getitem__", "index_select", "narrow", "repeat_interleave", "flip")
)


def _moved_positions(func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor | None:
    """Apply an operation on keys to their positions; None if it does not tell which keys are selected."""
    if func in _JOINING and not all(isinstance(x, CachedKeys) for x in (args[0] if args else kwargs["tensors"])):
        return None  # the joined keys have no positions yet
    if func in _COPYING:
        keys = next(x for x in args if isinstance(x, CachedKeys))
        return keys.positions.to(result.device)

    def replaced(value: Any) -> Any:
        if isinstance(value, CachedKeys):
            # one channel, and one head if heads agree and need not differ
            positions = value.positions if value.positions.ndim == 3 else value.positions[:, None]
            heads = value.shape[1] if func in _GATHERING or positions.shape[1] > 1 else 1
            return positions.expand(value.shape[0], heads, -1)[..., None]
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(map(replaced, value))
        if func in _GATHERING and isinstance(value, torch.Tensor):
            same = value.ndim == 4 and bool((value == value[..., :1]).all())
            return value[..., :1] if same else value
        return value

    try:
        taken = func(*map(replaced, args), **{name: replaced(value) for name, value in kwargs.items()})
    except (RuntimeError, IndexError, TypeError):  # the joined keys have no positions, or too few dimensions
        return None
    fits = taken.ndim == result.ndim == 4 and taken.shape[::2] == result.shape[::2]
    if not fits or taken.shape[1] not in (1, result.shape[1]) or taken.shape[3] != 1:
        return None
    return taken[:, 0, :, 0] if taken.shape[1] == 1 else taken[..., 0]


def tag_cache(cache: Cache, index: int, tag: str, accepts_plain: bool = False) -> None:
    """Mark a cache with the writer of its keys, and refuse one with keys of another writer.

    Args:
        index: index of a layer to which nothing was added in this forward.
        tag: the scheme and the rotation of its cached keys.
        accepts_plain: whether the unpatched checkpoint's keys are the same.

    Raises:
        UnsupportedPositions: the keys are from before the patch, from prefix tuning, from another scheme, or stored in
            another rotation.
    """
    its_tag = getattr(cache, CACHE_TAG, None)
    if its_tag == tag:
        return
    length = cache.get_seq_length(index)
    # values are unknown while compiling; a cache that a graph fills was tagged when it was empty
    empty = its_tag is None and isinstance(length, torch.Tensor) and traced()
    if not empty and length > 0 and not (its_tag is None and accepts_plain):
        by = "without a patch or by prefix tuning" if its_tag is None else f"under {its_tag}"
        raise UnsupportedPositions(
            f"past_key_values hold {int(length)} tokens with keys written {by}; {tag} would misread them: fill a new "
            "cache; instead of prefix tuning use LoRA or prompt tuning"
        )
    setattr(cache, CACHE_TAG, tag)


def positions_in(cache: Cache, index: int, start: int, name: str) -> torch.Tensor:
    """Positions of the `start` keys that a layer's cache, not yet updated, will return before the new ones:
    `(batch or 1, start)`, or `(batch, kv_heads, start)` if heads keep different keys.

    Raises:
        UnsupportedPositions: an operation added or removed keys without their positions.
    """
    keys = cast(Any, cache).layers[index].keys
    if not isinstance(keys, CachedKeys):
        raise UnsupportedPositions(
            f"{name}: the {start} keys in past_key_values have lost their positions; slices, indices, index_select, "
            "gather and cat keep them, and rope_patch.CachedKeys.of(keys, positions) sets them again"
        )
    positions = keys.positions
    if len(positions) not in (1, len(keys)):
        raise UnsupportedPositions(
            f"{name}: past_key_values have {len(keys)} rows of keys, but {len(positions)} rows of positions"
        )
    missing = start - positions.shape[-1]
    if missing > 0:  # steps of a compiled model, whose graph asserts consecutive positions
        if not getattr(cast(Any, cache).layers[index], _WHEN_READ, (0, True))[1]:
            raise UnsupportedPositions(
                f"{name}: a compiled model wrote {missing} keys in past_key_values behind pads; continue with the "
                "compiled model, or fill a new cache"
            )
        steps = torch.arange(1, missing + 1, device=positions.device)
        positions = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    return positions if positions.shape[-1] == start else positions[..., -start:]


def known_positions(
    cache: Cache, index: int, start: int | torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor | None:
    """Positions of the keys in a cache and of the new tokens, for a model that does not require them: without known
    positions, keys are counted back from the first query, which is in slot `start`.

    Returns:
        `(batch or 1, start + q_len)`, with a head axis in between if heads keep different keys; None while compiling.
    """
    if traced():
        return None
    start, layers = int(start), cast(Any, cache).layers
    if start and isinstance(layers[index].keys, CachedKeys):
        return joined(positions_in(cache, index, start, f"layer {index}"), position_ids)
    return key_positions(position_ids, start + position_ids.shape[-1], start)


def remember(cache: Cache, index: int, positions: torch.Tensor, in_order: bool) -> None:
    """Store positions on the keys of a layer after its cache was updated.

    Args:
        positions: positions of the earlier keys, from `positions_in`, and of the new keys, `(batch or 1, slots)` or
            `(batch, kv_heads, slots)`.
        in_order: whether the next token of every row is expected one position after the last slot.
    """
    layer = cast(Any, cache).layers[index]
    held = layer.keys.shape[-2]
    positions = positions if positions.shape[-1] <= held else positions[..., -held:]
    if isinstance(layer.keys, CachedKeys):  # a static cache is written in place
        layer.keys.positions = positions
    else:
        layer.keys = CachedKeys.of(layer.keys, positions)
    if layer.is_compileable:
        setattr(layer, _WHEN_READ, (int(cache.get_query_offset(index)), in_order))


def is_static(cache: Cache, index: int) -> bool:
    """Whether a layer keeps its keys in memory of fixed size, to which a compiled graph may write."""
    layers = cast(Any, cache).layers
    return index < len(layers) and layers[index].is_compileable


def positions_in_graph(cache: Cache, index: int, position_ids: torch.Tensor, name: str) -> torch.Tensor | None:
    """Positions of the keys in a static cache for a compiled graph; the keys were written eagerly.

    If they precede the queries without a gap, positions are counted back from the queries, and the graph asserts this.
    If there is a known gap (pads behind a prompt), the stored positions are read, and later ones are counted back.

    Returns:
        positions of the first keys, `(batch or 1, slots)`; None if all are counted back.

    Raises:
        UnsupportedPositions: there is a gap, and a sliding window moves the keys.
    """
    layer = cast(Any, cache).layers[index]
    if not isinstance(layer.keys, CachedKeys):
        return None  # written by the graph itself
    positions, (tokens, in_order) = layer.keys.positions, getattr(layer, _WHEN_READ)
    offset = cache.get_query_offset(index)
    if in_order and positions.ndim == 2:
        expected = positions[:, -1] + 1 + (offset - tokens)
        is_empty = 0 * expected + offset == 0  # after a reset; the offset is a number or a tensor
        torch._assert_async(
            (is_empty | (expected == position_ids[:, 0])).all(),
            "rope_patch: position_ids do not continue the positions of the cached keys; run this step eagerly",
        )
        return None
    if layer.is_sliding and offset + position_ids.shape[-1] > layer.max_cache_len:
        raise UnsupportedPositions(
            f"{name}: a compiled model cannot use a sliding static cache whose keys have gaps in their positions"
        )
    return positions
