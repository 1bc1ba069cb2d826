"""Flash attention for each piece of a region, merged by log-sum-exp: every visible pair is scored once, and no mask is
materialised.

No gradient flows through the merge, as in ring attention (Liu et al., 2310.01889). The loops run over groups of heads
and blocks of queries, so that the results of a block's tiles are added up while they are in cache.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.attention.bias import KeyTerm, TileBias, has_terms, tile_bias
from rope_patch.attention.chunk_runs import Runs, in_one, in_place, keys_of, queries_of, slots_of
from rope_patch.attention.executors import chunked
from rope_patch.attention.kernels import account, kernel_for
from rope_patch.attention.merging import merge, summed
from rope_patch.attention.pieces import Piece
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import EVERY, Rotation
from rope_patch.attention.spans import Span
from rope_patch.attention.sums import Gradient, Run, Sum
from rope_patch.attention.table import Executor, Needs
from rope_patch.attention.terms import upcast
from rope_patch.attention.tile_kernels import Biased, Kernel, Merged, Work
from rope_patch.attention.turner import Branch
from rope_patch.errors import UnsupportedModel
from rope_patch.schemes.slots import ALL_PAIRS, Bounds, Region


def attend(problem: Problem) -> Output:
    """Output of `reference.attend` for a call made of spans, `(batch, heads, q_len, value_dim)`.

    The caller ensures that there is no softcap, sink or dropout. Queries outside every span (pads) get zeros.

    Raises:
        UnsupportedModel: under `torch.jit.trace`, which would record the pieces of this one length.
    """
    if torch.jit.is_tracing():
        raise UnsupportedModel(
            "torch.jit.trace cannot record attention that is scored in pieces; torch.export.export(model, ...) can"
        )
    spans, call = problem.spans or (), problem.rotated.as_causal
    bias = tile_bias(call)
    if not torch.is_grad_enabled():  # the engine of gradients takes longer than a small kernel
        return forward(call, spans, bias)[0], None
    states = [state for branch in call.branches for state in (branch.query, branch.key)]
    return _Merged.apply(call, spans, bias, None if bias is None else bias.source, call.value, *states), None


def pieces(problem: Problem) -> int:
    """The number of pieces that `attend` scores, over all groups of heads."""
    spans, call = problem.spans or (), problem.rotated.as_causal
    return sum(len(block.pieces) for _, blocks in _by_heads(call, spans, tile_bias(call)) for _, block in blocks)


def _kernel(problem: Problem) -> str:
    """The name of the kernel that scores a piece, and why faster ones do not."""
    call = problem.rotated.as_causal
    return account(call.branches[0].query, call.value, tile_bias(call) is not None)


LARGE = 2**23
"""Maximum bytes of tile results for one group of heads. More does not fit the cache, and the C library does not keep
larger blocks, so that they are mapped and faulted in again at every call.
"""


def _objection(problem: Problem) -> str:
    """The reason why a call is not scored region by region, or an empty string if it is made of spans, in which every
    region and every bias keep their shape.
    """
    if not (problem.causal or problem.q_length == problem.kv_length or problem.q_length == 1):
        return "queries behind cached keys see later keys"
    if not has_terms(problem):
        return "running sums stand beside a bias that is not linear, or tokens see later keys"
    if (spans := problem.spans) is None:
        return "the mask or the positions are not made of spans: runs of tokens that follow one by one"
    if problem.biased and any(span.skips(int(problem.query_start)) for span in spans):
        return "positions skip, and a bias counts them"
    regions = [branch.region for branch in problem.rotated.branches if branch.region is not None]
    plain = all(span.window == math.inf for span in spans) and (problem.causal or problem.q_length == 1)
    if not (plain or all(region.translation_invariant for region in regions)):
        return "regions by chunk, or of first tokens, are cut by a window or see later keys"
    return ""


supports = Needs(compiling=False, fits_kernels=True, scattered=False, further=_objection)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Problem,
        spans: tuple[Span, ...],
        bias: TileBias | None,
        source: torch.Tensor | None,
        value: torch.Tensor,
        *states: torch.Tensor,
    ) -> torch.Tensor:
        out, lse = forward(call, spans, bias)
        if not any(ctx.needs_input_grad):
            return out
        kept, ctx.numbers = _distinct(states)
        ctx.save_for_backward(value, out, lse, *kept)
        nothing = value.new_empty(0)  # states are saved once, where hooks see them
        ctx.call = call.replaced(branches=(), value=nothing, bias=None, running_bias=None)
        ctx.branches = tuple((branch.region, branch.first, branch.turn) for branch in call.branches)
        ctx.spans, ctx.bias = spans, bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, out, lse, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            # one state may follow from another, as rotated keys from those of another region
            value, *kept = (x.view_as(x) for x in (value, *kept))
        branches = _as_branches(ctx.branches, [kept[number] for number in ctx.numbers])
        if torch.is_grad_enabled():  # a second derivative is wanted
            return _by_definition(ctx, grad, branches, value)
        call = ctx.call.replaced(branches=tuple(branches), value=value)
        of_bias = torch.zeros_like(ctx.bias.source) if ctx.needs_input_grad[3] else None
        gradients = backward(call, ctx.spans, ctx.bias, Merged(out, lse, grad), of_bias)
        return (None, None, None, of_bias, *gradients)


def forward(call: Problem, spans: tuple[Span, ...], bias: TileBias | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, `(batch, heads, q_len, value_dim)` and `(batch, heads, q_len)`."""
    query, value = call.branches[0].query, call.value
    batch, heads, length = query.shape[:3]
    places = [place for _, blocks in _by_heads(call, spans, bias) for place in blocks]
    filled = [
        len(range(batch)[block.rows]) * len(range(heads)[group.heads]) * block.q_length for group, block in places
    ]
    if filled == [batch * heads * length]:
        ((group, block),) = places
        out, lse = _attend(block, group, call.branches, value, call.scaling)
        return out.to(value.dtype), lse
    # the layout of the kernels' outputs, and the one that the model needs next
    out = torch.empty(batch, length, heads, value.shape[-1], dtype=value.dtype, device=value.device).transpose(1, 2)
    if sum(filled) < batch * heads * length:  # some queries see no key
        out.zero_()
    lse = torch.full(query.shape[:3], -torch.inf, dtype=upcast(query[:0]).dtype, device=query.device)
    for group, block in places:
        place = block.rows, group.heads, block.queries
        out[place], lse[place] = _attend(block, group, call.branches, value, call.scaling)
    return out, lse


