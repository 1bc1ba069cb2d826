"""A few queries against a long cache, without gradients and without rotating the cache: pieces side by side, one
softmax.

Keys are rotated only where the region differs from the rotation in the cache: the near window, a few of many. How a
token is scored is a plan without states, which layers with the same positions and mask share.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch

from rope_patch.attention.behind_cache import (
    NEEDS,
    added_to,
    adds,
    blind_queries,
    by_plan,
    is_block,
    place_of,
    planned_pieces,
    rows_alike,
)
from rope_patch.attention.decay import Decay
from rope_patch.attention.kernels import account, kernel_for
from rope_patch.attention.merging import merge, summed
from rope_patch.attention.pieces import Piece, Tile, few_queries, narrowed
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import EVERY, Rotate
from rope_patch.attention.table import Executor
from rope_patch.attention.tile_kernels import Work
from rope_patch.attention.turner import Turner
from rope_patch.schemes.slots import Region

BLOCK = 2**21  # bytes of keys that are rotated and scored at once, while they are in the processor's cache
FEW = 8  # up to this many rows, a product that reads the keys row by row is up to twice as fast as one by columns


def _objection(problem: Problem) -> str:
    """The reason why queries behind the keys of a cache are not scored by one plan, or an empty string."""
    if problem.q_length > 1 and problem.decay is not None:
        return "there are several queries, and scores decay"
    if problem.q_length > 1 and not is_block(problem, cast(Turner, problem.turner).forward):
        return "there are many queries, or their positions do not follow one by one"
    return "scores decay, and heads keep different keys" if problem.decay is not None and problem.by_head else ""


supports = dataclasses.replace(NEEDS, compiling=False, further=_objection)
"""A few queries behind the keys of a cache."""


def attend(problem: Problem) -> Output:
    """Attention of a few queries, `(batch, heads, q_len, value_dim)`, without gradients. The problem keeps its plan."""
    return by_plan(problem, _plan(problem)), None


def _kernel(problem: Problem) -> str:
    """The name of the kernel that scores a piece, and why faster ones do not; empty for products."""
    value = problem.value
    return "" if _holds_scores(value) else account(value, value, problem.q_length > 1 or adds(problem))


EXECUTOR = Executor("joined", "pieces side by side, one softmax", supports, attend, planned_pieces, _kernel)


# --- the plan ---


@dataclass(frozen=True)
class Term:
    """One piece of a plan: how its keys are prepared, and the term that is added to its scores.

    Attributes:
        piece: all queries of the call against a run of slots.
        prepare: rotates these keys for the region and lets them decay: `(rows, kv_heads, slots, head_dim)` to `(rows *
            kv_heads, slots, head_dim)`, the last axis twice as wide if rotations are side by side; None if nothing is
            left to do.
        added: to the scores, broadcasts to them, `(rows * kv_heads or 1, group * q_len or 1, slots)`.
    """

    piece: Piece
    prepare: Rotate | None
    added: torch.Tensor | None

    def keys(self, keys: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Keys of the piece, rotated, decayed and flattened to `(rows * kv_heads, slots, head_dim)`. They are taken
        from all `keys` of the rows, `(rows, kv_heads, kv_len, head_dim)`; `flat` has the same keys with rows and heads
        in one axis.
        """
        if self.prepare is None:
            return narrowed(flat, self.piece.keys)
        return self.prepare(narrowed(keys, self.piece.keys))


@dataclass(frozen=True)
class SlotRows:
    """Rows of the batch whose regions begin at the same slots, with their terms, oldest slots first. `blind` marks the
    queries that see no key because a bias hides all, `(rows * kv_heads or 1, group * q_len or 1, 1)`; None if there can
    be none.
    """

    rows: slice
    terms: tuple[Term, ...]
    blind: torch.Tensor | None = None

    @functools.cached_property
    def joined(self) -> tuple[slice, ...]:
        """The slots of all pieces, with adjacent runs joined."""
        return tuple(_joined([term.piece.keys for term in self.terms]))


