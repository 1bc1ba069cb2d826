"""The kernels: rotation, forward, the two halves of backward, and the merge of split keys. Imported only if Triton is
installed.

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

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))
ANYWHERE = tl.constexpr(2**30)


class States(NamedTuple):
    """A tensor whose last dimension is dense, with its strides of batch rows, heads and tokens."""

    data: Any
    batch: int
    head: int
    token: int


class Given(NamedTuple):
    """The inputs of a call.

    Attributes:
        q, k: rotated for each region.
        m, n, groups: positions of queries and keys, and groups of keys, the same for all heads.
        start: slot of the first query, as a number or a pointer.
        bias: slopes by head, or a table by head and distance, with `distances` entries from `first`.
        sums, sinks: see `AttentionInputs`.
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
    distances: int
    sums: States | None
    sinks: Any


class Area(NamedTuple):
    """A `Region` in integers; infinite bounds become numbers beyond all positions."""

    start: int
    stop: int
    chunk: int
    keys_below: int | None


class How(NamedTuple):
    """The compile-time constants of a kernel.

    Attributes:
        group: query heads per key head.
        head_dim, value_dim, width, value_width: of states, and the next power of two.
        rows, keys: of a block.
        in_order: whether distance is a difference of slots.
        bias: "slope", "table" or None.
        bias_gradient, sums_gradient: whether they are needed.
        products: the precision of products of float32, `input_precision` of `tl.dot`.
    """

    areas: tuple[Area, ...]
    group: int
    head_dim: int
    value_dim: int
    width: int
    value_width: int
    rows: int
    keys: int
    causal: bool
    in_order: bool
    start_in_memory: bool
    window: int | None
    softcap: float | None
    bias: str | None
    bias_gradient: bool
    sums_gradient: bool
    products: str


class Tokens(NamedTuple):
    """Of a block of rows or keys: which of them exist, and the token, head, slot, position and group of each. What does
    not exist repeats the last.
    """

    inside: Any
    token: Any
    head: Any
    slot: Any
    position: Any
    group: Any


@triton.jit
def _places(x, batch, heads, tokens):
    return x.data + (batch.to(tl.int64) * x.batch + heads.to(tl.int64) * x.head + tokens.to(tl.int64) * x.token)


@triton.jit
def _numbers(x, heads, tokens):
    return tl.load(_places(x, tl.program_id(2), heads, tokens))


@triton.jit
def _vectors(x, batch, heads, tokens, dim: tl.constexpr, width: tl.constexpr):
    """Vectors of some tokens, `(tokens, width)`, zero beyond `dim`."""
    dims = tl.arange(0, width)
    places = _places(x, batch, heads, tokens)[:, None] + dims[None, :]
    return tl.load(places) if dim == width else tl.load(places, mask=(dims < dim)[None, :], other=0.0)


@triton.jit
def _states(x, tokens, dim: tl.constexpr, width: tl.constexpr):
    return _vectors(x, tl.program_id(2), tokens.head, tokens.token, dim, width)


@triton.jit
def _store(x, value, batch, tokens, dim: tl.constexpr, width: tl.constexpr):
    dims = tl.arange(0, width)
    places = _places(x, batch, tokens.head, tokens.token)[:, None] + dims[None, :]
    tl.store(places, value, mask=tokens.inside[:, None] & (dims < dim)[None, :])


@triton.jit
def _entries(x, tokens, dims, inside):
    """Some dimensions of some tokens of a program's head in float32, `(tokens, dims)`; zero where not `inside`."""
    places = _places(x, tl.program_id(2), tl.program_id(1), tokens)[:, None] + dims
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotate(
    states,
    rotated,
    tables,
    partner,
    first,
    length,
    back: tl.constexpr,
    block: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
):
    """R x = x cos + x[partner] sin of a block of tokens of a head, for each of the `states`, with the sign in the sine.
    `back` multiplies by the transpose and adds up, into the only tensor of `rotated`; a table may be None there. Blocks
    that end before the slot `first`, a number or a pointer, are left out.
    """
    first = tl.load(first) if first.dtype.is_ptr() else first
    if (tl.program_id(0) + 1) * block > first:
        tokens, dims = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, width)[None, :]
        inside, total = (tokens < length)[:, None] & (dims < dim), tl.full((block, width), 0.0, tl.float32)
        for r in tl.static_range(len(tables)):
            turned = _entries(states[r], tokens, dims, inside)
            if tables[r] is not None:
                others = tl.load(partner + dims, mask=dims < dim, other=0)
                sin = _entries(tables[r][1], tokens, others if back else dims, inside)
                turned *= _entries(tables[r][0], tokens, dims, inside)
                turned += _entries(states[r], tokens, others, inside) * sin
            total = total + turned if back else turned
            if r == len(tables) - 1 or not back:
                into = rotated[0 if back else r]
                tl.store(_places(into, tl.program_id(2), tl.program_id(1), tokens)[:, None] + dims, total, mask=inside)


