"""Attention whose scores decay, in blocks of queries: within a block, queries grow and keys decay, see `Decay`."""

from __future__ import annotations

import math

import torch

from rope_patch.attention import decay, paths
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Needs, choose


def _objection(problem: Problem) -> str:
    """The reason why a call whose scores decay is not cut into blocks, or an empty string if it has several."""
    return "the queries are one block, and the decay is in its states" if problem.rotated.decay is None else ""


supports = Needs(decays=True, further=_objection)


def attend(problem: Problem) -> Output:
    """Attention under a decay, `(batch, heads, q_len, value_dim)`, block by block, each by the executor that the table
    takes for rotated states; and the weights where all of them keep theirs.

    Raises:
        UnsupportedPositions: heads keep different keys.
    """
    call, outputs, weights = _inside(problem.turned()), [], []
    for start in range(0, call.q_length, decay.ROWS):
        block = call.rows(start, min(start + decay.ROWS, call.q_length))
        output, weight = paths.score(block.decayed())
        outputs.append(output)
        if weight is not None:
            hidden = call.kv_length - weight.shape[-1]
            weights.append(torch.nn.functional.pad(weight, (0, hidden)))
    return torch.cat(outputs, dim=2), torch.cat(weights, dim=2) if weights else None


def _inside(call: Problem) -> Problem:
    """The call as its blocks are scored: its own name asks for no executor of a block."""
    return call.replaced(mode="auto") if call.mode == "decayed" else call


def _pieces(problem: Problem) -> int:
    return math.ceil(problem.q_length / decay.ROWS)


def _kernel(problem: Problem) -> str:
    """The name of the executor that scores the last block of queries, which is the largest."""
    call = _inside(problem.rotated)
    last = call.rows(max(0, call.q_length - decay.ROWS), call.q_length)
    return f"{choose(paths.ROWS, last.decayed()).name} for each block"


EXECUTOR = Executor("decayed", "blocks of queries, between which scores decay", supports, attend, _pieces, _kernel)
