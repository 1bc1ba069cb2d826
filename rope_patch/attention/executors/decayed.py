"""Blocks of queries, between which scores decay: within one, queries grow and keys decay, see `Decay`."""

from __future__ import annotations

import torch

from rope_patch.attention import paths
from rope_patch.attention.decay import Decay
from rope_patch.attention.problem import Branch, Output, Problem
from rope_patch.attention.table import Executor
from rope_patch.errors import UnsupportedPositions

ROWS = 1024  # queries per block: small enough for float16, large enough that keys are scaled only a few times


def supports(problem: Problem) -> str:
    """Why a call has no decay; empty if it has one."""
    return "scores do not decay" if problem.decay is None else ""


def attend(problem: Problem) -> Output:
    """Attention under a decay, `(batch, heads, q_len, value_dim)`, block by block, each by the executor that the table
    takes for rotated states; and the weights where all of them keep theirs.

    Raises:
        UnsupportedPositions: heads keep different keys.
    """
    call, decay = problem.turned(), problem.decay
    assert decay is not None  # for the type checker: see `supports`
    if problem.by_head:
        raise UnsupportedPositions(
            "heads keep different keys in past_key_values, but a scheme with a decay needs the same keys in all heads; "
            "keep the same keys for all heads of a layer"
        )
    outputs, weights = [], []
    for start in range(0, call.q_length, ROWS):
        block = call.rows(start, min(start + ROWS, call.q_length))
        branches = tuple(_decayed(branch, block, decay) for branch in block.branches)
        output, weight = paths.score(block.replaced(branches=branches, decay=None))
        outputs.append(output)
        if weight is not None:
            hidden = call.kv_length - weight.shape[-1]
            weights.append(torch.nn.functional.pad(weight, (0, hidden)))
    return torch.cat(outputs, dim=2), torch.cat(weights, dim=2) if weights else None


def _decayed(branch: Branch, block: Problem, decay: Decay) -> Branch:
    m, n = block.query_positions.float(), block.key_positions.float()
    if branch.region is not None:
        m, n = branch.region.rotated_positions(m, n)
    last = m.amax(dim=1, keepdim=True)
    # keys after the last query are hidden and only need to stay finite
    keys = (n[:, branch.first :] - last).clamp(max=0)
    query = branch.query * decay.factor(last - m, branch.query)
    return Branch(branch.region, query, branch.key * decay.factor(keys, branch.key), branch.first)


EXECUTOR = Executor("decayed", "blocks of queries, between which scores decay", supports, attend)
