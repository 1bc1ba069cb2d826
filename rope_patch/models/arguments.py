"""The arguments of a Transformers forward, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache

from rope_patch.attention.masks import attended
from rope_patch.errors import UnsupportedPositions
from rope_patch.graphs import traced

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named, as a pre-hook returns them


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name all arguments of a forward, from positional `args` and named `kwargs`."""
    return dict(zip(parameters_of(module), args, strict=False)) | kwargs if args else kwargs


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, without `self`. A wrapper that takes `*args` and `**kwargs` passes them on,
    so the parameters are those of the forward below it: of its class, or of a class that this one extends.
    """
    found = _parameters(module.forward)
    if found is None:  # else the classes are not read, which torch 2.11 cannot do in a graph
        below = (vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
        found = next((each for each in map(_parameters, below) if each is not None), {})
    return found


def _parameters(forward: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a forward, without `self`; None for a wrapper that passes them on."""
    found = {name: each for name, each in inspect.signature(forward).parameters.items() if name != "self"}
    kinds = {each.kind for each in found.values()}
    return None if kinds >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} else found


def tokens_of(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The ids or embeddings that a forward reads, `(batch, length, ...)`."""
    tokens = kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if tokens is None else tokens


NAMES_OF_CACHE = ("cache", "past_key_values")
"""The names of the cache among the arguments of a forward and in its output: since Transformers 5.24, which warns about
the other one, and before.
"""


def name_of_cache(module: nn.Module) -> str:
    """The name of the cache among the arguments of this forward, one of `NAMES_OF_CACHE`."""
    found = parameters_of(module)
    return next((name for name in NAMES_OF_CACHE if name in found), NAMES_OF_CACHE[-1])


def cache_in(kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the arguments of a forward, or a decoder's self-attention cache; None without one."""
    cache = kwargs.get("past_key_values", kwargs.get("cache"))
    if not isinstance(cache, Cache):  # under another name, or none
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cached_length(kwargs: dict[str, Any]) -> int | torch.Tensor:
    """The number of tokens in the cache of a forward, a tensor of shape `()` if it is static; 0 without a cache."""
    cache = cache_in(kwargs)
    return 0 if cache is None else cache.get_seq_length()


def check_tokens(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a forward without tokens: most models cannot reshape its tensors, and PyTorch's GRU crashes.

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
    """A boolean `(batch or 1, length)`, false on the pads among the tokens of a forward; None without a mask that shows
    them.
    """
    seen = None if tokens_of(kwargs) is None else _slots_seen(kwargs)
    return None if seen is None else seen[:, _slots_in(seen, kwargs)]


def _slots_seen(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A boolean `(batch or 1, slots)`, false on the pads among the slots of a mask; None without a mask that shows
    them.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):  # masks by layer type, as `generate` and models of images prepare them
        mask = mask.get("full_attention")
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.ndim == 4 and (mask.dtype == torch.bool or mask.is_floating_point()):
        return attended(mask[:, 0]).any(dim=-2)
    return mask.bool() if mask.ndim == 2 else None


def _slots(kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The slots of the tokens of a forward, `(length,)`."""
    tokens = cast(torch.Tensor, tokens_of(kwargs))
    return torch.arange(tokens.shape[1], device=device) + cached_length(kwargs)


def _slots_in(seen: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The slots of the tokens of a forward among the slots of a mask `(..., slots)`; a vector `(length,)`."""
    slots = _slots(kwargs, seen.device)
    # in a static sliding cache that is full, the tokens have the last slots
    return slots - (slots[-1:] + 1 - seen.shape[-1]).clamp(min=0)


def slot_positions(kwargs: dict[str, Any]) -> torch.Tensor:
    """Positions of the tokens of a forward by slot, `(1, length)`, as Transformers counts them without
    `position_ids`.
    """
    return _slots(kwargs, cast(torch.Tensor, tokens_of(kwargs)).device)[None]


def counted_positions(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Positions of the tokens of a forward, `(batch or 1, length)`, that count tokens and not the pads before them, as
    `generate` counts. None without a mask `(batch, slots)`, or prepared by layer type, that shows a pad before a token.
    A custom mask of four axes may hide tokens that are no pads, so it shows no pads.

    Pads before the first token get negative positions up to -1. Pads after the last token continue its count, so a row
    that is padded on the right keeps its positions. A graph cannot read values, so it counts under every such mask,
    with the same result.
    """
    tokens, mask = tokens_of(kwargs), kwargs.get("attention_mask")
    seen = None if isinstance(mask, torch.Tensor) and mask.ndim != 2 else _slots_seen(kwargs)
    if tokens is None or seen is None or seen.shape[1] < tokens.shape[1]:
        return None
    if not traced() and not (seen[:, 1:] > seen[:, :-1]).any():
        return None
    number = seen.cumsum(dim=-1)
    inner = ~seen & (number > 0) & (number < number[:, -1:])
    first = (number == 0).sum(dim=-1, keepdim=True) % seen.shape[1]  # 0 in a row of pads
    positions = (~inner).cumsum(dim=-1) - 1 - first
    return positions[:, _slots_in(seen, kwargs)].to(tokens.device)
