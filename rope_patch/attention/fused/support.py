"""Whether the kernels support a call, and are right on its device."""

from __future__ import annotations

import functools

import torch

from rope_patch.attention import oracle
from rope_patch.attention.fused import compiles
from rope_patch.attention.fused.launch import attend, is_slope
from rope_patch.attention.inputs import AttentionInputs, Branch
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Fused
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Identity


def supports(problem: Problem) -> str:
    """Why the kernels cannot compute a call; empty if they can, and equalled the definition when they were tried."""
    if problem.compiling:
        return "a compiled model calls one operator"
    if problem.turner is None:
        return "its states are rotated already"
    if problem.decay is not None:
        return "scores decay"
    if not compiles(problem.inputs.value.device):
        return "Triton is not installed, or does not compile for this device"
    return unsupported(problem.inputs, problem.fused())


def unsupported(inputs: AttentionInputs, call: Fused) -> str:
    """Why the kernels cannot compute a call; empty if they can."""
    queries, value, mask = call.queries, inputs.value, inputs.mask
    tables = [x for table in (*call.query_tables, *call.key_tables) if table is not None for x in table]
    one_query = inputs.q_length == 1
    if not queries.dtype == call.keys.dtype == value.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return "states differ in dtype, or have one that it does not compute"
    if max(queries.shape[-1], value.shape[-1]) > 256:
        return "heads are wider than 256"
    if inputs.content is not None or inputs.dropout != 0.0:
        return "scores have a term by content, or dropout"
    if inputs.key_positions.ndim != 2:
        return "heads keep different keys"
    if not (mask is None or (one_query and mask.dtype == torch.bool and mask.shape[1] == 1)):
        return "there is a mask for each pair"
    if not (inputs.causal or one_query or inputs.q_length == inputs.kv_length):
        return "queries behind cached keys see later keys"
    if not (inputs.bias is None or call.in_order or is_slope(inputs, inputs.bias)):
        return "positions skip, and a bias counts them"
    if any(x.requires_grad for x in tables):
        return "the rotation wants a gradient"
    if not agrees(queries.device, queries.dtype, queries.shape[-1], value.shape[-1], torch.is_grad_enabled()):
        return "it differed from the definition when it was tried, or does not run on this device"
    return ""


@functools.lru_cache(maxsize=64)
def agrees(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, gradients: bool = True) -> bool:
    """Whether the kernels are available and equal the oracle on small calls; tried once before use. With gradients they
    are compiled for half a minute, once: Triton keeps them on disk.
    """
    if not compiles(device):
        return False
    sizes = (device, dtype, head_dim, value_dim, gradients)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.autocast(device.type, enabled=False):
            # several tokens after a cache, with distance in chunks, and one token whose keys are split among programs
            return _tried(40, 100, 8, *sizes) and _tried(1, 300, 1, *sizes)
    except Exception:  # compilers and drivers fail in many ways, and other kernels exist
        return False


def _tried(
    length: int,
    kv_length: int,
    chunk: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    gradients: bool,
) -> bool:
    """Whether a call with two regions, one of which rotates keys, is correct."""
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
    inputs = AttentionInputs((), value, positions[:, start:], positions, None, length > 1, start, 0.1)
    call = Fused(query, key, (near, far), (of_queries, of_queries), (of_keys, None), partner)
    q, k = (x * cos + x[..., partner] * sin for x, (cos, sin) in ((query, of_queries), (key, of_keys)))
    defined = inputs.with_branches((Branch(near, q, k), Branch(far, q, key)))
    outputs = attend(inputs, call), oracle.attend(defined)[0]
    slopes = (torch.autograd.grad(out, leaves, grad) if gradients else () for out in outputs)
    pairs = zip(*((out, *each) for out, each in zip(outputs, slopes, strict=True)), strict=True)
    return all(bool((one.float() - other.float()).norm() < 0.03 * other.float().norm()) for one, other in pairs)
