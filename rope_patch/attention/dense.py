"""Small calls by PyTorch's attention with a mask of all pairs, as Transformers does at any size."""

from __future__ import annotations

import torch

from rope_patch.attention.inputs import AttentionInputs


def applies(inputs: AttentionInputs) -> bool:
    """Whether scores are those of one rotation plus a bias, in a dtype precise enough for the bias."""
    return (
        inputs.bias is not None
        and inputs.running_bias is None
        and inputs.fits_kernels
        and len(inputs.branches) == 1
        and inputs.branches[0].region is None
        and inputs.branches[0].key.shape[1] == inputs.branches[0].query.shape[1]
        and inputs.value.dtype in (torch.float32, torch.float64)
    )


def attend(inputs: AttentionInputs) -> torch.Tensor:
    """Output of `oracle.attend`, `(batch, heads, q_len, value_dim)`, bit for bit as T5 computes it under `sdpa`."""
    (branch,) = inputs.branches
    m, n = inputs.query_positions[:, :, None], inputs.key_positions[:, None, :]
    assert inputs.bias is not None  # for the type checker: see `applies`
    mask = inputs.bias.function(m - n).transpose(0, 1).to(inputs.value.dtype)
    seen = inputs.visible() if inputs.mask is None else inputs.mask
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
