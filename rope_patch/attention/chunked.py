"""The oracle in blocks of queries: memory linear in the length, for any mask, positions and region."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from rope_patch.attention import oracle
from rope_patch.attention.inputs import AttentionInputs

SCORES_PER_BLOCK = 2**22  # maximum number of scores of one head in a block of queries


def attend(inputs: AttentionInputs) -> torch.Tensor:
    """Output of `oracle.attend`, `(batch, heads, q_len, value_dim)`.

    If gradients are needed, the backward pass recomputes each block, so that its scores are not kept.
    """
    rows = max(1, SCORES_PER_BLOCK // inputs.kv_length)
    if rows >= inputs.q_length:
        return oracle.attend(inputs)[0]
    blocks = (inputs.rows(start, min(start + rows, inputs.q_length)) for start in range(0, inputs.q_length, rows))
    return torch.cat([_block(block) for block in blocks], dim=2)


def _block(inputs: AttentionInputs) -> torch.Tensor:
    tensors = [inputs.value, *(tensor for branch in inputs.branches for tensor in (branch.query, branch.key))]
    if inputs.running_bias is not None:
        tensors.append(inputs.running_bias)
    if inputs.content is not None:
        tensors += inputs.content.weights.values()
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return checkpoint(lambda: oracle.attend(inputs)[0], use_reentrant=False)
    return oracle.attend(inputs)[0]
