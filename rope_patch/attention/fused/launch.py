"""The interface of the kernels: inputs of a call, and attention with gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from rope_patch.attention.inputs import AttentionInputs, DistanceBias
from rope_patch.schemes.slots import Region

Table = tuple[torch.Tensor, torch.Tensor]

T = TypeVar("T")

FAR = 2**30
"""Beyond all positions, and far from the end of the range of int32."""


@dataclass(frozen=True)
class Fused:
    """Queries and keys as they arrived, and their rotation in each region.

    The rotation is x cos + x[partner] sin with full-width tables. The sine carries the sign; a dimension without
    rotation has cosine 1 and sine 0.

    Attributes:
        queries, keys: `(batch, heads or kv_heads, length, head_dim)`. A query scale is folded into the queries, or into
            their tables.
        regions: disjoint.
        query_tables, key_tables: cos and sin for each region, in shapes that expand to that of the queries or keys;
            None without rotation.
        partner: integer, `(head_dim,)`, its own inverse; None without rotation.
        in_order: whether every visible key has the same distance from its query in positions and in slots. If False,
            every region scans all keys.
        window: in slots, of sliding-window attention; infinite without a window.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    regions: tuple[Region, ...]
    query_tables: tuple[Table | None, ...]
    key_tables: tuple[Table | None, ...]
    partner: torch.Tensor | None = None
    in_order: bool = True
    window: float = math.inf


class Blocks(NamedTuple):
    """Rows and keys of a block, warps and pipeline stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """For the launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


PROGRAMS = 264
"""Programs that keep a GPU busy: with fewer, keys are split among more of them."""


def blocks_for(dtype: torch.dtype, width: int, rows: int, regions: int, arch: str) -> tuple[Blocks, Blocks, Blocks]:
    """Blocks for forward and the gradients of queries and of keys, chosen by the registers and the shared memory that
    they need as compiled (`benchmarks.registers`), not by speed.

    Args:
        dtype: of the states.
        width: of their vectors, the larger of keys and values.
        rows: of a key head: queries times the query heads that share it.
        regions: their number.
        arch: such as "sm_90".
    """
    half = dtype != torch.float32
    if width > 128:
        chosen = [(64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)] if half else [(32, 32, 8, 1)] + 2 * [(16, 32, 8, 1)]
    elif not half:
        chosen = [(64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)]
    elif arch in ("sm_90", "sm_100", "sm_103"):
        keys = 128 if regions <= 2 else 64
        chosen = [(128, 64, 8, 3 if arch == "sm_90" else 2), (64, 32, 8, 2), (32, keys, 8, 2)]
    else:
        chosen = [(64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 4, 2)]
    forward, of_queries, of_keys = (Blocks(*each) for each in chosen)
    if (few := power_of_two(rows)) < forward.rows:  # in decoding
        forward = Blocks(few, 64 if half and width <= 128 else 32, 8, min(forward.stages, 2))
    return forward, of_queries, of_keys