@dataclass(frozen=True)
class SlotPlan:
    """A plan for the scores of a few queries, which one layer after the other carries out.

    Attributes:
        rotate: rotates queries `(batch, heads, q_len, head_dim)` for each region; queries that share keys become the
            columns of one product, `(batch * kv_heads, head_dim, group * q_len)`.
        by_rows: all rows of the batch, in order.
        scaling: multiplies the scores, unless `rotate` scales the queries.
    """

    rotate: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    by_rows: tuple[SlotRows, ...]
    scaling: float
    _rooms: dict[int, Room] = field(default_factory=dict, init=False, repr=False)

    @property
    def pieces(self) -> int:
        """The number of pieces of all rows."""
        return sum(len(some.terms) for some in self.by_rows)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The output for the states of one layer, `(batch, heads, q_len, value_dim)`."""
        rotated, kv_heads, outputs = self.rotate(queries), value.shape[1], []
        for number, some in enumerate(self.by_rows):
            q, k, v = rotated, keys, value
            if some.rows != EVERY:
                place = slice(some.rows.start * kv_heads, some.rows.stop * kv_heads)
                q, k, v = tuple(x[place] for x in rotated), keys[some.rows], value[some.rows]
            if _holds_scores(value):
                if number not in self._rooms:
                    self._rooms[number] = Room.for_scores(some, q[0])
                found = _by_one_softmax(some, self._rooms[number], q, k, v.flatten(0, 1), self.scaling)
            else:
                found = _by_kernel(some, q, k, v.flatten(0, 1), self.scaling)
            outputs.append(found if some.blind is None else found.masked_fill(some.blind, 0))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.view(*queries.shape[:3], -1)


def _holds_scores(value: torch.Tensor) -> bool:
    """Whether products in the dtype of the values can hold scores; in half precision only a kernel keeps them in
    float32.
    """
    return value.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Room:
    """Memory for the scores of all pieces side by side, which every layer fills anew.

    Attributes:
        scores: `(rows * kv_heads, group * q_len, slots)`.
        parts: those of each piece, as its product writes them, with the last two axes exchanged if `by_row`.
        by_row: whether products read the keys row by row.
    """

    scores: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    by_row: bool

    @classmethod
    def for_scores(cls, some: SlotRows, queries: torch.Tensor) -> Room:
        """Room for the scores of some rows and their queries, `(rows * kv_heads, head_dim, group * q_len)`."""
        widths, (batch, _, columns) = [term.piece.width for term in some.terms], queries.shape
        by_row = columns <= FEW
        room = queries.new_empty((batch, sum(widths), columns) if by_row else (batch, columns, sum(widths)))
        return cls(room.mT if by_row else room, room.split(widths, dim=1 if by_row else 2), by_row)


def _by_one_softmax(
    some: SlotRows,
    room: Room,
    queries: tuple[torch.Tensor, ...],
    keys: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention with the scores of all pieces side by side and one softmax over them.

    Shape:
        queries, for each region, `(rows * kv_heads, head_dim, group * q_len)`; keys `(rows, kv_heads, kv_len,
        head_dim)`, value `(rows * kv_heads, kv_len, value_dim)`; returns `(rows * kv_heads, group * q_len, value_dim)`.
    """
    flat = keys.flatten(0, 1)
    for term, part in zip(some.terms, room.parts, strict=True):
        _score(queries[term.piece.region], term.keys(keys, flat), term.added, scaling, part, room.by_row)
    weights = room.scores.softmax(dim=-1)
    first, *others = some.joined
    if not others:
        return torch.bmm(weights, narrowed(value, first))
    width = first.stop - first.start
    out = torch.bmm(weights[..., :width], narrowed(value, first))
    for slots in others:
        start, width = width, width + slots.stop - slots.start
        out += torch.bmm(weights[..., start:width], narrowed(value, slots))
    return out


def _score(
    queries: torch.Tensor,
    keys: torch.Tensor,
    added: torch.Tensor | None,
    scaling: float,
    out: torch.Tensor,
    by_row: bool,
) -> None:
    """Write scaled products plus `Term.added` into `out`, a slice of a `Room`, by one kernel."""
    left, right = (keys, queries) if by_row else (queries.mT, keys.mT)
    if added is None and scaling == 1:
        torch.bmm(left, right, out=out)
    elif added is None:  # with beta=0, baddbmm uses only the dtype of its first argument
        torch.baddbmm(out, left, right, beta=0, alpha=scaling, out=out)
    else:
        torch.baddbmm(added.mT if by_row else added, left, right, alpha=scaling, out=out)


def _joined(runs: list[slice]) -> Iterator[slice]:
    """Join adjacent runs of slots."""
    start = runs[0].start
    for run, following in itertools.zip_longest(runs, runs[1:]):
        if following is None or following.start != run.stop:
            yield slice(start, run.stop)
            start = None if following is None else following.start


