"""One token in half precision on a GPU, by one call of flash: the host, which is slow there, starts few kernels.

Keys of all pieces are written side by side into one memory, turned such that one rotation of the query serves all of
them, so nothing has to be merged. Terms that are added to scores become further dimensions of queries and keys. How a
token is scored is a plan without states, as in `joined`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from rope_patch.attention.behind_cache import (
    NEEDS,
    added_to,
    adds,
    blind_queries,
    by_plan,
    place_of,
    planned_pieces,
    rows_alike,
)
from rope_patch.attention.kernels import has_flash
from rope_patch.attention.one_query import Turned, factor_of, meets, turned
from rope_patch.attention.pieces import Piece, few_queries, narrowed
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import EVERY, Rotate, Tables
from rope_patch.attention.table import Executor
from rope_patch.attention.tile_kernels import flash
from rope_patch.attention.trials import Comparisons, Trial
from rope_patch.attention.turner import Turner
from rope_patch.schemes.tools.rotary import RotaryLayout, half_split

MOST = 2**25
"""Bytes of states of a layer that may be copied: reading and writing them takes a GPU about as long as the host takes
to start the kernels of a merge.
"""

Fill = Callable[[torch.Tensor], object]
"""A function that writes queries or keys to their places, given all of a layer, `(batch, heads or kv_heads, length,
head_dim)`.
"""


@dataclass(frozen=True)
class OneCall:
    """A plan for one token, which one layer after the other carries out in the same memory.

    Attributes:
        pieces: how many.
        slots: of all pieces, an unbroken run; of those but the first if that is `apart`.
        scaling: multiplies the products.
        rotate: writes the queries `(batch, heads, 1, head_dim)` into `query`; None if they stay as they are.
        query: `(batch * kv_heads, group, 1, width)`; None without `rotate`.
        fills: writes each piece into `keys`; empty if the keys of the cache serve as they are.
        keys, values: `(batch * kv_heads, slots, 1, width)`; None where those of the cache are read.
        values_in: the part of `values` that has the values of the cache, `(batch, kv_heads, slots, head_dim)`.
        blind: marks queries that see no key, as in `joined.SlotRows`.
        apart: slots that a call of their own scores, because their keys are too many to be copied.
        share: memory for the share of that call in the output, `(batch * kv_heads, 1, group)`; None without one.
    """

    pieces: int
    slots: slice
    scaling: float
    rotate: Fill | None
    query: torch.Tensor | None
    fills: tuple[Fill, ...]
    keys: torch.Tensor | None
    values: torch.Tensor | None
    values_in: torch.Tensor | None
    blind: torch.Tensor | None = None
    apart: slice | None = None
    share: torch.Tensor | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The output for the states of one layer, `(batch, heads, 1, value_dim)`."""
        q, k, v = self.query, self.keys, self.values
        if q is None or self.rotate is None:
            q = query.reshape(len(key) * key.shape[1], -1, 1, query.shape[-1])
        else:
            self.rotate(query)
        for fill in self.fills:
            fill(key)
        if k is None:
            k = _as_rows(narrowed(key, self.slots))
        if v is None or self.values_in is None:
            v = _as_rows(narrowed(value, self.slots))
        else:
            self.values_in.copy_(narrowed(value, self.slots))
        out, lse = flash(q, k, v, self.scaling)
        if self.apart is not None and self.share is not None:
            other = _as_rows(narrowed(key, self.apart)), _as_rows(narrowed(value, self.apart))
            part, part_lse = flash(q, *other, self.scaling)
            torch.sigmoid(part_lse - lse, out=self.share)
            out.lerp_(part, self.share.view(*out.shape[:2], 1, 1))
        if out.shape[-1] > value.shape[-1]:
            out = out[..., : value.shape[-1]]
        if self.blind is not None:
            out = out.masked_fill(self.blind[..., None], 0)
        return out.view(*query.shape[:3], -1)


