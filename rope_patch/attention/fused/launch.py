"""The interface of the kernels: inputs of a call, whether the kernels support it, and attention with gradients."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rope_patch.attention import oracle
from rope_patch.attention.inputs import AttentionInputs, Branch, DistanceBias
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Identity

Table = tuple[torch.Tensor, torch.Tensor]

FAR = 2**30
"""Beyond all positions, and far from the end of the range of int32."""

ROTATED_STAGES = 2
"""Maximum pipeline stages when the loaded states are rotated: tables of cosines and sines also need shared memory."""


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
    """Rows and keys of a block, warps and pipeline stages of a program, and the number of programs that keeps a GPU
    busy: with fewer, keys are split among more programs.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 264


def default_blocks(call: Fused, value_dim: int) -> tuple[Blocks, Blocks]:
    """Blocks for forward and backward that fit the registers and the shared memory of an H100 or H200 (compiled for
    sm_90, speed not measured).
    """
    width = power_of_two(max(call.queries.shape[-1], value_dim))
    rows = call.queries.shape[1] // call.keys.shape[1] * call.queries.shape[2]
    half = call.queries.dtype != torch.float32
    if width <= 128:
        forward, backward = (128, 64, 8, 3) if half else (64, 32, 8, 2), (64, 32, 8, 2) if half else (32, 32, 8, 1)
    else:
        forward, backward = (64, 32, 8, 2) if half else (32, 32, 8, 1), (32, 32, 8, 2) if half else (16, 32, 8, 1)
    few = power_of_two(rows)  # in decoding
    if few < forward[0]:
        forward = (few, forward[1], 4, min(forward[3], 2))
    return Blocks(*forward), Blocks(*backward)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least` and at least 16, the minimum for tensor cores."""
    return max(16, 1 << (least - 1).bit_length())


def applies(inputs: AttentionInputs, call: Fused) -> bool:
    """Whether the kernels support a call, and equalled the oracle when they were tried."""
    queries, value = call.queries, inputs.value
    tables = [x for table in (*call.query_tables, *call.key_tables) if table is not None for x in table]
    one_query = inputs.q_length == 1
    return (
        queries.dtype == call.keys.dtype == value.dtype
        and queries.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and max(queries.shape[-1], value.shape[-1]) <= 256
        and inputs.content is None
        and inputs.dropout == 0.0
        and inputs.key_positions.ndim == 2
        and (inputs.mask is None or (one_query and inputs.mask.dtype == torch.bool and inputs.mask.shape[1] == 1))
        and (inputs.causal or one_query or inputs.q_length == inputs.kv_length)
        and (inputs.bias is None or call.in_order or _is_slope(inputs, inputs.bias))
        and not any(x.requires_grad for x in tables)
        and not torch.compiler.is_compiling()
        and agrees(queries.device, queries.dtype, queries.shape[-1], value.shape[-1])
    )


def attend(inputs: AttentionInputs, call: Fused, blocks: tuple[Blocks, Blocks] | None = None) -> torch.Tensor:
    """Output of `oracle.attend` for a call that `applies`, `(batch, heads, q_len, value_dim)`.

    Args:
        inputs: their branches are ignored.
        call: queries, keys, and their rotation.
        blocks: for forward and backward; default `default_blocks`.
    """
    blocks = blocks or default_blocks(call, inputs.value.shape[-1])
    bias, values = inputs.bias, None
    if bias is not None:
        first = 0 if inputs.causal or inputs.q_length == 1 else 1 - inputs.kv_length
        last = inputs.q_length if first < 0 else inputs.kv_length
        values = bias.values(0, 2).diff()[:, 0] if _is_slope(inputs, bias) else bias.values(first, last).contiguous()
    states = (_dense(x) for x in (call.queries, call.keys, inputs.value))
    out: torch.Tensor = _Attention.apply(inputs, call, blocks, *states, values, inputs.sinks, inputs.running_bias)
    return out


def _is_slope(inputs: AttentionInputs, bias: DistanceBias) -> bool:
    """Whether a bias is one number per head. The gradient of a learned bias needs its table."""
    return bias.linear and (inputs.causal or inputs.q_length == 1) and not bias.learned


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: AttentionInputs, call: Fused, blocks: tuple[Blocks, Blocks], *tensors: Any) -> Any:
        from rope_patch.attention.fused import triton_kernels

        query, _, value = tensors[:3]
        (batch, heads, length, _), (kv_heads, kv_length, value_dim) = query.shape, value.shape[1:]
        given, how = _described(inputs, call, blocks[0], tensors, gradients=())
        rows, keys, warps, stages, programs = blocks[0]
        row_blocks = -(-length * how.group // rows)
        key_blocks = -(-kv_length // keys)
        splits = max(1, min(programs // (row_blocks * kv_heads * batch), key_blocks // 2))
        span = FAR if splits == 1 else -(-key_blocks // splits) * keys

        def results(*parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            # the layout that the model needs next
            lse = torch.empty(*parts, batch, heads, length, dtype=torch.float32, device=value.device)
            out = torch.empty(*parts, batch, length, heads, value_dim, dtype=dtype, device=value.device)
            return out.transpose(-2, -3), lse

        out, lse = results(dtype=value.dtype)
        parts, part_lse = (out, lse) if splits == 1 else results(splits, dtype=torch.float32)
        with torch.cuda.device_of(value):
            places = _states(parts.flatten(0, -4)), _numbers(part_lse.flatten(0, -3))
            triton_kernels.forward[row_blocks * splits, kv_heads, batch](
                given, *places, splits, span, how, num_warps=warps, num_stages=stages
            )
            if splits > 1:
                some = 1 << (splits - 1).bit_length()
                triton_kernels.merge[length, heads, batch](_states(out), _numbers(lse), *places, splits, some, how)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.inputs, ctx.call, ctx.blocks = inputs, call, blocks[1]
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
        given, how = _described(ctx.inputs, ctx.call, ctx.blocks, tensors, gradients=(of_bias, of_sums))
        blocks = ctx.blocks
        rows, keys, warps, stages, _ = blocks
        grad, delta = _dense(grad), torch.empty_like(lse)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in tensors[:3])
        grad_values = torch.zeros_like(values) if of_bias else None
        at_queries = torch.empty_like(lse) if of_sums else None
        at_keys = lse.new_empty(*lse.shape[:2], key.shape[2]) if of_sums else None
        launch = {"num_warps": warps, "num_stages": stages}
        (batch, kv_heads, kv_length, _), length = key.shape, query.shape[2]
        with torch.cuda.device_of(value):
            shared = _states(grad), _numbers(lse), _numbers(delta)
            triton_kernels.query_gradients[-(-length * how.group // rows), kv_heads, batch](
                *(given, _states(out), *shared, _states(grad_q), grad_values, _numbers(at_queries), how), **launch
            )
            triton_kernels.key_gradients[-(-kv_length // keys), kv_heads, batch](
                *(given, *shared, _states(grad_k), _states(grad_v), _numbers(at_keys), power_of_two(how.group)),
                how._replace(stages=_stages(given, blocks, 0)),
                **launch,
            )
        grad_sinks = grad_sums = None
        if of_sinks:
            grad_sinks = -((sinks[:, None] - lse).exp() * delta).sum(dim=(0, 2)).to(sinks.dtype)
        if at_queries is not None and at_keys is not None:
            slots = torch.arange(length, device=lse.device) + ctx.inputs.query_start
            grad_sums = (-at_keys.to(sums.dtype)).index_add(-1, slots, at_queries.to(sums.dtype))
            grad_sums = grad_sums.sum_to_size(sums.shape)
        return (None, None, None, grad_q, grad_k, grad_v, grad_values, grad_sinks, grad_sums)


def _described(
    inputs: AttentionInputs, call: Fused, blocks: Blocks, tensors: Any, gradients: tuple[bool, ...]
) -> tuple[Any, Any]:
    """The inputs of the kernels, a `Given`, and their compile-time constants, a `How`."""
    from rope_patch.attention.fused.triton_kernels import Given, How

    query, key, value, values, sinks, sums = tensors
    length, kv_length, start = query.shape[2], key.shape[2], inputs.query_start
    groups = inputs.groups
    if inputs.mask is not None:  # of one query
        groups = torch.where(inputs.mask[:, 0, 0], 0, -1)
    every = zip(call.regions, call.query_tables, call.key_tables, strict=True)
    used = [each for each in every if each[0].stop > 0 or not inputs.causal]
    tables = tuple((_table(of_query, query), _table(of_key, key)) for _, of_query, of_key in used)
    in_table = values is not None and values.ndim == 2
    given = Given(
        q=_states(query),
        k=_states(key),
        v=_states(value),
        m=_numbers(inputs.query_positions),
        n=_numbers(inputs.key_positions),
        groups=_numbers(groups),
        start=start,
        q_length=length,
        kv_length=kv_length,
        scale=inputs.scaling,
        tables=tables,
        partner=call.partner,
        bias=None if values is None else _numbers(values[None] if in_table else values[None, :, None]),
        first=1 - kv_length if in_table and values.shape[1] > kv_length else 0,
        distances=values.shape[1] if in_table else 0,
        sums=_numbers(sums),
        sinks=sinks,
    )
    how = How(
        areas=tuple(_area(region) for region, *_ in used),
        group=query.shape[1] // key.shape[1],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        width=power_of_two(query.shape[-1]),
        value_width=power_of_two(value.shape[-1]),
        rows=blocks.rows,
        keys=blocks.keys,
        stages=_stages(given, blocks, 1),
        causal=inputs.causal,
        in_order=call.in_order,
        start_in_memory=isinstance(start, torch.Tensor),
        window=None if call.window == math.inf else int(call.window),
        softcap=inputs.softcap,
        bias=None if values is None else "table" if in_table else "slope",
        bias_gradient=gradients[:1] == (True,),
        sums_gradient=gradients[1:] == (True,),
    )
    return given, how


def _stages(given: Any, blocks: Blocks, walked: int) -> tuple[int, ...]:
    """Pipeline stages per region, for a loop over queries (0) or keys (1)."""
    return tuple(
        blocks.stages if table[walked] is None else min(blocks.stages, ROTATED_STAGES) for table in given.tables
    )


def _area(region: Region) -> Any:
    from rope_patch.attention.fused.triton_kernels import Area

    far = FAR // region.chunk
    start, stop = (int(min(max(bound, -far), far)) for bound in (region.start, region.stop))
    return Area(start, stop, region.chunk, None if region.keys_below == math.inf else int(region.keys_below))


def _table(table: Table | None, like: torch.Tensor) -> Any:
    return None if table is None else tuple(_states(_dense(x).expand_as(like)) for x in table)


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


@functools.lru_cache(maxsize=64)
def agrees(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether the kernels are available and equal the oracle on small calls, with gradients; tried once before use."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None or (device.type != "cuda" and not interpreted):
        return False
    sizes = (device, dtype, head_dim, value_dim)
    try:
        # several tokens after a cache, and one token whose keys are split among programs
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            return _tried(40, 100, *sizes) and _tried(1, 300, *sizes)
    except Exception:  # compilers and drivers fail in many ways, and other kernels exist
        return False


def _tried(
    length: int, kv_length: int, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> bool:
    """Whether a call with two regions, one of which rotates keys, is correct."""
    random = torch.Generator().manual_seed(0)

    def states(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(1, heads, length, dim, generator=random).to(device, dtype).requires_grad_()

    leaves = states(4, length, head_dim), states(2, kv_length, head_dim), states(2, kv_length, value_dim)
    grad, partner = torch.randn_like(states(4, length, value_dim)), torch.arange(head_dim, device=device).flip(0)
    of_queries, of_keys = ([x.detach() for x in states(2, n, head_dim)[0]] for n in (length, kv_length))
    regions = Region(Identity(), Identity(), stop=17), Region(Identity(), Identity(), start=17)
    positions = torch.arange(kv_length, device=device)[None]
    inputs = AttentionInputs(
        (), leaves[2], positions[:, kv_length - length :], positions, None, length > 1, kv_length - length, 0.1
    )
    tables = tuple(of_queries), tuple(of_keys)
    call = Fused(*leaves[:2], regions, (tables[0],) * 2, (tables[1], None), partner)
    rotated = [x * cos + x[..., partner] * sin for x, (cos, sin) in zip(leaves, tables, strict=False)]
    branches = tuple(
        Branch(region, rotated[0], key) for region, key in zip(regions, (rotated[1], leaves[1]), strict=True)
    )
    actual, expected = (
        (out, *torch.autograd.grad(out, leaves, grad))
        for out in (attend(inputs, call), oracle.attend(inputs.with_branches(branches))[0])
    )
    errors = (
        (one.float() - other.float()).norm() / other.float().norm() for one, other in zip(actual, expected, strict=True)
    )
    return all(bool(error < 0.03) for error in errors)
