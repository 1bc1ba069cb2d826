"""Rotary positions inside linear attention: memory and time grow with the length, not with its square."""

from __future__ import annotations

import torch

from rope_patch.attention.inputs import wide
from rope_patch.schemes.tools.rotary import RotaryLayout

ROWS = 128
"""Tokens that are scored pair by pair; whatever lies before them is a sum by then."""


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

    A product of three matrices may be multiplied from the right, so no weight of a pair is ever needed. Rotation comes
    after phi and keeps lengths; rotated products may be negative, so the denominator leaves the rotation out, and the
    weights of a row sum to one only where all angles are zero.

    Args:
        query, key, value: as projected; keys and values repeated where heads share them.
        layout: which dimensions turn together.
        cos, sin: tables of `rotation_tables` at the positions of the tokens, in the dtype of the queries or wider.
        causal: hide keys after the query; then queries and keys are the same tokens.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key `(batch, heads, kv_len, head_dim)`, value `(batch, heads, kv_len,
        value_dim)`, cos and sin `(batch or 1, 1, q_len, d/2)`; without `causal` too, q_len is kv_len.

    Returns:
        `(batch, heads, q_len, value_dim)` in the dtype of `value`; computed in float32 at least.

    Source:
        RoFormer, 2104.09864, equation 19; phi from "Transformers are RNNs", 2006.16236.
    """
    q, k, v = (wide(x) for x in (query, key, value))
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    turned_q, turned_k = (layout.rotate(x, cos.to(x.dtype), sin.to(x.dtype)) for x in (q, k))
    attend = _causal if causal else _full
    return attend(q, k, turned_q, turned_k, v).to(value.dtype)


def _full(
    q: torch.Tensor, k: torch.Tensor, turned_q: torch.Tensor, turned_k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    total = q @ k.sum(dim=2)[..., None]
    return turned_q @ (turned_k.transpose(-1, -2) @ v) / total


def _causal(
    q: torch.Tensor, k: torch.Tensor, turned_q: torch.Tensor, turned_k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Block by block: pairs within a block, and all keys before it as one sum."""
    state = torch.zeros_like(turned_k[:, :, :1].transpose(-1, -2) @ v[:, :, :1])
    norm = torch.zeros_like(k[:, :, 0])
    outputs = []
    for block in zip(*(x.split(ROWS, dim=2) for x in (q, k, turned_q, turned_k, v)), strict=True):
        q_rows, k_rows, turned_q_rows, turned_k_rows, v_rows = block
        inside = (turned_q_rows @ turned_k_rows.transpose(-1, -2)).tril() @ v_rows
        total = (q_rows * (norm[:, :, None] + k_rows.cumsum(dim=2))).sum(dim=-1, keepdim=True)
        outputs.append((inside + turned_q_rows @ state) / total)
        state = state + turned_k_rows.transpose(-1, -2) @ v_rows
        norm = norm + k_rows.sum(dim=2)
    return torch.cat(outputs, dim=2)