def _as_rows(states: torch.Tensor) -> torch.Tensor:
    """Reshape states `(batch, kv_heads, slots, dim)` as flash takes them, each head as a row of the batch: `(batch *
    kv_heads, slots, 1, dim)`.
    """
    return states.flatten(0, 1).unsqueeze(2)


def _objection(problem: Problem) -> str:
    """The reason why one query behind the keys of a cache is not scored by one call, or an empty string."""
    return _terms_objection(problem) or _plan_objection(problem)


def _terms_objection(problem: Problem) -> str:
    """The reason why states and terms of one query do not suit, or an empty string. Running sums differ in each layer,
    as learned terms do, so no other layer would gain from the plan.
    """
    query, key, value = cast("tuple[torch.Tensor, ...]", (problem.query, problem.key, problem.value))
    turner = cast(Turner, problem.turner)
    if problem.running_bias is not None or (turner.learned and problem.bias is not None):
        return "the term of the scores differs from layer to layer"
    if not query.dtype == key.dtype == value.dtype or query.shape[-1] != value.shape[-1]:
        return "keys and values differ in dtype or width"
    if problem.scaling <= 0:
        return "scores are not scaled by a positive number"
    if factor_of(turner) is None:
        return "heads, pairs or rows have frequencies of their own, or rotations are exact"
    return ""


def _plan_objection(problem: Problem) -> str:
    """The reason why no plan for one query takes all of its keys, or an empty string."""
    query, turner = cast(torch.Tensor, problem.query), cast(Turner, problem.turner)
    first, *others = rows_alike(problem, turner)
    if others:
        return "rows of the batch begin their regions at different slots"
    pieces = _pieces(problem, first[1])
    if not pieces or any(one.keys.stop != other.keys.start for one, other in itertools.pairwise(pieces)):
        return "the keys of its pieces do not follow one another"
    if not _fits(problem, pieces):
        return f"more than {MOST // 2**20} MiB of keys and values of a layer would be copied"
    width, columns = query.shape[-1], _group(problem) if adds(problem) else 0
    if not has_flash(query, _wide(width, columns)):
        return "flash does not take states of this width"
    return trial(query.device, query.dtype, width, columns)


supports = dataclasses.replace(
    NEEDS,
    compiling=False,
    on_gpu=True,
    one_query=True,
    half=True,
    decays=False,
    further=_objection,
)
"""One query in half precision behind the keys of a cache on a GPU."""


def _pieces(problem: Problem, position: int) -> tuple[Piece, ...]:
    """The pieces of a call whose query has the same `position` in all rows."""
    places = EVERY, 1, int(problem.query_start), position
    return tuple(few_queries(cast(Turner, problem.turner).regions, *places))


def _fits(problem: Problem, pieces: Sequence[Piece]) -> bool:
    """Whether there is not too much to copy, if need be without the oldest keys."""
    if _bytes(problem, pieces) <= MOST:
        return True
    turner, first = cast(Turner, problem.turner), pieces[0].region
    apart = not adds(problem) and first == _reference(pieces) and meets(turner, first, first)
    return apart and _bytes(problem, pieces[1:]) <= MOST


def attend(problem: Problem) -> Output:
    """Attention of one query, `(batch, heads, 1, value_dim)`, without gradients. The problem keeps its plan."""
    return by_plan(problem, _plan(problem)), None


EXECUTOR = Executor("one_call", "one query, all pieces by one call of flash", supports, attend, planned_pieces)


# --- the plan ---


def _bytes(problem: Problem, pieces: Sequence[Piece]) -> int:
    """Bytes of keys and values that are copied for one call of these pieces."""
    (batch, kv_heads, _, width), turner = problem.value.shape, cast(Turner, problem.turner)
    slots = batch * kv_heads * sum(piece.width for piece in pieces) * problem.value.element_size()
    if adds(problem):
        return 2 * slots * _wide(width, _group(problem))
    reference = _reference(pieces)
    return 0 if all(meets(turner, reference, piece.region) for piece in pieces) else slots * width