def backward(
    call: Problem,
    spans: tuple[Span, ...],
    bias: TileBias | None,
    merged: Merged,
    of_bias: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """The gradients of the values, and of the queries and keys of each branch, from those of the output of `forward`.
    If branches have the same keys or queries, all of their gradient is returned for the first of them, and None for the
    others. That of the bias is added to `of_bias`, if given, in the shape of its `source`.
    """
    value = call.value
    kept, numbers = _distinct([state for branch in call.branches for state in (branch.query, branch.key)])
    of_value, *of_states = (Gradient(state) for state in (value, *kept))
    of_queries, of_keys = ([of_states[number] for number in numbers[side::2]] for side in (0, 1))
    from_first = [(gradient, branch.first) for gradient, branch in zip(of_keys, call.branches, strict=True)]
    for together, blocks in _by_heads(call, spans, bias, value.shape[2]):
        to_keys = _to_keys(together, [block for _, block in blocks], of_value, from_first)
        for group, block in blocks:
            to_queries = _to_queries(group, block, of_queries)
            for piece, by in block.parts:
                place = block.rows, group.heads, piece.queries
                work = block.work(piece, group, call.branches, value, call.scaling)
                known = (queries_of(x[place], piece.tile) for x in (merged.out, merged.lse, merged.grad))
                in_tile, kernel = Merged(*known), by.for_heads(group.heads)
                of_query, of_key, of_values = kernel.backward(work, in_tile, of_bias)
                if (turn := call.branches[piece.region].turn) is not None:
                    of_query = turn.part(block.rows, piece.queries).back()(upcast(of_query))
                run = piece.tile if piece.tile.count > 1 else None
                to_queries[piece.region].add(EVERY, piece.queries, of_query, run)
                to_keys[piece.region].add(block.rows, piece.keys, of_key, run)
                to_keys[-1].add(block.rows, piece.keys, of_values, run)
            _close(to_queries)
        _close(to_keys)
    firsts = zip(numbers, _are_first(numbers), strict=True)
    return [of_value.all(), *(of_states[number].all() if own else None for number, own in firsts)]


def _by_definition(
    ctx: Any, grad: torch.Tensor, branches: list[Branch], value: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `_Merged.backward` in a form that can be differentiated again."""
    bias, running_bias = (None, None) if ctx.bias is None else ctx.bias.as_inputs()
    call = ctx.call.replaced(branches=tuple(branches), value=value, bias=bias, running_bias=running_bias)
    states = [state for branch in branches for state in (branch.query, branch.key)]
    every = None, None, None, None if ctx.bias is None else ctx.bias.source, value, *states
    first = *(True,) * 5, *_are_first(ctx.numbers)
    needed = [own and needs for own, needs in zip(first, ctx.needs_input_grad, strict=True)]
    wanted = [x for x, needs in zip(every, needed, strict=True) if needs and x is not None]
    gradients = iter(torch.autograd.grad(chunked.attend(call)[0], wanted, grad, create_graph=True))
    return tuple(next(gradients) if needs else None for needs in needed)


@dataclass(frozen=True)
class HeadGroup:
    """A slice of query heads, and the slice of key heads that they share."""

    heads: slice
    kv_heads: slice


@dataclass(frozen=True)
class Block:
    """Pieces with overlapping queries, the largest first, with the kernel of each, and the union of their queries."""

    rows: slice
    queries: slice
    parts: tuple[tuple[Piece, Biased], ...]

    @property
    def pieces(self) -> list[Piece]:
        """The pieces without their kernels."""
        return [piece for piece, _ in self.parts]

    @property
    def q_length(self) -> int:
        """Number of queries in a row."""
        return self.queries.stop - self.queries.start

    def work(
        self, piece: Piece, group: HeadGroup, branches: Sequence[Branch], value: torch.Tensor, scale: float
    ) -> Work:
        """The work of a tile for some heads, a run as the batch of one; `value` is `(batch, kv_heads, kv_len,
        value_dim)`.
        """
        branch, tile = branches[piece.region], piece.tile
        in_branch = slice(piece.keys.start - branch.first, piece.keys.stop - branch.first)
        query = queries_of(branch.queries(self.rows, group.heads, piece.queries), tile)
        key = keys_of(branch.key[self.rows, group.kv_heads, in_branch], tile)
        return Work(query, key, keys_of(value[self.rows, group.kv_heads, piece.keys], tile), tile, scale)


def _attend(
    block: Block, group: HeadGroup, branches: Sequence[Branch], value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(rows, heads, queries, value_dim)` and log-sum-exp `(rows, heads, queries)` of the queries of a block."""
    (first, kernel), *others = block.parts
    start, rows = block.queries.start, len(range(len(value))[block.rows])
    out, lse = kernel.for_heads(group.heads).forward(block.work(first, group, branches, value, scale))
    out, lse = _placed(out, lse, first, block, rows, sums=bool(others))
    for piece, kernel in others:
        part, part_lse = kernel.for_heads(group.heads).forward(block.work(piece, group, branches, value, scale))
        queries = slice(piece.queries.start - start, piece.queries.stop - start)
        part, into = in_place(part, out[:, :, queries], piece.tile)
        part_lse, into_lse = in_place(part_lse, lse[:, :, queries], piece.tile)
        if into.ndim == 4:
            merge(into, into_lse, part, part_lse)
            continue
        for row in range(rows):
            merge(into[row], into_lse[row], part[row], part_lse[row])
    return out, lse


def _placed(
    out: torch.Tensor, lse: torch.Tensor, piece: Piece, block: Block, rows: int, sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the first piece at its place in that of its block; with `sums` as an accumulator for others."""
    length = piece.queries.stop - piece.queries.start
    before, after = piece.queries.start - block.queries.start, block.queries.stop - piece.queries.stop
    out, lse = (
        x if piece.tile.count == 1 else in_one(x, piece.tile, rows, length, hidden)
        for x, hidden in ((out, 0.0), (lse, -torch.inf))
    )
    if sums:
        out = summed(out)
    if before or after:
        out = torch.nn.functional.pad(out, (0, 0, before, after))
        lse = torch.nn.functional.pad(lse, (before, after), value=-torch.inf)
    return out, lse


def _to_queries(group: HeadGroup, block: Block, gradients: list[Gradient]) -> list[Sum]:
    """The gradients of the queries of a block, one for each branch."""
    runs = [(piece.region, (EVERY, some)) for piece in block.pieces for some in slots_of(piece.queries, piece.tile)]
    place, first = (block.rows, group.heads, block.queries), block.queries.start
    return _sums([(gradient, first) for gradient in gradients], place, runs)


def _to_keys(
    group: HeadGroup, blocks: list[Block], of_value: Gradient, gradients: list[tuple[Gradient, int]]
) -> list[Sum]:
    """The gradients of the keys of some heads, one for each branch with its first slot, followed by that of the
    values.
    """
    places = [(block.rows, piece) for block in blocks for piece in block.pieces]
    runs = [(piece.region, (rows, some)) for rows, piece in places for some in slots_of(piece.keys, piece.tile)]
    place = EVERY, group.kv_heads
    return [*_sums(gradients, place, runs), Sum(of_value, place, [run for _, run in runs])]


def _sums(into: list[tuple[Gradient, int]], place: tuple[slice, ...], runs: list[tuple[int, Run]]) -> list[Sum]:
    """One `Sum` per branch, shared by branches with the same tensor; the `runs` of tiles name their branch."""
    together: dict[Gradient, list[Run]] = {gradient: [] for gradient, _ in into}
    for branch, run in runs:
        together[into[branch][0]].append(run)
    sums = {gradient: Sum(gradient, place, together[gradient], first) for gradient, first in into}
    return [sums[gradient] for gradient, _ in into]


def _close(sums: list[Sum]) -> None:
    """Write each sum into its gradient, and free it before the next heads allocate theirs."""
    while sums:
        one = sums.pop()
        if one not in sums:
            one.close()


def _distinct(states: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The distinct query and key tensors of the branches in turn, and the index of each branch's tensor among them."""
    names = [(place % 2, id(state)) for place, state in enumerate(states)]
    kept = dict(zip(names, states, strict=True))
    return list(kept.values()), [list(kept).index(name) for name in names]


def _are_first(numbers: list[int]) -> list[bool]:
    """Whether each state is the first with its number; the gradient of that one holds the gradients of all."""
    return [number not in numbers[:place] for place, number in enumerate(numbers)]


Cut = tuple[Bounds, Runs]
"""The bounds of a region, and how its tiles are joined."""


def blocks_of(
    spans: Sequence[Span], branches: Sequence[Branch], kernel: Kernel, bias: TileBias | None, forward: bool = True
) -> tuple[Block, ...]:
    """All tiles of a call, grouped by shared queries. Stairs are one of them for one text, as several would need copies
    of their keys, and in a `forward`, as keys that steps share would get a gradient from each.
    """
    alone = len(spans) == 1 and spans[0].rows.stop - spans[0].rows.start == 1
    regions = tuple(
        ((branch.region or ALL_PAIRS).bounds, _runs(branch, kernel, bias is None, forward and alone))
        for branch in branches
    )
    if bias is None:
        return _blocks_without_bias(tuple(spans), regions, kernel)  # type: ignore[arg-type]  # kernels have a hash
    return tuple(_blocks([Biased(kernel, span, bias.within(span)) for span in spans], regions))


def _runs(branch: Branch, kernel: Kernel, unbiased: bool, climbs: bool) -> Runs:
    """How the tiles of a branch are joined: not where a bias, or the rotation of queries, is for one block of them."""
    region, query = branch.region or ALL_PAIRS, branch.query
    if region.chunk == 1 or branch.turn is not None or not unbiased or not kernel.batches(query):
        return "none"
    whole = climbs and region.stop == math.inf and kernel.climbs(query, branch.key, region.chunk)
    return "stairs" if whole else "squares"


@functools.lru_cache(maxsize=64)
def _blocks_without_bias(spans: tuple[Span, ...], regions: tuple[Cut, ...], kernel: Kernel) -> tuple[Block, ...]:
    """The tiles of a call without a bias, found once for all its layers and for every text of one length."""
    return tuple(_blocks([Biased(kernel, span, None) for span in spans], regions))


def _blocks(kernels: Sequence[Biased], regions: Sequence[Cut]) -> Iterator[Block]:
    """Group the tiles of each span's kernel by shared queries."""
    for (rows, _), together in itertools.groupby(kernels, key=lambda by: (by.span.rows, by.span.queries)):
        yield from _by_queries(rows, [part for by in together for part in _pieces(by, regions)])


def _pieces(kernel: Biased, regions: Sequence[Cut]) -> Iterator[tuple[Piece, Biased]]:
    span = kernel.span
    for number, (bounds, runs) in enumerate(regions):
        for tile in kernel.tiles(Region.between(bounds), runs):
            queries = slice(span.queries.start + tile.queries.start, span.queries.start + tile.queries.stop)
            keys = slice(span.keys.start + tile.keys.start, span.keys.start + tile.keys.stop)
            yield Piece(span.rows, number, queries, keys, tile), kernel


def _by_queries(rows: slice, parts: list[tuple[Piece, Biased]]) -> Iterator[Block]:
    together: list[tuple[Piece, Biased]] = []
    stop = 0
    for one in sorted(parts, key=lambda part: part[0].queries.start):
        if together and one[0].queries.start >= stop:
            yield _block(rows, together)
            together = []
        together.append(one)
        stop = max(stop if len(together) > 1 else 0, one[0].queries.stop)
    if together:
        yield _block(rows, together)


def _block(rows: slice, parts: list[tuple[Piece, Biased]]) -> Block:
    start, stop = min(piece.queries.start for piece, _ in parts), max(piece.queries.stop for piece, _ in parts)
    # the result of a piece without gaps is what others are merged into
    in_order = sorted(parts, key=lambda part: (part[0].tile.has_gaps, part[0].queries.start - part[0].queries.stop))
    return Block(rows, slice(start, stop), tuple(in_order))


def _by_heads(
    call: Problem, spans: tuple[Span, ...], bias: TileBias | None, length: int | None = None
) -> Iterator[tuple[HeadGroup, list[tuple[HeadGroup, Block]]]]:
    """Yield groups of heads with all tiles of the call. Each block has its own heads: one head if the bias ends the
    reach of some head's queries, else the whole group. `length` is the length of the largest result of a tile: of keys,
    for gradients; by default, for a forward, the longest block's.
    """
    branches, query, value = call.branches, call.branches[0].query, call.value
    reaches = _reaches(call, bias)
    if reaches is None:
        kernel = kernel_for(query, value, bias is not None)
        blocks = blocks_of(spans, branches, kernel, bias, forward=length is None)
        longest = max((block.q_length for block in blocks), default=0) if length is None else length
        for group in head_groups(query, value, longest):
            yield group, [(group, block) for block in blocks]
        return
    kernel, shared = kernel_for(query[:, :1], value, masked=True), len(reaches) // value.shape[1]
    for number in range(value.shape[1]):
        heads, kv_head = range(number * shared, (number + 1) * shared), slice(number, number + 1)
        yield (
            HeadGroup(slice(heads.start, heads.stop), kv_head),
            [
                (HeadGroup(slice(head, head + 1), kv_head), block)
                for head in heads
                for block in blocks_of([span.within(reaches[head]) for span in spans], branches, kernel, bias)
            ],
        )


def _reaches(call: Problem, bias: TileBias | None) -> list[int] | None:
    """The distance for each head from which keys weigh nothing because of a bias; None if all keys may weigh something,
    or if a kernel gains nothing from fewer keys.
    """
    regions = [branch.region or ALL_PAIRS for branch in call.branches]
    sees_itself = any(region.start <= 0 < region.stop for region in regions)
    if not isinstance(bias, KeyTerm) or not call.value.is_cpu or not sees_itself:
        return None
    if not all(region.translation_invariant for region in regions):
        return None
    with torch.no_grad():
        norms = [[upcast(x).norm(dim=-1).amax(dim=(0, 2)) for x in (b.query, b.key)] for b in call.branches]
        shared = len(norms[0][0]) // len(norms[0][1])
        largest = [call.scaling * query * key.repeat_interleave(shared) for query, key in norms]
        reaches = bias.reaches(torch.stack(largest).amax(dim=0))
    return reaches if min(reaches) < call.kv_length else None


def head_groups(query: torch.Tensor, value: torch.Tensor, length: int) -> Iterator[HeadGroup]:
    """Split the heads into groups so small that each result of a tile of `length` queries or keys stays below `LARGE`
    bytes, but large enough to keep every thread busy; one group on devices other than CPUs, where a call costs more
    than memory.

    Shape:
        query `(batch, heads, q_len, head_dim)`, value `(batch, kv_heads, kv_len, value_dim)`.
    """
    batch, heads, *_ = query.shape
    kv_heads, shared = value.shape[1], heads // value.shape[1]
    size = 4 * batch * heads * length * max(query.shape[-1], value.shape[-1])
    number = max(1, min(math.ceil(size / LARGE), batch * heads // torch.get_num_threads())) if query.is_cpu else 1
    step = math.ceil(kv_heads / number)
    for start in range(0, kv_heads, step):
        stop = min(start + step, kv_heads)
        yield HeadGroup(slice(start * shared, stop * shared), slice(start, stop))


def _as_branches(places: tuple[tuple[Region | None, int, Rotation | None], ...], states: Any) -> list[Branch]:
    return [Branch(region, *states[2 * i : 2 * i + 2], *others) for i, (region, *others) in enumerate(places)]


EXECUTOR = Executor(
    "merged", "a kernel with log-sum-exp for each piece of a region, merged", supports, attend, pieces, _kernel
)
