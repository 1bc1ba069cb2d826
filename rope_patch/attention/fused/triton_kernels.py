"""The kernels: forward, the two halves of backward, and the merge of split keys. Imported only if Triton is installed.

A program handles one row of the batch (axis 2 of the grid) and one key head (axis 1), on a block of rows. The query
heads that share keys are rows of one program, so keys are read once for all of them: row r is token r // group of the
query head r % group of its key head. For each region the program rotates its queries, then loops over the blocks of
keys within the region's bounds: without a mask if every row sees the whole block, with one at the edges. Each pair is
in one region, so all regions share the running softmax.

Scores are in units of ln 2, since the hardware computes 2^x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))
PRODUCTS = tl.constexpr("tf32x3")  # float32 as three tensor-core products, as exact as one without tensor cores
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
        m, n, groups: positions of queries and keys, and groups of keys, the same for all heads.
        start: slot of the first query, as a number or a pointer.
        tables: for each region cos and sin of its queries, and of its keys; None without rotation.
        partner: the dimension that each dimension is paired with.
        bias: slopes by head, or a table by head and distance, with `distances` entries from `first`.
        sums, sinks: see `AttentionInputs`.
    """

    q: States
    k: States
    v: States
    m: States
    n: States
    groups: States | None
    start: Any
    q_length: int
    kv_length: int
    scale: float
    tables: tuple[Any, ...]
    partner: Any
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
        stages: pipeline stages of each region.
        in_order: whether distance is a difference of slots.
        bias: "slope", "table" or None.
        bias_gradient, sums_gradient: whether they are needed.
    """

    areas: tuple[Area, ...]
    group: int
    head_dim: int
    value_dim: int
    width: int
    value_width: int
    rows: int
    keys: int
    stages: tuple[int, ...]
    causal: bool
    in_order: bool
    start_in_memory: bool
    window: int | None
    softcap: float | None
    bias: str | None
    bias_gradient: bool
    sums_gradient: bool


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
def _store(x, value, batch, heads, tokens, inside, dim: tl.constexpr, width: tl.constexpr):
    dims = tl.arange(0, width)
    places = _places(x, batch, heads, tokens)[:, None] + dims[None, :]
    tl.store(places, value, mask=inside[:, None] & (dims < dim)[None, :])


@triton.jit
def _rotated(x, heads, tokens, given, how: tl.constexpr, r: tl.constexpr, side: tl.constexpr, back: tl.constexpr):
    """R x, or its transpose: x cos + x[partner] sin, with the sign in the sine; x itself without rotation."""
    if given.tables[r][side] is not None:
        dims, batch = tl.arange(0, how.width), tl.program_id(2)
        partner = tl.load(given.partner + dims, mask=dims < how.head_dim, other=0).to(tl.int32)
        partner = tl.broadcast_to(partner[None, :], x.shape)
        cos = _vectors(given.tables[r][side][0], batch, heads, tokens, how.head_dim, how.width).to(tl.float32)
        sin = _vectors(given.tables[r][side][1], batch, heads, tokens, how.head_dim, how.width).to(tl.float32)
        raw = x.to(tl.float32)
        swapped = tl.gather(raw * sin, partner, 1) if back else tl.gather(raw, partner, 1) * sin
        x = (raw * cos + swapped).to(x.dtype)
    return x


@triton.jit
def _start(given, how: tl.constexpr):
    return tl.load(given.start).to(tl.int32) if how.start_in_memory else given.start


@triton.jit
def _queries(block, given, how: tl.constexpr):
    """For a block of rows: which rows exist, and the token, head, slot, position and group of each. Rows beyond the
    last repeat the last.
    """
    count = given.q_length * how.group
    rows = block * how.rows + tl.arange(0, how.rows)
    inside, rows = rows < count, tl.minimum(rows, count - 1)
    token, head = rows // how.group, tl.program_id(1) * how.group + rows % how.group
    slot = token + _start(given, how)
    group = slot if given.groups is None else _numbers(given.groups, head, slot)
    return inside, token, head, slot, _numbers(given.m, head, token).to(tl.int32), group


@triton.jit
def _keys(first, given, how: tl.constexpr):
    """For a block of keys: which keys exist, and the head, slot, position and group of each."""
    slot = first + tl.arange(0, how.keys)
    inside, slot = slot < given.kv_length, tl.minimum(slot, given.kv_length - 1)
    head = tl.program_id(1)
    group = slot if given.groups is None else _numbers(given.groups, head, slot)
    return inside, head, slot, _numbers(given.n, head, slot).to(tl.int32), group


@triton.jit
def _rotated_queries(queries, given, how: tl.constexpr, r: tl.constexpr):
    _, token, head, _, _, _ = queries
    q = _vectors(given.q, tl.program_id(2), head, token, how.head_dim, how.width)
    return _rotated(q, head, token, given, how, r, 0, False)


@triton.jit
def _rotated_keys(keys, given, how: tl.constexpr, r: tl.constexpr):
    _, head, slot, _, _ = keys
    k = _vectors(given.k, tl.program_id(2), head, slot, how.head_dim, how.width)
    return _rotated(k, head, slot, given, how, r, 1, False)


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
    _, _, _, slot, m, _ = queries
    first, stop = slot * 0, slot * 0 + given.kv_length
    if how.causal:
        stop = tl.minimum(stop, slot + 1)
    if how.window is not None:
        first = tl.maximum(first, slot - how.window + 1)
    if how.in_order:
        unit, zero = _units(m, area.chunk), slot - m
        first = tl.maximum(first, zero + (unit - area.stop + 1) * area.chunk)
        stop = tl.minimum(stop, zero + (unit - area.start + 1) * area.chunk)
        if area.keys_below is not None:
            stop = tl.minimum(stop, zero + area.keys_below)
    return first, stop


@triton.jit
def _rows_of(keys, given, how: tl.constexpr, r: tl.constexpr):
    """The first row that may see each key in a region, and the end of its range."""
    area: tl.constexpr = how.areas[r]
    _, _, slot, n, _ = keys
    begin = _start(given, how)
    first, stop = slot * 0 + begin, slot * 0 + begin + given.q_length
    if how.causal:
        first = tl.maximum(first, slot)
    if how.window is not None:
        stop = tl.minimum(stop, slot + how.window)
    if how.in_order:
        unit, zero = _units(n, area.chunk), slot - n
        first = tl.maximum(first, zero + (unit + area.start) * area.chunk)
        stop = tl.minimum(stop, zero + (unit + area.stop) * area.chunk)
        if area.keys_below is not None:
            stop = tl.where(n < area.keys_below, stop, first)
    return (first - begin) * how.group, (stop - begin) * how.group


@triton.jit
def _blocks(bounds, low, high, size: tl.constexpr, given, how: tl.constexpr):
    """Blocks of `size` between `low` and `high` that overlap some bounds: the start of the first one, start and end of
    those within all bounds, and the number of the others.
    """
    first, stop = bounds
    start = tl.maximum(tl.min(first) // size * size, low)
    end = tl.maximum(tl.minimum(tl.cdiv(tl.max(stop), size) * size, high), start)
    whole_start, whole_end = start, start
    if how.in_order and given.groups is None:
        inner_start = tl.maximum(tl.cdiv(tl.max(first), size) * size, start)
        inner_end = tl.minimum(tl.min(stop) // size * size, end)
        whole_start = tl.where(inner_start < inner_end, inner_start, start)
        whole_end = tl.where(inner_start < inner_end, inner_end, start)
    return start, whole_start, whole_end, (end - start - (whole_end - whole_start)) // size


@triton.jit
def _edge(index, blocks, size: tl.constexpr):
    """The start of a block that is not within all bounds."""
    start, whole_start, whole_end, _ = blocks
    place = start + index * size
    return place + tl.where(place >= whole_start, whole_end - whole_start, 0)


@triton.jit
def _seen(queries, keys, how: tl.constexpr, r: tl.constexpr, grouped: tl.constexpr):
    """Which keys each query sees in a region, `(rows, keys)`."""
    area: tl.constexpr = how.areas[r]
    _, _, _, slot_m, m, group_m = queries
    inside, _, slot_n, n, group_n = keys
    distance = _units(m, area.chunk)[:, None] - _units(n, area.chunk)[None, :]
    seen = inside[None, :] & (distance >= area.start) & (distance < area.stop)
    if area.keys_below is not None:
        seen &= (n < area.keys_below)[None, :]
    if how.causal:
        seen &= slot_n[None, :] <= slot_m[:, None]
    if how.window is not None:
        seen &= slot_m[:, None] - slot_n[None, :] < how.window
    if grouped:
        # a pad sees every token that it may, see `AttentionInputs.visible`
        seen &= ((group_m[:, None] == group_n[None, :]) | (group_m < 0)[:, None]) & (group_n >= 0)[None, :]
    return seen


@triton.jit
def _in_table(queries, keys, given):
    """The index of each pair in the table of biases, arbitrary for hidden pairs."""
    distance = queries[4][:, None] - keys[3][None, :] - given.first
    return queries[2][:, None] * given.bias.head + tl.minimum(tl.maximum(distance, 0), given.distances - 1)


@triton.jit
def _scores(q, k, queries, keys, given, how: tl.constexpr, r: tl.constexpr, masked: tl.constexpr):
    """Scores in units of ln 2, -inf where hidden, and their derivative by the scaled products; `(rows, keys)`."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRODUCTS) * given.scale
    slope = 1.0
    if how.softcap is not None:
        bent = 1 - 2 / (1 + tl.exp2(scores * (2 / how.softcap * LOG2_E)))  # tanh
        scores, slope = bent * how.softcap, 1 - bent * bent
    _, _, head, slot, m, _ = queries
    if how.bias == "slope":
        scores += _numbers(given.bias, head, slot)[:, None] * (m[:, None] - keys[3][None, :])
    elif how.bias == "table":
        scores += tl.load(given.bias.data + _in_table(queries, keys, given))
    if given.sums is not None:
        of_keys = _places(given.sums, tl.program_id(2), head, slot * 0)[:, None] + keys[2][None, :] * given.sums.token
        scores += (_numbers(given.sums, head, slot)[:, None] - tl.load(of_keys)).to(tl.float32)
    scores *= LOG2_E
    if masked:
        scores = tl.where(_seen(queries, keys, how, r, given.groups is not None), scores, NONE)
    return scores, slope


