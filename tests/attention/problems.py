"""Calls of rotated states, as executors are asked about them."""

from rope_patch.attention.problem import Problem
from rope_patch.attention.spans import find_spans


def spans_of(inputs):
    """The spans of a call whose queries are all of its tokens, or follow others."""
    rows = len(inputs.value)
    return find_spans(inputs.query_positions, inputs.mask, inputs.groups, inputs.query_start, rows, inputs.causal)


def supports(executor, inputs, spans=None, decay=None, compiling=False):
    """Whether an executor's module computes a call."""
    problem = Problem(inputs, "auto", None, spans_of if spans is None else lambda _: spans, compiling)
    problem.decay = decay
    return executor.supports(problem) == ""