@triton.jit
def _start(given, how: tl.constexpr):
    return tl.load(given.start).to(tl.int32) if how.start_in_memory else given.start


@triton.jit
def _queries(block, given, how: tl.constexpr):
    count = given.q_length * how.group
    rows = block * how.rows + tl.arange(0, how.rows)
    inside, rows = rows < count, tl.minimum(rows, count - 1)
    token, head = rows // how.group, tl.program_id(1) * how.group + rows % how.group
    slot = token + _start(given, how)
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
    """What decides about a pair, with another axis, for a matrix of scores."""
    inside, head, slot = tl.expand_dims(x.inside, axis), tl.expand_dims(x.head, axis), tl.expand_dims(x.slot, axis)
    return Tokens(inside, None, head, slot, tl.expand_dims(x.position, axis), tl.expand_dims(x.group, axis))


@triton.jit
def _units(positions, chunk: tl.constexpr):
    """floor(positions / chunk), also for negative positions."""
    if chunk == 1:
        return positions
    return tl.where(positions < 0, -((chunk - 1 - positions) // chunk), positions // chunk)


@triton.jit
def _keys_of(queries, given, how: tl.constexpr, r: tl.constexpr):
    """The first slot that each query may see in a region, and the end of its range."""
    area: tl.constexpr = how.areas[r]
    slot = queries.slot
    first, stop = slot * 0, slot * 0 + given.kv_length
    if how.causal:
        stop = tl.minimum(stop, slot + 1)
    if how.window is not None:
        first = tl.maximum(first, slot - how.window + 1)
    if how.in_order:
        unit, zero = _units(queries.position, area.chunk), slot - queries.position
        first = tl.maximum(first, zero + (unit - area.stop + 1) * area.chunk)
        stop = tl.minimum(stop, zero + (unit - area.start + 1) * area.chunk)
        if area.keys_below is not None:
            stop = tl.minimum(stop, zero + area.keys_below)
    return first, stop


@triton.jit
def _rows_of(keys, given, how: tl.constexpr, r: tl.constexpr):
    """The first row that may see each key in a region, and the end of its range."""
    area: tl.constexpr = how.areas[r]
    slot, begin = keys.slot, _start(given, how)
    first, stop = slot * 0 + begin, slot * 0 + begin + given.q_length
    if how.causal:
        first = tl.maximum(first, slot)
    if how.window is not None:
        stop = tl.minimum(stop, slot + how.window)
    if how.in_order:
        unit, zero = _units(keys.position, area.chunk), slot - keys.position
        first = tl.maximum(first, zero + (unit + area.start) * area.chunk)
        stop = tl.minimum(stop, zero + (unit + area.stop) * area.chunk)
        if area.keys_below is not None:
            stop = tl.where(keys.position < area.keys_below, stop, first)
    return (first - begin) * how.group, (stop - begin) * how.group


@triton.jit
def _blocks(bounds, low, high, size: tl.constexpr, given, how: tl.constexpr):
    """Blocks of `size` between `low` and `high` that overlap some bounds: the start of the first one, that of the first
    one within all bounds, the number of those, and the number of the others, at the edges.
    """
    first, stop = bounds
    start = tl.maximum(tl.min(first) // size * size, low)
    end = tl.maximum(tl.minimum(tl.cdiv(tl.max(stop), size) * size, high), start)
    inner_start, inner = start, 0
    if how.in_order and given.groups is None:
        inner_start = tl.maximum(tl.cdiv(tl.max(first), size) * size, start)
        inner = tl.maximum(tl.minimum(tl.min(stop) // size * size, end) - inner_start, 0) // size
    return start, inner_start, inner, (end - start) // size - inner


@triton.jit
def _start_of(index, blocks, size: tl.constexpr, edge: tl.constexpr):
    """Where a block begins: one of those at the edges, or of those within all bounds."""
    start, inner_start, inner, _ = blocks
    place = (start if edge else inner_start) + index * size
    return place + tl.where(place >= inner_start, inner * size, 0) if edge else place


@triton.jit
def _seen(queries, keys, how: tl.constexpr, r: tl.constexpr, grouped: tl.constexpr):
    """Which keys each query sees in a region, in the shape of the scores."""
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
        # a pad sees every token that it may, see `AttentionInputs.visible`
        seen &= ((queries.group == keys.group) | (queries.group < 0)) & (keys.group >= 0)
    return seen


@triton.jit
def _in_table(queries, keys, given):
    """The index of each pair in the table of biases, arbitrary for hidden pairs."""
    distance = queries.position - keys.position - given.first
    return queries.head * given.bias.head + tl.minimum(tl.maximum(distance, 0), given.distances - 1)


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
    """Output and log-sum-exp of a block of rows over the `span` keys of one of the `splits`.

    Shape:
        out `(splits batch, heads, q_len, value_dim)`, lse `(splits batch, heads, q_len)`, float32.
    """
    # the last rows of causal attention take longest, so they start first
    block, split = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits, tl.program_id(0) % splits
    queries = _queries(block, given, how)
    down = _spread(queries, 1)
    mean, total = tl.full((how.rows, how.value_width), 0.0, tl.float32), tl.full((how.rows,), 0.0, tl.float32)
    most = total + NONE
    if given.sinks is not None:
        sink = tl.load(given.sinks + queries.head).to(tl.float32) * LOG2_E
        most, total = tl.where(split == 0, sink, most), tl.where(split == 0, 1.0, total)
    for r in tl.static_range(len(how.areas)):
        q = _states(given.q[r], queries, how.head_dim, how.width)
        blocks = _blocks(_keys_of(queries, given, how, r), split * span, (split + 1) * span, how.keys, given, how)
        for edge in tl.static_range(2):
            for index in tl.range(blocks[2 + edge]):
                keys = _keys(_start_of(index, blocks, how.keys, edge), given, how)
                k = _states(given.k[r], keys, how.head_dim, how.width)
                products = tl.dot(q, tl.trans(k), input_precision=how.products)
                scores, _ = _scores(products, down, _spread(keys, 0), given, how, r, edge)
                largest = tl.maximum(most, tl.max(scores, 1))
                base = tl.where(largest == NONE, 0.0, largest)
                weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(most - base)
                v = _states(given.v, keys, how.value_dim, how.value_width)
                mean = tl.dot(weights.to(v.dtype), v, mean * fade[:, None], input_precision=how.products)
                total, most = total * fade + tl.sum(weights, 1), largest
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    place = split * tl.num_programs(2) + tl.program_id(2)
    _store(out, mean, place, queries, how.value_dim, how.value_width)
    lse = _places(lse, place, queries.head, queries.token)
    tl.store(lse, (most + tl.log2(total)) / LOG2_E, mask=queries.inside)


@triton.jit
def merge(out, lse, parts, part_lse, splits, some: tl.constexpr, how: tl.constexpr):
    """Merge output and log-sum-exp of the `splits` for one query; `some` is the next power of two."""
    token, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place, dims = tl.arange(0, some), tl.arange(0, how.value_width)
    index = tl.minimum(place, splits - 1) * tl.num_programs(2) + batch
    each = tl.where(place < splits, tl.load(_places(part_lse, index, head, token)), NONE)
    most = tl.max(each, 0)
    weights = tl.exp(each - tl.where(most == NONE, 0.0, most))
    total = tl.sum(weights, 0)
    mean = tl.sum(_vectors(parts, index, head, token, how.value_dim, how.value_width) * weights[:, None], 0)
    mean = mean / tl.where(total == 0, 1.0, total)
    tl.store(_places(out, batch, head, token) + dims, mean, mask=dims < how.value_dim)
    tl.store(_places(lse, batch, head, token), most + tl.log(total))


@triton.jit
def _norms(queries, lse):
    """The log-sum-exp of each row in units of ln 2; infinite, for no weights, if there is no row or it sees nothing."""
    found = _numbers(lse, queries.head, queries.token)
    return tl.where(queries.inside & (found > NONE), found * LOG2_E, float("inf"))


@triton.jit
def query_gradients(given, out, grad, lse, delta, grad_q, table_gradient, sums_gradient, how: tl.constexpr):
    """Gradients of the rotated queries of a block of rows for each region, and of a table of biases, to which programs
    add in no fixed order. Writes `delta` for `key_gradients`, and the gradients of the running sums at the queries to
    `sums_gradient`.
    """
    queries, batch = _queries(tl.num_programs(0) - 1 - tl.program_id(0), given, how), tl.program_id(2)
    of_out = _states(grad, queries, how.value_dim, how.value_width)
    value = _states(out, queries, how.value_dim, how.value_width)
    dots = tl.sum(of_out.to(tl.float32) * value.to(tl.float32), 1)
    tl.store(_places(delta, batch, queries.head, queries.token), dots, mask=queries.inside)
    down, norm, of_sums = _spread(queries, 1), _norms(queries, lse), dots * 0
    for r in tl.static_range(len(how.areas)):
        q = _states(given.q[r], queries, how.head_dim, how.width)
        blocks = _blocks(_keys_of(queries, given, how, r), 0, ANYWHERE, how.keys, given, how)
        total = tl.full((how.rows, how.width), 0.0, tl.float32)
        for edge in tl.static_range(2):
            for index in tl.range(blocks[2 + edge]):
                keys = _keys(_start_of(index, blocks, how.keys, edge), given, how)
                across = _spread(keys, 0)
                k = _states(given.k[r], keys, how.head_dim, how.width)
                v = _states(given.v, keys, how.value_dim, how.value_width)
                products = tl.dot(q, tl.trans(k), input_precision=how.products)
                values = tl.dot(of_out, tl.trans(v), input_precision=how.products)
                scores, slope = _scores(products, down, across, given, how, r, edge)
                inner = tl.exp2(scores - norm[:, None]) * (values - dots[:, None])
                if how.bias_gradient:
                    places = table_gradient + _in_table(down, across, given)
                    tl.atomic_add(places, inner, mask=inner != 0, sem="relaxed")
                total = tl.dot((inner * slope).to(k.dtype), k, total, input_precision=how.products)
                of_sums += tl.sum(inner, 1)
        _store(grad_q[r], total * given.scale, batch, queries, how.head_dim, how.width)
    if how.sums_gradient:
        tl.store(_places(sums_gradient, batch, queries.head, queries.token), of_sums, mask=queries.inside)


@triton.jit
def key_gradients(given, grad, lse, delta, grad_k, grad_v, sums_gradient, some: tl.constexpr, how: tl.constexpr):
    """Gradients of a block of values, and of rotated keys for each region. Writes those of the running sums at the
    keys, with opposite sign, to `sums_gradient`. `some` is a power of two, at least 16 and at least the number of query
    heads per key head.
    """
    keys, batch = _keys(tl.program_id(0) * how.keys, given, how), tl.program_id(2)
    down, v = _spread(keys, 1), _states(given.v, keys, how.value_dim, how.value_width)
    of_values = tl.full((how.keys, how.value_width), 0.0, tl.float32)
    of_sums, heads = tl.full((how.keys, some), 0.0, tl.float32), tl.arange(0, some)[None, :]
    for r in tl.static_range(len(how.areas)):
        k = _states(given.k[r], keys, how.head_dim, how.width)
        blocks = _blocks(_rows_of(keys, given, how, r), 0, ANYWHERE, how.rows, given, how)
        total = tl.full((how.keys, how.width), 0.0, tl.float32)
        for edge in tl.static_range(2):
            for index in tl.range(blocks[2 + edge]):
                queries = _queries(_start_of(index, blocks, how.rows, edge) // how.rows, given, how)
                q = _states(given.q[r], queries, how.head_dim, how.width)
                of_out = _states(grad, queries, how.value_dim, how.value_width)
                products = tl.dot(k, tl.trans(q), input_precision=how.products)
                values = tl.dot(v, tl.trans(of_out), input_precision=how.products)
                scores, slope = _scores(products, _spread(queries, 0), down, given, how, r, edge)
                weights = tl.exp2(scores - _norms(queries, lse)[None, :])
                inner = weights * (values - _numbers(delta, queries.head, queries.token)[None, :])
                of_values = tl.dot(weights.to(v.dtype), of_out, of_values, input_precision=how.products)
                total = tl.dot((inner * slope).to(q.dtype), q, total, input_precision=how.products)
                if how.sums_gradient:
                    of_head = ((queries.head % how.group)[:, None] == heads).to(tl.float32)
                    of_sums = tl.dot(inner, of_head, of_sums, input_precision=how.products)
        _store(grad_k[r], total * given.scale, batch, keys, how.head_dim, how.width)
    _store(grad_v, of_values, batch, keys, how.value_dim, how.value_width)
    if how.sums_gradient:
        places = _places(sums_gradient, batch, tl.program_id(1) * how.group + heads, keys.slot[:, None])
        tl.store(places, of_sums, mask=(heads < how.group) & keys.inside[:, None])
