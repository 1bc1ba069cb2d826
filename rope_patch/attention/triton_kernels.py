"""Triton kernels: rotation, forward, the gradients of queries or of keys, and the merge of split keys. Imported only if
Triton is installed.

Queries and keys are rotated once, for each region, before they are scored: no loop over keys or queries reads a table.
A program then handles one row of the batch (axis 2 of the grid) and one key head (axis 1), on a block of rows. The
query heads that share keys are rows of one program, so keys are read once for all of them: row r is token r // group
of the query head r % group of its key head. For each region the program loops over the blocks of keys within the
region's bounds: without a mask if every row sees the whole block, with one at the edges. Each pair is in one region, so
all regions share the running softmax.

The gradients of keys come from scores of keys by queries, those of queries from queries by keys: what is accumulated
is then always the left matrix's rows, and no matrix is transposed in registers. Scores are in units of ln 2, since the
hardware computes 2^x.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))
FAR = tl.constexpr(2**30)  # beyond all positions, and far from the end of the range of int32


class States(NamedTuple):
    """A tensor with its strides of batch rows, heads and tokens."""

    data: Any
    batch: int
    head: int
    token: int

    @classmethod
    def from_tensor(cls, x: Any) -> Any:
        """Read the strides of `(batch, length)`, or of `(batch, heads, length)` of numbers or vectors; an axis of size
        1 gets stride 0, so that it repeats.
        """
        if x is None:
            return None
        strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
        return cls(x, strides[0], 0, strides[1]) if x.ndim == 2 else cls(x, *strides[:3])


class Given(NamedTuple):
    """The inputs of a call.

    Attributes:
        q, k: rotated for each region.
        m, n, groups: positions of queries and keys, and groups of keys, the same for all heads.
        start: slot of the first query, as a number or a pointer.
        bias: slopes by head, or a table by head and distance, from the distance `first` to that of the last key.
        sums, sinks: see `Problem`.
        last: None. Triton 3.6 forgets the constants inside of fields that no constant field follows.
    """

    q: tuple[States, ...]
    k: tuple[States, ...]
    v: States
    m: States
    n: States
    groups: States | None
    start: Any
    q_length: int
    kv_length: int
    scale: float
    bias: States | None
    first: int
    sums: States | None
    sinks: Any
    last: None = None


class Area(NamedTuple):
    """A `Region` whose bounds are integers that a kernel can hold."""

    start: int
    stop: int
    chunk: int
    keys_below: int | None

    @classmethod
    def from_region(cls, region: Any) -> Area:
        """Clamp the bounds of a `Region` to integers."""
        far = FAR.value // region.chunk
        start, stop = (int(min(max(bound, -far), far)) for bound in (region.start, region.stop))
        return cls(start, stop, region.chunk, None if region.keys_below == math.inf else int(region.keys_below))


class How(NamedTuple):
    """The compile-time constants of a kernel.

    Attributes:
        group: query heads per key head.
        rows, keys: of a block.
        in_order: whether distance is a difference of slots.
        bias: "slope", "table" or None.
        products: the precision of products of float32, `input_precision` of `tl.dot`.
    """

    areas: tuple[Area, ...]
    group: int
    head_dim: int
    value_dim: int
    rows: int
    keys: int
    causal: bool
    in_order: bool
    window: int | None
    softcap: float | None
    bias: str | None
    products: str


class Tokens(NamedTuple):
    """Facts about a block of rows or keys: the token, head, slot, position and group of each, and which of them are
    `inside`. Entries outside repeat the last one inside.
    """

    inside: Any
    token: Any
    head: Any
    slot: Any
    position: Any
    group: Any


@triton.constexpr_function
def padded(least):
    """The smallest power of two that is at least `least` and at least 16, the minimum for tensor cores."""
    return max(16, triton.next_power_of_2(least))


@triton.jit
def _places(x, batch, heads, tokens):
    return x.data + (batch.to(tl.int64) * x.batch + heads.to(tl.int64) * x.head + tokens.to(tl.int64) * x.token)


@triton.jit
def _number(x):
    """A number that was passed as a constant, or is loaded from a pointer."""
    x = tl.full((), 0, tl.int32) + x  # a constant becomes a tensor, and a pointer stays one
    return tl.load(x).to(tl.int32) if x.dtype.is_ptr() else x


@triton.jit
def _numbers(x, heads, tokens):
    return tl.load(_places(x, tl.program_id(2), heads, tokens))


@triton.jit
def _states(x, tokens, dim: tl.constexpr):
    """Load the vectors of some tokens, `(tokens, padded(dim))`, zero beyond `dim`."""
    dims = tl.arange(0, padded(dim))[None, :]
    places = _places(x, tl.program_id(2), tokens.head, tokens.token)[:, None] + dims
    return tl.load(places) if dim == padded(dim) else tl.load(places, mask=dims < dim, other=0.0)


@triton.jit
def _store(x, value, batch, tokens, dim: tl.constexpr):
    dims = tl.arange(0, padded(dim))[None, :]
    places = _places(x, batch, tokens.head, tokens.token)[:, None] + dims
    tl.store(places, value, mask=tokens.inside[:, None] & (dims < dim))


@triton.jit
def _entries(x, tokens, dims, inside):
    """Load some dimensions of some tokens of a program's head in float32, `(tokens, dims)`; zero where not `inside`."""
    places = _places(x, tl.program_id(2), tl.program_id(1), tokens)[:, None] + dims
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotate(states, rotated, tables, partner, first, length, back: tl.constexpr, block: tl.constexpr, dim: tl.constexpr):
    """Rotate a block of tokens of a head, R x = x cos + x[partner] sin, for each of the `states`, with the sign in the
    sine. `back` multiplies by the transpose and adds up, into the only tensor of `rotated`; a table may be None there.
    Blocks that end before the slot `first`, a number or a pointer, are left out.
    """
    if (tl.program_id(0) + 1) * block > _number(first):
        tokens, dims = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, padded(dim))[None, :]
        inside, total = (tokens < length)[:, None] & (dims < dim), tl.full((block, padded(dim)), 0.0, tl.float32)
        for r in tl.static_range(len(states)):
            turned = _entries(states[r], tokens, dims, inside)
            if tables[r] is not None:
                others = tl.load(partner + dims, mask=dims < dim, other=0)
                sin = _entries(tables[r][1], tokens, others if back else dims, inside)
                turned *= _entries(tables[r][0], tokens, dims, inside)
                turned += _entries(states[r], tokens, others, inside) * sin
            total = total + turned if back else turned
            if r == len(states) - 1 or not back:
                into = rotated[0 if back else r]
                tl.store(_places(into, tl.program_id(2), tl.program_id(1), tokens)[:, None] + dims, total, mask=inside)


