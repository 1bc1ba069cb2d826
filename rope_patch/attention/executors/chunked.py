"""The definition in blocks of queries: memory linear in the length, for any mask, positions and region."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from rope_patch.attention.executors import reference
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Needs

SCORES_PER_BLOCK = 2**22  # maximum number of scores of one head in a block of queries


supports = Needs()
"""The definition computes every call."""


def attend(problem: Problem) -> Output:
    """Compute what `reference.attend` does, `(batch, heads, q_len, value_dim)`, without the weights.

    If gradients are needed, the backward pass recomputes each block, so that its scores are not kept.
    """
    problem, rows = problem.turned(), max(1, SCORES_PER_BLOCK // problem.kv_length)
    if rows >= problem.q_length:
        return reference.attend(problem)[0], None
    blocks = (problem.rows(start, min(start + rows, problem.q_length)) for start in range(0, problem.q_length, rows))
    return torch.cat([_block(block) for block in blocks], dim=2), None


def _block(problem: Problem) -> torch.Tensor:
    tensors = [problem.value, *(tensor for branch in problem.branches for tensor in (branch.query, branch.key))]
    if problem.running_bias is not None:
        tensors.append(problem.running_bias)
    if problem.content is not None:
        tensors += problem.content.weights.values()
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return checkpoint(lambda: reference.attend(problem)[0], use_reentrant=False)
    return reference.attend(problem)[0]


EXECUTOR = Executor("chunked", "the definition in blocks of queries", supports, attend)
