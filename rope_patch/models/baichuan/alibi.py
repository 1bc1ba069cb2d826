"""Attention of the ALiBi kind: relative, in float32, and never a bias for all pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rope_patch.attention import engine
from rope_patch.attention.inputs import AttentionInputs, DistanceBias
from rope_patch.attention.masks import keys_seen, read_mask
from rope_patch.attention.spans import Span, find_spans
from rope_patch.errors import UnsupportedPositions
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.schemes.tools.positions import follow_on, joined, key_positions


class SharedByLayers:
    """What the layers of one forward compute once: they see the same mask and the same distances."""

    def __init__(self) -> None:
        self._memory: dict[Any, Any] = {}

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, or what it returned for this key before; a compiler shares equal expressions itself."""
        if torch.compiler.is_compiling():
            return compute()
        if key not in self._memory:
            self._memory[key] = compute()
        return self._memory[key]


def alibi_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    position_ids: torch.Tensor | None = None,
    start: int | torch.Tensor = 0,
    positions: torch.Tensor | None = None,
    shared: SharedByLayers | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(q k^T scaling - slope_h (m - n)) v.

    Args:
        module: the attention module, for its config.
        attention_mask: as Transformers makes it for `eager`, `sdpa` or flash attention.
        scaling: multiplies the products.
        position_ids: of the queries; default by slot.
        start: slot of the first query among the keys.
        positions: of cached keys and queries, as `known_positions` found them; default counted from the queries.
        shared: what the layers of this forward have in common.
        **kwargs: of other attention functions; nothing here depends on them.
        query, key, value: see Shape.

    Shape:
        query, key and value `(batch, heads, q_len or kv_len, head_dim)`; returns `(batch, q_len, heads, head_dim)`, and
        the weights `(batch, heads, q_len, kv_len)` under eager attention, else None.

    Raises:
        UnsupportedPositions: under an attention implementation whose masks are not understood here.
    """
    config: Any = module.config
    _check_implementation(config._attn_implementation)
    shared = SharedByLayers() if shared is None else shared
    heads, q_length, kv_length = query.shape[1], query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = (torch.arange(q_length, device=query.device) + start)[None]
    mask, groups = read_mask(attention_mask, position_ids, q_length, kv_length, start, config)

    def bias(distance: torch.Tensor) -> torch.Tensor:
        return ALiBi().bias(distance, heads)

    def table(low: int, high: int) -> torch.Tensor:
        return shared.once(("bias", low, high), lambda: bias(torch.arange(low, high, device=query.device)))

    def spans(_: AttentionInputs) -> tuple[Span, ...] | None:
        batch_size = query.shape[0]
        return shared.once("spans", lambda: find_spans(position_ids, mask, groups, int(start), batch_size))

    of_keys, scattered = key_positions(position_ids, kv_length, start), False
    if positions is not None and (length := positions.shape[-1] - q_length):
        seen, past = keys_seen(mask, groups), positions[..., :length]
        scattered = not shared.once(
            ("in order", id(positions)), lambda: (positions, bool(follow_on(past, position_ids, seen)))
        )[1]
        of_keys = joined(past, of_keys[:, length:]) if scattered else of_keys
    if isinstance(key, CachedKeys):  # of a static cache
        key = key.plain()
    inputs = AttentionInputs(
        branches=(),
        value=value,
        query_positions=position_ids,
        key_positions=of_keys,
        scattered=scattered,
        mask=mask,
        groups=groups,
        causal=q_length > 1,  # one query beside no mask is a decoding step: it sees every key there is
        query_start=start,
        scaling=scaling,
        # as a multiple of the distance it is a tenth faster, and off by the rounding of slope * 512: too much for
        # float32, nothing to half precision
        bias=DistanceBias(bias, ALiBi.linear and torch.finfo(query.dtype).bits < 32, table),
    )
    output, weights = engine.score(
        inputs,
        query,
        (ALL_PAIRS,),
        lambda region: query,
        lambda region, slots: key if slots is None else key[:, :, slots],
        spans,
        literal=config._attn_implementation == "eager",
    )
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _check_implementation(name: str) -> None:
    if name not in ("eager", "sdpa") and ("flash" not in name or name.startswith("paged")):
        raise UnsupportedPositions(
            f"attn_implementation={name!r} cannot score ALiBi; allowed: eager, sdpa, and the flash implementations"
        )
