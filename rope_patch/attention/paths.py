"""The executors of rotated states, in order: the last part of the table of `engine`."""

from __future__ import annotations

import math

import torch

from rope_patch.attention import chunked, decode, dense, oracle, products, segmented
from rope_patch.attention.inputs import AttentionInputs, AttentionMode
from rope_patch.attention.problem import Output, Problem, Spans
from rope_patch.attention.table import Executor, Row, choose

FEW = decode.SMALL // 16 + 1
"""From so many pairs on tiles are faster than one dense block."""


def _tiles(problem: Problem) -> int:
    return segmented.count(problem.by_spans().inputs, problem.spans() or ())


def _by_blocks(problem: Problem) -> Output:
    return chunked.attend(problem.rotated().inputs.turned()), None


BLOCK = Executor(
    "block",
    "PyTorch's attention with a mask of all pairs",
    dense.supports,
    lambda problem: (dense.attend(problem.rotated().inputs), None),
)
PRODUCTS = Executor(
    "products",
    "the processor's products of bfloat16 matrices, a block of queries against all keys that it sees",
    products.supports,
    lambda problem: (products.attend(problem.by_spans().inputs, problem.spans() or ()), None),
    _tiles,
)
MERGED = Executor(
    "merged",
    "a kernel with log-sum-exp for each piece of a region, merged",
    segmented.supports,
    lambda problem: (segmented.attend(problem.by_spans().inputs, problem.spans() or ()), None),
    _tiles,
)
CHUNKED = Executor("chunked", "the definition in blocks of queries", lambda problem: "", _by_blocks)
REFERENCE = Executor(
    "reference",
    "the definition, with all scores in memory",
    lambda problem: "",
    lambda problem: oracle.attend(problem.rotated().inputs),
)

REGIONS = Row(MERGED, modes=("segmented",), pairs=(FEW, math.inf))

ROWS = (
    Row(BLOCK, pairs=(0, decode.SMALL)),
    Row(PRODUCTS, pairs=(FEW, math.inf)),
    REGIONS,
    Row(CHUNKED, modes=("segmented",)),
    Row(REFERENCE, modes=("oracle",)),
)


def attend(inputs: AttentionInputs, mode: AttentionMode, spans: Spans) -> torch.Tensor:
    """Output `(batch, heads, q_len, value_dim)` of rotated states; `spans` finds the spans of a call, or None, and is
    called only where they help.
    """
    problem = Problem(inputs, mode, find_spans=spans)
    return choose(ROWS, problem).attend(problem)[0]
