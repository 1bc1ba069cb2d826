"""Linear attention with rotations: time and memory grow with the length, not with its square."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.attention.terms import upcast
from rope_patch.errors import UnsupportedPositions
from rope_patch.schemes.tools.rotary import RotaryLayout, half_split

ROWS = 128  # tokens of a block, which are scored pair by pair; all tokens before it are one sum


def rotary_linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: RotaryLayout,
    cos: torch.Tensor,
    sin: torch.Tensor,
    causal: bool = True,
) -> torch.Tensor:
    """o_m = sum_n <R_m phi(q_m), R_n phi(k_n)> v_n / sum_n <phi(q_m), phi(k_n)>, with phi(x) = elu(x) + 1.

    Without a softmax, keys and values are summed before they meet a query. The rotation follows phi and keeps lengths.
    Rotated products may be negative, so the denominator has no rotation, and the weights of a row sum to one only where
    all angles are zero.

    Args:
        query, key, value: as projected, before any rotation. Consecutive query heads share a key head.
        layout: which dimensions turn together; others are not rotated.
        cos, sin: `rotation_tables` at the positions of the tokens.
        causal: whether keys after the query are hidden.

    Shape:
        query `(batch, heads, length, head_dim)`, key `(batch, kv_heads, length, head_dim)`, value
        `(batch, kv_heads, length, value_dim)`, cos and sin `(batch or 1, 1, length, d/2)`.

    Returns:
        `(batch, heads, length, value_dim)` in the dtype of `value`; computed in float32 or wider.

    Raises:
        UnsupportedPositions: the number of queries differs from that of keys, as with a cache.

    Source:
        RoFormer, 2104.09864, equation 19; phi from "Transformers are RNNs", 2006.16236.
    """
    if query.shape[2] != key.shape[2]:
        raise UnsupportedPositions(
            f"{query.shape[2]} queries and {key.shape[2]} keys: linear attention takes a whole text, without a cache"
        )
    with torch.autocast(query.device.type, enabled=False):  # sums of a whole text need float32
        # where elu(x) + 1 would round to zero, exp(x) does not
        q, k = (x.clamp(max=0).exp() + x.relu() for x in (upcast(query), upcast(key)))
        rotated = [layout.rotate(x, cos.to(x.dtype), sin.to(x.dtype)) for x in (q, k)]
        # `(batch, kv_heads, heads that share one, length, dim)`
        q, k, rotated_q, rotated_k, v = (x.unflatten(1, (key.shape[1], -1)) for x in (q, k, *rotated, upcast(value)))
        seen = k.cumsum(dim=-2) if causal else k.sum(dim=-2, keepdim=True)
        sums = _causal(rotated_q, rotated_k, v) if causal else rotated_q @ (rotated_k.mT @ v)
        return (sums / (q * seen).sum(dim=-1, keepdim=True)).flatten(1, 2).to(value.dtype)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_{n <= m} <q_m, k_n> v_n: pairs within a block, and all keys before it as one sum."""
    passed, outputs = k[..., :0, :].mT @ v[..., :0, :], []
    for block_q, block_k, block_v in zip(*(x.split(ROWS, dim=-2) for x in (q, k, v)), strict=True):
        outputs.append((block_q @ block_k.mT).tril() @ block_v + block_q @ passed)
        passed = passed + block_k.mT @ block_v
    return torch.cat(outputs, dim=-2)


def rotate_after_feature_map(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A pre-hook of a Llama's attention: `attention_function` receives the tables and the states as projected."""
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (cos**0, 0 * sin), "tables": (cos, sin)}


def attention_function(module: Any, query: Any, key: Any, value: Any, mask: Any, *, tables: Any, **_: Any) -> Any:
    """Causal linear attention as Transformers calls it; the output is `(batch, length, heads, head_dim)`."""
    pairs = query.shape[-1] // 2
    cos, sin = (table[:, None, :, :pairs] for table in tables)  # Llama repeats them for the second half
    output = rotary_linear_attention(query, key, value, half_split(2 * pairs), cos, sin)
    return output.transpose(1, 2).contiguous(), None