@triton.jit
def _queries(block, given, how: tl.constexpr):
    count = given.q_length * how.group
    rows = block * how.rows + tl.arange(0, how.rows)
    inside, rows = rows < count, tl.minimum(rows, count - 1)
    token, head = rows // how.group, tl.program_id(1) * how.group + rows % how.group
    slot = token + _number(given.start)
    group = slot if given.groups is None else _numbers(given.groups, head, slot)
    return Tokens(inside, token, head, slot, _numbers(given.m, head, token).to(tl.int32), group)


@triton.jit
def _keys(first, given, how: tl.constexpr):
    slot = first + tl.arange(0, how.keys)
    inside, slot = slot < given.kv_length, tl.minimum(slot, given.kv_length - 1)
    head = slot * 0 + tl.program_id(1)
    group = slot if given.groups is None else _numbers(given.groups, head, slot)
    return Tokens(inside, slot, head, slot, _numbers(given.n, head, slot).to(tl.int32), group)


@triton.jit
def _spread(x, axis: tl.constexpr):
    """Give the facts about tokens another axis, so that they broadcast over a matrix of scores."""
    inside, token, head = (tl.expand_dims(x.inside, axis), tl.expand_dims(x.token, axis), tl.expand_dims(x.head, axis))
    slot, position, group = (
        tl.expand_dims(x.slot, axis),
        tl.expand_dims(x.position, axis),
        tl.expand_dims(x.group, axis),
    )
    return Tokens(inside, token, head, slot, position, group)


