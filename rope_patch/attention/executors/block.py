"""Small calls by PyTorch's attention with a mask of all pairs, as Transformers does at any size."""

from __future__ import annotations

import torch

from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Needs


def _objection(problem: Problem) -> str:
    """The reason why a call with a bias is not one rotation plus a bias by distance, or an empty string."""
    if problem.bias is None or problem.running_bias is not None:
        return "it needs a bias by distance"
    branches = problem.rotated.branches
    if len(branches) > 1 or branches[0].region is not None:
        return "it needs a single region"
    if branches[0].key.shape[1] != branches[0].query.shape[1]:
        return "heads share keys"
    return ""


supports = Needs(fits_kernels=True, biased=True, half=False, further=_objection)


def attend(problem: Problem) -> Output:
    """Compute what `reference.attend` does, `(batch, heads, q_len, value_dim)`, bit for bit as T5 does under `sdpa`."""
    (branch,) = problem.rotated.branches
    m, n = problem.query_positions[:, :, None], problem.key_positions[:, None, :]
    assert problem.bias is not None  # for the type checker: see `supports`
    mask = problem.bias.function(m - n).transpose(0, 1).to(problem.value.dtype)
    seen = problem.visible()
    if seen is not None:
        lowest = torch.finfo(mask.dtype).min
        if seen.dtype != torch.bool:
            mask, seen = mask + seen, seen > lowest / 2
        # hidden keys weigh nothing beside those that a bias of -inf hides, and all the same in a row of pads
        hidden = mask.new_full((), -torch.inf).where(seen.any(dim=-1, keepdim=True), lowest)
        mask = torch.where(seen, mask, hidden)
    states = branch.query, branch.key, problem.value
    attend, mask = torch.nn.functional.scaled_dot_product_attention, mask.contiguous()
    return attend(*states, attn_mask=mask, scale=problem.scaling), None


EXECUTOR = Executor("block", "PyTorch's attention with a mask of all pairs", supports, attend)