def _group(problem: Problem) -> int:
    """The number of query heads that share a key head."""
    return cast(torch.Tensor, problem.query).shape[1] // problem.value.shape[1]


def _reference(pieces: Sequence[Piece]) -> int:
    """The place of the region in whose rotation the query meets all keys: the one with the most of them."""
    return max(pieces, key=lambda piece: piece.width).region


def _plan(problem: Problem) -> OneCall:
    """The plan for a call that the executor `supports`."""
    query, turner = cast(torch.Tensor, problem.query), cast(Turner, problem.turner)
    ((_, position),) = rows_alike(problem, turner)
    pieces = _pieces(problem, position)
    added = tuple(
        added_to(problem, turner.forward, turner.regions[piece.region], query.shape[1], place_of(piece), position)
        for piece in pieces
    )
    terms = [term for term in added if term is not None]  # of all pieces, or of none
    apart = pieces[0].keys if _bytes(problem, pieces) > MOST else None
    some = pieces if apart is None else pieces[1:]
    places = tuple((each.region, each.keys.start, each.keys.stop) for each in some)
    found, runs = turned(turner, query, _reference(pieces), places), [each.keys for each in some]
    scaling, blind = problem.scaling * cast(float, factor_of(turner)), blind_queries(problem, turner.forward, added)
    term = _side_by_side(terms) if terms else None
    return _made(query, problem.value, runs, found, turner.layout, scaling, term, blind, apart)