@triton.jit
def _softmax_step(state, q, first, queries, given, how: tl.constexpr, r: tl.constexpr, masked: tl.constexpr):
    """Output, sum of weights and largest score of each row, after another block of keys."""
    out, total, most = state
    keys = _keys(first, given, how)
    scores, _ = _scores(q, _rotated_keys(keys, given, how, r), queries, keys, given, how, r, masked)
    largest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(largest == NONE, 0.0, largest)
    weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(most - base)
    v = _vectors(given.v, tl.program_id(2), keys[1], keys[2], how.value_dim, how.value_width)
    out = tl.dot(weights.to(v.dtype), v, out * fade[:, None], input_precision=PRODUCTS)
    return out, total * fade + tl.sum(weights, 1), largest


@triton.jit
def forward(given, out, lse, splits, span, how: tl.constexpr):
    """Output and log-sum-exp of a block of rows over the `span` keys of one of the `splits`.

    Shape:
        out `(splits batch, heads, q_len, value_dim)`, lse `(splits batch, heads, q_len)`, float32.
    """
    # the last rows of causal attention take longest, so they start first
    block, split = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits, tl.program_id(0) % splits
    queries = _queries(block, given, how)
    inside, token, head, _, _, _ = queries
    total = tl.full((how.rows,), 0.0, tl.float32)
    most = total + NONE
    if given.sinks is not None:
        sink = tl.load(given.sinks + head).to(tl.float32) * LOG2_E
        most, total = tl.where(split == 0, sink, most), tl.where(split == 0, 1.0, total)
    state = tl.full((how.rows, how.value_width), 0.0, tl.float32), total, most
    for r in tl.static_range(len(how.areas)):
        q = _rotated_queries(queries, given, how, r)
        blocks = _blocks(_keys_of(queries, given, how, r), split * span, (split + 1) * span, how.keys, given, how)
        for index in tl.range(blocks[3], num_stages=how.stages[r]):
            state = _softmax_step(state, q, _edge(index, blocks, how.keys), queries, given, how, r, True)
        for first in tl.range(blocks[1], blocks[2], how.keys, num_stages=how.stages[r]):
            state = _softmax_step(state, q, first, queries, given, how, r, False)
    mean, total, most = state
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    place = split * tl.num_programs(2) + tl.program_id(2)
    _store(out, mean, place, head, token, inside, how.value_dim, how.value_width)
    tl.store(_places(lse, place, head, token), (most + tl.log2(total)) / LOG2_E, mask=inside)


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
def _score_gradients(
    q, k, v, grad, norm, dots, queries, keys, given, how: tl.constexpr, r: tl.constexpr, masked: tl.constexpr
):
    """Weights, gradients of the scores, and those of the scaled products."""
    scores, slope = _scores(q, k, queries, keys, given, how, r, masked)
    weights = tl.exp2(scores - (norm * LOG2_E)[:, None])
    inner = weights * (tl.dot(grad, tl.trans(v), input_precision=PRODUCTS) - dots[:, None])
    return weights, inner, inner * slope


