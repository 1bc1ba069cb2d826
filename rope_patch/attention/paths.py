"""The executors of rotated states, in order: the last part of the table of `engine`."""

from __future__ import annotations

import math

from rope_patch.attention.behind_cache import SMALL
from rope_patch.attention.executors import block, chunked, merged, products, reference
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Row, choose

FEW = SMALL // 16 + 1
"""The number of pairs from which on tiles are faster than one dense block."""

MERGED = Row(merged.EXECUTOR, modes=("segmented",), pairs=(FEW, math.inf))

ROWS = (
    Row(block.EXECUTOR, pairs=(0, SMALL)),
    Row(products.EXECUTOR, products.with_tiles, pairs=(FEW, math.inf)),
    MERGED,
    Row(chunked.EXECUTOR, modes=("segmented",)),
    Row(reference.EXECUTOR, modes=("oracle",)),
)


def score(problem: Problem) -> Output:
    """Output `(batch, heads, q_len, value_dim)` of rotated states, and the weights under `oracle` and `reference`."""
    return choose(ROWS, problem).attend(problem)
