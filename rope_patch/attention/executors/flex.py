"""PyTorch's FlexAttention for scores with terms: a bias by distance, running sums, a softcap, sinks.

Every region is one call, and their outputs are merged by log-sum-exp. What a call reads are tensors, so that values
(positions, windows, slopes, lengths) compile nothing anew: a kernel is compiled once for each `Kind` of term. Source:
Dong et al., Flex Attention, 2412.05496.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from rope_patch.attention.executors import reference
from rope_patch.attention.forward import Forward
from rope_patch.attention.merging import compiles
from rope_patch.attention.problem import Output, Problem
from rope_patch.attention.table import Executor, Needs
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.trials import Comparisons, Trial
from rope_patch.attention.turner import Turner
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Identity

Shared = Callable[[Callable[..., Any]], Callable[..., Any]]
"""The type of `Forward.shared`."""

ScoreMod = Callable[..., torch.Tensor]
"""A function that changes the score of a pair, given the indices of its row, head, query and key."""

Condition = tuple[torch.Tensor, torch.Tensor]
"""Integers of the queries, `(batch or 1, q_len)`, and of the keys, `(batch or 1, heads or 1, kv_len)`: a query sees a
key if its number is at least the key's.
"""

BLOCK = 128
"""Block size in queries and keys, FlexAttention's default; a block in which no query sees a key is skipped."""

BEYOND = 2**62
"""A number beyond any in a condition, which a float can hold."""


def attend(problem: Problem) -> Output:
    """Output of `reference.attend` for a call that FlexAttention supports, `(batch, heads, q_len, value_dim)`."""
    call, shared = problem.turned(), cast(Turner, problem.turner).forward.shared
    batch, heads = call.branches[0].query.shape[:2]
    positions, start = (call.query_positions, call.key_positions), int(call.query_start)
    outputs, sums = [], []
    for branch in call.branches:
        mask = shared(block_mask)(*positions, call.visibility, branch.region, branch.first, batch, heads)
        states = branch.query, branch.key, call.value[:, :, branch.first :]
        out, lse = _kernel(call.value.device)(*states, _score_mod(call, branch.first, shared), mask, call.scaling)
        outputs.append(out)
        sums.append(lse)
    if call.running_bias is not None:
        own = call.running_bias[..., start : start + call.q_length]
        # c_m moves all scores of a query alike: its gradient is that of their log-sum-exp, and nothing of the output's
        sums = [lse + (own - own.detach()).to(lse.dtype) for lse in sums]
    return _merged(outputs, sums, call.sinks), None


def _objection(problem: Problem) -> str:
    """The reason why FlexAttention cannot compute a call, or an empty string if it can and equalled the definition when
    it was tried.
    """
    if problem.content is not None or problem.dropout != 0.0:
        return "scores have a term by content, or dropout"
    query, key, value = cast(torch.Tensor, problem.query), cast(torch.Tensor, problem.key), problem.value
    if not query.dtype == key.dtype == value.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return "states differ in dtype, or have a dtype that it does not support"
    if not 16 <= min(widths := (query.shape[-1], value.shape[-1])) <= max(widths) <= 256:
        return "heads are narrower than 16 or wider than 256"
    if value.is_cpu:
        return NO_GRADIENTS if _differentiable(problem) else ""
    if not compiles(value.device):
        return "Triton is not installed, or does not compile for this device"
    return objection(value.device, value.dtype, *widths, Kind.from_problem(problem))


supports = Needs(compiling=False, is_rotated=False, decays=False, mask_is_added=False, further=_objection)

NO_GRADIENTS = "FlexAttention has no gradients on a CPU"


def _differentiable(problem: Problem) -> bool:
    """Whether any input of a call needs a gradient."""
    leaves = problem.key, problem.value, problem.sinks, problem.running_bias
    wanted = any(x is not None and x.requires_grad for x in leaves)
    return problem.differentiable or (torch.is_grad_enabled() and wanted)


class Kind(NamedTuple):
    """The facts, besides dtype and widths, for which a kernel is compiled.

    Attributes:
        bias: by distance: `""`, `"slopes"` for a multiple of the distance on either side, or `"table"`.
        sums: whether there are running sums.
        softcap: whether there is a softcap.
        learned: whether a gradient flows into the bias or the sums.
        gradients: whether gradients are wanted.
    """

    bias: str
    sums: bool
    softcap: bool
    learned: bool
    gradients: bool

    @classmethod
    def from_problem(cls, problem: Problem) -> Kind:
        """Derive the kind from a call."""
        bias, sums, gradients = problem.bias, problem.running_bias, torch.is_grad_enabled()
        learned = (bias is not None and bias.learned) or (sums is not None and sums.requires_grad)
        form = "" if bias is None else "slopes" if bias.linear else "table"
        return cls(form, sums is not None, problem.softcap is not None, gradients and learned, gradients)


