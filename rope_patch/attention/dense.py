"""Small calls by PyTorch's attention with a mask of all pairs, as Transformers does at any size."""

from __future__ import annotations

import torch

from rope_patch.attention.inputs import AttentionInputs
from rope_patch.attention.problem import NOT_PRODUCTS, Problem


def supports(problem: Problem) -> str:
    """Why `attend` cannot compute a call; empty for one rotation plus a bias, in a dtype that holds the bias."""
    inputs = problem.inputs
    if inputs.bias is None or inputs.running_bias is not None:
        return "it is for a bias by distance"
    if not inputs.fits_kernels:
        return NOT_PRODUCTS
    if inputs.value.dtype not in (torch.float32, torch.float64):
        return f"{inputs.value.dtype} would round the bias"
    branches = problem.rotated().inputs.branches
    if len(branches) > 1 or branches[0].region is not None:
        return "it is for one region"
    if branches[0].key.shape[1] != branches[0].query.shape[1]:
        return "heads share keys"
    return ""


def attend(inputs: AttentionInputs) -> torch.Tensor:
    """Output of `oracle.attend`, `(batch, heads, q_len, value_dim)`, bit for bit as T5 computes it under `sdpa`."""
    (branch,) = inputs.branches
    m, n = inputs.query_positions[:, :, None], inputs.key_positions[:, None, :]
    assert inputs.bias is not None  # for the type checker: see `supports`
    mask = inputs.bias.function(m - n).transpose(0, 1).to(inputs.value.dtype)
    seen = inputs.visible()
    if seen is not None:
        lowest = torch.finfo(mask.dtype).min
        if seen.dtype != torch.bool:
            mask, seen = mask + seen, seen > lowest / 2
        # hidden keys weigh nothing beside those that a bias of -inf hides, and all the same in a row of pads
        hidden = mask.new_full((), -torch.inf).where(seen.any(dim=-1, keepdim=True), lowest)
        mask = torch.where(seen, mask, hidden)
    return torch.nn.functional.scaled_dot_product_attention(
        branch.query, branch.key, inputs.value, attn_mask=mask.contiguous(), scale=inputs.scaling
    )
