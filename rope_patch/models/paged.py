"""Continuous batching: one row holds the tokens of many requests, each of which is scored alone over a paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers.generation.continuous_batching import PagedAttentionCache

from rope_patch.attention.forward import Forward
from rope_patch.errors import UnsupportedPositions

ARGUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "read_index",
    "write_index",
    "block_table",
    "is_causal",
)
"""The arguments, apart from the cache, with which continuous batching describes a batch to attention."""


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of an attention function describe a row of continuous batching."""
    return any(kwargs.get(name) is not None for name in ("read_index", "block_table"))


@dataclass(frozen=True)
class Request:
    """One request of a row.

    Attributes:
        queries, keys: the request's slices of the row's queries, and of the keys that the cache returned.
        position_ids: positions of its queries, `(1, q_len)`.
    """

    queries: slice
    keys: slice
    position_ids: torch.Tensor
    forward: Forward = field(default_factory=Forward)

    @property
    def kv_length(self) -> int:
        """The number of keys."""
        return int(self.keys.stop - self.keys.start)

    @property
    def start(self) -> int:
        """The slot of the first query among the keys."""
        return self.kv_length - self.position_ids.shape[1]

    def mask(self, window: int | None) -> torch.Tensor | None:
        """A boolean mask `(1, 1, q_len, kv_len)`, true on the keys within a sliding `window`; None, for causal, without
        a window.
        """
        if window is None:
            return None
        return self.forward.shared(_seen_in_window)(self.start, self.kv_length, window, self.position_ids.device)


def _seen_in_window(start: int, kv_length: int, window: int, device: torch.device) -> torch.Tensor:
    m = torch.arange(start, kv_length, device=device)[:, None]
    distance = m - torch.arange(kv_length, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


@dataclass(frozen=True)
class Split:
    """A row of continuous batching, request by request.

    Attributes:
        parts: each request with its query, key and value, `(1, heads or kv_heads, length, head_dim)`.
        others: the remaining arguments of the attention function.
        output: the output, `(1, tokens, heads, value_dim)`, to be filled at the queries of each request; zero on
            padding behind the last request.
    """

    parts: list[tuple[Request, torch.Tensor, torch.Tensor, torch.Tensor]]
    others: dict[str, Any]
    output: torch.Tensor


def split_by_request(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    position_ids: torch.Tensor,
    forward: Forward,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> Split:
    """Split a row into requests, each to be scored alone; before Transformers 5.24, first write the new keys to its
    paged `cache`.

    Args:
        position_ids: positions of the whole row, `(1, tokens)`.

    Shape:
        query `(1, heads, tokens, head_dim)`, key and value `(1, kv_heads, tokens, head_dim)`, or of all keys without a
        `cache`.

    Raises:
        UnsupportedPositions: the batch has a block table.
    """
    if kwargs.get("block_table") is not None:
        raise UnsupportedPositions(
            f"{type(module).__name__}: continuous batching passed a block table, which only flash attention can read; "
            "set max_blocks_per_request=0 in the ContinuousBatchingConfig"
        )
    key_bounds = kwargs["cu_seq_lens_k"]
    if cache is not None:
        key, value, key_bounds = _update(cache, cast(Any, module).layer_idx, key, value, kwargs)
    requests = forward.shared(requests_of)(position_ids, kwargs["cu_seq_lens_q"], key_bounds)
    parts = [
        (request, query[:, :, request.queries], key[:, :, request.keys], value[:, :, request.keys])
        for request in requests
    ]
    others = {name: value for name, value in kwargs.items() if name not in ARGUMENTS}
    return Split(parts, others, query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]))


def _update(
    cache: Any, index: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write the new keys, and return all keys and values of a row, `(1, kv_heads, kv_len, head_dim)`, with the bounds
    of each request in them.
    """
    if not hasattr(cache, "sliding_windows"):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=kwargs)
        return key, value, kwargs["cu_seq_lens_k"]
    places = {name: kwargs[name] for name in ("read_index", "write_index")}  # the cache of Transformers 5.17
    key, value = cache.update(key_states=key, value_states=value, layer_idx=index, **places)
    bounds = kwargs["cu_seq_lens_k"]
    if isinstance(bounds, dict):
        bounds = bounds["full_attention" if cache.sliding_windows[index] == 1 else "sliding_attention"]
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None], bounds


def requests_of(position_ids: torch.Tensor, query_bounds: torch.Tensor, key_bounds: torch.Tensor) -> list[Request]:
    """The requests of a row with `position_ids` `(1, tokens)`; the bounds, `(requests + 1,)`, are the starts of each
    request's queries and keys.
    """
    queries, keys = (
        [slice(*pair) for pair in itertools.pairwise(bounds.tolist())] for bounds in (query_bounds, key_bounds)
    )
    pairs = zip(queries, keys, strict=True)
    return [Request(own, kept, position_ids[:, own]) for own, kept in pairs if own.start < own.stop]


def forget_managers(modules: Iterable[nn.Module]) -> None:
    """Destroy the managers that `generate_batch(persistent_manager=True)` left on these models: under another scheme,
    requests would reuse cached blocks of keys from the old scheme.
    """
    for module in modules:
        if "_cached_continuous_batching_manager" in vars(module):
            cast(Any, module).destroy_cached_continuous_batching_manager()
