"""The arguments of a Transformers forward, by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache

from rope_patch.attention.masks import attended
from rope_patch.errors import UnsupportedPositions

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named, as a pre-hook returns them


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward by name, from positional `args` and named `kwargs`."""
    if not args:
        return kwargs
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return dict(zip(names, args, strict=False)) | kwargs


def tokens_of(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The ids or embeddings that a forward reads, `(batch, length, ...)`."""
    tokens = kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if tokens is None else tokens


def cache_in(kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the arguments of a forward, or a decoder's self-attention cache; None without one. Its name is
    `cache` since Transformers 5.24, and `past_key_values` before.
    """
    cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cached_length(kwargs: dict[str, Any]) -> int | torch.Tensor:
    """Number of tokens in the cache of a forward, a tensor of shape `()` if it is static; 0 without a cache."""
    cache = cache_in(kwargs)
    return 0 if cache is None else cache.get_seq_length()


def check_tokens(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a forward without tokens: most models cannot reshape it, and PyTorch's GRU crashes.

    Raises:
        UnsupportedPositions: the batch or the length is 0.
    """
    tokens = tokens_of(kwargs)
    tokens = kwargs.get("hidden_states") if tokens is None else tokens
    if isinstance(tokens, torch.Tensor) and not tokens.numel():
        raise UnsupportedPositions(
            f"{type(module).__name__}: an input of shape {tuple(tokens.shape[:2])} has no tokens; the batch and the "
            "length must be at least 1"
        )


def tokens_seen(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """False on the pads among the tokens of a forward, `(batch or 1, length)`; None without a mask that shows them."""
    mask, tokens = kwargs.get("attention_mask"), tokens_of(kwargs)
    if isinstance(mask, dict):  # by layer type, as `generate` prepares them
        mask = mask.get("full_attention")
    if not isinstance(mask, torch.Tensor) or tokens is None:
        return None
    if mask.ndim == 2:
        return mask[:, -tokens.shape[1] :].bool()
    if mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None
    slots = torch.arange(tokens.shape[1], device=mask.device) + cached_length(kwargs)
    # in a static sliding cache that is full, the tokens have the last slots
    slots = slots - (slots[-1] + 1 - mask.shape[-1]).clamp(min=0)
    return attended(mask[:, 0]).any(dim=-2)[:, slots]


def counted_positions(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Positions of the tokens of a forward, `(batch or 1, length)`; left pads get negative ones."""
    tokens = tokens_of(kwargs)
    if tokens is None:
        return None
    mask, length = kwargs.get("attention_mask"), tokens.shape[1]
    compiling = torch.compiler.is_compiling()  # without values to look at
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= length and (compiling or not mask.all()):
        places = torch.arange(mask.shape[1], device=mask.device)
        return (places - mask.long().argmax(dim=-1, keepdim=True))[:, -length:]
    return (torch.arange(length, device=tokens.device) + cached_length(kwargs))[None]
