"""Running sums of a bias from hidden states, kept in further layers of the cache, in the slots of the keys."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from rope_patch.errors import UnsupportedPositions
from rope_patch.models.cached_keys import complete_layers

_OF = "_rope_patch_sums_of"


def contributions(
    added: torch.Tensor, cache: Cache | None, index: int, num_layers: int, kv_length: int
) -> torch.Tensor:
    """The addend of each slot to the sums, `(batch, kv_length, heads)`; earlier contributions are read from the cache.

    Args:
        added: contributions of the new tokens, `(batch, length, heads)`.
        index: index of the layer, whose cache is not yet updated.
        num_layers: number of the model's own layers that keep keys in the cache.

    Raises:
        UnsupportedPositions: keys were removed from the cache without their contributions.
    """
    if cache is not None:
        layer = _sums_layer(cache, index, num_layers)
        added = layer.update(added[:, None], added[:, None, :, :0])[0][:, 0]
        if added.shape[1] != kv_length:
            raise UnsupportedPositions(
                f"layer {index}: the cache has {kv_length} keys, but sums of {added.shape[1]} tokens; a bias from "
                "hidden states needs every earlier token: do not evict keys"
            )
    return added


def running_sums(added: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """The sums up to each slot, float64, `(batch, heads, kv_length)`.

    Args:
        added: the result of `contributions`.
        seen: false on pads, which add nothing, `(batch or 1, kv_length)`; None without pads.
    """
    added = added if seen is None else torch.where(seen[..., None], added, 0)
    return added.transpose(1, 2).contiguous().double().cumsum(dim=-1)


def _sums_layer(cache: Cache, index: int, num_layers: int) -> Any:
    """The cache layer with the sums of layer `index`, behind the model's own layers."""
    for layer in cache.layers:
        if getattr(layer, _OF, None) == index:
            return layer
    layers = complete_layers(cache, num_layers)
    keys = layers[index]
    slots = getattr(keys, "max_cache_len", None)
    layers.append(type(keys)(max_cache_len=slots, sliding_window=getattr(keys, "sliding_window", slots)))
    setattr(layers[-1], _OF, index)
    if hasattr(keys, "record_past"):  # a sliding cache, which assisted decoding crops
        layers[-1].record_past = keys.record_past
    return layers[-1]
