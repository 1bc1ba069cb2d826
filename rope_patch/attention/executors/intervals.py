"""Attention by a kernel of interval masks, called once per region and merged by LSE: chunks, packed rows and pads need
no tiles.

The kernels are those of `cudnn.flex_attention` in `nvidia-cudnn-frontend` 1.32 (extra `gpu`), for compute capability
9.0, 10.0 and 10.3. They are compiled for about a minute at their first use in a process, forward and backward. On an
H200 an attention module at 8,192 tokens took 1.20 times plain attention under ReRoPE and 1.32 under DCA. Tests put what
their documentation says in their place.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch

from rope_patch.attention.executors import chunked, reference
from rope_patch.attention.intervals import Runs, end_points, runs_of
from rope_patch.attention.kernels import kernel_for
from rope_patch.attention.merging import merge, summed
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Needs
from rope_patch.attention.terms import upcast
from rope_patch.attention.trials import Comparisons, Trial
from rope_patch.attention.turner import Branch, Turner
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import Identity

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernels support."""


def attend(problem: Problem) -> Output:
    """Output of `reference.attend`, `(batch, heads, q_len, value_dim)`; zeros for queries that see no key."""
    call = problem.turned()
    states = [state for branch in call.branches for state in (branch.query, branch.key)]
    plans = _plans(problem, call)
    return _Intervals.apply(call, plans, call.value, *states), None


def _objection(problem: Problem) -> str:
    """The reason why the kernels cannot compute products, or an empty string if they can and equalled the definition
    when they were tried.
    """
    value = problem.value
    if reason := missing(value.device):
        return reason
    head_dim, value_dim = problem.rotated.branches[0].query.shape[-1], value.shape[-1]
    if any(state.dtype != value.dtype for state in problem.rotated.states()) or not problem.half:
        return "states differ in dtype, or are not in half precision"
    if (head_dim, value_dim) not in ((192, 128), (256, 256)) and not (_is_narrow(head_dim) and _is_narrow(value_dim)):
        return "heads have widths that the kernels do not support"
    if _runs(problem) is None:
        return "the mask or the positions give some query keys in many places"
    return objection(value.device, value.dtype, head_dim, value_dim)


supports = Needs(compiling=False, fits_kernels=True, biased=False, by_head=False, further=_objection)


def _is_narrow(width: int) -> bool:
    return width % 8 == 0 and width <= 128


def missing(device: torch.device) -> str:
    """The reason why a device has no interval-mask kernels, or an empty string."""
    if device.type != "cuda":
        return "it is for GPUs"
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed (extra `gpu`)"
    if torch.cuda.get_device_capability(device) not in CAPABILITIES:
        return "the kernels are for compute capability 9.0, 10.0 and 10.3"
    return ""


def _runs(problem: Problem) -> Runs | None:
    """The runs of a call, which layers of one forward share."""
    compute = runs_of if problem.turner is None else problem.turner.forward.shared(runs_of)
    seen = problem.mask, problem.groups, problem.causal
    return compute(problem.key_positions, problem.q_length, int(problem.query_start), *seen)


def _no_plans() -> dict[Any, Any]:
    return {}


def _plans(problem: Problem, call: Problem) -> list[Any]:
    """The mask plan of each region. Layers of one forward share those for states of equal shapes."""
    from cudnn.flex_attention import create_mask_plan

    forward = None if problem.turner is None else problem.turner.forward
    points, known = (end_points, {}) if forward is None else (forward.shared(end_points), forward.shared(_no_plans)())
    runs, batch = cast(Runs, _runs(problem)), len(call.value)
    backward = torch.is_grad_enabled() and any(state.requires_grad for state in call.states())
    plans = []
    for branch in call.branches:
        ends = points(branch.region or ALL_PAIRS, runs, problem.query_positions, batch, branch.first)
        states = [x.transpose(1, 2) for x in (branch.query, branch.key, call.value[:, :, branch.first :])]
        key = ends, backward, *(x.shape for x in states)
        if key not in known:
            known[key] = create_mask_plan(ends, *(x.detach() for x in states), build_backward=backward)
        plans.append(known[key])
    return plans


