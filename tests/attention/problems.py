"""Calls as executors are asked about them."""

from rope_patch.attention.forward import Forward
from rope_patch.attention.problem import Problem
from rope_patch.attention.spans import find_spans
from rope_patch.attention.turner import Turner
from rope_patch.schemes.slots import ALL_PAIRS


def spans_of(inputs):
    """The spans of a call whose queries are all of its tokens, or follow others."""
    rows = len(inputs.value)
    return find_spans(inputs.query_positions, inputs.mask, inputs.groups, inputs.query_start, rows, inputs.causal)


def supports(executor, inputs, spans=None, decay=None, compiling=False):
    """Whether an executor's module computes a call."""
    find_spans = spans_of if spans is None else lambda _: spans
    problem = Problem(inputs, decay=decay, find_spans=find_spans, compiling=compiling)
    return executor.supports(problem) == ""


def whole(inputs, query, key, mode="auto", regions=(ALL_PAIRS,), **others):
    """A call without rotations."""
    turner = Turner(Forward(), inputs.query_positions, inputs.key_positions, regions)
    return Problem(inputs, mode, query, key, turner, **others)
