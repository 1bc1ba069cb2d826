"""The one table that chooses how a call is scored: executors in the order in which they are asked, for each device."""

from __future__ import annotations

import math
from typing import cast

import torch

from rope_patch.attention import paths
from rope_patch.attention.cudnn_kernels import CuDNNWindows
from rope_patch.attention.executors import (
    decayed,
    flex,
    fused,
    graph,
    intervals,
    joined,
    masked,
    merged,
    one_call,
    one_rotation,
    traced,
)
from rope_patch.attention.kernels import kernel_for
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Row, choose
from rope_patch.attention.tile_kernels import FlashCUDA, Kernel
from rope_patch.attention.turner import Turner


def score(problem: Problem) -> Output:
    """Compute the attention of a whole call, decoding steps included, and note the executor in `problem.taken`.

    Returns:
        output `(batch, heads, q_len, value_dim)`, and under the modes `oracle` and `reference` the weights
        `(batch, heads, q_len, kv_len)`.

    Raises:
        UnsupportedModel: the executor that the problem's mode names cannot compute the call; the message says why.
    """
    executor = choose(rows_for(problem), problem)
    problem.taken = executor.name
    return executor.attend(problem)


def rows_for(problem: Problem) -> tuple[Row, ...]:
    """The table for the device of a problem."""
    return TABLE.get(problem.value.device.type, ROWS)


def _with_flash(problem: Problem) -> str:
    """The reason why the fused kernel is not preferred on a GPU, or an empty string. Flash per region is faster, except
    for regions of many chunks without gradients that cuDNN does not take as runs, and for one token without a plan
    (docs/benchmarks.md, on an H100).
    """
    in_chunks = any(region.chunk > 1 for region in cast(Turner, problem.turner).regions)
    without_gradients = in_chunks and not torch.is_grad_enabled()
    if problem.compiling or problem.q_length == 1 or not _is_flash(problem):
        return ""
    if without_gradients and not _runs_are_faster(problem):
        return ""
    return "flash for each region is faster on this GPU"


def _without_flash(problem: Problem) -> str:
    """The reason why a plan of slots is not preferred for a few tokens on a GPU, or an empty string. Without flash,
    products hold all scores in memory. One token has few, and the fused kernel would compile anew whenever the number
    of slots is a multiple of 16.
    """
    suits = problem.q_length == 1 or _is_flash(problem)
    return "" if suits else "flash does not compute these states, and products of several tokens hold all scores"


def _without_terms(problem: Problem) -> str:
    """The reason why FlexAttention is not preferred on a GPU, or an empty string: it pays for many queries whose scores
    have a bias, a softcap or sinks.
    """
    if not problem.biased and problem.softcap is None and problem.sinks is None:
        return "scores have no bias, softcap or sinks, so others compute them"
    return "" if problem.q_length > 1 else "there is one query, for which others start faster"


def _is_flash(problem: Problem) -> bool:
    return problem.fits_kernels and isinstance(_kernel(problem), FlashCUDA)


def _runs_are_faster(problem: Problem) -> bool:
    """Whether cuDNN takes the chunks of a call as the batches of a few calls, in spans, and that is faster. On an H200
    an attention module under DCA took 1.48 times plain attention at 8,192 tokens with 32 heads of 128, and 1.47 by the
    fused kernel; a whole model with heads of 64 took 1.51 and 1.42. At 32,768 tokens attention alone takes 1.16.
    """
    kernel, query = _kernel(problem), cast(torch.Tensor, problem.query)
    if not isinstance(kernel, CuDNNWindows):
        return False
    operations = 2 * math.prod(query.shape) * problem.kv_length
    return operations >= 16 * kernel.least and kernel.batches(query) and not merged.supports(problem)


def _kernel(problem: Problem) -> Kernel:
    return kernel_for(cast(torch.Tensor, problem.query), problem.value, masked=problem.biased)


_WITHIN = tuple(dict.fromkeys(["segmented", "fused", "intervals", *(row.executor.name for row in paths.ROWS)]))
"""Words for `attention` under which `graph` and `decayed` are asked first, and ask the table again inside: the names of
all executors that take rotated states. Such an executor never sees the decay of several blocks.
"""

_AROUND = (
    Row(graph.EXECUTOR, modes=(*(word for word in _WITHIN if word != "reference"), "decayed")),
    Row(decayed.EXECUTOR, modes=("oracle", *_WITHIN)),
)
"""Executors that cut a call, or hide it from a compiler, and ask the table again inside."""
_ONE_QUERY = (
    Row(one_call.EXECUTOR, modes=("segmented", "joined")),
    Row(traced.EXECUTOR, modes=("segmented", "joined")),
)
ROWS: tuple[Row, ...] = (
    Row(fused.EXECUTOR, by_name=True),
    Row(flex.EXECUTOR, by_name=True),
    Row(one_rotation.EXECUTOR, by_name=True),  # on a CPU, `traced` gathers a narrow region, and its kernel reads less
    *_ONE_QUERY,
    Row(masked.EXECUTOR, modes=("segmented",)),
    Row(joined.EXECUTOR, modes=("segmented",)),
    *_AROUND,
    Row(intervals.EXECUTOR, by_name=True),
    *paths.ROWS,
)
"""The default order of executors."""

TABLE: dict[str, tuple[Row, ...]] = {
    "cuda": (
        # for a token of a compiled model it starts fewer kernels than `traced` (`python -m benchmarks.ahead`)
        Row(one_rotation.EXECUTOR),
        *_ONE_QUERY,
        Row(joined.EXECUTOR, _without_flash),
        Row(fused.EXECUTOR, _with_flash),
        # takes what the fused kernel refuses, until a GPU measurement says which of the two is faster under a term
        Row(flex.EXECUTOR, _without_terms),
        Row(joined.EXECUTOR, modes=("segmented",)),
        *_AROUND,
        Row(intervals.EXECUTOR, intervals.in_few_tiles, pairs=(paths.FEW, math.inf)),
        *paths.ROWS,
    ),
}
"""The order of executors for each type of device."""
