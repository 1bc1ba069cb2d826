"""A few queries against a long cache, without gradients and without rotating the cache: pieces side by side, one
softmax.

Keys are rotated only where the region differs from the rotation in the cache: the near window, a few of many. How a
token is scored is a plan without states, which layers with the same positions and mask share.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from rope_patch.attention.decay import Decay
from rope_patch.attention.executors import one_call, traced
from rope_patch.attention.executors.one_call import OneCall
from rope_patch.attention.forward import Forward
from rope_patch.attention.kernels import kernel_for
from rope_patch.attention.merging import merge, summed
from rope_patch.attention.pieces import Piece, Tile, few_queries
from rope_patch.attention.problem import NOT_PRODUCTS, Output, Problem
from rope_patch.attention.rotation import EVERY, Rotate, narrowed
from rope_patch.attention.table import Executor
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.tile_kernels import Work
from rope_patch.attention.turner import Turner
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.slots import Region

QUERIES = 32  # up to this many are scored like one, at any cache length; tiles are for more
SMALL = 2**18  # or up to this many pairs per row: one dense block is then faster than many tiles
BLOCK = 2**21  # bytes of keys that are rotated and scored at once, while they are in the processor's cache
FEW = 8  # up to this many rows, a product that reads the keys row by row is up to twice as fast as one by columns


def supports(problem: Problem) -> str:
    """The reason why `attend` cannot compute a call, or an empty string: it takes a few queries behind the keys of a
    cache.
    """
    decay = problem.decay
    if problem.turner is None:
        return "its states are rotated already"
    if problem.scattered:
        return "keys of the cache have gaps between their positions"
    if not problem.fits_kernels:
        return NOT_PRODUCTS
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        return "the mask is added to the scores"
    if problem.differentiable:
        return "gradients are wanted"
    if problem.q_length > 1 and (decay is not None or problem.compiling):
        return "there are several queries" + (", and scores decay" if decay is not None else " in a compiled model")
    if problem.q_length > 1 and not _is_block(problem, problem.turner.forward):
        return "there are many queries, or they do not follow keys of a cache one by one"
    if decay is not None and (problem.compiling or problem.by_head):
        return "scores decay" + (" in a compiled model" if problem.compiling else ", and heads keep different keys")
    return ""


def _is_block(problem: Problem, forward: Forward) -> bool:
    """Whether several queries at consecutive positions follow keys of a cache."""
    if not problem.causal:
        return False
    few = problem.q_length <= QUERIES or problem.pairs <= SMALL
    if not few or problem.q_length >= problem.kv_length:
        return False
    return forward.shared(_are_consecutive)(problem.query_positions)


def _are_consecutive(positions: torch.Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())


def attend(problem: Problem) -> Output:
    """Attention of a few queries, `(batch, heads, q_len, value_dim)`, without gradients. The problem keeps its plan."""
    if problem.compiling:
        return traced.attend(problem), None
    query, key = cast(tuple[torch.Tensor, torch.Tensor], (problem.query, problem.key))
    problem.plan = _plan(problem)
    with torch.no_grad():  # results are written into memory, which has no gradient, and none is wanted
        return problem.plan.attend(query, key, problem.value), None


def pieces(problem: Problem) -> int:
    """The number of pieces that a call is scored in."""
    if problem.plan is None:
        return len(cast(Turner, problem.turner).regions)
    return cast(int, problem.plan.pieces)


EXECUTOR = Executor("joined", "pieces side by side, one softmax", supports, attend, pieces)


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


def _plan(problem: Problem) -> SlotPlan | OneCall:
    """Plan how a few queries are scored. The plan keeps no states.

    Distance is a difference of slots: the positions of keys are counted from the queries.
    """
    turner, query = cast(Turner, problem.turner), cast(torch.Tensor, problem.query)
    alike = tuple(_rows_alike(problem, turner))
    if len(alike) == 1 and one_call.suits(problem) and (at_once := _at_once(problem, turner, alike[0][1])) is not None:
        return at_once
    by_rows = tuple(_slot_rows(problem, turner, *some) for some in alike)
    value, scaling = problem.value, problem.scaling
    if not _holds_scores(value):  # products in half precision cannot hold scores, so queries are not scaled either
        return SlotPlan(turner.for_queries(query, value.shape[1])[0], by_rows, scaling)
    rotate, left = turner.for_queries(query, value.shape[1], scaling, beside=True)
    return SlotPlan(rotate, by_rows, left)


def _at_once(problem: Problem, turner: Turner, position: int) -> OneCall | None:
    """The plan for one query, at the same `position` in all rows, by one call of the kernel; None if it has none."""
    query, forward = cast(torch.Tensor, problem.query), turner.forward
    places = EVERY, 1, int(problem.query_start), position
    pieces = tuple(few_queries(turner.regions, *places, lambda number: math.inf))
    if not one_call.covers(problem, pieces):
        return None
    added = tuple(
        _added(problem, forward, turner.regions[piece.region], query.shape[1], _place(piece), position)
        for piece in pieces
    )
    return one_call.planned(problem, pieces, added, _blind_queries(problem, forward, added))


def _slot_rows(problem: Problem, turner: Turner, rows: slice, position: int) -> SlotRows:
    terms = tuple(_terms(problem, turner, rows, position))
    return SlotRows(rows, terms, _blind_queries(problem, turner.forward, tuple(term.added for term in terms)))


def _blind_queries(problem: Problem, forward: Forward, added: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """`SlotRows.blind`, from the terms added to the scores of all pieces."""
    if problem.bias is None or problem.bias.linear:
        return None
    return forward.shared(_blind)(*cast("tuple[torch.Tensor, ...]", added))


def _blind(*added: torch.Tensor) -> torch.Tensor:
    """Compute `SlotRows.blind` from the terms added to scores. It stays a tensor, because reading it would synchronise
    with the device; the softmax of a blind query may be over nothing but -inf.
    """
    largest = functools.reduce(torch.maximum, (x.amax(dim=-1, keepdim=True) for x in added))
    return largest <= torch.finfo(largest.dtype).min / 2


def _rows_alike(problem: Problem, turner: Turner) -> Iterator[tuple[slice, int]]:
    """Group neighbouring rows whose regions begin at the same slots; yield each group with the position of its first
    query.
    """
    if all(region.translation_invariant for region in turner.regions):
        yield EVERY, int(problem.query_start)  # any position will do
        return
    forward, positions = turner.forward, [int(problem.query_start)]
    if not forward.counted:
        positions = forward.shared(_first_positions)(problem.query_positions)
    start = 0
    for position, run in itertools.groupby(positions):
        stop = start + len(list(run))
        yield EVERY if len(positions) == 1 else slice(start, stop), position
        start = stop


def _first_positions(positions: torch.Tensor) -> list[int]:
    return cast(list[int], positions[:, 0].tolist())


def _terms(problem: Problem, turner: Turner, rows: slice, position: int) -> Iterator[Term]:
    """The pieces of some rows with their terms, oldest slots first as far as regions allow."""
    query, key, decay = cast(torch.Tensor, problem.query), cast(torch.Tensor, problem.key), problem.decay
    slot, regions = int(problem.query_start), turner.regions
    beside = _holds_scores(problem.value) and turner.by_matrix(query)

    def most(number: int) -> float:
        """The largest number of keys in a piece: keys that must be rotated are prepared a block at a time."""
        rotates = decay is not None or turner.rotates(regions[number].key_map)
        slot = len(range(len(key))[rows]) * key.shape[1] * key.shape[-1] * key.element_size()  # bytes
        return max(1, BLOCK // slot) if key.is_cpu and rotates else math.inf

    by_region = itertools.groupby(
        few_queries(regions, rows, problem.q_length, slot, position, most), key=lambda piece: piece.region
    )
    for number, group in by_region:
        region, of_region = regions[number], list(group)
        slots = slice(of_region[0].keys.start, of_region[-1].keys.stop)
        turn = turner.for_keys(region, key, slots, rows, beside)
        for piece in of_region:
            place = _place(piece)
            decayed = None
            if decay is not None:
                positions = problem.query_positions, problem.key_positions
                decayed = turner.forward.shared(_decayed)(*positions, region, decay, *place, key.dtype, key.shape[-1])
            prepare: Rotate | None = None if turn is None else turn(piece.keys)
            if prepare is not None or decayed is not None:
                prepare = functools.partial(_prepared, decay=decayed, rotate=prepare)
            added = _added(problem, turner.forward, region, query.shape[1], place, position)
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


Place = tuple[int, int, Any, Any]
"""Start and stop of a run of slots, then start and stop of rows of the batch."""


def _place(piece: Piece) -> Place:
    return piece.keys.start, piece.keys.stop, piece.rows.start, piece.rows.stop


def _added(
    problem: Problem, forward: Forward, region: Region, heads: int, place: Place, position: int
) -> torch.Tensor | None:
    """The term added to scaled products of `heads` query heads, in the shape of `Term.added`: biases, and the lowest
    number for keys that a query does not see in this region.
    """
    if problem.q_length == 1 and not one_call.adds(problem):
        return None
    running, value = problem.running_bias_of_pairs, problem.value
    dtype = torch.promote_types(value.dtype, torch.float32)
    compute = (
        _sum_of_terms if running is not None else forward.shared(_sum_of_terms)
    )  # a layer has its own running sums
    states = heads, value.shape[1], len(value), dtype, value.device
    return compute(problem.visibility, problem.bias, running, region, place, position, *states)


def _sum_of_terms(
    visibility: Visibility,
    bias: DistanceBias | None,
    running: torch.Tensor | None,
    region: Region,
    place: Place,
    position: int,
    heads: int,
    kv_heads: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    slot, length = int(visibility.query_start), visibility.q_length
    first, stop, *bounds = place
    rows, slots = slice(*bounds), slice(first, stop)
    i = torch.arange(length, device=device)[:, None]
    distance = (slot + i) - torch.arange(first, stop, device=device)
    seen = visibility.pairs(device)
    if seen is not None:
        seen = (seen if len(seen) == 1 else seen[rows])[..., slots]
    if length > 1:
        inside = region.contains(position + i, position + i - distance)
        seen = inside if seen is None else seen & inside
    added = torch.zeros((), dtype=dtype, device=device)
    if bias is not None:
        added = bias.values(0, slot + length)[:, distance.clamp(min=0)][None].to(dtype)
    if running is not None:
        added = added + (running if len(running) == 1 else running[rows])[..., slots].to(dtype)
    if seen is not None:
        added = torch.where(seen, added, torch.finfo(dtype).min)
    return _by_kv_head(added, len(range(batch)[rows]), kv_heads, heads)


def _by_kv_head(added: torch.Tensor, batch: int, kv_heads: int, heads: int) -> torch.Tensor:
    """Reshape `(batch or 1, heads or 1, q_len, slots)` to the shape of `Term.added`."""
    if added.ndim == 2:
        added = added[None, None]
    if added.shape[:3] == (1, 1, 1):
        return added[0]
    group = heads // kv_heads
    if added.shape[1] == 1:  # one term for all heads
        added = added[:, :, None].expand(-1, kv_heads if len(added) > 1 else 1, group, -1, -1)
    else:
        added = added.unflatten(1, (kv_heads, group)).expand(batch if kv_heads > 1 else len(added), -1, -1, -1, -1)
    return added.flatten(2, 3).flatten(0, 1)
