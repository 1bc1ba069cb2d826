"""The one table that chooses how a call is scored: executors in the order in which they are asked, for each device."""

from __future__ import annotations

from typing import cast

import torch

from rope_patch.attention import decode, decode_traced, operator, paths
from rope_patch.attention.decay import attend_with_decay
from rope_patch.attention.fused import launch, support
from rope_patch.attention.inputs import AttentionInputs
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Row, choose
from rope_patch.attention.tile_kernels import FlashCUDA, kernel_for
from rope_patch.attention.turner import Turner


def score(problem: Problem) -> Output:
    """Attention of a whole call, decoding steps included. The problem keeps the name of the executor that was taken.

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
    return TABLE.get(problem.inputs.value.device.type, ROWS)


def _one_by_one(problem: Problem) -> Output:
    return (decode_traced if problem.compiling else decode).attend(problem), None


def _runs(problem: Problem) -> int:
    regions = cast(Turner, problem.turner).regions
    return len(regions) if problem.plan is None else sum(len(some.runs) for some in problem.plan.by_rows)


def _as_operator(problem: Problem) -> Output:
    mode = "auto" if problem.mode == "graph" else problem.mode  # inside it the table is asked anew
    return operator.attend(problem.rotated().inputs, problem.decay, mode), None


def _without_decay(problem: Problem) -> str:
    return "scores do not decay" if problem.decay is None else ""


def _by_blocks(problem: Problem) -> Output:
    decay, mode = problem.decay, problem.mode
    assert decay is not None  # for the type checker: see `_without_decay`

    def attend(block: AttentionInputs) -> Output:
        inner = Problem(block, mode)
        return choose(paths.ROWS, inner).attend(inner)

    return attend_with_decay(problem.rotated().inputs, decay, attend)


FUSED = Executor(
    "fused",
    "one Triton kernel for all regions",
    support.supports,
    lambda problem: (launch.attend(problem.inputs, problem.fused()), None),
    lambda problem: len(cast(Turner, problem.turner).regions),
)
JOINED = Executor("joined", "runs of slots side by side, one softmax", decode.supports, _one_by_one, _runs)
GRAPH = Executor("graph", "one operator of a compiled model, which chooses inside", operator.supports, _as_operator)
DECAYED = Executor("decayed", "blocks of queries, between which scores decay", _without_decay, _by_blocks)


def _with_flash(problem: Problem) -> str:
    """Why one kernel for all regions is not the fastest on a GPU: flash per region is, but for regions of many chunks
    without gradients, and for one token without a plan (docs/benchmarks.md, on an H100).
    """
    in_chunks = any(region.chunk > 1 for region in cast(Turner, problem.turner).regions)
    without_gradients = in_chunks and not torch.is_grad_enabled()
    if problem.compiling or problem.inputs.q_length == 1 or without_gradients or not _is_flash(problem):
        return ""
    return "flash for each region is faster on this GPU"


def _without_flash(problem: Problem) -> str:
    """Why a plan of slots is not the fastest for a few tokens on a GPU: without flash, one kernel is."""
    flash = problem.compiling or _is_flash(problem)
    return "" if flash else "flash does not compute these states, so that one kernel for all regions starts faster"


def _is_flash(problem: Problem) -> bool:
    query, value = cast(torch.Tensor, problem.query), problem.inputs.value
    return problem.inputs.fits_kernels and isinstance(kernel_for(query, value, masked=problem.biased), FlashCUDA)


_EVERYWHERE = (
    Row(GRAPH, modes=("chunked", "segmented", "fused", "merged", "products", "block")),
    Row(DECAYED, modes=("oracle", "reference", "chunked", "segmented", "fused", "merged", "products", "block")),
    *paths.ROWS,
)
ROWS = (Row(FUSED, by_name=True), Row(JOINED, modes=("segmented",)), *_EVERYWHERE)
"""The order where nothing else is said."""

TABLE: dict[str, tuple[Row, ...]] = {
    "cuda": (
        Row(JOINED, _without_flash),
        Row(FUSED, _with_flash),
        Row(JOINED, modes=("segmented",)),
        *_EVERYWHERE,
    ),
}
"""The order on a type of device."""