def _by_kernel(
    some: SlotRows, queries: tuple[torch.Tensor, ...], keys: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Like `_by_one_softmax`, but one call of the platform's kernel per piece, merged by LSE."""
    kernel = kernel_for(value, value, masked=any(term.added is not None for term in some.terms))
    out, lse, flat = None, None, keys.flatten(0, 1)
    for term in some.terms:
        q, k, v = queries[term.piece.region].mT, term.keys(keys, flat), narrowed(value, term.piece.keys)
        added = None if term.added is None else term.added[:, None]
        tile = Tile(0, q.shape[1], 0, k.shape[1])
        own, own_lse = kernel.forward(Work(q[:, None], k[:, None], v[:, None], tile, scaling, added))
        if out is None or lse is None:
            out, lse = summed(own), own_lse
        else:
            merge(out, lse, own, own_lse)
    assert out is not None  # for the type checker: the query itself is in some region
    return out[:, 0].to(value.dtype)


# --- how it is made ---


def _plan(problem: Problem) -> SlotPlan:
    """Plan how a few queries are scored. The plan keeps no states.

    Distance is a difference of slots: the positions of keys are counted from the queries.
    """
    turner, query = cast(Turner, problem.turner), cast(torch.Tensor, problem.query)
    by_rows = tuple(_slot_rows(problem, turner, *some) for some in rows_alike(problem, turner))
    value, scaling = problem.value, problem.scaling
    if not _holds_scores(value):  # products in half precision cannot hold scores, so queries are not scaled either
        return SlotPlan(turner.for_queries(query, value.shape[1])[0], by_rows, scaling)
    rotate, left = turner.for_queries(query, value.shape[1], scaling, beside=True)
    return SlotPlan(rotate, by_rows, left)


def _slot_rows(problem: Problem, turner: Turner, rows: slice, position: int) -> SlotRows:
    terms = tuple(_terms(problem, turner, rows, position))
    return SlotRows(rows, terms, blind_queries(problem, turner.forward, tuple(term.added for term in terms)))


def _terms(problem: Problem, turner: Turner, rows: slice, position: int) -> Iterator[Term]:
    """The pieces of some rows with their terms, oldest slots first as far as regions allow."""
    query, key, decay = cast(torch.Tensor, problem.query), cast(torch.Tensor, problem.key), problem.decay
    slot, regions = int(problem.query_start), turner.regions
    beside = _holds_scores(problem.value) and turner.by_matrix(query)

    most: list[float] | None = None
    if key.is_cpu:  # keys that must be rotated are prepared a block at a time
        of_slot = len(range(len(key))[rows]) * key.shape[1] * key.shape[-1] * key.element_size()  # bytes
        block = max(1, BLOCK // of_slot)
        most = [block if decay is not None or turner.rotates(region.key_map) else math.inf for region in regions]
    by_region = itertools.groupby(
        few_queries(regions, rows, problem.q_length, slot, position, most), key=lambda piece: piece.region
    )
    for number, group in by_region:
        region, of_region = regions[number], list(group)
        slots = slice(of_region[0].keys.start, of_region[-1].keys.stop)
        turn = turner.for_keys(region, key, slots, rows, beside)
        for piece in of_region:
            place = place_of(piece)
            decayed = None
            if decay is not None:
                positions = problem.query_positions, problem.key_positions
                decayed = turner.forward.shared(_decayed)(*positions, region, decay, *place, key.dtype, key.shape[-1])
            prepare: Rotate | None = None if turn is None else turn(piece.keys)
            if prepare is not None or decayed is not None:
                prepare = functools.partial(_prepared, decay=decayed, rotate=prepare)
            added = added_to(problem, turner.forward, region, query.shape[1], place, position)
            yield Term(piece, prepare, added)


def _prepared(keys: torch.Tensor, decay: torch.Tensor | None, rotate: Rotate | None) -> torch.Tensor:
    """Let keys `(rows, kv_heads, slots, head_dim)` decay, rotate them, and flatten rows and heads into one axis."""
    decayed = keys if decay is None else keys * decay
    rotated = decayed if rotate is None else rotate(decayed)
    return rotated.flatten(0, 1) if rotated.ndim == 4 else rotated


def _decayed(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    region: Region,
    decay: Decay,
    first: int,
    stop: int,
    first_row: int | None,
    last_row: int | None,
    dtype: torch.dtype,
    head_dim: int,
) -> torch.Tensor:
    """Decay factors of the keys in the slots from `first` to below `stop`, for each dimension and the only query,
    `(batch or 1, 1, slots, head_dim)`.
    """
    m, n = query_positions.float(), key_positions[:, first:stop].float()
    distance = region.rotated_distance(m, n)
    like = torch.empty((), dtype=dtype, device=m.device).expand(1, 1, 1, head_dim)
    return decay.factor(-(distance if len(distance) == 1 else distance[first_row:last_row]), like)