def _side_by_side(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The terms of all pieces, `(batch * kv_heads or 1, group or 1, slots)`."""
    rows, group = (max(term.shape[axis] for term in terms) for axis in (0, 1))
    return terms[0] if len(terms) == 1 else torch.cat([term.expand(rows, group, -1) for term in terms], dim=-1)


def _made(
    query: torch.Tensor,
    value: torch.Tensor,
    runs: Sequence[slice],
    how: Turned,
    layout: RotaryLayout | None,
    scaling: float,
    term: torch.Tensor | None = None,
    blind: torch.Tensor | None = None,
    apart: slice | None = None,
) -> OneCall:
    """The plan for states of these shapes, with memory for them. The `runs` of slots follow one another; `term` is
    added to the scores of all of them. The keys `apart` stay as they are.
    """
    (batch, heads, _, width), kv_heads = query.shape, value.shape[1]
    slots, group = slice(runs[0].start, runs[-1].stop), heads // kv_heads
    rotate = into = keys = values = None
    wide = _wide(width, 0 if term is None else term.shape[1])
    shape = batch, kv_heads, slots.stop - slots.start, wide
    if how.query is not None or term is not None:
        into = query.new_empty(batch * kv_heads, group, 1, wide)
        rotate = _rotation(how.query, into.view(batch, heads, wide)[..., :width])
    fills: tuple[Fill, ...] = ()
    if term is not None or any(turn is not None for turn in how.keys):
        keys = query.new_empty(shape) if term is None else query.new_zeros(shape)
        places = [keys[:, :, run.start - slots.start : run.stop - slots.start, :width] for run in runs]
        fills = tuple(_fill(*each, layout) for each in zip(runs, how.keys, places, strict=True))
    if term is not None and into is not None and keys is not None:
        into[..., 0, width:] = _selectors(group, term.shape[1], wide - width, query.dtype, query.device)
        _write(term / scaling, keys.flatten(0, 1)[..., width:])
        values = value.new_zeros(shape)
    return OneCall(
        len(runs) + (apart is not None),
        slots,
        scaling,
        rotate,
        into,
        fills,
        keys=None if keys is None else _as_rows(keys),
        values=None if values is None else _as_rows(values),
        values_in=None if values is None else values[..., :width],
        blind=blind,
        apart=apart,
        share=None if apart is None else query.new_empty(batch * kv_heads, 1, group),
    )


# --- queries and keys in their places ---


def _rotation(matrix: torch.Tensor | None, into: torch.Tensor) -> Fill:
    """The function that writes queries `(batch, heads, 1, head_dim)`, multiplied by a `matrix` of `Turned.query`, into
    a view `(batch, heads, head_dim)`.
    """
    if matrix is None:
        return into.unsqueeze(2).copy_
    if len(matrix) == 1:
        return functools.partial(_multiplied_by_one, matrix=matrix[0], into=into.view(-1, into.shape[-1]))
    return functools.partial(_multiplied, matrices=matrix, into=into)


def _multiplied_by_one(query: torch.Tensor, matrix: torch.Tensor, into: torch.Tensor) -> None:
    torch.mm(query.reshape(into.shape), matrix, out=into)


def _multiplied(query: torch.Tensor, matrices: torch.Tensor, into: torch.Tensor) -> None:
    torch.bmm(query[:, :, 0], matrices, out=into)


def _fill(slots: slice, turn: torch.Tensor | Tables | None, into: torch.Tensor, layout: RotaryLayout | None) -> Fill:
    """The function that writes the keys in some `slots` into a view `(batch, kv_heads, slots, head_dim)`, rotated as
    one of `Turned.keys` says.
    """
    if turn is None or layout is None:
        return functools.partial(_copied, slots=slots, into=into)
    batch, kv_heads, length, width = into.shape
    if isinstance(turn, torch.Tensor) and turn.ndim == 3:
        matrix = turn[:, None].expand(batch, kv_heads, width, width).flatten(0, 1)
        return functools.partial(_turned_alike, slots=slots, matrix=matrix, into=into.view(-1, length, width))
    if isinstance(turn, tuple):
        rotate = functools.partial(layout.rotate_wide, cos=turn[0], sin=turn[1])
        return functools.partial(_turned_by, slots=slots, rotate=rotate, into=into)
    room = into.new_empty(batch, kv_heads, length, 2, 2, width // 2)
    halves = into.view(batch, kv_heads, length, 2, width // 2)
    return functools.partial(_turned, slots=slots, table=turn, room=room, into=halves)


def _copied(keys: torch.Tensor, slots: slice, into: torch.Tensor) -> None:
    into.copy_(narrowed(keys, slots))


def _turned_alike(keys: torch.Tensor, slots: slice, matrix: torch.Tensor, into: torch.Tensor) -> None:
    torch.bmm(narrowed(keys.flatten(0, 1), slots), matrix, out=into)


def _turned_by(keys: torch.Tensor, slots: slice, rotate: Rotate, into: torch.Tensor) -> None:
    into.copy_(rotate(narrowed(keys, slots)))


def _turned(keys: torch.Tensor, slots: slice, table: torch.Tensor, room: torch.Tensor, into: torch.Tensor) -> None:
    """Rotate keys by two kernels: both products of each number in `room`, `(batch, kv_heads, slots, 2, 2, d/2)`, and
    their sums. The `table` `(batch or 1, 1, slots, 2, 2, d/2)` has the rotation of each pair as a matrix. Products and
    sums are rounded like those of attention modules in this dtype.
    """
    halves = narrowed(keys, slots).view(*room.shape[:3], 1, 2, room.shape[-1])
    torch.mul(halves, table, out=room)
    torch.sum(room, dim=-2, out=into)


# --- terms as dimensions ---

PARTS = 3
"""Numbers in half precision whose sum has the digits of one in float32."""


def _wide(width: int, group: int) -> int:
    """The width of states with the terms of a group as further dimensions: flash takes multiples of eight."""
    return width + -(-PARTS * group // 8) * 8


def _step(dtype: torch.dtype) -> float:
    """The factor from one part of a number to the next: float16 has too few exponents for all parts at one scale."""
    return 2.0**11 if dtype == torch.float16 else 1.0


@functools.lru_cache(maxsize=16)
def _selectors(group: int, terms: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The further dimensions of queries, `(group, columns)`: each of a group selects the parts of its own term, or of
    the only one.
    """
    with torch.inference_mode(False):  # another forward may be differentiated
        own = (
            torch.eye(group, dtype=dtype, device=device)
            if terms > 1
            else torch.ones(group, 1, dtype=dtype, device=device)
        )
        parts = [own * _step(dtype) ** (1 - number) for number in range(PARTS)]
        return torch.nn.functional.pad(torch.cat(parts, dim=1), (0, columns - PARTS * terms))


def _write(term: torch.Tensor, into: torch.Tensor) -> None:
    """Write a term `(batch * kv_heads or 1, terms, slots)`, float32, as further dimensions of keys, `(batch * kv_heads,
    slots, columns)`. What hides a key becomes a number whose multiples are finite.
    """
    step, terms = _step(into.dtype), term.shape[1]
    lowest = -(2.0**100) if step == 1 else -(2.0**15)  # a part of its own, so that the others are zero
    rest = (term.mT if step == 1 else term.mT / step).clamp(min=lowest)
    for number in range(PARTS):
        part = into[..., number * terms : (number + 1) * terms]
        part.copy_(rest)
        if number + 1 < PARTS:
            rest = rest - part[: len(rest)]
            rest = rest if step == 1 else rest * step


# --- the trial ---


def _compared(device: torch.device, dtype: torch.dtype, head_dim: int, terms: int) -> Comparisons:
    """Compare a call of all kinds of pieces with its definition."""
    random, (group, kv_heads, length, scaling) = torch.Generator().manual_seed(0), (max(2, terms), 2, 96, 0.3)
    query = torch.randn(1, group * kv_heads, 1, head_dim, generator=random).to(device, dtype)
    key, value = torch.randn(2, 1, kv_heads, length + 1, head_dim, generator=random).to(device, dtype)
    layout, runs = half_split(head_dim), [slice(1, 40), slice(40, 60), slice(60, length + 1)]
    angles = torch.rand(length, head_dim // 2, generator=random).to(device) * 6
    cos, sin = angles.cos(), angles.sin()
    blocks = torch.stack([cos, -sin, sin, cos], dim=1).unflatten(1, (2, 2))
    matrices = [_matrix(blocks[at]) for at in (3, 7)]
    term = None
    if terms:
        term = -torch.rand(kv_heads, terms, length, generator=random).to(device) * 20
        term[:, :, 5] = torch.finfo(torch.float32).min
    own = blocks[None, None, 59:]
    how = Turned(matrices[0].to(dtype), (None, matrices[1].to(dtype), own.to(dtype)))
    made = functools.partial(_made, query, value, layout=layout, scaling=scaling)
    q, (*others, last) = query.float() @ matrices[0], (key[:, :, run].float() for run in runs)
    last = (last.unflatten(-1, (1, 2, -1)) * own).sum(dim=-2).flatten(-2)
    keys = torch.cat([others[0], others[1] @ matrices[1], last], dim=2)
    scores = q.view(1, kv_heads, group, head_dim) @ keys.mT * scaling
    weights = (scores if term is None else scores + term.expand(-1, group, -1)).softmax(dim=-1)
    expected = (weights @ value[:, :, 1:].float()).flatten()
    yield "output", made(runs=runs, how=how, term=term).attend(query, key, value).flatten(), expected
    if term is None:
        rest = Turned(how.query, how.keys[1:])
        found = made(runs=runs[1:], how=rest, apart=runs[0]).attend(query, key, value)
        yield "output with keys apart", found.flatten(), expected


def _matrix(blocks: torch.Tensor) -> torch.Tensor:
    """The matrix `(1, head_dim, head_dim)` that rotates row vectors as `blocks` `(2, 2, d/2)` rotate pairs."""
    (a, b), (c, d) = (map(torch.diag, row) for row in blocks)
    return torch.cat([torch.cat([a, c], dim=1), torch.cat([b, d], dim=1)])[None]


trial = Trial("One call of flash for all pieces of a token", _compared, tolerance=0.03)
"""The reason why a device does not score tokens so, for a dtype, a width and a number of terms of a group, or an empty
string.
"""