class _Intervals(torch.autograd.Function):
    """One call of the interval-mask kernel per region, merged by LSE. As in `merged`, the backward of each region,
    called with the merged output and log-sum-exp, is its exact share of the gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: Problem, plans: list[Any], value: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        from cudnn.flex_attention import flex_attn_func

        parts = []
        for branch, plan in zip(call.branches, plans, strict=True):
            q, k, v = (x.transpose(1, 2) for x in (branch.query, branch.key, value[:, :, branch.first :]))
            part, part_lse = flex_attn_func(q, k, v, mask_plan=plan, softmax_scale=call.scaling, return_lse=True)
            parts.append((part.transpose(1, 2), part_lse.clamp(min=LOWEST)))
        (out, lse), *others = parts
        out = summed(out)
        for part, part_lse in others:
            merge(out, lse, part, part_lse)
        out, lse = out.to(value.dtype), lse.masked_fill(lse == LOWEST, -torch.inf)
        ctx.save_for_backward(value, out, lse, *states)
        ctx.call = call.replaced(branches=(), value=value.new_empty(0))
        ctx.places, ctx.plans = [(branch.region, branch.first) for branch in call.branches], plans
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, out, lse, *states = ctx.saved_tensors
        queries, keys = states[::2], states[1::2]
        if torch.is_grad_enabled():  # a second derivative is wanted
            return None, None, *_by_definition(ctx, grad, value, states)
        from cudnn.flex_attention.execution import _flex_attention_backward

        of_value, of_states = torch.zeros_like(upcast(value)), []
        merged = [x.transpose(1, 2).contiguous() for x in (out, grad)]
        for (_, first), plan, query, key in zip(ctx.places, ctx.plans, queries, keys, strict=True):
            q, k, v = (x.transpose(1, 2) for x in (query, key, value[:, :, first:]))
            of_q, of_k, of_v = _flex_attention_backward(
                *(q, k, v, *merged, lse),
                mask_plan=plan,
                softmax_scale=ctx.call.scaling,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            of_states += [of_q.transpose(1, 2), of_k.transpose(1, 2)]
            of_value[:, :, first:] += of_v.transpose(1, 2)
        return None, None, of_value.to(value.dtype), *of_states


def _by_definition(
    ctx: Any, grad: torch.Tensor, value: torch.Tensor, states: list[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of values and states, computed by the definition so that they can be differentiated again."""
    # one state may follow from another, as rotated keys from those of another region
    value, *states = (x.view_as(x) for x in (value, *states))
    pairs = zip(ctx.places, states[::2], states[1::2], strict=True)
    branches = tuple(Branch(region, query, key, first) for (region, first), query, key in pairs)
    needed = ctx.needs_input_grad[2:]
    wanted = [x for x, needs in zip((value, *states), needed, strict=True) if needs]
    call = ctx.call.replaced(branches=branches, value=value)
    gradients = iter(torch.autograd.grad(chunked.attend(call)[0], wanted, grad, create_graph=True))
    return tuple(next(gradients) if needs else None for needs in needed)


def _compared(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> Comparisons:
    """Compare the kernels with the definition on two rows, one padded and one packed, with distance in chunks."""
    random = torch.Generator().manual_seed(0)

    def states(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(2, heads, 200, dim, generator=random).to(device, dtype).requires_grad_()

    value, *leaves = (states(2, value_dim), *(states(n, head_dim) for n in (4, 2, 4, 2)))
    groups = torch.zeros(2, 200, dtype=torch.long, device=device)
    groups[0, :70], groups[1, 90:] = -1, 1
    positions = torch.arange(200, device=device).expand(2, -1) - 90 * groups.clamp(min=0)
    near, far = (Region(Identity(), Identity(), chunk=40, **bound) for bound in ({"stop": 1}, {"start": 1}))
    branches = Branch(near, leaves[0], leaves[1]), Branch(far, leaves[2], leaves[3])
    kept = (groups >= 0)[:, None, :, None]
    grad = torch.randn(2, 4, 200, value_dim, generator=random).to(device, dtype) * kept
    names = "output", *(f"gradient {of}" for of in ("of values", *("of queries", "of keys") * 2))
    results = []
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for attend_by in (attend, reference.attend):
            problem = Problem(branches, value, positions, positions, None, True, 0, 0.1, groups=groups, compiling=False)
            out = attend_by(problem)[0]
            results.append((out * kept, *torch.autograd.grad(out, (value, *leaves), grad)))
    yield from zip(names, *results, strict=True)


objection = Trial("The kernels of interval masks", _compared, tolerance=0.03)
"""The reason why the kernels are not used on a device for a dtype and two widths, or an empty string."""

LOWEST = torch.finfo(torch.float32).min
"""The log-sum-exp that stands for no keys in a merge, because the difference of two infinities is NaN."""

FEW = 16
"""The number of pairs of a span and a region up to which `merged` scores a call in few tiles."""


def in_few_tiles(problem: Problem) -> str:
    """The reason why other executors are preferred, or an empty string: they start without compiling, and the tiles of
    `merged` are large unless regions are chunks that its kernel takes one by one, or rows have many documents.
    """
    turner = cast(Turner, problem.turner)
    if problem.compiling:
        return ""
    if not problem.differentiable:
        return "its kernels take a minute to compile, which pays in training alone"
    in_chunks = any(region.chunk > 1 for region in turner.regions)
    if problem.scattered or (in_chunks and not _in_runs(problem)) or problem.spans is None:
        return ""
    return "tiles are few and large" if len(problem.spans) * len(turner.regions) <= FEW else ""


def _in_runs(problem: Problem) -> bool:
    """Whether the chunks of a call are the batches of a few tiles."""
    query = cast(torch.Tensor, problem.query)
    return kernel_for(query, problem.value, masked=problem.biased).batches(query)


EXECUTOR = Executor("intervals", "a kernel of interval masks for each region, merged", supports, attend)
