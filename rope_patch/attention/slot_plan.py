"""A few queries scored in runs of slots, by a plan without states: layers with the same positions and mask share it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rope_patch.attention.merging import merge, summed
from rope_patch.attention.tile_kernels import Work, kernel_for
from rope_patch.attention.tiles import Tile

EVERY = slice(None)
Rotate = Callable[[torch.Tensor], torch.Tensor]
FEW = 8  # up to this many rows, a product that reads the keys row by row is up to twice as fast as one by columns


@dataclass(frozen=True)
class SlotRun:
    """A run of slots in one region.

    Attributes:
        region: its place among the regions of the call.
        slots: of the keys.
        rotate: rotates these keys for the region, `(rows, kv_heads, slots, head_dim)`; None if nothing is left to do.
        decay: multiplies the rotated keys, `(rows or 1, 1, slots, head_dim)`; None without a decay.
        added: to the scores, broadcasts to them, `(rows * kv_heads or 1, group * q_len or 1, slots)`.
    """

    region: int
    slots: slice
    rotate: Rotate | None
    decay: torch.Tensor | None
    added: torch.Tensor | None

    def keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys of the run, rotated and flattened to `(rows * kv_heads, slots, head_dim)`, of all `keys` of the rows."""
        own = part(keys, self.slots)
        if self.rotate is not None:
            own = self.rotate(own)
        if self.decay is not None:
            own = own * self.decay
        return own.flatten(0, 1)


@dataclass(frozen=True)
class SlotRows:
    """Rows of the batch whose regions begin at the same slots, with their runs, oldest slots first."""

    rows: slice
    runs: tuple[SlotRun, ...]

    @functools.cached_property
    def joined(self) -> tuple[slice, ...]:
        """The slots of all runs, with adjacent runs joined."""
        return tuple(_joined([run.slots for run in self.runs]))


@dataclass(frozen=True)
class SlotPlan:
    """How a few queries are scored.

    Attributes:
        rotate: rotates queries `(batch, heads, q_len, head_dim)` for each region.
        by_rows: all rows of the batch, in order.
    """

    rotate: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    by_rows: tuple[SlotRows, ...]

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """The output for the states of one layer, `(batch, heads, q_len, value_dim)`."""
        # in half precision, only the kernel keeps scores in float32
        attend = _by_one_softmax if value.dtype in (torch.float32, torch.float64) else _by_kernel
        rotated, outputs = self.rotate(queries), []
        for some in self.by_rows:
            q, k, v = rotated, keys, value
            if some.rows != EVERY:
                q, k, v = tuple(x[some.rows] for x in rotated), keys[some.rows], value[some.rows]
            # queries that share keys are rows of one product
            by_kv_head = tuple(x.reshape(len(k) * k.shape[1], -1, x.shape[-1]) for x in q)
            outputs.append(attend(some, by_kv_head, k, v.flatten(0, 1), scaling))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.view(*queries.shape[:3], -1)


def _by_one_softmax(
    some: SlotRows,
    queries: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The scores of all runs side by side.

    Shape:
        queries, for each region, `(rows * kv_heads, group * q_len, head_dim)`; keys `(rows, kv_heads, kv_len,
        head_dim)`, value `(rows * kv_heads, kv_len, value_dim)`; returns `(rows * kv_heads, group * q_len, value_dim)`.
    """
    scores = [_products(queries[run.region], run.keys(keys), run.added, scaling) for run in some.runs]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)).softmax(dim=-1)
    first, *others = some.joined
    width = first.stop - first.start
    out = torch.bmm(weights[..., :width] if others else weights, part(value, first))
    for slots in others:
        start, width = width, width + slots.stop - slots.start
        out += torch.bmm(weights[..., start:width], part(value, slots))
    return out


def _products(queries: torch.Tensor, keys: torch.Tensor, added: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Scaled products plus `SlotRun.added`, `(rows * kv_heads, group * q_len, slots)`, in one kernel."""
    # with beta=0, baddbmm uses only the dtype of its first argument
    added, beta = (queries.new_empty(1, 1, 1), 0) if added is None else (added, 1)
    if queries.shape[1] > FEW:
        return torch.baddbmm(added, queries, keys.mT, beta=beta, alpha=scaling)
    return torch.baddbmm(added.mT, keys, queries.mT, beta=beta, alpha=scaling).mT


def part(states: torch.Tensor, slots: slice) -> torch.Tensor:
    """States of some slots, `(..., slots, dim)`, of all states `(..., kv_len, dim)`."""
    width = slots.stop - slots.start
    return states if width == states.shape[-2] else states.narrow(-2, slots.start, width)


def _joined(runs: list[slice]) -> Iterator[slice]:
    """Runs of slots, with adjacent runs joined."""
    start = runs[0].start
    for run, following in itertools.zip_longest(runs, runs[1:]):
        if following is None or following.start != run.stop:
            yield slice(start, run.stop)
            start = None if following is None else following.start


def _by_kernel(
    some: SlotRows,
    queries: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Like `_by_one_softmax`, but a call of the platform's kernel for each run, merged by log-sum-exp."""
    kernel = kernel_for(value, value, masked=any(run.added is not None for run in some.runs))
    out = lse = None
    for run in some.runs:
        q, k, v = queries[run.region], run.keys(keys), part(value, run.slots)
        added = None if run.added is None else run.added[:, None]
        tile = Tile(0, q.shape[1], 0, k.shape[1])
        own, own_lse = kernel.forward(Work(q[:, None], k[:, None], v[:, None], tile, scaling, added))
        if out is None or lse is None:
            out, lse = summed(own), own_lse
        else:
            merge(out, lse, own, own_lse)
    assert out is not None  # for the type checker: the query itself is in some region
    return out.to(value.dtype)