@triton.jit
def _units(positions, chunk: tl.constexpr):
    """Compute floor(positions / chunk), also for negative positions."""
    if chunk == 1:
        return positions
    return tl.where(positions < 0, -((chunk - 1 - positions) // chunk), positions // chunk)


@triton.jit
def _within(bounds, zero, unit, low, high, chunk: tl.constexpr, of_keys: tl.constexpr):
    """Clip `bounds` to the slots whose distance from each token is in [low, high): `chunk` slots are one unit of
    distance, the token is in its `unit`, and unit 0 begins at the slot `zero`.
    """
    low, high = (low, high) if of_keys else (1 - high, 1 - low)
    return tl.maximum(bounds[0], zero + (unit + low) * chunk), tl.minimum(bounds[1], zero + (unit + high) * chunk)


@triton.jit
def _bounds(own, given, how: tl.constexpr, r: tl.constexpr, of_keys: tl.constexpr):
    """The first key that each query may see in a region, and the end of that range; or, for keys, the range of rows
    that see each.
    """
    area: tl.constexpr = how.areas[r]
    begin, length = (_number(given.start), given.q_length) if of_keys else (0, given.kv_length)
    bounds = own.slot * 0 + begin, own.slot * 0 + begin + length
    low, high = 0 if how.causal else -FAR, FAR if how.window is None else how.window
    bounds = _within(bounds, 0, own.slot, low, high, 1, of_keys)
    if how.in_order:
        zero, unit = own.slot - own.position, _units(own.position, area.chunk)
        first, stop = _within(bounds, zero, unit, area.start, area.stop, area.chunk, of_keys)
        if area.keys_below is not None:
            below = own.position < area.keys_below
            stop = tl.where(below, stop, first) if of_keys else tl.minimum(stop, zero + area.keys_below)
        bounds = first, stop
    return ((bounds[0] - begin) * how.group, (bounds[1] - begin) * how.group) if of_keys else bounds


@triton.jit
def _run(edge: tl.constexpr, bounds, low, high, size: tl.constexpr, given, how: tl.constexpr):
    """Start and end of a loop over blocks of `size` between `low` and `high`, and the place and length of the gap that
    it leaves out. It covers the blocks within all bounds, or at the `edge` the others that overlap some.
    """
    start = tl.maximum(tl.min(bounds[0]) // size * size, low)
    end = tl.maximum(tl.minimum(tl.cdiv(tl.max(bounds[1]), size) * size, high), start)
    inner_start, inner_end = start, start
    if how.in_order and given.groups is None:
        inner_start = tl.minimum(tl.maximum(tl.cdiv(tl.max(bounds[0]), size) * size, start), end)
        inner_end = tl.maximum(tl.minimum(tl.min(bounds[1]) // size * size, end), inner_start)
    inner = inner_end - inner_start
    return (start, end - inner, inner_start, inner) if edge else (inner_start, inner_end, inner_end, 0)


@triton.jit
def _seen(queries, keys, how: tl.constexpr, r: tl.constexpr, grouped: tl.constexpr):
    """A boolean in the shape of the scores, true where a query sees a key in a region."""
    area: tl.constexpr = how.areas[r]
    distance = _units(queries.position, area.chunk) - _units(keys.position, area.chunk)
    seen = keys.inside & (distance >= area.start) & (distance < area.stop)
    if area.keys_below is not None:
        seen &= keys.position < area.keys_below
    if how.causal:
        seen &= keys.slot <= queries.slot
    if how.window is not None:
        seen &= queries.slot - keys.slot < how.window
    if grouped:
        # a pad sees every token that it may, see `Visibility`
        seen &= ((queries.group == keys.group) | (queries.group < 0)) & (keys.group >= 0)
    return seen


@triton.jit
def _in_table(queries, keys, given):
    """The index of each pair in the table of biases, arbitrary for hidden pairs."""
    distance = queries.position - keys.position - given.first
    last = given.kv_length - 1 - given.first
    return queries.head * given.bias.head + tl.minimum(tl.maximum(distance, 0), last)


@triton.jit
def _scores(products, queries, keys, given, how: tl.constexpr, r: tl.constexpr, masked: tl.constexpr):
    """Scores in units of ln 2, -inf where hidden, and their derivative by the scaled products, in the shape of the
    products; `queries` and `keys` are spread over its axes.
    """
    scores, slope = products * given.scale, 1.0
    if how.softcap is not None:
        bent = 1 - 2 / (1 + tl.exp2(scores * (2 / how.softcap * LOG2_E)))  # tanh
        scores, slope = bent * how.softcap, 1 - bent * bent
    if how.bias == "slope":
        scores += _numbers(given.bias, queries.head, queries.slot) * (queries.position - keys.position)
    elif how.bias == "table":
        scores += tl.load(given.bias.data + _in_table(queries, keys, given))
    if given.sums is not None:
        at_queries = _numbers(given.sums, queries.head, queries.slot)
        scores += (at_queries - _numbers(given.sums, queries.head, keys.slot)).to(tl.float32)
    scores *= LOG2_E
    if masked:
        scores = tl.where(_seen(queries, keys, how, r, given.groups is not None), scores, NONE)
    return scores, slope


@triton.jit
def forward(given, out, lse, splits, span, how: tl.constexpr):
    """Compute output and log-sum-exp of a block of rows over the `span` keys of one of the `splits`.

    Shape:
        out `(splits batch, heads, q_len, value_dim)`, lse `(splits batch, heads, q_len)`, float32.
    """
    # the last rows of causal attention take longest, so they start first
    block, split = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits, tl.program_id(0) % splits
    queries = _queries(block, given, how)
    down = _spread(queries, 1)
    mean, total = tl.full((how.rows, padded(how.value_dim)), 0.0, tl.float32), tl.full((how.rows,), 0.0, tl.float32)
    most = total + NONE
    if given.sinks is not None:
        sink = tl.load(given.sinks + queries.head).to(tl.float32) * LOG2_E
        most, total = tl.where(split == 0, sink, most), tl.where(split == 0, 1.0, total)
    for r in tl.static_range(len(how.areas)):
        q = _states(given.q[r], queries, how.head_dim)
        bounds = _bounds(queries, given, how, r, False)
        for edge in tl.static_range(2):
            first, stop, gap_at, gap = _run(edge, bounds, split * span, (split + 1) * span, how.keys, given, how)
            for start in tl.range(first, stop, how.keys):
                keys = _keys(start + tl.where(start < gap_at, 0, gap), given, how)
                k = _states(given.k[r], keys, how.head_dim)
                products = tl.dot(q, tl.trans(k), input_precision=how.products)
                scores, _ = _scores(products, down, _spread(keys, 0), given, how, r, edge)
                largest = tl.maximum(most, tl.max(scores, 1))
                base = tl.where(largest == NONE, 0.0, largest)
                weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(most - base)
                v = _states(given.v, keys, how.value_dim)
                mean = tl.dot(weights.to(v.dtype), v, mean * fade[:, None], input_precision=how.products)
                total, most = total * fade + tl.sum(weights, 1), largest
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    place = split * tl.num_programs(2) + tl.program_id(2)
    _store(out, mean, place, queries, how.value_dim)
    lse = _places(lse, place, queries.head, queries.token)
    tl.store(lse, (most + tl.log2(total)) / LOG2_E, mask=queries.inside)


@triton.jit
def merge(out, lse, parts, part_lse, splits, some: tl.constexpr, how: tl.constexpr):
    """Merge output and log-sum-exp of the `splits` for one query; `some` is the next power of two."""
    token, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place, dims = tl.arange(0, some), tl.arange(0, padded(how.value_dim))
    index, known = tl.minimum(place, splits - 1) * tl.num_programs(2) + batch, dims < how.value_dim
    each = tl.where(place < splits, tl.load(_places(part_lse, index, head, token)), NONE)
    most = tl.max(each, 0)
    weights = tl.exp(each - tl.where(most == NONE, 0.0, most))
    total = tl.sum(weights, 0)
    vectors = tl.load(_places(parts, index, head, token)[:, None] + dims[None, :], mask=known[None, :], other=0.0)
    mean = tl.sum(vectors * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(_places(out, batch, head, token) + dims, mean, mask=known)
    tl.store(_places(lse, batch, head, token), most + tl.log(total))


@triton.jit
def fold(out, lse, part, part_lse, length, block: tl.constexpr, dim: tl.constexpr):
    """Fold another part of the keys into output and log-sum-exp of a block of queries of a head, in one pass."""
    batch, head, tokens = tl.program_id(2), tl.program_id(1), tl.program_id(0) * block + tl.arange(0, block)
    dims, known = tl.arange(0, padded(dim))[None, :], tokens < length
    inside, at = known[:, None] & (dims < dim), _places(lse, batch, head, tokens)
    before = tl.load(at, mask=known, other=0.0)
    more = tl.load(_places(part_lse, batch, head, tokens), mask=known, other=0.0)
    mean = _entries(out, tokens, dims, inside)
    mean += (_entries(part, tokens, dims, inside) - mean) * tl.sigmoid(more - before)[:, None]
    tl.store(_places(out, batch, head, tokens)[:, None] + dims, mean, mask=inside)
    most = tl.maximum(before, more)
    tl.store(at, most + tl.log(tl.exp(before - most) + tl.exp(more - most)), mask=known)


@triton.jit
def _norms(queries, lse):
    """The log-sum-exp of each row in units of ln 2; infinite, so that weights are zero, if there is no row or it sees
    nothing.
    """
    found = _numbers(lse, queries.head, queries.token)
    return tl.where(queries.inside & (found > NONE), found * LOG2_E, float("inf"))


@triton.jit
def gradients(given, out, grad, lse, delta, into, of_v, of_table, of_sums, of_keys: tl.constexpr, how: tl.constexpr):
    """Compute the gradients of a block of rotated queries, or of keys and their values: `into` has a tensor for each
    region.

    Queries come first, since they write `delta`, which keys read. They add to the gradient of a table of biases, in no
    fixed order of programs. Both write their share of the gradient of the running sums, keys with opposite sign: that
    of a query is the rounding of its output, which all earlier tokens would inherit.
    """
    batch = tl.program_id(2)
    if of_keys:
        own, size = _keys(tl.program_id(0) * how.keys, given, how), how.rows
        mine, theirs, of_theirs = given.k, given.q, grad
        of_x = _states(given.v, own, how.value_dim)
        values_total = tl.full(of_x.shape, 0.0, tl.float32)
        heads = tl.arange(0, padded(how.group))[None, :]
        sums_total = tl.full((how.keys, padded(how.group)), 0.0, tl.float32)
    else:
        own, size = _queries(tl.num_programs(0) - 1 - tl.program_id(0), given, how), how.keys
        mine, theirs, of_theirs = given.q, given.k, given.v
        of_x = _states(grad, own, how.value_dim)
        dots = tl.sum(of_x.to(tl.float32) * _states(out, own, how.value_dim).to(tl.float32), 1)
        tl.store(_places(delta, batch, own.head, own.token), dots, mask=own.inside)
        norms, dots = _norms(own, lse)[:, None], dots[:, None]
        sums_total = tl.full((how.rows,), 0.0, tl.float32)
    down = _spread(own, 1)
    for r in tl.static_range(len(how.areas)):
        x = _states(mine[r], own, how.head_dim)
        bounds = _bounds(own, given, how, r, of_keys)
        total = tl.full(x.shape, 0.0, tl.float32)
        for edge in tl.static_range(2):
            first, stop, gap_at, gap = _run(edge, bounds, 0, FAR, size, given, how)
            for start in tl.range(first, stop, size):
                start += tl.where(start < gap_at, 0, gap)
                other = _queries(start // size, given, how) if of_keys else _keys(start, given, how)
                y, of_y = _states(theirs[r], other, how.head_dim), _states(of_theirs, other, how.value_dim)
                products = tl.dot(x, tl.trans(y), input_precision=how.products)
                values = tl.dot(of_x, tl.trans(of_y), input_precision=how.products)
                queries, keys = (_spread(other, 0), down) if of_keys else (down, _spread(other, 0))
                scores, slope = _scores(products, queries, keys, given, how, r, edge)
                if of_keys:
                    norms, dots = _norms(other, lse)[None, :], _numbers(delta, other.head, other.token)[None, :]
                weights = tl.exp2(scores - norms)
                of_scores = weights * (values - dots)
                if of_table is not None:
                    places = of_table + _in_table(queries, keys, given)
                    tl.atomic_add(places, of_scores, mask=of_scores != 0, sem="relaxed")
                if of_keys:
                    values_total = tl.dot(weights.to(of_y.dtype), of_y, values_total, input_precision=how.products)
                if of_sums is not None:
                    if of_keys:
                        of_head = ((other.head % how.group)[:, None] == heads).to(tl.float32)
                        sums_total = tl.dot(of_scores, of_head, sums_total, input_precision=how.products)
                    else:
                        sums_total += tl.sum(of_scores, 1)
                total = tl.dot((of_scores * slope).to(y.dtype), y, total, input_precision=how.products)
        _store(into[r], total * given.scale, batch, own, how.head_dim)
    if of_keys:
        _store(of_v, values_total, batch, own, how.value_dim)
    if of_sums is not None:
        if of_keys:
            places = _places(of_sums, batch, tl.program_id(1) * how.group + heads, own.slot[:, None])
            tl.store(places, sums_total, mask=(heads < how.group) & own.inside[:, None])
        else:
            tl.store(_places(of_sums, batch, own.head, own.token), sums_total, mask=own.inside)