@triton.jit
def _norms(queries, lse):
    """The log-sum-exp of each row; infinite, for zero weights, if the row does not exist or sees nothing."""
    inside, token, head, _, _, _ = queries
    found = _numbers(lse, head, token)
    return tl.where(inside & (found > NONE), found, float("inf"))


@triton.jit
def _query_step(
    state, q, rest, first, queries, given, table_gradient, how: tl.constexpr, r: tl.constexpr, masked: tl.constexpr
):
    grad_q, of_sums = state
    keys = _keys(first, given, how)
    k = _rotated_keys(keys, given, how, r)
    v = _vectors(given.v, tl.program_id(2), keys[1], keys[2], how.value_dim, how.value_width)
    _, inner, product = _score_gradients(q, k, v, *rest, queries, keys, given, how, r, masked)
    if how.bias_gradient:
        tl.atomic_add(table_gradient + _in_table(queries, keys, given), inner, mask=inner != 0, sem="relaxed")
    return tl.dot(product.to(k.dtype), k, grad_q, input_precision=PRODUCTS), of_sums + tl.sum(inner, 1)


@triton.jit
def query_gradients(given, out, grad, lse, delta, grad_q, table_gradient, sums_gradient, how: tl.constexpr):
    """Gradients of the queries of a block of rows, and of a table of biases, to which programs add in no fixed order.
    Writes `delta` for `key_gradients`, and the gradients of the running sums at the queries to `sums_gradient`.
    """
    queries = _queries(tl.num_programs(0) - 1 - tl.program_id(0), given, how)
    inside, token, head, _, _, _ = queries
    batch = tl.program_id(2)
    of_out = _vectors(grad, batch, head, token, how.value_dim, how.value_width)
    value = _vectors(out, batch, head, token, how.value_dim, how.value_width)
    dots = tl.sum(of_out.to(tl.float32) * value.to(tl.float32), 1)
    tl.store(_places(delta, batch, head, token), dots, mask=inside)
    rest = of_out, _norms(queries, lse), dots
    total, of_sums = tl.full((how.rows, how.width), 0.0, tl.float32), dots * 0
    for r in tl.static_range(len(how.areas)):
        q = _rotated_queries(queries, given, how, r)
        blocks = _blocks(_keys_of(queries, given, how, r), 0, ANYWHERE, how.keys, given, how)
        state = tl.full((how.rows, how.width), 0.0, tl.float32), of_sums
        for index in tl.range(blocks[3], num_stages=how.stages[r]):
            first = _edge(index, blocks, how.keys)
            state = _query_step(state, q, rest, first, queries, given, table_gradient, how, r, True)
        for first in tl.range(blocks[1], blocks[2], how.keys, num_stages=how.stages[r]):
            state = _query_step(state, q, rest, first, queries, given, table_gradient, how, r, False)
        of_sums = state[1]
        total += _rotated(state[0], head, token, given, how, r, 0, True)
    _store(grad_q, total * given.scale, batch, head, token, inside, how.head_dim, how.width)
    if how.sums_gradient:
        tl.store(_places(sums_gradient, batch, head, token), of_sums, mask=inside)