# --- the kernel ---


def _by_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreMod | None, mask: Any, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(batch, heads, q_len, value_dim)` and log-sum-exp `(batch, heads, q_len)`, -inf where no key is seen."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    grouped = query.shape[1] != key.shape[1]
    # one kernel for every number of queries, the one that was tried
    options: Any = {"BACKEND": "TRITON"}
    given = {"score_mod": score_mod, "block_mask": mask, "scale": scaling, "enable_gqa": grouped}
    out, extra = flex_attention(query, key, value, **given, kernel_options=options, return_aux=AuxRequest(lse=True))
    return out, extra.lse


MOST_KERNELS = 256
"""The number of kernels that are kept: PyTorch keeps 8 by default, and would then score all pairs without one."""


def _kernel(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return _by_flex if device.type == "cpu" else _by_compiled_flex


def _by_compiled_flex(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch._dynamo.config.patch(recompile_limit=MOST_KERNELS):
        return _compiled()(*arguments)


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_by_flex, dynamic=True, fullgraph=True)


def _merged(outputs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], sinks: torch.Tensor | None) -> torch.Tensor:
    """Merge outputs of disjoint keys by their log-sum-exp; sinks count as keys without values."""
    if len(outputs) == 1 and sinks is None:
        return outputs[0]
    if sinks is not None:
        sums = [*sums, sinks.to(sums[0].dtype)[:, None].expand_as(sums[0])]
    # a query that sees no key has no share of -inf
    shares = torch.stack(list(sums)).clamp(min=torch.finfo(sums[0].dtype).min).softmax(dim=0)
    merged = sum(share[..., None] * out for share, out in zip(shares, outputs, strict=False))
    return cast(torch.Tensor, merged).to(outputs[0].dtype)


# --- terms of a score ---


def _score_mod(call: Problem, first: int, shared: Shared) -> ScoreMod | None:
    """Compose all terms of the scores, in order, for the keys from slot `first` on; None without any term."""
    terms: list[ScoreMod] = []
    batch, heads = call.branches[0].query.shape[:2]
    if call.softcap is not None:
        terms.append(_softcap(torch.full((), call.softcap, device=call.value.device)))
    if call.bias is not None:
        positions = call.query_positions, call.key_positions
        m, n = shared(_numbers)(*positions, batch, heads)
        if call.bias.linear:
            terms.append(_by_slopes(call.bias.values(-1, 2).expand(heads, -1), m, n[..., first:]))
        else:
            least, most = shared(_reach)(*positions)
            table = call.bias.values(least, most + 1).expand(heads, -1)
            terms.append(_by_table(table, m - least, n[..., first:]))
    if call.running_bias is not None:
        start = int(call.query_start)
        queries, keys = slice(start, start + call.q_length), slice(first, None)
        terms.append(_by_sums(call.running_bias.expand(batch, -1, -1), queries, keys))
    if not terms:
        return None
    every = tuple(terms)

    def score_mod(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        for term in every:
            score = term(score, *place)
        return score

    return score_mod


def _softcap(cap: torch.Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: cap * (score / cap).tanh()


def _by_slopes(sides: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> ScoreMod:
    """Add a multiple of the distance, given its values at the distances -1, 0 and 1, `(heads, 3)`."""

    def term(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        distance = m[b, q] - n[b, h, k]
        return score + sides[h, distance.sign() + 1] * distance.abs()

    return term


def _by_table(table: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> ScoreMod:
    """Add the value that a table `(heads, distances)` has for the distance."""
    return lambda score, b, h, q, k: score + table[h, m[b, q] - n[b, h, k]]


def _by_sums(sums: torch.Tensor, queries: slice, keys: slice) -> ScoreMod:
    """Add c_m - c_n of float64 sums, each split into a float32 number and its remainder, so that a difference of near
    sums is exact. A gradient flows through c_n alone; the gradient of c_m is known without the kernel.
    """
    high = sums.float()
    rest = (sums - high).detach().float()
    of_query, of_key = high[..., queries].detach(), high[..., keys]
    rest_of_query, rest_of_key = rest[..., queries], rest[..., keys]

    def term(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rests = rest_of_query[b, h, q] - rest_of_key[b, h, k]
        return score + ((of_query[b, h, q] - of_key[b, h, k]) + rests)

    return term


def _numbers(m: torch.Tensor, n: torch.Tensor, batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries and keys as a kernel reads them, `(batch, q_len)` and `(batch, heads, kv_len)`, int32."""
    return m.int().expand(batch, -1), _of_heads(n.int(), heads).expand(batch, heads, -1)


def _of_heads(n: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat positions of keys for the query heads, `(batch or 1, heads or 1, kv_len)`."""
    return n[:, None] if n.ndim == 2 else n.repeat_interleave(heads // n.shape[1], dim=1)


def _reach(m: torch.Tensor, n: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest distance of a call. Reading them synchronises with the device, once in a forward."""
    least, most = torch.stack([m.amin() - n.amax(), m.amax() - n.amin()]).tolist()
    return least, most


# --- which keys a query sees ---


def block_mask(
    m: torch.Tensor,
    n: torch.Tensor,
    sees: Visibility,
    region: Region | None,
    first: int,
    batch: int,
    heads: int,
) -> Any:
    """The `BlockMask` of a region for the keys from the slot `first` on; None if every query sees every key.

    What is known of a block are the smallest and largest numbers of its queries and keys: that is enough to leave a
    block out, or to read it whole, without a look at its pairs.

    Args:
        m, n: positions of queries and keys, integer, `(batch or 1, q_len)` and `(batch or 1, kv_len)`, the latter
            `(batch, kv_heads, kv_len)` if heads keep different keys.
        sees: which keys a query may see; its mask is boolean.
        region: None for all pairs.
        first: slot of the first key.
        batch, heads: of the queries.
    """
    from torch.nn.attention.flex_attention import BlockMask

    of_region = [] if region is None else _conditions_of_region(m, _of_heads(n, heads), region)
    of_slots = _conditions_of_slots(sees, m.device) if sees.mask is None else []
    conditions = [(of_queries, of_keys[..., first:]) for of_queries, of_keys in (*of_region, *of_slots)]
    mask = None if sees.mask is None else sees.mask[..., first:]
    if mask is None and not conditions:
        return None
    some, whole = _blocks(conditions, mask)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(conditions, mask, batch, heads),
        seq_lengths=(sees.q_length, sees.kv_length - first),
    )


def _conditions_of_region(m: torch.Tensor, n: torch.Tensor, region: Region) -> list[Condition]:
    """Express the finite bounds of a region as conditions on pairs of a query and a key."""
    here, there = (x.div(region.chunk, rounding_mode="floor") for x in (m, n))
    conditions = []
    if region.start > -math.inf:
        conditions.append((here - int(region.start), there))
    if region.stop < math.inf:
        conditions.append((int(region.stop) - 1 - here, -there))
    if region.keys_below < math.inf:
        conditions.append((torch.full_like(m, int(region.keys_below) - 1), n))
    return conditions


def _conditions_of_slots(sees: Visibility, device: torch.device) -> list[Condition]:
    """Express causality and segment ids as conditions: a query sees keys of its own group, a pad sees all tokens, and
    no token sees a pad.
    """
    conditions, queries = [], torch.arange(sees.q_length, device=device) + sees.query_start
    if sees.causal:
        conditions.append((queries[None], torch.arange(sees.kv_length, device=device)[None, None]))
    if sees.groups is not None:
        of_queries, of_keys = sees.groups[:, queries].long(), sees.groups[:, None].long()
        most = of_queries.masked_fill(of_queries < 0, BEYOND - 1)
        conditions += [(most, of_keys), (-of_queries.clamp(min=0), -of_keys)]
    return conditions


def _blocks(conditions: Sequence[Condition], mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Two boolean maps of blocks, `(batch or 1, heads or 1, blocks of queries, blocks of keys)`: blocks in which some
    query sees a key, and blocks in which every query sees every key. A block that is not full of queries and keys does
    not count as whole.
    """
    some, whole = [], []
    for of_queries, of_keys in conditions:
        queries, keys = _in_blocks(of_queries[:, None].long(), -BEYOND), _in_blocks(of_keys.long(), BEYOND)
        some.append(queries.amax(-1)[..., None] >= keys.amin(-1)[..., None, :])
        whole.append(queries.amin(-1)[..., None] >= keys.amax(-1)[..., None, :])
    if mask is not None:
        # blocks of keys, keys, blocks of queries, queries
        pairs = _in_blocks(_in_blocks(mask, False).movedim(2, -1), False)
        some.append(pairs.amax(dim=(3, 5)).mT)
        whole.append(pairs.amin(dim=(3, 5)).mT)
    return functools.reduce(torch.logical_and, some), functools.reduce(torch.logical_and, whole)


def _in_blocks(x: torch.Tensor, fill: int) -> torch.Tensor:
    """Split the last axis into blocks, `(..., blocks, BLOCK)`, padded with a number."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK), value=fill).unflatten(-1, (-1, BLOCK))


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of true blocks in each row, and the indices of all blocks, the true ones first."""
    numbers = blocks.int()
    return numbers.sum(dim=-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).int()


def _mask_mod(
    conditions: Sequence[Condition], mask: torch.Tensor | None, batch: int, heads: int
) -> Callable[..., torch.Tensor]:
    every = tuple(
        (of_queries.expand(batch, -1), of_keys.expand(batch, heads, -1)) for of_queries, of_keys in conditions
    )
    masks = () if mask is None else (mask.expand(batch, heads, -1, -1),)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = [pairs[b, h, q, k] for pairs in masks]
        seen += [of_queries[b, q] >= of_keys[b, h, k] for of_queries, of_keys in every]
        return functools.reduce(torch.logical_and, seen)

    return mask_mod


# --- the trial ---


def _compared(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, kind: Kind) -> Comparisons:
    """Compare FlexAttention with the definition on a call of several blocks behind a cache: two regions, whose outputs
    are merged, pads, a skip, and the terms of a kind. A GPU compiles it for some seconds to a minute.
    """
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(kind.gradients),
        torch.autocast(device.type, enabled=False),
    ):
        problem, leaves = _tried(device, dtype, head_dim, value_dim, kind)
        outputs = [each.attend(problem)[0] for each in (EXECUTOR, reference.EXECUTOR)]
        results = [[out] for out in outputs]
        if kind.gradients:
            grad = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            for out, result in zip(outputs, results, strict=True):
                result += torch.autograd.grad(out, list(leaves.values()), grad, materialize_grads=True)
    names = ("output", *(f"gradient of {name}" for name in leaves))
    yield from zip(names, *results, strict=False)


def _tried(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, kind: Kind
) -> tuple[Problem, dict[str, torch.Tensor]]:
    """The call of a trial, and the tensors whose gradients it compares."""
    random, start, length = torch.Generator().manual_seed(0), 50, 200

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=random).to(device, dtype)

    leaves = {
        "queries": leaf(4, length - start, head_dim),
        "keys": leaf(2, length, head_dim),
        "values": leaf(2, length, value_dim),
        "sinks": leaf(4)[0],
    }
    slopes = torch.linspace(0.01, 0.3, 4, device=device)
    sums = -torch.rand(2, 4, length, generator=random).double().cumsum(dim=-1).to(device)
    learned = {"slopes": slopes} if kind.bias else {}
    learned |= {"running sums": sums} if kind.sums else {}
    leaves |= learned if kind.learned else {}
    for x in leaves.values():
        x.requires_grad_(kind.gradients)

    def bias(distance: torch.Tensor) -> torch.Tensor:
        far = distance.to(device).abs()
        return -slopes.view(-1, *[1] * far.ndim) * (far if kind.bias == "slopes" else far.float().sqrt())

    slots = torch.arange(length, device=device)
    m = (slots + 9 * (slots >= 120))[None]
    regions = (Region(Identity(), Identity(), stop=60), Region(Identity(), Identity(), start=60))
    problem = Problem(
        branches=(),
        value=leaves["values"],
        query_positions=m[:, start:],
        key_positions=m,
        mask=None,
        causal=True,
        query_start=start,
        scaling=head_dim**-0.5,
        bias=DistanceBias(bias, linear=kind.bias == "slopes") if kind.bias else None,
        running_bias=sums if kind.sums else None,
        softcap=2.0 if kind.softcap else None,
        sinks=leaves["sinks"],
        groups=torch.stack([torch.zeros_like(slots), -(slots < 20).long()]),
        query=leaves["queries"],
        key=leaves["keys"],
        turner=Turner(Forward(), m[:, start:], m, regions),
    )
    return problem, leaves


objection = Trial("FlexAttention", _compared, tolerance=0.03)
"""The reason why FlexAttention is not used on a device for a dtype, two widths and a `Kind`, or an empty string."""

EXECUTOR = Executor(
    "flex",
    "PyTorch's FlexAttention for each region, merged",
    supports,
    attend,
    lambda problem: len(cast(Turner, problem.turner).regions),
)
