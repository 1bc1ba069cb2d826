"""A few queries scored in runs of slots, by a plan without states: layers with the same positions and mask share it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rope_patch.attention.inputs import wide
from rope_patch.attention.segmented import merge
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
        """Those of the run, rotated, `(rows * kv_heads, slots, head_dim)`, of all `keys` of the rows."""
        own = keys.narrow(2, self.slots.start, self.slots.stop - self.slots.start)
        if self.rotate is not None:
            own = self.rotate(own)
        if self.decay is not None:
            own = own * self.decay
        return own.flatten(0, 1)


@dataclass(frozen=True)
class SlotPlan:
    """How a few queries are scored.

    Attributes:
        rotate: rotates queries `(batch, heads, q_len, head_dim)` for each region.
        by_rows: rows of the batch whose regions begin at the same slots, with their runs, oldest slots first.
    """

    rotate: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    by_rows: tuple[tuple[slice, tuple[SlotRun, ...]], ...]

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """The output for the states of one layer, `(batch, heads, q_len, value_dim)`."""
        # in half precision, only the kernel keeps scores in float32
        attend = _by_one_softmax if value.dtype in (torch.float32, torch.float64) else _by_kernel
        rotated, outputs = self.rotate(queries), []
        for rows, runs in self.by_rows:
            q, k, v = rotated, keys, value
            if rows != EVERY:
                q, k, v = tuple(x[rows] for x in rotated), keys[rows], value[rows]
            # queries that share keys are rows of one product
            by_kv_head = tuple(x.reshape(len(k) * k.shape[1], -1, x.shape[-1]) for x in q)
            outputs.append(attend(runs, by_kv_head, k, v.flatten(0, 1), scaling))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.view(*queries.shape[:3], -1)


def _by_one_softmax(
    runs: tuple[SlotRun, ...],
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
    scores = [_products(queries[run.region], run.keys(keys), run.added, scaling) for run in runs]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)).softmax(dim=-1)
    out, start = None, 0
    for slots in _joined([run.slots for run in runs]):
        stop = start + slots.stop - slots.start
        part, start = torch.bmm(weights[..., start:stop], value[:, slots]), stop
        out = part if out is None else out + part
    assert out is not None  # for the type checker: the query itself is in some region
    return out


def _products(queries: torch.Tensor, keys: torch.Tensor, added: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Scaled products plus `SlotRun.added`, `(rows * kv_heads, group * q_len, slots)`, in one kernel."""
    # with beta=0, baddbmm uses only the dtype of its first argument
    added, beta = (queries.new_empty(1, 1, 1), 0) if added is None else (added, 1)
    if queries.shape[1] > FEW:
        return torch.baddbmm(added, queries, keys.mT, beta=beta, alpha=scaling)
    return torch.baddbmm(added.mT, keys, queries.mT, beta=beta, alpha=scaling).mT


def _joined(runs: list[slice]) -> Iterator[slice]:
    """Runs of slots, with adjacent runs joined."""
    start = runs[0].start
    for run, following in itertools.zip_longest(runs, runs[1:]):
        if following is None or following.start != run.stop:
            yield slice(start, run.stop)
            start = None if following is None else following.start


def _by_kernel(
    runs: tuple[SlotRun, ...],
    queries: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The same with the platform's kernel for each run, merged by log-sum-exp."""
    kernel = kernel_for(value, value, masked=any(run.added is not None for run in runs))
    out = lse = None
    for run in runs:
        q, k, v = queries[run.region], run.keys(keys), value[:, run.slots]
        added = None if run.added is None else run.added[:, None]
        tile = Tile(0, q.shape[1], 0, k.shape[1])
        part, part_lse = kernel.forward(Work(q[:, None], k[:, None], v[:, None], tile, scaling, added))
        if out is None or lse is None:
            out, lse = wide(part), part_lse
        else:
            merge(out, lse, part, part_lse)
    assert out is not None  # for the type checker: the query itself is in some region
    return out.to(value.dtype)