@triton.jit
def _key_step(
    state, k, v, first, keys, given, grad, lse, delta, how: tl.constexpr, r: tl.constexpr, masked: tl.constexpr
):
    grad_k, grad_v, of_sums = state
    queries = _queries(first // how.rows, given, how)
    _, token, head, _, _, _ = queries
    q = _rotated_queries(queries, given, how, r)
    of_out = _vectors(grad, tl.program_id(2), head, token, how.value_dim, how.value_width)
    norm, dots = _norms(queries, lse), _numbers(delta, head, token)
    weights, inner, product = _score_gradients(q, k, v, of_out, norm, dots, queries, keys, given, how, r, masked)
    grad_v = tl.dot(tl.trans(weights).to(v.dtype), of_out, grad_v, input_precision=PRODUCTS)
    grad_k = tl.dot(tl.trans(product).to(q.dtype), q, grad_k, input_precision=PRODUCTS)
    if how.sums_gradient:
        of_head = tl.arange(0, of_sums.shape[0])[:, None] == (head % how.group)[None, :]
        of_sums = tl.dot(of_head.to(tl.float32), inner, of_sums, input_precision=PRODUCTS)
    return grad_k, grad_v, of_sums


@triton.jit
def key_gradients(given, grad, lse, delta, grad_k, grad_v, sums_gradient, some: tl.constexpr, how: tl.constexpr):
    """Gradients of a block of keys and values. Writes those of the running sums at the keys, with opposite sign, to
    `sums_gradient`. `some` is a power of two, at least 16 and at least the number of query heads per key head.
    """
    keys = _keys(tl.program_id(0) * how.keys, given, how)
    inside, kv_head, slot, _, _ = keys
    batch = tl.program_id(2)
    v = _vectors(given.v, batch, kv_head, slot, how.value_dim, how.value_width)
    total = tl.full((how.keys, how.width), 0.0, tl.float32)
    of_values = tl.full((how.keys, how.value_width), 0.0, tl.float32)
    of_sums = tl.full((some, how.keys), 0.0, tl.float32)
    for r in tl.static_range(len(how.areas)):
        k = _rotated_keys(keys, given, how, r)
        blocks = _blocks(_rows_of(keys, given, how, r), 0, ANYWHERE, how.rows, given, how)
        state = tl.full((how.keys, how.width), 0.0, tl.float32), of_values, of_sums
        for index in tl.range(blocks[3], num_stages=how.stages[r]):
            first = _edge(index, blocks, how.rows)
            state = _key_step(state, k, v, first, keys, given, grad, lse, delta, how, r, True)
        for first in tl.range(blocks[1], blocks[2], how.rows, num_stages=how.stages[r]):
            state = _key_step(state, k, v, first, keys, given, grad, lse, delta, how, r, False)
        of_values, of_sums = state[1], state[2]
        total += _rotated(state[0], kv_head, slot, given, how, r, 1, True)
    _store(grad_k, total * given.scale, batch, kv_head, slot, inside, how.head_dim, how.width)
    _store(grad_v, of_values, batch, kv_head, slot, inside, how.value_dim, how.value_width)
    if how.sums_gradient:
        index = tl.arange(0, some)
        places = _places(sums_gradient, batch, kv_head * how.group + index, index * 0)[:, None] + slot[None, :]
        tl.store(places, of_sums, mask=(index < how.group)[:, None] & inside[None, :])
