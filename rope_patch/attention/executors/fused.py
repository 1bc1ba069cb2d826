"""One Triton kernel for all regions of a call, with gradients: what it supports, its trial, and its launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from rope_patch.attention.executors import reference
from rope_patch.attention.merging import compiles
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.rotation import Tables
from rope_patch.attention.rotation_kernel import dense, launch, rotations
from rope_patch.attention.table import Executor, Needs
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.trials import Comparisons, Trial
from rope_patch.attention.turner import Branch, Fused, Turner
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Identity


def attend(problem: Problem) -> Output:
    """Output of `reference.attend` for a call that the kernels support, `(batch, heads, q_len, value_dim)`."""
    return launched(problem, problem.fused), None


def _objection(problem: Problem) -> str:
    """The reason why the kernels cannot compute a call, or an empty string if they can and equalled the definition when
    they were tried.
    """
    if not compiles(problem.value.device):
        return "Triton is not installed, or does not compile for this device"
    return unsupported(problem, problem.fused)


supports = Needs(compiling=False, is_rotated=False, decays=False, by_head=False, further=_objection)


def unsupported(problem: Problem, call: Fused) -> str:
    """The reason why the kernels cannot compute a call, whatever their trial says, or an empty string."""
    queries, value, mask = call.queries, problem.value, problem.mask
    tables = [x for table in (*call.query_tables, *call.key_tables) if table is not None for x in table]
    one_query = problem.q_length == 1
    if not queries.dtype == call.keys.dtype == value.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return "states differ in dtype, or have a dtype that it does not support"
    if max(queries.shape[-1], value.shape[-1]) > 256:
        return "heads are wider than 256"
    if problem.content is not None or problem.dropout != 0.0:
        return "scores have a term by content, or dropout"
    if not (mask is None or (one_query and mask.dtype == torch.bool and mask.shape[1] == 1)):
        return "there is a mask for each pair"
    if not (problem.causal or one_query or problem.q_length == problem.kv_length):
        return "queries behind cached keys see later keys"
    if not (problem.bias is None or call.in_order or is_slope(problem, problem.bias)):
        return "positions skip, and a bias counts them"
    if any(x.requires_grad for x in tables):
        return "the rotation needs a gradient"
    return objection(queries.device, queries.dtype, queries.shape[-1], value.shape[-1], torch.is_grad_enabled())


def _compared(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, gradients: bool = True
) -> Comparisons:
    """Compare the kernels with the definition on small calls. With gradients they are compiled for half a minute, once:
    Triton keeps them on disk.
    """
    sizes = (device, dtype, head_dim, value_dim, gradients)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.autocast(device.type, enabled=False):
        # several tokens after a cache, with distance in chunks, and one token whose keys are split among programs
        found = [*_tried(40, 100, 8, *sizes), *_tried(1, 300, 1, *sizes)]
    yield from found


def _tried(
    length: int,
    kv_length: int,
    chunk: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    gradients: bool,
) -> Comparisons:
    """Compute a call with two regions, one of which rotates keys, by the kernels and by the definition."""
    random = torch.Generator().manual_seed(0)

    def states(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(1, heads, length, dim, generator=random).to(device, dtype).requires_grad_(gradients)

    query, key, value = leaves = (
        states(4, length, head_dim),
        states(2, kv_length, head_dim),
        states(2, kv_length, value_dim),
    )
    grad, partner = torch.randn_like(states(4, length, value_dim)), torch.arange(head_dim, device=device).flip(0)
    of_queries, of_keys = (tuple(states(2, n, head_dim)[0].detach()) for n in (length, kv_length))
    near, far = (Region(Identity(), Identity(), chunk=chunk, **{bound: 17 // chunk}) for bound in ("stop", "start"))
    positions, start = torch.arange(kv_length, device=device)[None], kv_length - length
    problem = Problem((), value, positions[:, start:], positions, None, length > 1, start, 0.1)
    call = Fused(query, key, (near, far), (of_queries, of_queries), (of_keys, None), partner)
    q, k = (x * cos + x[..., partner] * sin for x, (cos, sin) in ((query, of_queries), (key, of_keys)))
    defined = problem.replaced(branches=(Branch(near, q, k), Branch(far, q, key)))
    outputs = launched(problem, call), reference.attend(defined)[0]
    slopes = (torch.autograd.grad(out, leaves, grad) if gradients else () for out in outputs)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    pairs = zip(*((out, *each) for out, each in zip(outputs, slopes, strict=True)), strict=True)
    return ((f"{name} of {length} queries", *pair) for name, pair in zip(names, pairs, strict=False))


objection = Trial("The Triton kernel for all regions", _compared, tolerance=0.03)
"""The reason why the kernels are not used on a device for a dtype and two widths, with gradients or without, or an
empty string.
"""


# --- the launch ---


class Blocks(NamedTuple):
    """Block sizes of rows and keys, and the number of warps and pipeline stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments for the launch of a Triton kernel."""
        return {"num_warps": self.warps, "num_stages": self.stages}


PROGRAMS = 264
"""The number of programs that keep a GPU busy; if there are fewer, keys are split among more programs."""


def blocks_for(
    dtype: torch.dtype, width: int, rows: int, regions: int, arch: str, sums: bool = False
) -> tuple[Blocks, Blocks, Blocks]:
    """Block sizes for the forward and for the gradients of queries and of keys, chosen by the registers and the shared
    memory that they need as compiled (`benchmarks.registers`), not by speed.

    Args:
        dtype: of the states.
        width: of their vectors, the larger of keys and values.
        rows: of a key head: queries times the query heads that share it.
        regions: their number.
        arch: such as "sm_90".
        sums: whether there are running sums, of which each stage holds a number in float64 for every pair.
    """
    half = dtype != torch.float32
    if width > 128:
        chosen = [(64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)] if half else [(32, 32, 8, 1)] + 2 * [(16, 32, 8, 1)]
    elif not half:
        chosen = [(64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)]
    elif arch in ("sm_90", "sm_100", "sm_103"):
        keys = 128 if regions <= 2 else 64
        chosen = [(128, 64, 8, 3 if arch == "sm_90" and not sums else 2), (64, 32, 8, 2), (32, keys, 8, 2)]
    else:
        chosen = [(64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 4, 2)]
    forward, of_queries, of_keys = (Blocks(*each) for each in chosen)
    if (few := max(16, 1 << (rows - 1).bit_length())) < forward.rows:  # few rows, as in decoding
        forward = Blocks(few, 64 if half and width <= 128 else 32, 8, min(forward.stages, 2))
    return forward, of_queries, of_keys


def launched(problem: Problem, call: Fused, blocks: tuple[Blocks, Blocks, Blocks] | None = None) -> torch.Tensor:
    """Output of `reference.attend` for a call that the kernels support, `(batch, heads, q_len, value_dim)`.

    Args:
        problem: its branches are ignored.
        call: queries, keys, and their rotation.
        blocks: for forward, and for the gradients of queries and of keys; default `blocks_for` the device.
    """
    query, key, value = states = [dense(x) for x in (call.queries, call.keys, problem.value)]
    if blocks is None:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(query.device)) if query.is_cuda else ""
        rows, width = query.shape[1] // key.shape[1] * query.shape[2], max(query.shape[-1], value.shape[-1])
        sums = problem.running_bias is not None
        blocks = blocks_for(query.dtype, width, rows, len(call.regions), arch, sums)
    if problem.causal:
        call = call.past()
    bias, values = problem.bias, None
    if bias is not None:
        first = 0 if problem.causal or problem.q_length == 1 else 1 - problem.kv_length
        last = problem.q_length if first < 0 else problem.kv_length
        values = bias.values(0, 2).diff()[:, 0] if is_slope(problem, bias) else bias.values(first, last).contiguous()
    out: torch.Tensor = _Attention.apply(problem, call, blocks, *states, values, problem.sinks, problem.running_bias)
    return out


def is_slope(problem: Problem, bias: DistanceBias) -> bool:
    """Whether a bias is one number per head. The gradient of a learned bias needs its table."""
    return bias.linear and (problem.causal or problem.q_length == 1) and not bias.learned


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, call: Fused, blocks: tuple[Blocks, ...], *tensors: Any) -> Any:
        from rope_patch.attention import triton_kernels as kernels

        query, _, value = tensors[:3]
        (batch, heads, length, _), (kv_heads, kv_length, value_dim) = query.shape, value.shape[1:]
        rows, keys, *_ = blocks[0]
        row_blocks = -(-length * (heads // kv_heads) // rows)
        key_blocks = -(-kv_length // keys)
        splits = max(1, min(PROGRAMS // (row_blocks * kv_heads * batch), key_blocks // 2))
        span = -(-key_blocks // splits) * keys

        def results(*parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            # the layout that the model needs next
            lse = torch.empty(*parts, batch, heads, length, dtype=torch.float32, device=value.device)
            out = torch.empty(*parts, batch, length, heads, value_dim, dtype=dtype, device=value.device)
            return out.transpose(-2, -3), lse

        out, lse = results(dtype=value.dtype)
        parts, part_lse = (out, lse) if splits == 1 else results(splits, dtype=torch.float32)
        with torch.cuda.device_of(value):
            first = 0 if any(ctx.needs_input_grad) else _first_key(problem, call)
            given, how = described(problem, call, blocks[0], tensors, first=first)
            places = (
                kernels.States.from_tensor(parts.flatten(0, -4)),
                kernels.States.from_tensor(part_lse.flatten(0, -3)),
            )
            grid = row_blocks * splits, kv_heads, batch
            kernels.forward[grid](given, *places, splits, span, how, **blocks[0].options)
            if splits > 1:
                whole, some = (
                    (kernels.States.from_tensor(out), kernels.States.from_tensor(lse)),
                    1 << (splits - 1).bit_length(),
                )
                kernels.merge[length, heads, batch](*whole, *places, splits, some, how)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.problem, ctx.call, ctx.blocks = problem, call, blocks[1:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        from rope_patch.attention import triton_kernels as kernels

        if torch.is_grad_enabled():  # `once_differentiable` overlooks what depends on the inputs alone
            raise RuntimeError(
                "create_graph=True: the fused kernel has no second derivatives; patch with attention='chunked'"
            )
        *tensors, out, lse = ctx.saved_tensors
        query, key, value, values, sinks, sums = tensors
        of_bias, of_sinks, of_sums = (
            tensor is not None and wanted for tensor, wanted in zip(tensors[3:], ctx.needs_input_grad[6:], strict=True)
        )
        problem, call, (by_query, by_key) = ctx.problem, ctx.call, ctx.blocks
        (batch, kv_heads, kv_length, _), length = key.shape, query.shape[2]
        grad, delta, grad_v = dense(grad), torch.empty_like(lse), torch.empty_like(value)
        grad_table = torch.zeros_like(values) if of_bias else None
        at_queries, at_keys = (lse.new_empty(*lse.shape[:2], n) if of_sums else None for n in (length, kv_length))
        with torch.cuda.device_of(value):
            given, how = described(problem, call, by_query, tensors)
            strided = kernels.States.from_tensor
            shared = [strided(x) for x in (out, grad, lse, delta)]
            grads_q, grads_k = ([torch.empty_like(x) for _ in call.regions] for x in (query, key))
            into_q, into_k = (tuple(map(strided, grads)) for grads in (grads_q, grads_k))
            kernels.gradients[-(-length * how.group // by_query.rows), kv_heads, batch](
                given, *shared, into_q, None, grad_table, strided(at_queries), False, how, **by_query.options
            )
            how = how._replace(rows=by_key.rows, keys=by_key.keys)
            kernels.gradients[-(-kv_length // by_key.keys), kv_heads, batch](
                given,
                *shared,
                into_k,
                *map(strided, (grad_v, None, at_keys)),
                True,
                how,
                **by_key.options,
            )
            grad_q = _rotated_back(grads_q, call.query_tables, call.partner)
            grad_k = _rotated_back(grads_k, call.key_tables, call.partner)
        grad_sinks = -((sinks[:, None] - lse).exp() * delta).sum(dim=(0, 2)).to(sinks.dtype) if of_sinks else None
        grad_sums = None
        if at_queries is not None and at_keys is not None:
            slots = torch.arange(length, device=lse.device) + problem.query_start
            grad_sums = (-at_keys.to(sums.dtype)).index_add_(-1, slots, at_queries.to(sums.dtype))
            grad_sums = grad_sums.sum_to_size(sums.shape)
        return (None, None, None, grad_q, grad_k, grad_v, grad_table, grad_sinks, grad_sums)


def described(
    problem: Problem, call: Fused, blocks: Blocks, tensors: Sequence[Any], first: int | torch.Tensor = 0
) -> tuple[Any, Any]:
    """The inputs of the kernels, a `Given`, with queries and keys rotated, and their compile-time constants, a `How`.

    Args:
        problem, call: as for `launched`.
        blocks: of the kernel that is next.
        tensors: queries, keys and values, `(batch, heads or kv_heads, length, dim)`; bias, sinks and running sums.
        first: slot of the first key that is read.
    """
    from rope_patch.attention.triton_kernels import Area, Given, How, States

    query, key, value, values, sinks, sums = tensors
    kv_length, groups = key.shape[2], problem.groups
    if problem.mask is not None:  # a mask of one query
        groups = torch.where(problem.mask[:, 0, 0], 0, -1)
    in_table = values is not None and values.ndim == 2
    given = Given(
        q=tuple(map(States.from_tensor, rotations(query, call.query_tables, call.partner))),
        k=tuple(map(States.from_tensor, rotations(key, call.key_tables, call.partner, first))),
        v=States.from_tensor(value),
        m=States.from_tensor(problem.query_positions),
        n=States.from_tensor(problem.key_positions),
        groups=States.from_tensor(groups),
        start=problem.query_start,
        q_length=query.shape[2],
        kv_length=kv_length,
        scale=problem.scaling,
        bias=States.from_tensor(values if values is None else values[None] if in_table else values[None, :, None]),
        first=1 - kv_length if in_table and values.shape[1] > kv_length else 0,
        sums=States.from_tensor(sums),
        sinks=sinks,
    )
    how = How(
        areas=tuple(map(Area.from_region, call.regions)),
        group=query.shape[1] // key.shape[1],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        rows=blocks.rows,
        keys=blocks.keys,
        causal=problem.causal,
        in_order=call.in_order,
        window=None if call.window == math.inf else int(call.window),
        softcap=problem.softcap,
        bias=None if values is None else "table" if in_table else "slope",
        products="ieee" if torch.version.hip else "tf32x3",  # three products are as exact as one without tensor cores
    )
    return given, how


def _first_key(problem: Problem, call: Fused) -> int | torch.Tensor:
    """The first slot whose key is scored in a region that rotates keys."""
    pairs = zip(call.regions, call.key_tables, strict=True)
    reach = max((region.stop * region.chunk for region, table in pairs if table is not None), default=0)
    return problem.query_start - int(reach) if call.in_order and reach < math.inf else 0


def _rotated_back(
    grads: list[torch.Tensor], tables: Sequence[Tables | None], partner: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of the states, from the gradients of what `_rotated` returned."""
    return grads[0] if tables == (None,) else launch(grads, tables, partner, back=True)[0]


EXECUTOR = Executor(
    "fused",
    "one Triton kernel for all regions",
    supports,
    attend,
    lambda problem: len(cast(Turner, problem.turner).regions),
)