def _default_blocks(call: Fused, value_dim: int) -> tuple[Blocks, Blocks, Blocks]:
    query, arch = call.queries, ""
    if query.is_cuda:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(query.device))
    rows, width = query.shape[1] // call.keys.shape[1] * query.shape[2], max(query.shape[-1], value_dim)
    return blocks_for(query.dtype, power_of_two(width), rows, len(call.regions), arch)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least` and at least 16, the minimum for tensor cores."""
    return max(16, 1 << (least - 1).bit_length())


def attend(inputs: AttentionInputs, call: Fused, blocks: tuple[Blocks, Blocks, Blocks] | None = None) -> torch.Tensor:
    """Output of `oracle.attend` for a call that `applies`, `(batch, heads, q_len, value_dim)`.

    Args:
        inputs: their branches are ignored.
        call: queries, keys, and their rotation.
        blocks: for forward, and for the gradients of queries and of keys; default `blocks_for` the device.
    """
    blocks = blocks or _default_blocks(call, inputs.value.shape[-1])
    bias, values = inputs.bias, None
    if bias is not None:
        first = 0 if inputs.causal or inputs.q_length == 1 else 1 - inputs.kv_length
        last = inputs.q_length if first < 0 else inputs.kv_length
        values = bias.values(0, 2).diff()[:, 0] if is_slope(inputs, bias) else bias.values(first, last).contiguous()
    states = (_dense(x) for x in (call.queries, call.keys, inputs.value))
    out: torch.Tensor = _Attention.apply(inputs, call, blocks, *states, values, inputs.sinks, inputs.running_bias)
    return out


def is_slope(inputs: AttentionInputs, bias: DistanceBias) -> bool:
    """Whether a bias is one number per head. The gradient of a learned bias needs its table."""
    return bias.linear and (inputs.causal or inputs.q_length == 1) and not bias.learned


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: AttentionInputs, call: Fused, blocks: tuple[Blocks, ...], *tensors: Any) -> Any:
        from rope_patch.attention.fused import triton_kernels

        query, _, value = tensors[:3]
        (batch, heads, length, _), (kv_heads, kv_length, value_dim) = query.shape, value.shape[1:]
        rows, keys = blocks[0].rows, blocks[0].keys
        row_blocks = -(-length * (heads // kv_heads) // rows)
        key_blocks = -(-kv_length // keys)
        splits = max(1, min(PROGRAMS // (row_blocks * kv_heads * batch), key_blocks // 2))
        span = FAR if splits == 1 else -(-key_blocks // splits) * keys

        def results(*parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            # the layout that the model needs next
            lse = torch.empty(*parts, batch, heads, length, dtype=torch.float32, device=value.device)
            out = torch.empty(*parts, batch, length, heads, value_dim, dtype=dtype, device=value.device)
            return out.transpose(-2, -3), lse

        out, lse = results(dtype=value.dtype)
        parts, part_lse = (out, lse) if splits == 1 else results(splits, dtype=torch.float32)
        with torch.cuda.device_of(value):
            first = 0 if any(ctx.needs_input_grad) else _first_key(inputs, call)
            given, how = described(inputs, call, blocks[0], tensors, first=first)
            places = _states(parts.flatten(0, -4)), _numbers(part_lse.flatten(0, -3))
            triton_kernels.forward[row_blocks * splits, kv_heads, batch](
                given, *places, splits, span, how, **blocks[0].options
            )
            if splits > 1:
                some = 1 << (splits - 1).bit_length()
                triton_kernels.merge[length, heads, batch](_states(out), _numbers(lse), *places, splits, some, how)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.inputs, ctx.call, ctx.blocks = inputs, call, blocks[1:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        from rope_patch.attention.fused import triton_kernels

        if torch.is_grad_enabled():  # `once_differentiable` overlooks what depends on the inputs alone
            raise RuntimeError(
                "create_graph=True: the fused kernel has no second derivatives; patch with attention='chunked'"
            )
        *tensors, out, lse = ctx.saved_tensors
        query, key, value, values, sinks, sums = tensors
        of_bias, of_sinks, of_sums = (
            tensor is not None and wanted for tensor, wanted in zip(tensors[3:], ctx.needs_input_grad[6:], strict=True)
        )
        inputs, call, (by_query, by_key) = ctx.inputs, ctx.call, ctx.blocks
        (batch, kv_heads, kv_length, _), length = key.shape, query.shape[2]
        grad, delta, grad_v = _dense(grad), torch.empty_like(lse), torch.empty_like(value)
        grad_values = torch.zeros_like(values) if of_bias else None
        at_queries = torch.empty_like(lse) if of_sums else None
        at_keys = lse.new_empty(*lse.shape[:2], kv_length) if of_sums else None
        with torch.cuda.device_of(value):
            given, how = described(inputs, call, by_query, tensors, (of_bias, of_sums))
            shared = _states(grad), _numbers(lse), _numbers(delta)
            grads_q, grads_k = ([torch.empty_like(x) for _ in given.q] for x in (query, key))
            triton_kernels.query_gradients[-(-length * how.group // by_query.rows), kv_heads, batch](
                *(given, _states(out), *shared, tuple(map(_states, grads_q)), grad_values, _numbers(at_queries), how),
                **by_query.options,
            )
            triton_kernels.key_gradients[-(-kv_length // by_key.keys), kv_heads, batch](
                *(given, *shared, tuple(map(_states, grads_k)), _states(grad_v), _numbers(at_keys)),
                *(power_of_two(how.group), how._replace(rows=by_key.rows, keys=by_key.keys)),
                **by_key.options,
            )
            grad_q = _rotated_back(grads_q, _used(inputs, call, call.query_tables), call.partner)
            grad_k = _rotated_back(grads_k, _used(inputs, call, call.key_tables), call.partner)
        grad_sinks = grad_sums = None
        if of_sinks:
            grad_sinks = -((sinks[:, None] - lse).exp() * delta).sum(dim=(0, 2)).to(sinks.dtype)
        if at_queries is not None and at_keys is not None:
            slots = torch.arange(length, device=lse.device) + inputs.query_start
            grad_sums = (-at_keys.to(sums.dtype)).index_add(-1, slots, at_queries.to(sums.dtype))
            grad_sums = grad_sums.sum_to_size(sums.shape)
        return (None, None, None, grad_q, grad_k, grad_v, grad_values, grad_sinks, grad_sums)


def described(
    inputs: AttentionInputs,
    call: Fused,
    blocks: Blocks,
    tensors: Sequence[Any],
    gradients: tuple[bool, bool] = (False, False),
    first: int | torch.Tensor = 0,
) -> tuple[Any, Any]:
    """The inputs of the kernels, a `Given`, with queries and keys rotated, and their compile-time constants, a `How`.

    Args:
        inputs, call: as for `attend`.
        blocks: of the kernel that is next.
        tensors: queries, keys and values, `(batch, heads or kv_heads, length, dim)`; bias, sinks and running sums.
        gradients: whether that of the bias and that of the sums are wanted.
        first: slot of the first key that is read.
    """
    from rope_patch.attention.fused.triton_kernels import Given, How

    query, key, value, values, sinks, sums = tensors
    kv_length, start, groups = key.shape[2], inputs.query_start, inputs.groups
    if inputs.mask is not None:  # of one query
        groups = torch.where(inputs.mask[:, 0, 0], 0, -1)
    in_table = values is not None and values.ndim == 2
    given = Given(
        q=_rotated(query, _used(inputs, call, call.query_tables), call.partner),
        k=_rotated(key, _used(inputs, call, call.key_tables), call.partner, first),
        v=_states(value),
        m=_numbers(inputs.query_positions),
        n=_numbers(inputs.key_positions),
        groups=_numbers(groups),
        start=start,
        q_length=query.shape[2],
        kv_length=kv_length,
        scale=inputs.scaling,
        bias=None if values is None else _numbers(values[None] if in_table else values[None, :, None]),
        first=1 - kv_length if in_table and values.shape[1] > kv_length else 0,
        distances=values.shape[1] if in_table else 0,
        sums=_numbers(sums),
        sinks=sinks,
    )
    how = How(
        areas=tuple(map(_area, _used(inputs, call, call.regions))),
        group=query.shape[1] // key.shape[1],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        width=power_of_two(query.shape[-1]),
        value_width=power_of_two(value.shape[-1]),
        rows=blocks.rows,
        keys=blocks.keys,
        causal=inputs.causal,
        in_order=call.in_order,
        start_in_memory=isinstance(start, torch.Tensor),
        window=None if call.window == math.inf else int(call.window),
        softcap=inputs.softcap,
        bias=None if values is None else "table" if in_table else "slope",
        bias_gradient=gradients[0],
        sums_gradient=gradients[1],
        products="ieee" if torch.version.hip else "tf32x3",  # three products are as exact as one without tensor cores
    )
    return given, how


def _used(inputs: AttentionInputs, call: Fused, of_regions: tuple[T, ...]) -> tuple[T, ...]:
    """What belongs to the regions that have pairs."""
    pairs = zip(call.regions, of_regions, strict=True)
    return tuple(each for region, each in pairs if region.stop > 0 or not inputs.causal)


def _first_key(inputs: AttentionInputs, call: Fused) -> int | torch.Tensor:
    """The first slot whose key is scored in a region that rotates keys."""
    pairs = zip(call.regions, call.key_tables, strict=True)
    reach = max((region.stop * region.chunk for region, table in pairs if table is not None), default=0)
    return inputs.query_start - int(reach) if call.in_order and reach < FAR else 0


def _rotated(
    x: torch.Tensor, tables: Sequence[Table | None], partner: torch.Tensor | None, first: int | torch.Tensor = 0
) -> tuple[Any, ...]:
    """States rotated by each of the tables, from the slot `first` on."""
    distinct = {id(table): table for table in tables if table is not None}
    rotated = {id(None): x, **{name: torch.empty_like(x) for name in distinct}}
    if distinct:
        _rotate([x] * len(distinct), [rotated[name] for name in distinct], list(distinct.values()), partner, first)
    return tuple(_states(rotated[id(table)]) for table in tables)


def _rotated_back(
    grads: list[torch.Tensor], tables: Sequence[Table | None], partner: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of states from those of `_rotated`."""
    if len(grads) == 1 and tables[0] is None:
        return grads[0]
    out = torch.empty_like(grads[0])
    _rotate(grads, [out], tables, partner, back=True)
    return out


def _rotate(
    states: list[torch.Tensor],
    rotated: list[torch.Tensor],
    tables: Sequence[Table | None],
    partner: torch.Tensor | None,
    first: int | torch.Tensor = 0,
    back: bool = False,
) -> None:
    from rope_patch.attention.fused import triton_kernels

    batch, heads, length, dim = states[0].shape
    by = tuple(table and tuple(_states(_dense(x).expand_as(states[0])) for x in table) for table in tables)
    places = tuple(map(_states, states)), tuple(map(_states, rotated)), by, partner, first, length
    triton_kernels.rotate[-(-length // TOKENS), heads, batch](*places, back, TOKENS, dim, power_of_two(dim))


TOKENS = 32
"""In a block of a rotation."""


def _area(region: Region) -> Any:
    from rope_patch.attention.fused.triton_kernels import Area

    far = FAR // region.chunk
    start, stop = (int(min(max(bound, -far), far)) for bound in (region.start, region.stop))
    return Area(start, stop, region.chunk, None if region.keys_below == math.inf else int(region.keys_below))


def _states(x: torch.Tensor) -> Any:
    """A tensor `(batch, heads, length, dim)` as the kernels expect it."""
    from rope_patch.attention.fused.triton_kernels import States

    return States(x, *x.stride()[:3])


def _numbers(x: torch.Tensor | None) -> Any:
    """A number for each token, `(batch or 1, length)` or `(batch or 1, heads, length or 1)`."""
    from rope_patch.attention.fused.triton_kernels import States

    if x is None:
        return None
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    batch, head, token = (strides[0], 0, strides[1]) if x.ndim == 2 else strides
    return States(x, batch, head, token)
